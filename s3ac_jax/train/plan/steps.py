"""The programs of a run, one after the other as a tick calls them, each ready to be compiled."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import Learner, PyTree
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.parallel.regrid import Regrid, regrid
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.plan import arguments as args
from s3ac_jax.train.plan import flops, traffic
from s3ac_jax.train.plan.flops import Flops
from s3ac_jax.train.programs import Programs, Role, abstract_learner, make_programs
from s3ac_jax.train.rollouts import make_engine

NO_FLOPS = Flops(0.0, 0.0)
ROLES = ("actor", "critic")
ROLLOUT_WEIGHTS = "rollout weights"
# The critic that training starts from; one that selection asks in place of the learning one; a
# copy of whom it asks, for a selection that runs ahead.
STARTING_CRITIC, JUDGE = "starting critic weights", "judge weights"
COPIED_JUDGE = "copied judge weights"


@dataclasses.dataclass(frozen=True)
class Step:
    """One program and how a tick uses it.

    phase: of the tick; "start" and "pretraining" come before the first one. turns: of its loop
    over micro-batches. times: calls per tick (or in all, before the first). holds: what of the
    run's state is among its arguments. moved: bytes through a device's memory, at least.
    critic: share of its time that is the critic's. tokens: it reads or makes in a call. apart: it
    runs on devices that only sample. Source: ours.
    """

    name: str
    phase: str
    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Mesh
    times: float
    holds: frozenset[str]
    flops: Flops = NO_FLOPS
    moved: float = 0.0
    turns: float = 1.0
    critic: float = 0.0
    tokens: float = 0.0
    apart: bool = False

    @property
    def trains(self) -> bool:
        """Whether its first argument is a learner. Source: ours."""
        return isinstance(self.arguments[0], Learner)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The mesh of a run, and its state as shapes with places. apart: of devices that only sample.

    Source: ours.
    """

    config: RunConfig
    programs: Programs
    mesh: Mesh
    engine: Engine
    actor: Learner
    critic: Learner | None
    apart: Mesh | None = None

    @functools.cached_property
    def grids(self) -> Regrid | None:
        """How the mesh becomes the sampler's, None where that is the same, or of other devices.

        Source: ours.
        """
        if self.apart is not None or self.config.samples_in_place:
            return None
        return regrid(self.mesh, self.config.decode_mesh)

    @property
    def decode_mesh(self) -> Mesh:
        """Where responses are made. Source: ours."""
        if self.apart is not None:
            return self.apart
        return self.mesh if self.grids is None else self.grids.target

    @property
    def copied_judge(self) -> PyTree:
        """The critic's weights as `train/ahead.py` copies them. Source: ours."""
        assert self.critic is not None
        params, network = params_of(self.critic), self.programs.critic.network
        if self.apart is None:
            return params
        places = parallel.shardings(network.axes, network.abstract, self.apart, whole=True)
        return args.placed(params, places)


def machine_on(config: RunConfig, mesh: Mesh, apart: Mesh | None = None) -> Machine:
    """The run of this config on this mesh, nothing compiled and no array made. Source: ours."""
    programs, critic = make_programs(config), None
    if config.recipe.critic is not None:
        critic = abstract_learner(programs.critic, mesh)
    # What ends a response is a number like any other.
    engine = make_engine(config, programs.actor.network, stop_ids=(0,))
    actor = abstract_learner(programs.actor, mesh)
    return Machine(config, programs, mesh, engine, actor, critic, apart)


def training_steps(machine: Machine) -> Iterator[Step]:
    """What follows the rollout in a tick, and what selection asks before it. Source: ours."""
    config, programs, mesh = machine.config, machine.programs, machine.mesh
    recipe, number = config.recipe, config.minibatches
    rows = args.tick_rows(config, mesh)
    policy = params_of(machine.actor)
    values = None if machine.critic is None else params_of(machine.critic)
    every = _rows_of(config, rows.tokens.shape[0])
    yield from _selecting(machine)
    first = 1 if recipe.first_step_reads else 0
    of_actor = every.reading(head=True)
    if recipe.reads_values and number > first:
        of_critic = every.reading(head=False)
        yield Step(
            "score", "score", programs.score, (policy, values, rows), mesh, float(number - first),
            frozenset({"actor weights", "critic weights"}), of_actor[0] + of_critic[0],
            of_actor[1] + of_critic[1],
            every.turns, of_critic[0].done / (of_actor[0].done + of_critic[0].done), every.tokens,
        )  # fmt: skip
    if first or not recipe.reads_values:
        times = float(first if recipe.reads_values else number)
        yield Step(
            "score of the actor", "score", programs.score_actor, (policy, None, rows), mesh,
            times, frozenset({"actor weights"}), *of_actor, every.turns, 0.0, every.tokens,
        )  # fmt: skip
    yield _prepare(machine, rows)
    if machine.critic is not None and recipe.critic is not None:
        batch = args.critic_batch(mesh, rows, clipped=recipe.critic.clip is not None)
        yield _learning(
            machine, "critic step", "critic", programs.critic, machine.critic,
            programs.critic_step, batch, every, float(number * recipe.critic.epochs),
        )  # fmt: skip
    yield _learning(
        machine, "actor step", "actor", programs.actor, machine.actor, programs.actor_step,
        args.actor_batch(config, mesh, rows), every, float(number),
    )  # fmt: skip


