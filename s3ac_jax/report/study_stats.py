"""What seeds allow to say: Student-t intervals, paired differences, and curves read at one point.

A seed is one observation. Curves are read by linear interpolation between evaluations of one seed;
nothing is smoothed, and nothing is guessed beyond a run's end.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import special  # pyrefly: ignore[untyped-import]

from s3ac_jax.report.study_data import ACCURACY, Results

CONFIDENCE = 0.95
HIGHER, LOWER, NOT_SEPARATED, TOO_FEW = "higher", "lower", "not separated", "too few seeds"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over n seeds and its 95 % interval, in the unit of the values.

    mean: NaN if n = 0. low, high: NaN if n < 2 or a value is infinite ("never").

    Source: ours: one seed says nothing of the spread.
    """

    mean: float
    low: float
    high: float
    n: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of A - B over the seeds that both have, for this comparison by itself.

    interval: 95 %. p: two-sided, NaN without an interval. verdict: "higher" or "lower" (A against
    B) if 0 is outside of the interval, "too few seeds" if n < 2, else "not separated"; it is not
    corrected for other comparisons (`holm_verdicts` is).

    Source: ours: a difference within the noise must not look like a result.
    """

    interval: Interval
    p: float
    verdict: str


def interval(values: Iterable[float]) -> Interval:
    """95 % Student-t interval of the mean of `values`; NaN entries are left out of n.

    Source: ours: Student's t, n - 1 degrees of freedom, as few seeds need it.
    """
    known = np.array([value for value in values if not math.isnan(value)], float)
    n = len(known)
    if n and not np.isfinite(known).all():
        return Interval(float(known.max()), math.nan, math.nan, n)
    mean = float(known.mean()) if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n)
    half = float(special.stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * _standard_error(known)
    return Interval(mean, mean - half, mean + half, n)


def paired_difference(a: dict[int, float], b: dict[int, float]) -> Difference:
    """A - B over the seeds at which both have a value.

    a, b: value by seed. Runs of equal seed share prompts and orders, so they are paired.

    Source: ours: the paired t test; what a seed does to both arms cancels.
    """
    differences = [a[seed] - b[seed] for seed in common_seeds(a, b)]
    found = interval(differences)
    if math.isnan(found.low):
        return Difference(found, math.nan, TOO_FEW if found.n < 2 else NOT_SEPARATED)
    error = _standard_error(np.array(differences))
    if error > 0:
        p = 2 * float(special.stdtr(found.n - 1, -abs(found.mean) / error))
    else:
        p = 1.0 if found.mean == 0 else 0.0
    return Difference(found, p, _verdict(found.mean, found.low > 0 or found.high < 0))


def common_seeds(a: dict[int, float], b: dict[int, float]) -> list[int]:
    """Seeds at which both have a value that is not NaN, ascending.

    Source: ours: the pairs of `paired_difference`.
    """
    return [seed for seed in sorted(a.keys() & b.keys()) if not math.isnan(a[seed] + b[seed])]


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for being listed together, in the order given; NaN stays NaN.

    Source: Holm 1979: the i-th smallest of m times m - i + 1, made monotone, at most 1.
    """
    p = np.asarray(p_values, float)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    corrected = np.full(len(p), np.nan)
    factors = len(order) - np.arange(len(order))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * factors))
    return [float(value) for value in corrected]


def holm_verdicts(differences: Sequence[Difference]) -> list[tuple[float, str]]:
    """Corrected p and verdict of each, at a family-wise error of 5 % over `differences`.

    Source: Holm 1979, see `holm`.
    """
    corrected = holm([difference.p for difference in differences])
    return [
        (p, d.verdict if math.isnan(p) else _verdict(d.interval.mean, p < 1 - CONFIDENCE))
        for p, d in zip(corrected, differences, strict=True)
    ]


