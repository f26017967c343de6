"""What samples of problems say: avg@k, pass@k, maj@k, and how far each can be trusted.

A problem was answered n times. Which answers are one answer is decided before, by the verifier;
here they are numbers.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
# Numbers held at a time while resampling.
_BLOCK = 1 << 22


class Estimate(NamedTuple):
    """A mean over problems and its 95 % interval, NaN where there is none.

    Source: ours.
    """

    value: float
    low: float
    high: float


def pass_at(n: int, correct: int, k: int) -> float:
    """Probability that at least one of k answers is right, from `correct` right ones of n.

    Unbiased for any k <= n: one minus the share of k-subsets without a right answer, as a product
    of n - c - i over n - i, which neither overflows nor loses digits.
    Raises ValueError unless 0 <= correct <= n and 1 <= k <= n.
    Source: Codex (2107.03374), equation 1.
    """
    _check(n, k)
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} answers can't be right")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod((n - correct - i) / (n - i) for i in range(k))


def maj_at(groups: Sequence[tuple[int, float]], unanswered: int, k: int) -> float:
    """Probability that the most frequent of k answers is right, over all k-subsets of n answers.

    groups: one (how often it was given, share of it that is right) for each answer given.
    unanswered: responses without an answer, which have no vote; a subset of them alone is wrong.
    Groups that tie share the vote: the expected value of drawing one of them.
    Raises ValueError unless 1 <= k <= n.
    Source: self-consistency (2203.11171); ours: the exact expectation, where others draw subsets.
    """
    n = sum(count for count, _ in groups) + unanswered
    _check(n, k)
    if k == n:
        best = max((count for count, _ in groups), default=0)
        won = [right for count, right in groups if count == best]
        return sum(won) / len(won) if won else 0.0
    # Exact to the last division: binomials of 64 samples are beyond what a float holds exactly, and
    # those of a thousand beyond what it holds at all.
    total = Fraction(0)
    for place, (count, right) in enumerate(groups):
        if not right:
            continue
        others = [size for other, (size, _) in enumerate(groups) if other != place]
        for most in range(1, min(count, k) + 1):
            ways = _ways(others, unanswered, k - most, most)
            share = sum(Fraction(ways[ties], ties + 1) for ties in range(len(ways)))
            total += Fraction(right) * math.comb(count, most) * share
    return float(total / math.comb(n, k))


def _ways(sizes: Sequence[int], unanswered: int, rest: int, most: int) -> list[int]:
    """In how many ways `rest` more answers leave no group above `most`, by how many reach it."""
    ties = rest // most
    # ways[m][s]: s answers drawn so far, m groups with `most` of them.
    ways = [[0] * (rest + 1) for _ in range(ties + 1)]
    ways[0][0] = 1
    for size in sizes:
        chosen = [math.comb(size, drawn) for drawn in range(min(size, most, rest) + 1)]
        new = [[0] * (rest + 1) for _ in range(ties + 1)]
        for m, row in enumerate(ways):
            for s, count in enumerate(row):
                if not count:
                    continue
                for drawn, times in enumerate(chosen[: rest - s + 1]):
                    if drawn < most:
                        new[m][s + drawn] += count * times
                    elif m < ties:
                        new[m + 1][s + drawn] += count * times
        ways = new
    return [
        sum(count * math.comb(unanswered, rest - s) for s, count in enumerate(row)) for row in ways
    ]


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must be in 1..{n}, the answers there are, got {k}")


def over_problems(values: Sequence[float], *, resamples: int, seed: int = 0) -> Estimate:
    """The mean of one value per problem, as problems like these would have it.

    Problems are drawn anew, with replacement; the interval is between the 2.5 % and 97.5 %
    quantiles of the resampled means. Both ends are NaN for fewer than two problems.
    Source: the bootstrap (Efron 1979), percentile interval.
    """
    known = np.asarray(values, float)
    if len(known) < 2:
        return Estimate(float(known.mean()) if len(known) else math.nan, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _BLOCK // len(known))
    for start in range(0, resamples, step):
        size = (min(step, resamples - start), len(known))
        means[start : start + step] = known[rng.integers(len(known), size=size)].mean(axis=1)
    return _estimate(float(known.mean()), means)


def over_samples(correct: Sequence[Sequence[bool]], *, resamples: int, seed: int = 0) -> Estimate:
    """avg@n of these problems, as other samples (other seeds) of the same policy would have it.

    correct: of each problem, which of its answers are right. Each problem's answers are drawn anew
    with replacement, so it is the noise of sampling alone; NaN ends where no problem has two.
    Source: the bootstrap (Efron 1979): a resampled count of right ones of n is binomial.
    """
    n = np.array([len(row) for row in correct])
    if not len(n):
        return Estimate(math.nan, math.nan, math.nan)
    share = np.array([np.mean(row) for row in correct])
    if n.max() < 2:
        return Estimate(float(share.mean()), math.nan, math.nan)
    rng = np.random.default_rng(seed)
    means = np.array([np.mean(rng.binomial(n, share) / n) for _ in range(resamples)])
    return _estimate(float(share.mean()), means)


def std_over_samples(correct: Sequence[Sequence[bool]]) -> float:
    """Standard deviation of avg@1 between one sample of every problem and the next; NaN for one.

    correct: as for `over_samples`; problems with fewer samples than another count up to the
    shortest. Source: ours: how far an evaluation with one sample would be off.
    """
    n = min((len(row) for row in correct), default=0)
    if n < 2:
        return math.nan
    return float(np.array([row[:n] for row in correct], float).mean(axis=0).std(ddof=1))


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Estimate(value, float(low), float(high))
