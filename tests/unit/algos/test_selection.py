"""The select column: chances and priorities against loops, aging, what each refuses."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.selection import Accepting, Daps, Pcl, Ranking, Select, Spo, Uniform

COLUMNS = [Uniform(), Daps(), Pcl(), Spo()]


def test_which_looks_at_what():
    facts = {
        type(one).__name__: (isinstance(one, Ranking), one.reads_values, one.tracks_drift)
        for one in COLUMNS
    }
    assert all(isinstance(one, Accepting) != isinstance(one, Ranking) for one in COLUMNS)
    assert facts == {
        "Uniform": (False, False, False),
        "Daps": (False, True, False),
        "Pcl": (True, True, False),
        "Spo": (True, False, True),
    }


def test_uniform():
    nan = np.full(3, np.nan)
    np.testing.assert_array_equal(Uniform().acceptance(nan, nan, nan), [1, 1, 1])
    s, n = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    for column in (Uniform(), Pcl()):
        aged = column.aged(s, n, np.array([0, 50]), np.array([9.0, np.nan]))
        np.testing.assert_array_equal(aged, [s, n])


def test_daps_examples_of_the_paper_and_a_broken_critic():
    value, none = np.array([-0.8, 0.0, np.nan]), np.zeros(3)
    np.testing.assert_allclose(Daps().acceptance(value, none, none), [0.424, 1, 1], rtol=1e-5)


@pytest.mark.parametrize(("n_c", "a_min"), [(4.0, 0.1), (0.0, 0.3), (16.0, 0.0)])
def test_daps_oracle(n_c, a_min):
    rng = np.random.default_rng(0)
    value = rng.uniform(-1.4, 1.4, 30)
    attempts = rng.integers(0, 5, 30).astype(float)
    successes = np.floor(attempts * rng.random(30))
    want = []
    for v, s, n in zip(value, successes, attempts, strict=True):
        prior = min(max((v + 1) / 2, 0.0), 1.0)
        p = prior if n + n_c == 0 else (s + n_c * prior) / (n + n_c)
        want.append(a_min + (1 - a_min) * 4 * p * (1 - p))
    got = Daps(n_c=n_c, a_min=a_min).acceptance(value, successes, attempts)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_daps_ages_by_ticks_and_not_by_drift():
    s, n = np.ones(3), np.full(3, 2.0)
    nan = np.full(3, np.nan)
    got = Daps(decay=0.5).aged(s, n, np.array([0, 1, 2]), nan)
    np.testing.assert_allclose(got, [[1, 0.5, 0.25], [2, 1, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("tau", [0.5, 0.2])
def test_pcl_puts_first_what_is_nearest_to_tau(tau):
    value = np.array([-1.0, -0.5, 0.1, 0.6, 1.3, np.nan, -0.1])
    distance = [
        abs((0.5 if math.isnan(v) else min(max((v + 1) / 2, 0), 1)) - tau) for v in value.tolist()
    ]
    got = Pcl(tau=tau).priority(jax.random.key(0), value, np.zeros(7), np.zeros(7))
    np.testing.assert_allclose(got, [-d for d in distance], rtol=1e-5, atol=1e-6)
    # History has no say.
    again = Pcl(tau=tau).priority(jax.random.key(1), value, np.full(7, 3.0), np.full(7, 4.0))
    np.testing.assert_array_equal(got, again)


def test_pools():
    assert Pcl(pool_factor=4).pool(8, 100) == 32
    assert Pcl(pool_factor=4).pool(8, 20) == 20
    assert Pcl(pool_factor=1).pool(8, 20) == 8
    assert Spo().pool(8, 100) == 100


def spo_weight(s, n, floor=0.05):
    v = s / n if n else 0.5
    return math.sqrt(max(v * (1 - v), 0.0)) + floor


def test_spo_draws_without_replacement_by_its_weights():
    """The largest two of Gumbel-perturbed log weights are a draw of two, one after the other."""
    successes = np.array([0.0, 4.0, 2.0, 0.0, 0.5])
    attempts = np.array([8.0, 8.0, 8.0, 0.0, 4.0])
    weights = [spo_weight(s, n) for s, n in zip(successes, attempts, strict=True)]
    assert weights[0] == 0.05
    assert weights[3] == 0.55  # nothing known: as uncertain as can be
    total, want = sum(weights), {}
    for first, second in itertools.permutations(range(5), 2):
        want[first, second] = weights[first] / total * weights[second] / (total - weights[first])
    assert sum(want.values()) == pytest.approx(1.0)
    draws = 20000
    keys = jax.random.split(jax.random.key(0), draws)
    priority = jax.jit(jax.vmap(lambda key: Spo().priority(key, jnp.zeros(5), successes, attempts)))
    order = np.argsort(-np.asarray(priority(keys)), axis=1)
    chi_square = 0.0
    for (first, second), chance in want.items():
        seen = int(((order[:, 0] == first) & (order[:, 1] == second)).sum())
        chi_square += (seen - draws * chance) ** 2 / (draws * chance)
    assert chi_square < 43.8  # 19 degrees of freedom: 0.1 % are above


def test_spo_reads_no_values():
    key, none = jax.random.key(0), np.zeros(3)
    got = Spo().priority(key, np.full(3, np.nan), none, none)
    np.testing.assert_array_equal(got, Spo().priority(key, none, none, none))
    assert np.isfinite(got).all()


def test_spo_starts_from_reference_rollouts():
    """a_0 = n_0 (k + 1/2) / (n + 1), N = a_0 + b_0 = n_0 however many were sampled."""
    successes, samples = np.array([0, 3, 8, 0]), np.array([8, 8, 8, 0])
    got_s, got_n = Spo(n_0=8.0).start(successes, samples)
    want = [8 * (k + 0.5) / (n + 1) for k, n in zip(successes, samples, strict=True)]
    np.testing.assert_allclose(got_s, want, rtol=1e-6)
    np.testing.assert_allclose(got_n, 8.0, rtol=1e-6)
    assert got_s[3] == 4.0  # nothing sampled: one half


def test_others_start_from_nothing():
    for column in (Uniform(), Daps(), Pcl()):
        got = column.start(np.array([3, 8]), np.array([8, 8]))
        np.testing.assert_array_equal(got, np.zeros((2, 2)))


def test_spo_forgets_by_drift():
    drift = np.array([0.0, 0.003, 0.006, 0.01, 0.06, 5.0, np.nan])
    want = []
    for d in drift.tolist():
        want.append(1.0 if math.isnan(d) else min(max(2 ** (-d / 0.06), 0.875), 0.96))
    assert want[:2] == [0.96, 0.96]  # some is forgotten even without drift
    assert 0.875 < want[3] < 0.96
    assert want[4:6] == [0.875, 0.875]
    s, n = np.full(7, 3.0), np.full(7, 8.0)
    got = Spo().aged(s, n, np.full(7, 1000), drift)
    np.testing.assert_allclose(got, [np.multiply(3.0, want), np.multiply(8.0, want)], rtol=1e-6)
    other = Spo(half_life=0.01, low=0.1, high=0.9).aged(s, n, np.zeros(7, int), drift)
    np.testing.assert_allclose(np.asarray(other[0])[[3, 4]], [1.5, 0.3], rtol=1e-5)


@pytest.mark.parametrize("column", COLUMNS, ids=lambda one: type(one).__name__)
def test_values_of_the_union(column):
    assert isinstance(column, Select)
    assert hash(column) == hash(dataclasses.replace(column))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (Daps, {"n_c": -1.0}, "n_c must not be negative, got -1.0"),
        (Daps, {"n_c": math.nan}, "n_c must not be negative"),
        (Daps, {"a_min": 1.5}, "a_min must be in 0..1, got 1.5"),
        (Daps, {"decay": -0.1}, "decay must be in 0..1"),
        (Daps, {"a_min": 0.0, "n_c": 0.0}, "no prompt might ever be accepted"),
        (Pcl, {"pool_factor": 0}, "pool_factor must be at least 1, got 0"),
        (Pcl, {"tau": 1.1}, "tau must be in 0..1, got 1.1"),
        (Spo, {"n_0": 0.0}, "n_0 must be positive, got 0.0"),
        (Spo, {"half_life": math.nan}, "half_life must be positive"),
        (Spo, {"floor": 0.0}, "floor must be positive, got 0.0"),
        (Spo, {"low": 0.97}, "0 <= low <= high <= 1, got 0.97, 0.96"),
        (Spo, {"high": 1.5}, "0 <= low <= high <= 1"),
    ],
)
def test_messages(kind, changes, words):
    with pytest.raises(ValueError, match=words):
        kind(**changes)
