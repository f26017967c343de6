"""Metrics of a tick that are made on the host: outcomes, selection, staleness, routing."""

import numpy as np

from s3ac_jax.core.types import Rollout, Scored
from s3ac_jax.train.build import Parts
from s3ac_jax.train.gather import Gathered
from s3ac_jax.train.tasks import Split


def host_metrics(parts: Parts, batch: Gathered, tick: int) -> dict[str, float]:
    """All of them, for the rollout batch of this tick. Source: ours."""
    return {
        **outcome_metrics(parts.train, batch.made),
        **selection_metrics(parts, batch),
        **routing_metrics(batch.made.rollout),
        "staleness": staleness(batch.trained.rollout, tick),
    }


def outcome_metrics(split: Split, scored: Scored) -> dict[str, float]:
    """How a batch of responses came out, overall and by difficulty level. Source: ours."""
    rollout = scored.rollout
    levels = split.prompts.levels[rollout.prompt.index]
    shares = split.verifier.shares(scored)
    result = {
        "reward": float(scored.reward.mean()),
        "success": float(scored.success.mean()),
        "response_tokens": float(rollout.num_tokens.mean()),
        "truncated": float(1 - rollout.stopped.mean()),
        **{name: share.of() for name, share in shares.items()},
    }
    for level in np.unique(levels):
        of_level, called = levels == level, split.prompts.called.names[level]
        result[f"success/{called}"] = float(scored.success[of_level].mean())
        for name, share in shares.items():
            if share.by_level:
                result[f"{name}/{called}"] = share.of(of_level)
    return result


def selection_metrics(parts: Parts, batch: Gathered) -> dict[str, float]:
    """What selection and filter did, the acceptance by difficulty level. Source: ours.

    dropped, dropped_groups: responses made whose group was dropped, and such groups. ungraded:
    share of responses made that got no verdict. equal_outcome: share of responses made whose
    group was all right or all wrong. reference_mid: share of trained prompts that the reference
    policy solves in 20 to 80 % of its tries.
    """
    size = parts.config.recipe.responses_per_prompt
    right = batch.made.success.reshape(-1, size).mean(axis=1)
    result = {
        "candidates": float(sum(len(draw.seen) for draw in batch.draws)),
        "forced": float(sum(draw.forced for draw in batch.draws)),
        "nan_values": float(sum(draw.nan_values for draw in batch.draws)),
        "generated": float(len(batch.made.success)),
        "dropped": float(len(batch.made.success) - len(batch.trained.success)),
        "missing_prompts": float(batch.missing),
        "ungraded": float(1 - batch.made.valid.mean()),
    }
    result["dropped_groups"] = result["dropped"] / size
    if size > 1:
        result["equal_outcome"] = float(((right == 0) | (right == 1)).mean())
    trained = batch.trained.rollout.prompt.index[::size]
    if parts.reference is not None and len(trained):
        known = parts.reference[trained]
        result["reference_mid"] = float(((known >= 0.2) & (known <= 0.8)).mean())
    seen = np.concatenate([draw.seen for draw in batch.draws])
    accepted = np.concatenate([draw.acceptance for draw in batch.draws])
    levels = parts.train.prompts.levels[seen]
    for level in np.unique(levels):
        called = parts.train.prompts.called.names[level]
        result[f"accept/{called}"] = float(accepted[levels == level].mean())
    return result


def staleness(rollout: Rollout, tick: int) -> float:
    """How many ticks old the weights are that made these tokens, on average. Source: ours."""
    made = rollout.version >= 0
    return float((tick - rollout.version[made]).mean()) if made.any() else 0.0


def routing_metrics(rollout: Rollout) -> dict[str, float]:
    """routing_unrecorded: share of the tokens read whose experts weren't recorded in every layer.

    The trainer routes those anew. The last token of a response is not read. Nothing for a rollout
    without routing.
    Source: Rollout routing replay (2510.11370).
    """
    if rollout.routing is None:
        return {}
    read = rollout.prompt.num_tokens + rollout.num_tokens - 1
    is_read = np.arange(rollout.routing.shape[1]) < read[:, None]
    missing = (rollout.routing < 0).any(axis=(2, 3))
    return {"routing_unrecorded": float(missing[is_read].mean())}
