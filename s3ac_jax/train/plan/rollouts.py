"""The programs of rollouts, each with the places that the one before it gives its results."""

import dataclasses
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from s3ac_jax.core.types import PyTree
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.rollout.local import Mover
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.plan import arguments as args
from s3ac_jax.train.plan import flops, traffic
from s3ac_jax.train.plan.compiling import Compiled
from s3ac_jax.train.plan.flops import Flops
from s3ac_jax.train.plan.steps import ROLLOUT_WEIGHTS, Machine, Step


@dataclasses.dataclass(frozen=True)
class Slots:
    """What rollouts keep on the devices: the weights as they are sampled from, and the slots.

    shared: the weights are the trainer's own. Source: ours.
    """

    weights: PyTree
    state: PyTree
    shared: bool

    @property
    def pieces(self) -> dict[str, PyTree]:
        """Those that take memory of their own. Source: ours."""
        return {"slots": self.state} | ({} if self.shared else {ROLLOUT_WEIGHTS: self.weights})


def server_steps(machine: Machine) -> Generator[Step, Compiled, dict[str, PyTree]]:
    """As `rollout_steps`, where servers sample: the weights that they are sent are kept here.

    Source: ours: those that are read from files lie on no device.
    """
    config, network, policy = machine.config, machine.engine.network, params_of(machine.actor)
    if config.rollout.backend != "remote":
        return {}
    if network.spec.dtype != "float32":
        cast = network.in_compute_dtype
        made = yield _cast(machine, jax.jit(cast), machine.mesh)
        if made.memory is None:
            return {}
        policy = args.placed(args.shapes(machine.mesh, cast, policy), made.places)
    elif not config.rollout.ahead:
        return {}
    return {ROLLOUT_WEIGHTS: policy}


def rollout_steps(machine: Machine) -> Generator[Step, Compiled, dict[str, PyTree]]:
    """Yields each step and is sent what became of it; ends early where memory was lacking.

    Returns what sampling keeps on the devices.
    Source: ours: a tick's longest case, every response as long as it may be.
    """
    engine, mesh = machine.engine, machine.decode_mesh
    weights = yield from _weights(machine)
    if weights is None:
        return {}
    state = args.shapes(mesh, engine.init_decode_state, weights)
    shared = _is_shared(params_of(machine.actor), weights)
    made = yield Step(
        "empty slots", "sync", jax.jit(engine.init_decode_state), (weights,), mesh, 1.0,
        frozenset({"actor weights" if shared else ROLLOUT_WEIGHTS}), apart=_apart(machine),
    )  # fmt: skip
    if made.memory is None:
        return {}
    kept = Slots(weights, args.placed(state, made.places), shared)
    yield from _sampling(machine, kept)
    return kept.pieces


def _apart(machine: Machine) -> bool:
    return machine.apart is not None


def _cast(machine: Machine, program: Any, mesh: Mesh) -> Step:
    policy = params_of(machine.actor)
    return Step(
        "weight sync",
        "sync",
        program,
        (policy,),
        mesh,
        1.0,
        frozenset({"actor weights"}),
        moved=2 * args.device_bytes(policy),
    )


def _weights(machine: Machine) -> Generator[Step, Compiled, PyTree | None]:
    """The trainer's weights cast, brought to the decode mesh, and laid out for its programs."""
    engine, mesh = machine.engine, machine.decode_mesh
    network, policy = engine.network, params_of(machine.actor)
    held = frozenset({"actor weights"})
    mover = None if machine.grids is None else Mover(network, machine.mesh, machine.grids)
    if mover is not None or network.spec.dtype != "float32":
        cast = network.in_compute_dtype
        program = jax.jit(cast) if mover is None else mover.program
        made = yield _cast(machine, program, machine.mesh if mover is None else mover.grids.between)
        if made.memory is None:
            return None
        places = made.places if mover is None else mover.places
        policy, held = args.placed(args.shapes(machine.mesh, cast, policy), places), frozenset()
    if _apart(machine):
        # Sent there by a copy from devices to devices, which is no program.
        whole = parallel.shardings(network.axes, network.abstract, mesh, whole=True)
        policy, held = args.placed(policy, whole), frozenset()
    if engine.scan_layers and engine.weights == "model":
        return policy
    made = yield Step(
        "weights laid out", "sync", jax.jit(engine.load_params), (policy,), mesh, 1.0, held,
        moved=2 * args.device_bytes(policy), apart=_apart(machine),
    )  # fmt: skip
    if made.memory is None:
        return None
    return args.placed(args.shapes(mesh, engine.load_params, policy), made.places)