def _selecting(machine: Machine) -> Iterator[Step]:
    """One pass of the critic over prompts, and how far the policy has moved on those drawn."""
    config, programs = machine.config, machine.programs
    if machine.critic is not None and (count := args.candidates(config)):
        asked, held, mesh = params_of(machine.critic), "critic weights", machine.mesh
        spec, apart = config.mesh, False
        if config.rollout.ahead:
            asked, held, apart = machine.copied_judge, COPIED_JUDGE, machine.apart is not None
            mesh, spec = (machine.apart, config.decode_mesh) if machine.apart else (mesh, spec)
        elif config.scheduler.judge != "learning":
            held = JUDGE
        width = config.task.max_prompt_tokens
        tokens = float(count * width)
        yield Step(
            "prompt values", "select", programs.prompt_values,
            (asked, *args.prompts(config, mesh, count)), mesh, 1.0, frozenset({held}),
            flops.reading(config.model, tokens, width / 2, head=False),
            traffic.reading(config.model, spec, tokens, 1.0, head=False),
            critic=1.0, tokens=tokens, apart=apart,
        )  # fmt: skip
    if config.recipe.select.tracks_drift:
        number = config.minibatches
        each = -(-config.train.batch_prompts // number)
        rows = args.packed(config, machine.mesh, each, routing=False)
        one = _rows_of(config, rows.tokens.shape[0])
        arithmetic, moved = one.reading(head=True)
        yield Step(
            "drift", "select", programs.drift, (params_of(machine.actor), [rows] * number),
            machine.mesh, 1.0, frozenset({"actor weights"}), arithmetic * number, moved * number,
            one.turns, tokens=one.tokens * number,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A packed batch of which every row is full. Source: ours."""

    config: RunConfig
    turns: float
    tokens: float
    context: float

    def reading(self, *, head: bool) -> tuple[Flops, float]:
        """Operations, and bytes moved, of a forward pass over it. Source: ours."""
        spec, mesh = self.config.model, self.config.mesh
        return (
            flops.reading(spec, self.tokens, self.context, head=head),
            traffic.reading(spec, mesh, self.tokens, self.turns, head=head),
        )


def _rows_of(config: RunConfig, rows: int) -> _Rows:
    tokens = rows * config.train.pack_tokens
    turns = rows // config.train.micro_rows
    return _Rows(config, float(turns), float(tokens), (config.longest + 1) / 2)


def _learning(
    machine: Machine, name: str, phase: str, role: Role, learner: Learner,
    program: Callable[..., Any], batch: PyTree, every: _Rows, times: float,
) -> Step:  # fmt: skip
    config, head = machine.config, role.name == "actor"
    critic = config.recipe.critic
    frozen = not head and critic is not None and critic.freeze_attention
    return Step(
        name, phase, program, (learner, batch), machine.mesh, times,
        frozenset({f"{role.name} weights", f"{role.name} optimiser"}),
        flops.learning(
            config.model, every.tokens, every.context, head=head, mixers_frozen=frozen
        ),
        traffic.learning(
            config.model, config.mesh, every.tokens, every.turns, head=head,
            trainable=args.device_bytes(learner.trainable),
            optimizer=args.device_bytes(learner.opt_state),
        ),
        every.turns, 0.0 if head else 1.0, every.tokens,
    )  # fmt: skip


def _prepare(machine: Machine, rows: PyTree) -> Step:
    config, mesh, number = machine.config, machine.mesh, machine.config.minibatches
    floats = args.of(mesh, rows.tokens.shape)
    values = floats if config.recipe.reads_values else None
    each = args.of(mesh, (config.batch_responses,), bool), args.of(mesh, (config.batch_responses,))
    arguments = [rows] * number, [(floats, values)] * number, *each, args.of(mesh, (2,))
    # Some 30 passes over arrays of the batch's shape.
    moved = 30 * 4.0 * number * rows.tokens.size / config.mesh.row_shards
    return Step(
        "prepare", "prepare", machine.programs.prepare, arguments, mesh, 1.0, frozenset(),
        moved=moved, tokens=float(number * rows.tokens.size),
    )  # fmt: skip


def pretraining_step(machine: Machine, learner: Learner) -> Step | None:
    """The step of value pretraining, if the recipe asks for it. Source: ours."""
    config, pretraining = machine.config, machine.programs.pretraining
    spec = config.recipe.critic
    if pretraining is None or spec is None or spec.pretraining == "none":
        return None
    settings = config.value_pretraining
    responses = sum(settings.prompts(spec.pretraining).values())
    batches = max(1, responses // settings.batch_responses)
    rows = args.packed(config, machine.mesh, -(-responses // batches), routing=False)
    every = _rows_of(config, rows.tokens.shape[0])
    batch = args.critic_batch(machine.mesh, rows, clipped=False)
    return _learning(
        machine, "value pretraining step", "pretraining", pretraining.role, learner,
        pretraining.step, batch, every, float(batches * settings.epochs),
    )  # fmt: skip
