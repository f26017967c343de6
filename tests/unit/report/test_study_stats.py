"""Intervals and tests against scipy.stats; readings of curves against numbers from hand."""

import math

import numpy as np
import pytest
from scipy import stats

from s3ac_jax.report.study_data import KEYS, METRICS, load
from s3ac_jax.report.study_stats import (
    area,
    at_seconds,
    at_tick,
    equal_budget,
    equal_ticks,
    holm,
    holm_verdicts,
    interval,
    paired_difference,
    ticks_to,
)

NAN, INF = math.nan, math.inf
A = {0: 0.81, 1: 0.84, 2: 0.79, 3: 0.90, 4: 0.86}
B = {0: 0.80, 1: 0.80, 2: 0.77, 3: 0.87, 4: 0.81}


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_interval_is_scipys(n):
    values = np.random.default_rng(n).normal(3, 2, n)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = interval(values)
    assert (found.low, found.high) == pytest.approx(tuple(expected), rel=1e-12)
    assert (found.mean, found.n) == (pytest.approx(values.mean()), n)


def test_interval_of_few_values():
    one = interval([0.5, NAN])
    assert (one.mean, one.n) == (0.5, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert interval([]).n == 0
    assert math.isnan(interval([]).mean)
    never = interval([10.0, INF])
    assert (never.mean, never.n) == (INF, 2)
    assert math.isnan(never.high)


def test_paired_difference_is_scipys():
    expected = stats.ttest_rel(list(A.values()), list(B.values()))
    low, high = expected.confidence_interval(0.95)
    found = paired_difference(A, B)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high), rel=1e-10)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-10)
    assert found.verdict == "higher"
    assert paired_difference(B, A).verdict == "lower"


def test_pairs_are_made_by_seed_and_only_of_those_in_both():
    shuffled = {**dict(reversed(B.items())), 7: 100.0, 3: NAN}
    found = paired_difference({**A, 9: -100.0}, shuffled)
    kept = [0, 1, 2, 4]
    expected = stats.ttest_rel([A[s] for s in kept], [B[s] for s in kept])
    assert found.interval.n == 4
    assert found.p == pytest.approx(expected.pvalue)


@pytest.mark.parametrize(
    ("a", "b", "p", "verdict"),
    [
        ({0: 1.0, 1: 3.0}, {0: 2.0, 1: 1.0}, None, "not separated"),
        ({0: 1.0}, {0: 2.0}, NAN, "too few seeds"),
        ({0: 1.0, 1: 1.0}, {2: 2.0}, NAN, "too few seeds"),
        ({0: 4.0, 1: 6.0}, {0: 4.0, 1: 6.0}, 1.0, "not separated"),
        ({0: 5.0, 1: 7.0}, {0: 4.0, 1: 6.0}, 0.0, "higher"),
        ({0: INF, 1: 7.0}, {0: 4.0, 1: 6.0}, NAN, "not separated"),
    ],
)
def test_verdicts_at_the_edges(a, b, p, verdict):
    found = paired_difference(a, b)
    assert found.verdict == verdict
    if p is not None:
        assert found.p == pytest.approx(p, nan_ok=True)


def test_holm_by_hand():
    # Sorted: 0.01 * 4, 0.02 * 3, 0.03 * 2, 0.04 * 1; the maximum so far is never undercut.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, NAN, 0.9]) == pytest.approx([1.0, NAN, 1.0], nan_ok=True)
    assert holm([]) == []