def _sampling(machine: Machine, kept: Slots) -> Generator[Step, Compiled, None]:
    config, engine, mesh = machine.config, machine.engine, machine.decode_mesh
    rollout, requests = config.rollout, config.rollout.insert_batch
    weights, state = kept.weights, kept.state
    sampled = frozenset({"actor weights" if kept.shared else ROLLOUT_WEIGHTS})
    width, calls = config.task.max_prompt_tokens, -(-config.batch_responses // requests)
    prompts = args.prompts(config, mesh, requests)
    chunk = min(rollout.prefill_chunk or width, width)
    spec, there = config.model, config.decode_mesh
    tokens = float(requests * width)
    prefix = args.shapes(mesh, engine.prefill, weights, *prompts)
    made = yield Step(
        "prefill", "rollout", _bound(engine, "prefill"), (weights, *prompts), mesh, float(calls),
        sampled, flops.reading(spec, tokens, width / 2, head=False),
        traffic.reading(spec, there, tokens, -(-width // chunk), head=False),
        float(-(-width // chunk)), tokens=tokens, apart=_apart(machine),
    )  # fmt: skip
    if made.memory is None:
        return
    prefix = args.placed(prefix, made.places)
    each = args.of(mesh, (requests,), jnp.int32)
    yield Step(
        "insert", "rollout", _bound(engine, "insert"),
        (prefix, state, each, each, args.sampling(mesh, requests)), mesh, float(calls),
        frozenset({"slots"}), moved=2 * args.device_bytes(prefix.cache), apart=_apart(machine),
    )  # fmt: skip
    steps, slots = rollout.steps_per_dispatch, rollout.slots
    waves = -(-config.batch_responses // slots)
    one = traffic.decoding(
        args.device_bytes(weights), args.device_bytes(state.cache), spec, there, slots
    )
    yield Step(
        "generate", "rollout", _bound(engine, "generate"), (weights, state), mesh,
        float(waves * -(-rollout.max_response_tokens // steps)), sampled | {"slots"},
        _decoding(machine), steps * one, tokens=float(steps * slots), apart=_apart(machine),
    )  # fmt: skip


def _decoding(machine: Machine) -> Flops:
    """One dispatch: attention looks at the whole cache, half of which is full on average."""
    config = machine.config
    tokens = float(config.rollout.steps_per_dispatch * config.rollout.slots)
    seen = config.task.max_prompt_tokens + config.rollout.max_response_tokens / 2
    model = flops.reading(config.model, tokens, seen, head=True).model
    return Flops(model, flops.reading(config.model, tokens, config.longest, head=True).done)


def _bound(engine: Any, name: str) -> Any:
    """A jitted method as a program of its other arguments."""
    return _Method(getattr(type(engine), name), engine)


@dataclasses.dataclass(frozen=True)
class _Method:
    """A jitted method whose first argument is there. Source: ours."""

    method: Any
    engine: Any

    def trace(self, *arguments: Any) -> Any:
        """As a jitted function has it. Source: ours."""
        return self.method.trace(self.engine, *arguments)


def _is_shared(policy: PyTree, weights: PyTree) -> bool:
    """Whether loading changed nothing: a float32 model whose layers stay stacked where they are."""
    if jax.tree.structure(policy) != jax.tree.structure(weights):
        return False
    pairs = zip(jax.tree.leaves(policy), jax.tree.leaves(weights), strict=True)
    return all(
        a.dtype == b.dtype and a.shape == b.shape
        and a.sharding.is_equivalent_to(b.sharding, len(a.shape)) for a, b in pairs
    )  # fmt: skip
