"""The whole plan: every program compiled and judged, then the tick that they make up."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax

from s3ac_jax.config.devices import check_platform
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import Learner, PyTree
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.plan.compiling import Compiled, compile_program
from s3ac_jax.train.plan.fitting import Fit, fit
from s3ac_jax.train.plan.rollouts import rollout_steps, server_steps
from s3ac_jax.train.plan.roofline import Bound, bound
from s3ac_jax.train.plan.state import BASE, before, parked, present, tick_pieces
from s3ac_jax.train.plan.steps import (
    STARTING_CRITIC,
    Machine,
    Step,
    machine_on,
    pretraining_step,
    training_steps,
)
from s3ac_jax.train.plan.target import PlanError, Target
from s3ac_jax.train.plan.tick import BEFORE
from s3ac_jax.train.programs import Role, abstract_learner, learner_maker


@dataclasses.dataclass(frozen=True)
class Planned:
    """A step, what the compiler made of it, whether it fits, and how long it takes at least.

    Source: ours.
    """

    step: Step
    made: Compiled
    fit: Fit
    bound: Bound


@dataclasses.dataclass(frozen=True)
class Plan:
    """All steps of a run on a machine. pieces: bytes of the run's state on a device.

    Source: ours.
    """

    config: RunConfig
    target: Target
    steps: list[Planned]
    pieces: dict[str, PyTree]

    @property
    def fits(self) -> bool:
        """Whether every step does. Source: ours."""
        return all(one.fit.fits for one in self.steps)


def make_plan(
    config: RunConfig, target: Target, *, full: bool = False,
    told: Callable[[Step, Compiled | None], Any] = lambda step, made: None,
) -> Plan:  # fmt: skip
    """Compiles all programs of the config for the target.

    full: with XLA's default effort, else with little (the memory is much the same). told: called
    with a step before it is compiled, and with what came of it after.
    Raises PlanError when the config's mesh has another number of devices, or what XLA can't do.
    Source: ours.
    """
    machine = make_machine(config, target)
    found: list[tuple[Step, Compiled]] = []

    def compiled(step: Step) -> Compiled:
        told(step, None)
        made = compile_program(step.program, step.arguments, step.mesh, target, turns=step.turns)
        found.append((step, made))
        told(step, made)
        return made

    learner = _pretraining_learner(machine)
    with effort(full):
        for step in start_steps(machine):
            compiled(step)
        rollouts = _rollouts(machine, compiled)
        if learner is not None and (step := pretraining_step(machine, learner)) is not None:
            compiled(step)
        for step in training_steps(machine):
            compiled(step)
    pieces = tick_pieces(machine, rollouts)
    steps = [
        judged(step, made, before(machine, step, learner), target) if step.phase in BEFORE
        else judged_in_tick(config, step, made, pieces, target)
        for step, made in found
    ]  # fmt: skip
    return Plan(config, target, steps, pieces)


def judged_in_tick(
    config: RunConfig, step: Step, made: Compiled, pieces: dict[str, PyTree], target: Target
) -> Planned:
    """A compiled step of a tick: its fit beside the run's state, and its bound. Source: ours."""
    there = present(config, step, pieces)
    return judged(step, made, there, target, parked=parked(config, step, pieces))


def judged(
    step: Step, made: Compiled, there: dict[str, PyTree], target: Target, *,
    parked: dict[str, PyTree] | None = None,
) -> Planned:  # fmt: skip
    """A compiled step with its fit and its bound. there: what lies on the devices. Source: ours."""
    return Planned(
        step, made, fit(step, made, there, target.chip.memory, parked=parked),
        bound(step, made.collectives, target.chip, target.islands(step.mesh)),
    )  # fmt: skip