def test_holm_can_take_a_verdict_back():
    # By itself 0.0316; two such lines stand at twice that.
    found = paired_difference({0: 1.0, 1: 1.2, 2: 0.6}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert found.verdict == "higher"
    assert [verdict for _, verdict in holm_verdicts([found])] == ["higher"]
    too_few = paired_difference({0: 1.0}, {0: 0.0})
    corrected = holm_verdicts([found, too_few, found])
    assert [verdict for _, verdict in corrected] == [
        "not separated", "too few seeds", "not separated",
    ]  # fmt: skip
    assert corrected[0][0] == pytest.approx(2 * found.p)


@pytest.fixture
def results(tmp_path):
    """a: 20 ticks of 2 s after 30 s offline; b: of 1 s. Seed 1 of a stops after 10 ticks."""
    rows = [
        ("a", 0, 0, 0, 30, 0.2), ("a", 0, 10, 20, 30, 0.6), ("a", 0, 20, 40, 30, 0.8),
        ("a", 1, 0, 0, 30, 0.4), ("a", 1, 10, 20, 30, 0.5),
        ("b", 0, 0, 0, 0, 0.1), ("b", 0, 5, 5, 0, 0.9), ("b", 0, 20, 20, 0, 0.7),
        ("c", 0, 0, 0, 0, ""),
    ]  # fmt: skip
    names = (*KEYS, *METRICS)
    lines = [",".join(names)]
    for arm, seed, tick, seconds, offline, accuracy in rows:
        cells = {"arm": arm, "family": "group", "recipe": "r", "seed": seed, "tick": tick,
                 "seconds": seconds, "offline_seconds": offline,
                 "held_out_accuracy": accuracy}  # fmt: skip
        lines.append(",".join(str(cells.get(name, "")) for name in names))
    path = tmp_path / "results.csv"
    path.write_text("\n".join(lines))
    return load(path)


def test_at_tick(results):
    accuracy = "held_out_accuracy"
    assert at_tick(results, "a", accuracy, 5) == pytest.approx({0: 0.4, 1: 0.45})
    assert at_tick(results, "a", accuracy, 10) == pytest.approx({0: 0.6, 1: 0.5})
    assert at_tick(results, "a", accuracy, 15) == pytest.approx({0: 0.7, 1: NAN}, nan_ok=True)
    assert at_tick(results, "c", accuracy, 0) == pytest.approx({0: NAN}, nan_ok=True)


@pytest.mark.parametrize(
    ("seconds", "with_offline", "expected"),
    [
        (10, False, {0: 0.4, 1: 0.45}),
        (30, False, {0: 0.7, 1: NAN}),
        (40, False, {0: 0.8, 1: NAN}),
        (41, False, {0: NAN, 1: NAN}),
        (10, True, {0: 0.2, 1: 0.4}),
        (40, True, {0: 0.4, 1: 0.45}),
        (70, True, {0: 0.8, 1: NAN}),
    ],
)
def test_at_seconds(results, seconds, with_offline, expected):
    found = at_seconds(results, "a", "held_out_accuracy", seconds, with_offline)
    assert found == pytest.approx(expected, nan_ok=True)


def test_area(results):
    # (0.2 + 0.6) / 2 * 10 + (0.6 + 0.8) / 2 * 10 = 11 over 20 ticks; 4.5 over 10.
    assert area(results, "a") == pytest.approx({0: 0.55, 1: 0.45})
    # (0.1 + 0.9) / 2 * 5 + (0.9 + 0.7) / 2 * 15 = 14.5 over 20 ticks.
    assert area(results, "b") == pytest.approx({0: 0.725})
    # Up to tick 15: 4 + (0.6 + 0.7) / 2 * 5 = 7.25.
    assert area(results, "a", 15) == pytest.approx({0: 7.25 / 15, 1: NAN}, nan_ok=True)
    assert area(results, "a", 0) == pytest.approx({0: 0.2, 1: 0.4})
    assert area(results, "c") == pytest.approx({0: NAN}, nan_ok=True)


def test_ticks_to(results):
    assert ticks_to(results, "a", 0.7) == {0: pytest.approx(15), 1: INF}
    assert ticks_to(results, "a", 0.3) == {0: pytest.approx(2.5), 1: 0}
    # The first crossing counts, though accuracy falls again.
    assert ticks_to(results, "b", 0.8) == {0: pytest.approx(4.375)}
    assert ticks_to(results, "c", 0.0) == {0: INF}


def test_equal_budgets(results):
    assert equal_budget(results, ["a", "b"]) == 20
    assert equal_budget(results, ["a"], with_offline=True) == 50
    assert equal_budget(results, ["a", "b"], with_offline=True) == 20
    assert equal_budget(results, ["a", "c"]) == 0
    assert equal_ticks(results, ["a", "b"]) == 10
    assert equal_ticks(results, ["b"]) == 20
