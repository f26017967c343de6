"""Whether a step fits a device beside what else lies there, and what to shrink if it does not."""

import dataclasses

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import Learner, PyTree
from s3ac_jax.train.plan.arguments import device_bytes
from s3ac_jax.train.plan.compiling import Compiled
from s3ac_jax.train.plan.steps import ROLES, ROLLOUT_WEIGHTS, Step

# Kind of tensor -> what makes less of it, the cheapest first.
KNOBS = {
    "weights": "mesh.fsdp (more devices), mesh.tensor, train.offload=idle for the other role",
    "optimiser": "train.offload=optimizer, mesh.fsdp (more devices), model.lora",
    "gradients": "mesh.fsdp (more devices), mesh.tensor, model.lora",
    "activations": (
        "train.micro_rows, model.remat=True, mesh.context, model.remat_policy=offload, "
        "train.pack_tokens"
    ),
    "rollout weights": "rollout.weights=int8, rollout.mesh with more tensor",
    "slots": "rollout.slots, rollout.kv_dtype=int8, rollout.max_response_tokens",
    "temporaries": "rollout.slots, rollout.insert_batch, rollout.prefill_chunk",
    "batch": "train.minibatches, train.micro_rows",
    "prefilled prompts": "rollout.insert_batch, rollout.prefill_chunk",
}


@dataclasses.dataclass(frozen=True)
class Fit:
    """Memory of one step on one device. beside: bytes of what lies there but isn't an argument.

    total: of all, None when the compiler gave up and didn't say. classes: bytes by kind of tensor,
    what is there beside the step included. Source: ours.
    """

    beside: float
    total: float | None
    limit: float
    classes: dict[str, float]

    @property
    def fits(self) -> bool:
        """Whether all of it is within the limit. Source: ours."""
        return self.total is not None and self.total <= self.limit

    @property
    def advice(self) -> str:
        """The largest kind of tensor, and the knobs that shrink it. Source: ours."""
        largest = max(self.classes, key=lambda name: self.classes[name])
        return f"{largest} are the most; less by {KNOBS[largest]}"


def fit(step: Step, made: Compiled, pieces: dict[str, PyTree], limit: float) -> Fit:
    """How the step fits beside the pieces of the run's state. limit: bytes of a device.

    Source: ours.
    """
    sizes = {name: device_bytes(tree) for name, tree in pieces.items()}
    classes = dict.fromkeys(KNOBS, 0.0)
    for name, size in sizes.items():
        classes[_class_of(name)] += size
    beside = sum(size for name, size in sizes.items() if name not in step.holds)
    arguments = sum(map(device_bytes, step.arguments))
    rest = arguments - sum(size for name, size in sizes.items() if name in step.holds)
    classes["prefilled prompts" if step.name == "insert" else "batch"] += max(0.0, rest)
    if step.trains:
        classes["gradients"] = device_bytes(step.arguments[0].trainable)
    inside = made.needed if made.memory is None else made.memory.total
    if inside is None:
        return Fit(beside, None, limit, classes)
    made_within = max(0.0, inside - arguments - classes["gradients"])
    sampling = step.phase in ("start", "sync", "rollout")
    classes["temporaries" if sampling else "activations"] = made_within
    return Fit(beside, inside + beside, limit, classes)


def present(config: RunConfig, step: Step, pieces: dict[str, PyTree]) -> dict[str, PyTree]:
    """Those pieces of the run's state that are on the devices while a tick calls this step.

    Rollouts give up what they hold before the updates; `train.offload` sends more away. When
    weights are handed over, those of an evaluation may still be there.
    Source: ours: as `train/tick.py` does it.
    """
    gone: set[str] = set()
    if step.phase in ("score", "prepare", "critic", "actor"):
        gone |= {"slots", ROLLOUT_WEIGHTS}
    if step.name == "empty slots":
        gone |= {"slots"}
    if config.train.offload != "none":
        gone |= {f"{role} optimiser" for role in ROLES if step.phase != role}
    if config.train.offload == "idle" and step.phase in ROLES:
        gone |= {f"{role} weights" for role in ROLES if step.phase != role}
    return {name: tree for name, tree in pieces.items() if name not in gone}


def _class_of(piece: str) -> str:
    return piece if piece in KNOBS else piece.split()[-1]


def learner_pieces(role: str, learner: Learner) -> dict[str, PyTree]:
    """The two pieces of a role's state. Source: ours."""
    return {
        f"{role} weights": (learner.trainable, learner.frozen),
        f"{role} optimiser": learner.opt_state,
    }