def _rollouts(machine: Machine, compiled: Callable[[Step], Compiled]) -> dict[str, PyTree]:
    """Compiles the steps of rollouts; what rollouts keep on the devices, if they got that far."""
    local = machine.config.rollout.backend == "local"
    steps = rollout_steps(machine) if local else server_steps(machine)
    try:
        step = next(steps)
        while True:
            step = steps.send(compiled(step))
    except StopIteration as end:
        return end.value


def make_machine(config: RunConfig, target: Target) -> Machine:
    """Meshes and abstract state of a run on this target.

    Raises PlanError on another mesh, and on what devices of this kind don't have. Source: ours.
    """
    devices, apart = len(target.devices), config.rollout.apart
    sampling = config.decode_mesh.num_devices if apart else 0
    if config.mesh.num_devices + sampling != devices:
        has = f"the config's mesh {config.mesh.num_devices}"
        if apart:
            has += f" and its rollout.mesh, apart from it, {sampling}"
        raise PlanError(
            f"{target.name} has {devices} devices, {has}: {_suggested(config, devices - sampling)}"
        )
    try:
        check_platform(config, target.chip.platform)
        mesh = parallel.make_mesh(config.mesh, target.devices)
        taken = set(mesh.devices.flat)
        others = [device for device in target.devices if device not in taken]
        samplers = parallel.make_mesh(config.decode_mesh, others) if apart else None
    except ValueError as error:
        raise PlanError(f"{target.name}: {str(error).splitlines()[0]}") from error
    return machine_on(config, mesh, samplers)


def _suggested(config: RunConfig, devices: int) -> str:
    """A mesh with so many devices that keeps tensor, expert and context where it can."""
    mesh = config.mesh
    kept = mesh.tensor * mesh.expert * mesh.context
    if devices < 1 or devices % kept:
        number = "what rollout.mesh leaves" if config.rollout.apart else "that number"
        return f"set mesh.data x fsdp x tensor x expert x context to {number}"
    fsdp = devices // kept
    shares = [
        f"{name} ({size}) has to be a multiple of {fsdp * mesh.expert} then"
        for name, size in (
            ("train.micro_rows", config.train.micro_rows), ("rollout.slots", config.rollout.slots)
        ) if size % (fsdp * mesh.expert)
    ]  # fmt: skip
    return "; ".join([
        f"say --config.mesh.data=1 --config.mesh.fsdp={fsdp} "
        f"(tensor {mesh.tensor}, expert {mesh.expert}, context {mesh.context})", *shares,
    ])  # fmt: skip


def start_steps(machine: Machine) -> Iterator[Step]:
    """All learners, made from the weights that they start with; the judge is a critic's too.

    Source: ours.
    """
    programs, judge = machine.programs, machine.config.scheduler.judge
    yield _starting(machine, "actor learner", programs.actor, machine.actor, BASE)
    if machine.critic is None:
        return
    yield _starting(machine, "critic learner", programs.critic, machine.critic, STARTING_CRITIC)
    if judge != "learning":
        yield _starting(
            machine, "judge learner", programs.critic, machine.critic, STARTING_CRITIC,
            given=judge == "stale",
        )  # fmt: skip


def _starting(
    machine: Machine, name: str, role: Role, learner: Learner, held: str, *, given: bool = True
) -> Step:
    key = jax.eval_shape(lambda: jax.random.key(0))
    start = params_of(learner) if given else {}
    return Step(
        name, "start", learner_maker(role, machine.mesh), (key, start), machine.mesh, 1.0,
        frozenset({held} if given else ()),
    )  # fmt: skip


def _pretraining_learner(machine: Machine) -> Learner | None:
    pretraining = machine.programs.pretraining
    return None if pretraining is None else abstract_learner(pretraining.role, machine.mesh)


@contextlib.contextmanager
def effort(full: bool) -> Generator[None]:
    """How hard XLA tries, for programs compiled within. Source: ours."""
    before = jax.config.values["jax_optimization_level"]
    if not full:
        jax.config.update("jax_optimization_level", "O1")
    try:
        yield
    finally:
        jax.config.update("jax_optimization_level", before)
