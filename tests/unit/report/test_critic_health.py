"""Calibration, coverage and advantages of a tick's responses, against plain loops."""

import json
import math

import numpy as np
import pytest

from s3ac_jax.report.critic_health import (
    advantage_metrics,
    coverage_facts,
    coverage_metrics,
    coverage_of,
    length_edges,
    v0_metrics,
    whole_coverage,
)
from s3ac_jax.report.tripwires import Coverage


@pytest.mark.parametrize(
    ("limit", "edges"),
    [
        (40, (0, 5, 10, 15, 20, 25, 30, 35, 40)),
        (11, (0, 1, 2, 4, 5, 6, 8, 9, 11)),
        (8, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
        (3, (0, 1, 2, 3)),
        (1, (0, 1)),
    ],
)
def test_edges_are_eighths_of_the_limit_and_all_different(limit, edges):
    assert length_edges(limit) == edges


@pytest.mark.parametrize(("limit", "number", "seed"), [(40, 300, 0), (11, 50, 1), (3, 9, 2)])
def test_each_response_is_counted_once_where_it_belongs(limit, number, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, limit + 1, size=number).astype(np.int32)
    success = rng.random(number) < 0.4
    found = coverage_of(tokens, success, limit)
    buckets = list(zip(found.edges[:-1], found.edges[1:], strict=True))
    counts, right = [0] * len(buckets), [0] * len(buckets)
    for length, good in zip(tokens.tolist(), success.tolist(), strict=True):
        (place,) = (k for k, (low, high) in enumerate(buckets) if low < length <= high)
        counts[place] += 1
        right[place] += good
    assert found.responses == tuple(counts)
    assert found.correct == tuple(right)
    assert sum(found.responses) == number
    assert all(type(one) is int for one in (*found.responses, *found.correct))
    order = rng.permutation(number)
    assert coverage_of(tokens[order], success[order], limit) == found


def test_bounds_and_nobody():
    found = coverage_of(np.array([0, 5, 6, 40, 41]), np.array([True, True, False, True, False]), 40)
    assert found.responses == (2, 1, 0, 0, 0, 0, 0, 2)
    assert found.correct == (2, 0, 0, 0, 0, 0, 0, 1)
    nobody = coverage_of(np.zeros(0, np.int32), np.zeros(0, bool), 40)
    assert nobody.responses == nobody.correct == (0,) * 8
    assert set(coverage_metrics(nobody).values()) == {0.0}


def test_metrics_are_shares_and_rates_by_the_names_of_the_bounds():
    found = coverage_metrics(Coverage((0, 5, 10, 16), (6, 0, 2), (3, 0, 2)))
    assert found == {
        "coverage/share_0_5": 0.75, "coverage/accuracy_0_5": 0.5, "coverage/share_5_10": 0.0,
        "coverage/share_10_16": 0.25, "coverage/accuracy_10_16": 1.0,
    }  # fmt: skip


def test_the_mixture_comes_back_from_what_is_kept():
    policies = {
        "early": Coverage((0, 5, 10), (4, 1), (2, 0)), "late": Coverage((0, 5, 10), (3, 7), (0, 5)),
    }  # fmt: skip
    facts = json.loads(json.dumps(coverage_facts(policies)))
    assert facts["policies"]["late"] == {"responses": [3, 7], "correct": [0, 5]}
    assert whole_coverage(facts) == Coverage((0, 5, 10), (7, 8), (2, 5))
    one = {"late": policies["late"]}
    assert whole_coverage(coverage_facts(one)) == policies["late"]
    # Of runs of before there was any, and of a critic that saw nobody.
    for nothing in (None, {}, coverage_facts({})):
        assert whole_coverage(nothing) is None


def calibration_oracle(v0, success):
    bins = [[] for _ in range(10)]
    for value, good in zip(v0, success, strict=True):
        p = min(max((float(value) + 1) / 2, 0.0), 1.0)
        bins[min(int(p * 10), 9)].append((p, bool(good)))
    error = 0.0
    for members in filter(None, bins):
        p = sum(one for one, _ in members) / len(members)
        rate = sum(good for _, good in members) / len(members)
        error += abs(p - rate) * len(members) / len(v0)
    return error


@pytest.mark.parametrize(("number", "seed"), [(1, 0), (7, 1), (256, 2)])
def test_v0_against_outcomes(number, seed):
    rng = np.random.default_rng(seed)
    v0 = rng.uniform(-1.3, 1.3, size=number).astype(np.float32)
    success = rng.random(number) < 0.5
    reward = (np.where(success, 1.0, -1.0) - 0.3 * rng.random(number)).astype(np.float32)
    found = v0_metrics(v0, reward, success)
    v, r = v0.astype(float), reward.astype(float)
    assert found["v0_mean_error"] == pytest.approx(sum(v - r) / number)
    assert found["v0_calibration_error"] == pytest.approx(calibration_oracle(v0, success))
    if number > 1:
        want = 1 - np.var(r - v) / np.var(r)
        assert found["v0_explained_variance"] == pytest.approx(want)
    # What is not in the batch has no say, whatever stands there.
    for poison in (math.nan, math.inf, -math.inf):
        longer = v0_metrics(
            np.append(v0, np.float32(poison)), np.append(reward, np.float32(9)),
            np.append(success, True),
        )  # fmt: skip
        assert longer == pytest.approx(found)


def test_a_judge_who_is_right_on_average_is_calibrated():
    v0 = np.repeat([0.5, -0.5], 8).astype(np.float32)  # success probabilities 3/4 and 1/4
    success = np.array([1, 1, 1, 0] * 2 + [0, 0, 0, 1] * 2, bool)
    found = v0_metrics(v0, np.where(success, 1.0, -1.0), success)
    assert found["v0_calibration_error"] == pytest.approx(0)
    assert found["v0_mean_error"] == pytest.approx(0)
    assert v0_metrics(v0 * 0 + 1, success * 1.0, ~success & success)["v0_calibration_error"] == 1
    # A constant one explains nothing, however right.
    found = v0_metrics(v0 * 0, np.where(success, 1.0, -1.0), success)
    assert found["v0_explained_variance"] == pytest.approx(0)
    assert found["v0_calibration_error"] == pytest.approx(0)


def test_equal_outcomes_have_no_variance_to_explain():
    ones = np.ones(4, np.float32)
    found = v0_metrics(0.8 * ones, ones, ones > 0)
    assert found.keys() == {"v0_mean_error", "v0_calibration_error"}
    assert found["v0_calibration_error"] == pytest.approx(0.1)
    assert v0_metrics(np.full(3, np.nan), np.ones(3), np.ones(3, bool)) == {}
    assert v0_metrics(np.zeros(0), np.zeros(0), np.zeros(0, bool)) == {}


def test_advantage_of_a_level_is_the_mean_over_its_tokens():
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 12, size=40)
    each = [rng.normal(size=n) for n in tokens]
    advantage = np.array([x.mean() for x in each])
    levels = rng.choice(["steps_1", "steps_2", "steps_7"], size=40).tolist()
    left_out = {3, 17}
    advantage[list(left_out)] = np.nan
    found = advantage_metrics(advantage, tokens, levels)
    assert found.keys() == {"advantage/steps_1", "advantage/steps_2", "advantage/steps_7"}
    for level in ("steps_1", "steps_2", "steps_7"):
        members = [each[n] for n in range(40) if levels[n] == level and n not in left_out]
        want = np.concatenate(members).mean()
        assert found[f"advantage/{level}"] == pytest.approx(want)


def test_a_level_that_nobody_trained_on_has_no_advantage():
    found = advantage_metrics(np.array([np.nan, 0.5]), np.array([3, 4]), ["hard", "easy"])
    assert found == {"advantage/easy": 0.5}
    assert advantage_metrics(np.zeros(0), np.zeros(0, int), []) == {}
