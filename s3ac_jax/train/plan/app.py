"""The whole plan: every program compiled and judged, then the tick that they make up."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import Learner, PyTree
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.plan.compiling import Compiled, compile_program
from s3ac_jax.train.plan.fitting import Fit, fit, learner_pieces, present
from s3ac_jax.train.plan.rollouts import Slots, rollout_steps
from s3ac_jax.train.plan.roofline import Bound, bound
from s3ac_jax.train.plan.steps import (
    Machine,
    Step,
    machine_on,
    pretraining_step,
    training_steps,
)
from s3ac_jax.train.plan.target import PlanError, Target
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
        slots = _rollouts(machine, compiled) if config.rollout.backend == "local" else {}
        if learner is not None and (step := pretraining_step(machine, learner)) is not None:
            compiled(step)
        for step in training_steps(machine):
            compiled(step)
    pieces = learner_pieces("actor", machine.actor) | slots
    if machine.critic is not None:
        pieces |= learner_pieces("critic", machine.critic)
    before = slots if learner is None else slots | learner_pieces("critic", learner)
    beside = {"start": {}, "pretraining": before}
    steps = [
        judged(step, made, beside.get(step.phase, present(config, step, pieces)), target)
        for step, made in found
    ]
    return Plan(config, target, steps, pieces)


def judged(step: Step, made: Compiled, pieces: dict[str, PyTree], target: Target) -> Planned:
    """A compiled step with its fit and its bound. Source: ours."""
    return Planned(
        step, made, fit(step, made, pieces, target.chip.memory),
        bound(step, made.collectives, target.chip, target.islands(step.mesh)),
    )  # fmt: skip


def _rollouts(machine: Machine, compiled: Callable[[Step], Compiled]) -> dict[str, PyTree]:
    """Compiles the steps of rollouts; what rollouts keep on the devices, if they got that far."""
    steps = rollout_steps(machine)
    try:
        step = next(steps)
        while True:
            step = steps.send(compiled(step))
    except StopIteration as end:
        slots: Slots | None = end.value
        return {} if slots is None else slots.pieces


def make_machine(config: RunConfig, target: Target) -> Machine:
    """Meshes and abstract state of a run on this target. Raises PlanError on another mesh.

    Source: ours.
    """
    devices = len(target.devices)
    if config.mesh.num_devices != devices:
        raise PlanError(
            f"{target.name} has {devices} devices, the config's mesh {config.mesh.num_devices}: "
            f"{_suggested(config.mesh, devices)}"
        )
    try:
        mesh = parallel.make_mesh(config.mesh, target.devices)
    except ValueError as error:
        raise PlanError(str(error)) from error
    return machine_on(config, mesh)


def _suggested(mesh: MeshSpec, devices: int) -> str:
    """A mesh with so many devices that keeps tensor, expert and context where it can."""
    kept = mesh.tensor * mesh.expert * mesh.context
    if devices % kept:
        return "set mesh.data x fsdp x tensor x expert x context to that number"
    return (
        f"say --config.mesh.data=1 --config.mesh.fsdp={devices // kept} "
        f"(tensor {mesh.tensor}, expert {mesh.expert}, context {mesh.context})"
    )


def start_steps(machine: Machine) -> Iterator[Step]:
    """Both learners, made from the weights that they start with. Source: ours."""
    programs, mesh = machine.programs, machine.mesh
    roles: list[tuple[Role, Learner | None]] = [
        (programs.actor, machine.actor), (programs.critic, machine.critic)
    ]  # fmt: skip
    for role, learner in roles:
        if learner is not None:
            key = jax.eval_shape(lambda: jax.random.key(0))
            yield Step(
                f"{role.name} learner", "start", learner_maker(role, mesh),
                (key, params_of(learner)), mesh, 1.0, frozenset(),
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
