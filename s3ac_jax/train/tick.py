"""One tick, read top to bottom: gather, score, prepare, critic, actor."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from s3ac_jax.core import metrics
from s3ac_jax.core.types import Packed, PyTree, RunState, Scored
from s3ac_jax.parallel.hosts import keep_pace, to_host
from s3ac_jax.rollout.backend import RolloutError, make_sampling
from s3ac_jax.train import keys
from s3ac_jax.train.build import Parts
from s3ac_jax.train.gather import Gathered, gather, pack_batches
from s3ac_jax.train.grading import graded
from s3ac_jax.train.health import check_finite
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.offload import Parking
from s3ac_jax.train.phases import PhaseTimes
from s3ac_jax.train.prepare import Prepared, Scores
from s3ac_jax.train.programs import Role
from s3ac_jax.train.tasks import Split
from s3ac_jax.train.tick_metrics import host_metrics, outcome_metrics

# Looks at a rollout batch once it is ready to be learnt from: (tick, batch, packed, scores,
# prepared).
See = Callable[[int, Gathered, list[Packed], list[Scores], Prepared], None]


def look_away(*_: Any) -> None:
    """Sees nothing. Source: ours."""


def run_tick(
    parts: Parts, state: RunState, run_key: PRNGKeyArray, judge: PyTree = None,
    see: See = look_away,
) -> tuple[RunState, dict[str, Any], dict[str, float]]:  # fmt: skip
    """(state after, metrics still on the device, metrics of the host). The state is donated.

    The tick's key is fold_in(run_key, tick): with the state it decides everything. judge: weights
    of the critic that selects prompts, the state's own when None. see: called before the updates.
    Source: S3AC (2610.35518), order of one step; ours: the tick as a function.
    """
    times, state = PhaseTimes(), readable(parts, state)
    batch = gather_for_tick(parts, state, run_key, judge, times)
    parts.rollout.rest()
    return learn_from(parts, state, batch, run_key, times, see)


def readable(parts: Parts, state: RunState) -> RunState:
    """The state with both roles' weights on the devices; the one given is donated. Source: ours."""
    parking = Parking(parts.config.train.offload)
    critic = None if state.critic is None else parking.readable(state.critic)
    return dataclasses.replace(state, actor=parking.readable(state.actor), critic=critic)


def judge_of(state: RunState, judge: PyTree) -> PyTree:
    """`judge`, or the weights of the state's own critic in its place. Source: ours."""
    return params_of(state.critic) if judge is None and state.critic is not None else judge


def gather_for_tick(
    parts: Parts, state: RunState, run_key: PRNGKeyArray, judge: PyTree, times: PhaseTimes
) -> Gathered:
    """The rollout batch of the state's tick, by its own weights. judge: as for `run_tick`.

    Source: S3AC (2610.35518), DAPS.
    """
    policy = params_of(state.actor)
    parts.rollout.update_weights(policy, int(state.tick))
    return gather_batch(parts, state, run_key, judge_of(state, judge), times, policy)


def gather_batch(
    parts: Parts, state: RunState, run_key: PRNGKeyArray, judge: PyTree, times: PhaseTimes,
    policy: PyTree = None, wanted: Callable[[], bool] = lambda: True,
) -> Gathered:  # fmt: skip
    """The rollout batch of the state's tick, by the weights that the rollout engine has.

    judge: weights of the critic that selects prompts. policy: the policy's, for a selection that
    asks how far it has moved. The state's learners are not looked at. wanted: as for `gather`.
    Source: S3AC (2610.35518), DAPS.
    """
    select_key, sample_key, _ = _keys(run_key, int(state.tick))
    values = _selection_values(parts, judge, select_key)
    return gather(parts, state, policy, values, (select_key, sample_key), times, wanted)