def at_tick(results: Results, arm: str, metric: str, tick: float) -> dict[int, float]:
    """Per seed, `metric` after `tick` ticks; NaN beyond the run's last measurement.

    Between two measurements it is interpolated linearly; before the first it is the first.

    Source: ours: equal optimiser steps.
    """
    return _read(results, arm, metric, tick, "tick")


def at_seconds(
    results: Results, arm: str, metric: str, seconds: float, with_offline: bool
) -> dict[int, float]:
    """Per seed, `metric` after `seconds` of training; NaN beyond the run's last measurement.

    with_offline: work before online training counts, and while it goes on the metric is the first
    one measured: the policy has not moved yet.

    Source: ours: equal wall time.
    """
    return _read(results, arm, metric, seconds, _axis(with_offline))


def area(results: Results, arm: str, last: float | None = None) -> dict[int, float]:
    """Per seed, mean held-out accuracy over ticks 0..last by the trapezoid rule, a fraction.

    last: tick; default: the last evaluation. NaN for a seed that ends before.

    Source: ours: says who learns faster, where the end only says who arrives.
    """
    means = {}
    for seed in results.seeds(arm):
        x, y = results.curve(arm, seed, ACCURACY)
        end = last if last is not None or not len(x) else float(x[-1])
        if end is None or not len(x) or x[-1] < end:
            means[seed] = math.nan
            continue
        inside = (x > 0) & (x < end)
        xs = np.concatenate([[0.0], x[inside], [end]])
        ys = np.interp(xs, x, y)
        means[seed] = float(np.trapezoid(ys, xs) / end) if end > 0 else float(ys[0])
    return means


def ticks_to(results: Results, arm: str, level: float) -> dict[int, float]:
    """Per seed, the first tick at which interpolated accuracy reaches `level`; inf when never.

    level: a fraction.

    Source: ours: the cost of a given quality.
    """
    return {seed: _first_at(*results.curve(arm, seed, ACCURACY), level)
            for seed in results.seeds(arm)}  # fmt: skip


def equal_ticks(results: Results, arms: Sequence[str]) -> float:
    """The largest tick at which every (arm, seed) of `arms` was evaluated or had been; 0 if none.

    Source: ours: seeds that are still training must not be guessed.
    """
    return _shortest(results, arms, "tick")


def equal_budget(results: Results, arms: Sequence[str], with_offline: bool = False) -> float:
    """The longest seconds that every (arm, seed) of `arms` reached with an evaluation; 0 if none.

    with_offline: see `at_seconds`.

    Source: ours: see `at_seconds`.
    """
    return _shortest(results, arms, _axis(with_offline))


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def _verdict(mean: float, separated: bool) -> str:
    return (HIGHER if mean > 0 else LOWER) if separated else NOT_SEPARATED


def _axis(with_offline: bool) -> str:
    return "seconds_with_offline" if with_offline else "seconds"


def _read(results: Results, arm: str, metric: str, x: float, axis: str) -> dict[int, float]:
    found = {}
    for seed in results.seeds(arm):
        xs, ys = results.curve(arm, seed, metric, axis)
        inside = len(xs) and x <= xs[-1]
        found[seed] = float(np.interp(x, xs, ys)) if inside else math.nan
    return found


def _first_at(x: np.ndarray, y: np.ndarray, level: float) -> float:
    reached = np.flatnonzero(y >= level)
    if not len(reached):
        return math.inf
    i = int(reached[0])
    if i == 0:
        return float(x[0])
    return float(x[i - 1] + (level - y[i - 1]) / (y[i] - y[i - 1]) * (x[i] - x[i - 1]))


def _shortest(results: Results, arms: Sequence[str], axis: str) -> float:
    curves = [results.curve(arm, seed, ACCURACY, axis)[0]
              for arm in arms for seed in results.seeds(arm)]  # fmt: skip
    return min((float(x[-1]) if len(x) else 0.0 for x in curves), default=0.0)
