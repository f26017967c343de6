"""DAPS: golden vectors, loops, and the article's two examples."""

import json
from pathlib import Path

import numpy as np
import pytest

from s3ac_jax.algos.difficulty import (
    acceptance,
    decay_history,
    distance_to,
    fuse,
    success_prior,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "objectives.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["daps"])
def test_golden(case):
    prior = success_prior(case["value"])
    p = fuse(prior, case["successes"], case["attempts"], n_c=case["n_c"])
    tight = {"rtol": 2e-6, "atol": 1e-6}
    np.testing.assert_allclose(prior, case["want_p_c"], **tight)
    np.testing.assert_allclose(p, case["want_p_hat"], **tight)
    np.testing.assert_allclose(acceptance(p, a_min=case["a_min"]), case["want_acceptance"], **tight)


@pytest.mark.parametrize(("size", "seed"), [(1, 0), (9, 1), (64, 2)])
def test_oracle_and_permutation(size, seed):
    rng = np.random.default_rng(seed)
    value = (1.5 * rng.normal(size=size)).astype(np.float32)
    attempts = rng.integers(0, 20, size).astype(np.float32)
    successes = np.floor(attempts * rng.random(size)).astype(np.float32)
    since = rng.integers(0, 300, size)
    want_s, want_n, want = [], [], []
    for v, s, n, k in zip(value, successes, attempts, since, strict=True):
        s, n = float(s) * 0.99 ** int(k), float(n) * 0.99 ** int(k)
        p = (s + 4.0 * min(max((float(v) + 1) / 2, 0.0), 1.0)) / (n + 4.0)
        want_s.append(s)
        want_n.append(n)
        want.append(0.1 + 0.9 * 4 * p * (1 - p))

    def run(value, successes, attempts, since):
        s, n = decay_history(successes, attempts, since, decay=0.99)
        return s, n, acceptance(fuse(success_prior(value), s, n, n_c=4.0), a_min=0.1)

    got = run(value, successes, attempts, since)
    for a, b in zip(got, (want_s, want_n, want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    order = rng.permutation(size)
    moved = run(value[order], successes[order], attempts[order], since[order])
    np.testing.assert_array_equal(moved[2], np.asarray(got[2])[order])


def test_the_examples_of_the_article():
    got = acceptance(success_prior(np.array([-0.8, 0.0])), a_min=0.1)
    np.testing.assert_allclose(got, [0.424, 1.0], rtol=1e-5)


def test_limits():
    np.testing.assert_allclose(acceptance(np.array([0.0, 1.0, 0.5]), a_min=0.1), [0.1, 0.1, 1.0])
    # No history: the critic's word. No critic: the history. Neither: still the prior.
    np.testing.assert_allclose(fuse(0.3, 0.0, 0.0, n_c=4.0), 0.3, rtol=1e-6)
    np.testing.assert_allclose(fuse(0.3, 3.0, 4.0, n_c=0.0), 0.75, rtol=1e-6)
    np.testing.assert_allclose(fuse(0.3, 0.0, 0.0, n_c=0.0), 0.3, rtol=1e-6)


def test_a_broken_critic_counts_as_one_half():
    got = success_prior(np.array([np.nan, np.inf, -np.inf, 0.5]))
    np.testing.assert_allclose(got, [0.5, 1.0, 0.0, 0.75])


def test_lazy_decay_is_eager_decay():
    s, n = np.array([3.0]), np.array([5.0])
    once = decay_history(s, n, np.array([7]), decay=0.9)
    twice = decay_history(*decay_history(s, n, np.array([3]), decay=0.9), np.array([4]), decay=0.9)
    np.testing.assert_allclose(once, twice, rtol=1e-6)
    np.testing.assert_array_equal(decay_history(s, n, np.array([0]), decay=0.9), [s, n])
    np.testing.assert_allclose(once[0] / once[1], s / n, rtol=1e-6)


@pytest.mark.parametrize("tau", [0.5, 0.3])
def test_distance_to_oracle_and_permutation(tau):
    rng = np.random.default_rng(4)
    p = rng.random(33).astype(np.float32)
    got = np.asarray(distance_to(p, tau=tau))
    np.testing.assert_allclose(got, [abs(float(x) - tau) for x in p], rtol=1e-5, atol=1e-7)
    order = rng.permutation(33)
    np.testing.assert_array_equal(distance_to(p[order], tau=tau), got[order])


def test_distance_to_limits_and_a_broken_critic():
    got = distance_to(success_prior(np.array([-1.0, 1.0, 0.0, np.nan])), tau=0.5)
    np.testing.assert_array_equal(got, [0.5, 0.5, 0.0, 0.0])
    assert distance_to(np.array([0, 1]), tau=0.25).dtype == np.float32
