"""What of a run's state lies on a device, and when: as `train/run.py` and `train/tick.py` do it."""

from typing import Any

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import Learner, PyTree
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.plan import arguments as args
from s3ac_jax.train.plan.steps import (
    COPIED_JUDGE,
    JUDGE,
    ROLES,
    ROLLOUT_WEIGHTS,
    STARTING_CRITIC,
    Machine,
    Step,
)

UPDATES = ("score", "prepare", "critic", "actor")
BASE, BATCHES, PREPARED = "base policy weights", "batches", "prepared batches"
# With rollout.apart these lie on the sampler's devices, and all else on the trainer's.
SAMPLERS = {"slots", ROLLOUT_WEIGHTS, COPIED_JUDGE}


def learner_pieces(role: str, learner: Learner) -> dict[str, PyTree]:
    """The two pieces of a role's state. Source: ours."""
    return {
        f"{role} weights": (learner.trainable, learner.frozen),
        f"{role} optimiser": learner.opt_state,
    }


def tick_pieces(machine: Machine, rollouts: dict[str, PyTree]) -> dict[str, PyTree]:
    """All that lies on devices at some time of a tick. rollouts: what sampling keeps there.

    Source: ours.
    """
    pieces = learner_pieces("actor", machine.actor) | rollouts
    if machine.critic is not None:
        pieces |= learner_pieces("critic", machine.critic)
        if machine.config.scheduler.judge != "learning":
            pieces[JUDGE] = params_of(machine.critic)
        if machine.config.rollout.ahead:
            pieces[COPIED_JUDGE] = machine.copied_judge
    return pieces | _batches(machine)


def _batches(machine: Machine) -> dict[str, PyTree]:
    """The optimiser batches of a tick with what was read of them, and what is made of that."""
    config, mesh = machine.config, machine.mesh
    number = config.minibatches
    rows = args.tick_rows(config, mesh)
    floats = args.of(mesh, rows.tokens.shape)
    read = (floats, floats if config.recipe.reads_values else None)
    made: list[Any] = [args.actor_batch(config, mesh, rows)]
    if (critic := config.recipe.critic) is not None:
        made.append(args.critic_batch(mesh, rows, clipped=critic.clip is not None))
    # The rows in them are the same arrays.
    prepared = [{k: x for k, x in vars(batch).items() if k != "packed"} for batch in made]
    return {BATCHES: [rows, *read] * number, PREPARED: prepared * number}


def present(config: RunConfig, step: Step, pieces: dict[str, PyTree]) -> dict[str, PyTree]:
    """Those pieces that are on the devices of this step while a tick calls it.

    Rollouts in this process give up what they hold before the updates; `train.offload` sends more
    away. When weights are handed over, those of an evaluation may still be there.
    Source: ours.
    """
    gone = {*parked(config, step, pieces)}
    if config.rollout.apart:
        gone |= pieces.keys() - SAMPLERS if step.apart else SAMPLERS
    elif step.phase in UPDATES and config.rollout.backend == "local":
        gone |= {"slots", ROLLOUT_WEIGHTS}
    if step.name == "empty slots":
        gone.add("slots")
    if step.phase not in UPDATES and not _among_updates(config, step):
        gone |= {BATCHES, PREPARED}
    if step.phase in ("score", "prepare"):
        gone.add(PREPARED)
    return {name: tree for name, tree in pieces.items() if name not in gone}


def parked(config: RunConfig, step: Step, pieces: dict[str, PyTree]) -> dict[str, PyTree]:
    """Those pieces that are in the hosts' memory while a tick calls this step. Source: ours."""
    if config.train.offload == "none" or step.apart or _among_updates(config, step):
        return {}
    # The critic is made ready before the batches are.
    critic_next = step.phase == "prepare" and config.recipe.critic is not None
    awake = "critic" if critic_next else step.phase
    gone = {f"{role} optimiser" for role in ROLES if role != awake}
    if config.train.offload == "idle" and awake in ROLES:
        gone |= {f"{role} weights" for role in ROLES if role != awake}
    return {name: tree for name, tree in pieces.items() if name in gone}


def _among_updates(config: RunConfig, step: Step) -> bool:
    """Whether it runs at any time of the updates, on their devices: servers sample meanwhile."""
    return step.phase == "select" and bool(config.rollout.ahead) and not step.apart


def before(machine: Machine, step: Step, pretraining: Learner | None) -> dict[str, PyTree]:
    """What is on the devices when a step before the first tick is called.

    The base policy is there when it came from files that are read onto the devices; rollouts have
    given up what they hold. pretraining: its learner.
    Source: ours.
    """
    config, critic = machine.config, machine.critic
    pieces: dict[str, PyTree] = {BASE: params_of(machine.actor)} if config.start.hf else {}
    if critic is None:
        return pieces
    if step.phase == "pretraining":
        if config.value_pretraining.diagnose_steps:
            # The diagnoses make the same step beside the critic that was pretrained.
            pieces[STARTING_CRITIC] = params_of(critic)
        return pieces if pretraining is None else pieces | learner_pieces("critic", pretraining)
    pieces[STARTING_CRITIC] = params_of(critic)
    made: list[tuple[str, Learner]] = [("actor", machine.actor), ("critic", critic)]
    for role, learner in made[: _MADE.get(step.name, 0)]:
        pieces |= learner_pieces(role, learner)
        away = _ASLEEP[config.train.offload]
        if step.name == "judge learner" and role == "actor":
            # By then it is ready to be read.
            away = away[:1]
        for what in away:
            pieces.pop(f"{role} {what}")
    return pieces


# Learners that were made before.
_MADE = {"critic learner": 1, "judge learner": 2}
# What a learner that was just made is sent away, by train.offload.
_ASLEEP = {"none": (), "optimizer": ("optimiser",), "idle": ("optimiser", "weights")}