def learn_from(
    parts: Parts, state: RunState, batch: Gathered, run_key: PRNGKeyArray, times: PhaseTimes,
    see: See = look_away,
) -> tuple[RunState, dict[str, Any], dict[str, float]]:  # fmt: skip
    """What `run_tick` returns, for a batch that is there. The state is donated.

    Source: S3AC (2610.35518), order of one step.
    """
    config, recipe, tick = parts.config, parts.config.recipe, int(state.tick)
    parking = Parking(config.train.offload)
    with times.phase("score"):
        packed, filled = _packed(parts, batch, _keys(run_key, tick)[2])
        # The first critic step reads V itself, of the batch that it learns from.
        early = filled[0] if filled and recipe.first_step_reads else None
        actor_params = params_of(state.actor)
        critic_params = None if state.critic is None else params_of(state.critic)
        scores = [
            keep_pace(
                parts.score_actor(actor_params, None, part)
                if number == early
                else parts.score(actor_params, critic_params, part)
            )
            for number, part in enumerate(packed)
        ]
        jax.block_until_ready(scores)
    actor, critic, critic_report = state.actor, state.critic, {}
    if critic is not None:
        with times.phase("critic"):
            actor, critic = parking.asleep(actor), parking.awake(critic)
            if early is not None:
                first = parts.first_targets(packed[early])
                critic, critic_report, values_old = _learn(
                    parts.critic, parts.critic_step, critic, [first], tick
                )
                scores[early] = scores[early][0], values_old
    with times.phase("prepare"):
        prepared = parts.prepare(
            packed, scores, _padded(config.batch_responses, batch.trained.success),
            _padded(config.batch_responses, batch.baseline), state.entropy_band,
        )  # fmt: skip
        jax.block_until_ready(prepared)
        see(tick, batch, packed, scores, prepared)
    if recipe.critic is not None:
        with times.phase("critic"):
            todo = [prepared.critic[n] for n in filled] * recipe.critic.epochs
            todo = todo[early is not None :]
            critic, new, _ = _learn(parts.critic, parts.critic_step, critic, todo, tick)
            critic_report = metrics.merge(critic_report, new)
    warming = recipe.critic is not None and tick < recipe.critic.warmup_ticks
    with times.phase("actor"):
        critic, actor = critic and parking.asleep(critic), parking.awake(actor)
        todo = [] if warming else [prepared.actor[n] for n in filled]
        actor, actor_report, _ = _learn(parts.actor, parts.actor_step, actor, todo, tick)
        actor = parking.readable(actor)

    after = RunState(actor, critic, batch.stats, batch.cursor, prepared.band, np.int32(tick + 1))
    report = dict(prepared.report)
    report |= {_named("critic", name): value for name, value in critic_report.items()}
    report |= {_named("actor", name): value for name, value in actor_report.items()}
    seconds = times.since_start()
    rollout = batch.made.rollout
    made = int(rollout.num_tokens.sum() + rollout.prompt.num_tokens.sum())
    host = host_metrics(parts, batch, tick)
    host |= times.seconds | {"time/tick": seconds, "tokens_per_second": made / seconds}
    return after, report, host


def _keys(run_key: PRNGKeyArray, tick: int) -> tuple[PRNGKeyArray, PRNGKeyArray, PRNGKeyArray]:
    """Of selection, of sampling and of the order in which responses are trained on."""
    select, sample, shuffle = jax.random.split(jax.random.fold_in(run_key, tick), 3)
    return select, sample, shuffle


def _packed(parts: Parts, batch: Gathered, key: PRNGKeyArray) -> tuple[list[Packed], list[int]]:
    """The optimiser batches in shuffled order, and the numbers of those that hold anything."""
    config = parts.config
    order = np.asarray(jax.random.permutation(key, config.batch_responses))
    # Dropped groups and failed gradings leave rows empty; the shape must not follow.
    order = order[order < len(batch.trained.valid)]
    order = order[batch.trained.valid[order]]
    packed = pack_batches(
        parts, batch.trained, order, config.minibatches, most=config.batch_responses
    )
    # An optimiser would still move on a batch without any token, by its momentum.
    filled = [n for n, part in enumerate(np.array_split(order, config.minibatches)) if len(part)]
    return packed, filled


