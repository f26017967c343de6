"""One rollout batch: prompts drawn, answered, graded, and filtered until the batch is full."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from s3ac_jax.core.types import DataCursor, Packed, PromptStats, PyTree, Rollout, RunState, Scored
from s3ac_jax.data.packing import pack
from s3ac_jax.parallel.hosts import to_host
from s3ac_jax.rollout.backend import Sampling, make_sampling
from s3ac_jax.scheduler.select import Draw
from s3ac_jax.train.build import Parts
from s3ac_jax.train.grading import graded
from s3ac_jax.train.phases import PhaseTimes


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A rollout batch. trained: responses to train on, group by group; made: all of them.

    baseline: success rate that each trained response's prompt had before. draws: one per round.
    missing: prompts that the last round left open.
    Source: ours.
    """

    trained: Scored
    made: Scored
    baseline: np.ndarray
    draws: list[Draw]
    stats: PromptStats
    cursor: DataCursor
    missing: int


class GivenUp(Exception):
    """Nobody wants the batch that is being made any more. Source: ours."""


def gather(
    parts: Parts,
    state: RunState,
    actor_params: PyTree,
    values: Callable[[np.ndarray], jax.Array],
    keys: tuple[PRNGKeyArray, PRNGKeyArray],
    times: PhaseTimes,
    wanted: Callable[[], bool] = lambda: True,
) -> Gathered:
    """Rounds of select, rollout and reward, until enough groups are kept or rounds are used up.

    By the weights that the rollout engine has. actor_params: the policy's, for a selection that
    asks how far it has moved. values(index) -> V(s_0) for the selection. keys: of selection and of
    sampling. wanted: asked between phases; GivenUp is raised once it says False.
    Source: DAPO (2503.14476), dynamic sampling; ours: each round draws only what is missing, and
    history counts every graded response, those of dropped groups included (S3AC 2610.35518, DAPS).
    """
    config, recipe, tick = parts.config, parts.config.recipe, int(state.tick)
    size = recipe.responses_per_prompt
    stats, cursor, missing = state.stats, state.cursor, config.train.batch_prompts
    kept_rows, made, baseline, draws = [], [], [], []
    for number in range(recipe.keep.max_rounds):
        select_key, sample_key = (jax.random.fold_in(key, number) for key in keys)
        _go_on(wanted)
        with times.phase("select"):
            draw = parts.scheduler.draw(select_key, stats, cursor, tick, values, missing)
            before = parts.scheduler.success_rate(stats, draw.index)
            drift = _drift(parts, actor_params, stats, draw.index)
        with times.phase("rollout"):
            prompt = parts.train.prompts.take(np.repeat(draw.index, size))
            # Seeds for a whole batch, though a refill needs fewer: one shape, one compilation.
            sampling = make_sampling(
                sample_key, config.batch_responses, temperature=config.rollout.temperature,
                max_tokens=config.rollout.max_response_tokens,
                stop_ids=parts.task.tokenizer.stop_ids,
            )  # fmt: skip
            sampling = Sampling(*(field[: len(prompt.index)] for field in sampling))
            _go_on(wanted)
            rollout = parts.rollout.generate(prompt, sampling)
            _go_on(wanted)
        with times.phase("reward"):
            scored = _shaped(parts, _whole(graded("gather", parts.train.verifier, rollout)))
            stats = parts.scheduler.record(stats, scored, tick, drift)
            group = np.arange(len(scored.success)) // size
            keep = recipe.keep.groups(
                scored.success, scored.valid, group, num_groups=len(draw.index)
            )
        kept_rows.append(keep[group])
        made.append(scored)
        baseline.append(np.repeat(before, size))
        draws.append(draw)
        cursor = draw.cursor
        missing -= int(keep.sum())
        if not missing:
            break
    everything = jax.tree.map(lambda *x: np.concatenate(x), *made)
    kept = np.concatenate(kept_rows)
    trained = jax.tree.map(lambda x: x[kept], everything)
    return Gathered(
        trained, everything, np.concatenate(baseline)[kept], draws, stats, cursor, missing
    )


def _go_on(wanted: Callable[[], bool]) -> None:
    if not wanted():
        raise GivenUp


def _whole(scored: Scored) -> Scored:
    """Responses that somebody cut off count as not graded."""
    aborted = scored.rollout.aborted
    if aborted is None:
        return scored
    rollout = dataclasses.replace(scored.rollout, aborted=None)
    return dataclasses.replace(scored, rollout=rollout, valid=scored.valid & ~aborted)


def _shaped(parts: Parts, scored: Scored) -> Scored:
    shaping = parts.config.recipe.shaping
    if shaping is None:
        return scored
    reward = shaping.shaped(
        scored.reward, scored.rollout.num_tokens,
        max_tokens=parts.config.rollout.max_response_tokens,
    )  # fmt: skip
    return dataclasses.replace(scored, reward=reward)


def _drift(parts: Parts, params: PyTree, stats: PromptStats, index: np.ndarray) -> np.ndarray:
    """How far the policy has moved on the last response of each drawn prompt; NaN without one."""
    last = stats.last
    if last is None:
        return np.full(len(index), np.nan, np.float32)
    lengths = last.num_tokens[index]
    zeros = np.zeros(len(index), np.float32)
    rollout = Rollout(
        parts.train.prompts.take(index), last.tokens[index], lengths, last.logp[index],
        zeros > 0, np.zeros(last.logp[index].shape, np.int32),
    )  # fmt: skip
    answered = np.flatnonzero(lengths > 0)
    scored = Scored(rollout, zeros, zeros > 0, zeros == 0)
    packed = pack_batches(
        parts, scored, answered, parts.config.minibatches, most=parts.config.train.batch_prompts
    )
    # A refill draws fewer prompts than the shape has room for.
    return to_host(parts.drift(params, packed))[: len(index)]


def pack_batches(
    parts: Parts, scored: Scored, order: np.ndarray, num_batches: int, *, most: int | None = None
) -> list[Packed]:
    """The responses in `order`, cut into optimiser batches of one static shape, on the mesh.

    most: responses that there might have been, len(order) if None; the shape follows from it.
    Source: ours.
    """
    max_rows = parts.config.rows_for(-(-(most or len(order)) // num_batches))
    pack_tokens = parts.config.train.pack_tokens
    batches = [
        pack(scored, rows, pack_tokens=pack_tokens, max_rows=max_rows)
        for rows in np.array_split(order, num_batches)
    ]
    return [parts.place(batch) for batch in batches]
