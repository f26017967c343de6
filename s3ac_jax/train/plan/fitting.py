"""Whether a step fits a device beside what else lies there, and what to shrink if it does not."""

import dataclasses

from s3ac_jax.core.types import PyTree
from s3ac_jax.train.plan.arguments import device_bytes
from s3ac_jax.train.plan.compiling import Compiled
from s3ac_jax.train.plan.state import BATCHES, UPDATES
from s3ac_jax.train.plan.steps import ROLES, Step

# By phase, what a program makes that is neither an argument nor a gradient: a learner, at first.
_MADE_WITHIN = {"start": "optimiser", "sync": "temporaries", "rollout": "temporaries"}
# Kind of tensor -> what makes less of it, the cheapest first.
KNOBS = {
    "weights": "mesh.fsdp (more devices), mesh.tensor",
    "optimiser": "mesh.fsdp (more devices), model.lora",
    "gradients": "mesh.fsdp (more devices), mesh.tensor, model.lora",
    "activations": (
        "train.micro_rows, model.remat=True, mesh.context, model.remat_policy=offload (with "
        "remat), train.pack_tokens"
    ),
    "rollout weights": "rollout.weights=int8, rollout.mesh with more tensor",
    "slots": "rollout.slots, rollout.kv_dtype=int8, rollout.max_response_tokens",
    "temporaries": "rollout.slots, rollout.insert_batch, rollout.prefill_chunk",
    BATCHES: (
        "mesh.fsdp (more devices), train.batch_prompts, train.pack_tokens a multiple of the "
        "longest response, recipe.replay_routing=False"
    ),
    "prefilled prompts": "rollout.insert_batch, rollout.prefill_chunk",
}


@dataclasses.dataclass(frozen=True)
class Fit:
    """Memory of one step on one device. beside: bytes of what lies there but isn't an argument.

    total: of all, None when the compiler gave up and didn't say. classes: bytes by kind of tensor,
    what is there beside the step included. parked: those that train.offload would make less of,
    and its value. host: bytes in the host's memory for this device.
    Source: ours.
    """

    beside: float
    total: float | None
    limit: float
    classes: dict[str, float]
    host: float = 0.0
    parked: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether all of it is within the limit. Source: ours."""
        return self.total is not None and self.total <= self.limit

    @property
    def advice(self) -> str:
        """The largest kind of tensor, and the knobs that shrink it. Source: ours."""
        largest = max(self.classes, key=lambda name: self.classes[name])
        first = f"train.offload={self.parked[largest]}, " if largest in self.parked else ""
        return f"most of it is {largest}; less by {first}{KNOBS[largest]}"


def fit(
    step: Step, made: Compiled, pieces: dict[str, PyTree], limit: float, *,
    parked: dict[str, PyTree] | None = None,
) -> Fit:  # fmt: skip
    """How the step fits beside the pieces of the run's state that are there.

    limit: bytes of a device. parked: pieces that are in the host's memory meanwhile. Source: ours.
    """
    sizes = {name: device_bytes(tree) for name, tree in pieces.items()}
    classes = dict.fromkeys(KNOBS, 0.0)
    for name, size in sizes.items():
        classes[_class_of(name)] += size
    beside = sum(size for name, size in sizes.items() if name not in step.holds)
    arguments = sum(map(device_bytes, step.arguments))
    rest = arguments - sum(size for name, size in sizes.items() if name in step.holds)
    if step.phase in UPDATES and BATCHES in pieces:
        # One of those that lie there.
        beside = max(0.0, beside - rest)
    else:
        classes["prefilled prompts" if step.name == "insert" else BATCHES] += max(0.0, rest)
    if step.trains:
        classes["gradients"] = device_bytes(step.arguments[0].trainable)
    inside = made.needed if made.memory is None else made.memory.total
    host = device_bytes(parked or {}) + (0.0 if made.memory is None else made.memory.host)
    could_be_parked = _could_be_parked(step, pieces)
    if inside is None:
        return Fit(beside, None, limit, classes, host, could_be_parked)
    made_within = max(0.0, inside - arguments - classes["gradients"])
    classes[_MADE_WITHIN.get(step.phase, "activations")] += made_within
    return Fit(beside, inside + beside, limit, classes, host, could_be_parked)


def _could_be_parked(step: Step, pieces: dict[str, PyTree]) -> dict[str, str]:
    """What lies beside the step and need not; what is parked already is not among the pieces."""
    beside = [name for name in pieces if name not in step.holds]
    found = {}
    if step.phase != "pretraining" and any(name.endswith("optimiser") for name in beside):
        found["optimiser"] = "optimizer"
    if step.phase in ROLES and any(name in beside for name in (f"{r} weights" for r in ROLES)):
        found["weights"] = "idle"
    return found


def _class_of(piece: str) -> str:
    return piece if piece in KNOBS else piece.split()[-1]