def _learn(
    role: Role, step: Callable, learner: Any, batches: Sequence[PyTree], tick: int
) -> tuple[Any, dict[str, Any], Any]:
    """The learner after a step on each of the batches, all metrics, and what the last step read."""
    report: dict[str, Any] = {}
    read = None
    for batch in batches:
        learner, new, *read = step(learner, batch)
        report = keep_pace(metrics.merge(report, new))
    jax.block_until_ready(learner)
    if batches:
        check_finite(
            role.name, role.network, params_of(learner), report, batches, f"tick {tick}",
            f"{role.name}.lr",
        )  # fmt: skip
    return learner, report, read[0] if read else None


def _selection_values(
    parts: Parts, judge: PyTree, key: PRNGKeyArray
) -> Callable[[np.ndarray], jax.Array]:
    """index -> V(s_0) of these prompts, with the noise that the config asks for."""
    tokens, num_tokens = parts.train.prompts.tokens, parts.train.prompts.num_tokens
    noise = parts.config.scheduler.value_noise

    def values(rows: np.ndarray) -> jax.Array:
        read = to_host(parts.prompt_values(judge, tokens[rows], num_tokens[rows]))
        if noise:
            # One number per prompt and tick, whatever the round or the order.
            drawn = jax.random.normal(jax.random.fold_in(key, 2**31), (len(num_tokens),))
            read = read + noise * drawn[rows]
        return read

    return values


def _padded(length: int, x: np.ndarray) -> np.ndarray:
    return np.pad(x, (0, length - len(x)))


def _named(role: str, name: str) -> str:
    return name if name in ("value_loss", "entropy", "policy_loss") else f"{role}_{name}"


def respond(
    parts: Parts,
    split: Split,
    index: np.ndarray,
    key: PRNGKeyArray,
    *,
    temperature: float | None = None,
) -> Scored:
    """Graded responses of the rollout engine's present weights to these prompts of the split.

    temperature: that of the config's rollouts when None. Raises RolloutError when one was aborted.
    Source: ours.
    """
    config = parts.config.rollout
    sampling = make_sampling(
        key, len(index), max_tokens=config.max_response_tokens,
        stop_ids=parts.task.tokenizer.stop_ids,
        temperature=config.temperature if temperature is None else temperature,
    )  # fmt: skip
    rollout = parts.rollout.generate(split.prompts.take(index), sampling, keep_routing=False)
    if rollout.aborted is not None:
        raise RolloutError(
            f"{int(rollout.aborted.sum())} of {len(index)} responses were aborted outside training"
        )
    return graded("respond", split.verifier, rollout)


def evaluate(
    parts: Parts,
    params: PyTree,
    key: PRNGKeyArray,
    *,
    temperature: float | None = None,
    samples: int = 1,
) -> dict[str, float]:
    """Accuracy on the held-out problems, `samples` responses each, as `held_out/...`.

    temperature: that of the rollouts when None, 0 is greedy.
    Source: ours: the same engine as training and the same key each time.
    """
    split = parts.held_out
    rows = np.repeat(np.arange(len(split.prompts)), samples)
    parts.rollout.update_weights(params, 0)
    scored = respond(parts, split, rows, key, temperature=temperature)
    outcome = outcome_metrics(split, scored)
    return {
        f"held_out/{name.replace('success', 'accuracy').replace('/', '_')}": value
        for name, value in outcome.items()
    }


def reference_success(parts: Parts, base: PyTree) -> np.ndarray:
    """Success rate of these weights on each training prompt [P].

    Source: ours: the same for all seeds of a run, for the prompts are the same.
    """
    config, num_prompts = parts.config, len(parts.train.prompts)
    key = keys.stage_key(config.task.seed, keys.REFERENCE)
    parts.rollout.update_weights(base, 0)
    total = np.zeros(num_prompts)
    for number in range(config.reference.samples):
        scored = respond(
            parts, parts.train, np.arange(num_prompts), jax.random.fold_in(key, number)
        )
        total += scored.success
    parts.rollout.rest()
    return (total / config.reference.samples).astype(np.float32)
