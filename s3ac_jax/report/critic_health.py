"""What one tick's responses say about the critic: calibration of V(s_0), coverage, advantages."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from s3ac_jax.report.tripwires import Coverage, coverage_name

BUCKETS = 8
_BINS = 10


def length_edges(max_response_tokens: int) -> tuple[int, ...]:
    """Bounds of the buckets of response length, tokens; fewer buckets where the limit is short.

    Source: ours: eighths of the limit, so that runs of one limit compare.
    """
    buckets = min(BUCKETS, max_response_tokens)
    return tuple(max_response_tokens * n // buckets for n in range(buckets + 1))


def coverage_of(tokens: np.ndarray, success: np.ndarray, max_response_tokens: int) -> Coverage:
    """How many responses there are of each length, and how many of them are right.

    tokens, success: of each response [N].
    Source: S3AC (2610.35518), coverage: is "long and correct" there at all?
    """
    edges = length_edges(max_response_tokens)
    bucket = np.clip(np.searchsorted(edges, tokens, side="left") - 1, 0, len(edges) - 2)
    counts = np.bincount(bucket, minlength=len(edges) - 1)
    right = np.bincount(bucket, weights=success, minlength=len(edges) - 1)
    return Coverage(edges, tuple(map(int, counts)), tuple(map(int, right)))


def coverage_facts(coverage: Mapping[str, Coverage]) -> dict[str, Any]:
    """Coverage of several policies as JSON, to be kept. Source: ours."""
    edges = [list(one.edges) for one in coverage.values()][:1]
    policies = {
        name: {"responses": list(one.responses), "correct": list(one.correct)}
        for name, one in coverage.items()
    }
    return {"edges": edges[0] if edges else [], "policies": policies}


def whole_coverage(facts: dict[str, Any] | None) -> Coverage | None:
    """Of all policies together, from what `coverage_facts` gave; None for nothing kept.

    Source: S3AC (2610.35518): the mixture is what the critic sees.
    """
    if not facts or not facts["policies"]:
        return None
    responses, correct = (
        tuple(
            sum(column)
            for column in zip(*(one[what] for one in facts["policies"].values()), strict=True)
        )
        for what in ("responses", "correct")
    )
    return Coverage(tuple(facts["edges"]), responses, correct)


def coverage_metrics(coverage: Coverage) -> dict[str, float]:
    """Share and accuracy of each bucket that has responses, by the names of the metrics.

    Source: S3AC (2610.35518), coverage.
    """
    total, found = sum(coverage.responses), {}
    pairs = zip(coverage.edges[:-1], coverage.edges[1:], strict=True)
    for pair, count, right in zip(pairs, coverage.responses, coverage.correct, strict=True):
        name = coverage_name(*pair)
        found[f"coverage/share_{name}"] = count / total if total else 0.0
        if count:
            found[f"coverage/accuracy_{name}"] = right / count
    return found


def v0_metrics(v0: np.ndarray, reward: np.ndarray, success: np.ndarray) -> dict[str, float]:
    """How well V(s_0) foretells outcomes. Arrays [N], reward units; success is the verifier's word.

    v0_mean_error: mean of V(s_0) - R. v0_explained_variance: 1 - Var(R - V) / Var(R), absent where
    all rewards are equal. v0_calibration_error: mean distance of the success probability
    (V(s_0) + 1) / 2 from the success rate, over ten bins of that probability, by responses.
    Source: S3AC (2610.35518) reads V(s_0) as difficulty; Naeini et al. 2015 for the error.
    """
    seen = np.isfinite(v0)
    v0, reward, success = v0[seen].astype(float), reward[seen].astype(float), success[seen]
    if not len(v0):
        return {}
    found = {"v0_mean_error": float((v0 - reward).mean())}
    if np.ptp(reward) > 1e-6:
        found["v0_explained_variance"] = float(1 - np.var(reward - v0) / np.var(reward))
    p = np.clip((v0 + 1) / 2, 0, 1)
    bins = np.minimum((p * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, weights=p - success, minlength=_BINS)
    found["v0_calibration_error"] = float(np.abs(gaps).sum() / len(p))
    return found


def advantage_metrics(
    advantage: np.ndarray, tokens: np.ndarray, levels: Sequence[str]
) -> dict[str, float]:
    """Mean raw advantage over the tokens of the responses of each difficulty level, reward units.

    advantage: mean over each response's tokens [N], NaN for one not trained on. tokens, levels: of
    each response [N].
    Source: S3AC (2610.35518): failures on easy prompts are punished, on hard ones hardly.
    """
    seen, names = np.isfinite(advantage), np.asarray(levels)
    found = {}
    for level in dict.fromkeys(levels):
        rows = seen & (names == level)
        if rows.any():
            found[f"advantage/{level}"] = float(np.average(advantage[rows], weights=tokens[rows]))
    return found
