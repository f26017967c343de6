"""One tick, read top to bottom: select, rollout, reward, score, prepare, critic, actor."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from s3ac_jax.core import metrics
from s3ac_jax.core.types import Packed, PyTree, RunState, Scored
from s3ac_jax.data.packing import pack
from s3ac_jax.rollout.local import make_sampling
from s3ac_jax.scheduler.select import Draw
from s3ac_jax.train.build import Parts, Split
from s3ac_jax.train.health import check_finite
from s3ac_jax.train.learner import params_of


class PhaseTimes:
    """Seconds per phase of one tick; a phase waits for its own device work before it ends.

    Source: ours.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Adds the time spent inside to `time/<name>`. Source: ours."""
        start = time.perf_counter()
        yield
        key = f"time/{name}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start


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


def run_tick(
    parts: Parts, state: RunState, run_key: PRNGKeyArray
) -> tuple[RunState, dict[str, Any], dict[str, float]]:
    """(state after, metrics still on the device, metrics of the host). The state is donated.

    The tick's key is fold_in(run_key, tick): with the state it decides everything.
    Source: S3AC (2610.35518), order of one step; ours: the tick as a function.
    """
    config, recipe, tick = parts.config, parts.config.recipe, int(state.tick)
    times, start = PhaseTimes(), time.perf_counter()
    select_key, sample_key, shuffle_key = jax.random.split(jax.random.fold_in(run_key, tick), 3)
    actor_params, critic_params = params_of(state.actor), params_of(state.critic)

    with times.phase("select"):
        tokens, num_tokens = parts.train.prompts.tokens, parts.train.prompts.num_tokens
        draw = parts.scheduler.draw(
            select_key, state.stats, state.cursor, tick,
            lambda rows: parts.prompt_values(critic_params, tokens[rows], num_tokens[rows]),
        )  # fmt: skip
        index = np.repeat(draw.index, recipe.responses_per_prompt)
        prompt = parts.train.prompts.take(index)
    with times.phase("rollout"):
        parts.rollout.update_weights(actor_params, tick)
        sampling = make_sampling(
            sample_key, len(index), temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_response_tokens,
        )  # fmt: skip
        rollout = parts.rollout.generate(prompt, sampling)
    with times.phase("reward"):
        scored = parts.train.verifier.grade(rollout)
        stats = parts.scheduler.record(state.stats, index, scored.success, scored.valid, tick)
    with times.phase("score"):
        order = np.asarray(jax.random.permutation(shuffle_key, len(index)))
        order = order[_kept(parts, scored)[order]]
        # A grading that failed leaves its response out; the shape must not follow.
        packed = pack_batches(parts, scored, order, config.train.minibatches, most=len(index))
        scores = [parts.score(actor_params, critic_params, batch) for batch in packed]
        jax.block_until_ready(scores)
    with times.phase("prepare"):
        batches, band, report = parts.prepare(packed, scores, state.entropy_band)
        jax.block_until_ready(batches)
    with times.phase("critic"):
        critic, critic_report = state.critic, {}
        for _ in range(recipe.critic.epochs):
            for batch in batches:
                critic, new = parts.critic_step(critic, batch)
                critic_report = metrics.merge(critic_report, new)
        jax.block_until_ready(critic)
        check_finite(
            "critic",
            parts.critic.network,
            params_of(critic),
            critic_report,
            batches,
            f"tick {tick}",
            "critic.lr",
        )
    with times.phase("actor"):
        actor, actor_report = state.actor, {}
        for batch in batches:
            actor, new = parts.actor_step(actor, batch)
            actor_report = metrics.merge(actor_report, new)
        jax.block_until_ready(actor)
        check_finite(
            "actor",
            parts.actor.network,
            params_of(actor),
            actor_report,
            batches,
            f"tick {tick}",
            "actor.lr",
        )

    after = RunState(actor, critic, stats, draw.cursor, band, np.int32(tick + 1))
    report |= {_named("critic", name): value for name, value in critic_report.items()}
    report |= {_named("actor", name): value for name, value in actor_report.items()}
    seconds = time.perf_counter() - start
    made = int(rollout.num_tokens.sum() + rollout.prompt.num_tokens.sum())
    host = outcome_metrics(parts.train, scored) | selection_metrics(parts, draw) | times.seconds
    return after, report, host | {"time/tick": seconds, "tokens_per_second": made / seconds}


def _kept(parts: Parts, scored: Scored) -> np.ndarray:
    group = np.arange(len(scored.success)) // parts.config.recipe.responses_per_prompt
    keep = parts.config.recipe.keep.responses(
        scored.success, group, num_groups=parts.config.train.batch_prompts
    )
    return np.asarray(keep) & scored.valid


def _named(role: str, name: str) -> str:
    return name if name in ("value_loss", "entropy", "policy_loss") else f"{role}_{name}"


def outcome_metrics(split: Split, scored: Scored) -> dict[str, float]:
    """How a batch of responses came out, overall and by difficulty level. Source: ours."""
    rollout = scored.rollout
    levels = split.prompts.levels[rollout.prompt.index]
    steps = split.verifier.count_steps(rollout)
    all_right = steps.right == steps.required
    result = {
        "reward": float(scored.reward.mean()),
        "success": float(scored.success.mean()),
        "response_tokens": float(rollout.num_tokens.mean()),
        "truncated": float(1 - rollout.stopped.mean()),
        "step_accuracy": float(steps.right.sum() / steps.required.sum()),
        "worked_answers": float((all_right & scored.success).sum() / max(scored.success.sum(), 1)),
    }
    for level in np.unique(levels):
        of_level = levels == level
        result[f"success/steps_{level}"] = float(scored.success[of_level].mean())
        result[f"step_accuracy/steps_{level}"] = float(
            steps.right[of_level].sum() / steps.required[of_level].sum()
        )
    return result


def selection_metrics(parts: Parts, draw: Draw) -> dict[str, float]:
    """What selection did, by difficulty level. Source: ours."""
    levels = parts.train.prompts.levels[draw.seen]
    result = {
        "candidates": float(len(draw.seen)),
        "forced": float(draw.forced),
        "nan_values": float(draw.nan_values),
    }
    for level in np.unique(levels):
        result[f"accept/steps_{level}"] = float(draw.acceptance[levels == level].mean())
    return result


def respond(
    parts: Parts,
    split: Split,
    index: np.ndarray,
    key: PRNGKeyArray,
    *,
    temperature: float | None = None,
) -> Scored:
    """Graded responses of the rollout engine's present weights to these prompts of the split.

    temperature: that of the config's rollouts when None. Source: ours.
    """
    config = parts.config.rollout
    sampling = make_sampling(
        key, len(index), max_tokens=config.max_response_tokens,
        temperature=config.temperature if temperature is None else temperature,
    )  # fmt: skip
    return split.verifier.grade(parts.rollout.generate(split.prompts.take(index), sampling))


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
    parts.rollout.update_weights(params, -1)
    scored = respond(parts, split, rows, key, temperature=temperature)
    outcome = outcome_metrics(split, scored)
    return {
        f"held_out/{name.replace('success', 'accuracy').replace('/', '_')}": value
        for name, value in outcome.items()
    }
