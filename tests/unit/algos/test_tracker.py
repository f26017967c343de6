"""SPO's tracker: loops, limits, and what NaN and absence mean."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.tracker import (
    forgetting,
    initial_counts,
    sampling_weight,
    tracked_advantages,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("n_0", [8.0, 2.5])
def test_initial_counts_oracle_and_permutation(n_0):
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 20, 50)
    successes = rng.integers(0, samples + 1)
    got = initial_counts(successes, samples, n_0=n_0)
    want = [n_0 * (int(k) + 0.5) / (int(n) + 1) for k, n in zip(successes, samples, strict=True)]
    np.testing.assert_allclose(got[0], want, rtol=1e-6)
    np.testing.assert_allclose(got[1], [n_0 - a for a in want], rtol=1e-5)
    order = rng.permutation(50)
    moved = initial_counts(successes[order], samples[order], n_0=n_0)
    for a, b in zip(moved, got, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b)[order])


def test_initial_counts_limits():
    a, b = initial_counts(np.array([0, 0, 8]), np.array([0, 8, 8]), n_0=8.0)
    np.testing.assert_allclose(a, [4.0, 4 / 9, 68 / 9], rtol=1e-6)
    np.testing.assert_allclose(b, [4.0, 68 / 9, 4 / 9], rtol=1e-5)
    assert a[0] == b[0] == 4.0
    for n_0 in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="n_0"):
            initial_counts(1, 2, n_0=n_0)


def test_forgetting_oracle_and_permutation():
    rng = np.random.default_rng(1)
    drift = rng.exponential(0.01, 60).astype(np.float32)
    got = np.asarray(forgetting(drift))
    want = [min(max(2.0 ** (-float(d) / 0.06), 0.875), 0.96) for d in drift]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert len({0.875, 0.96} & {round(x, 6) for x in want}) == 2
    order = rng.permutation(60)
    np.testing.assert_array_equal(forgetting(drift[order]), got[order])
    got = forgetting(drift, half_life=0.01, low=0.1, high=1.0)
    want = [min(max(2.0 ** (-float(d) / 0.01), 0.1), 1.0) for d in drift]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_forgetting_limits():
    # No drift still forgets 4 %; endless drift forgets an eighth; never answered forgets nothing.
    got = forgetting(np.array([0.0, np.inf, np.nan]))
    np.testing.assert_array_equal(got, np.array([0.96, 0.875, 1.0], np.float32))
    half = forgetting(np.array([0.06, 0.12]), low=0.0, high=1.0)
    np.testing.assert_allclose(half, [0.5, 0.25], rtol=1e-6)


@pytest.mark.parametrize(
    "bad", [{"half_life": 0.0}, {"half_life": math.nan}, {"low": 0.97}, {"high": 1.1}, {"low": -1}]
)
def test_forgetting_refuses(bad):
    with pytest.raises(ValueError, match="half_life"):
        forgetting(0.1, **bad)


def test_sampling_weight_oracle_and_limits():
    v = np.random.default_rng(2).random(40).astype(np.float32)
    want = [math.sqrt(float(x) * (1 - float(x))) + 0.05 for x in v]
    np.testing.assert_allclose(sampling_weight(v), want, rtol=1e-5)
    got = sampling_weight(np.array([0, 1]), floor=0.1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(sampling_weight(0.5), 0.55, rtol=1e-6)
    assert sampling_weight(np.nextafter(np.float32(1), np.float32(2))) == np.float32(0.05)
    assert np.isnan(sampling_weight(np.nan))
    np.testing.assert_array_equal(sampling_weight(v[::-1]), np.asarray(sampling_weight(v))[::-1])


def drift_case(rows, tokens, seed):
    rng = np.random.default_rng(seed)
    now, then = -rng.exponential(1.0, (2, rows, tokens)).astype(np.float32)
    return now, then, rng.random((rows, tokens)) < 0.6


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (16, 1), (257, 2)])
def test_tracked_advantages_oracle_permutation_and_absence(size, seed):
    rng = np.random.default_rng(seed)
    success = (rng.random(size) < 0.5).astype(np.float32)
    v, present = rng.random(size).astype(np.float32), rng.random(size) < 0.7
    present[:2] = True
    live = [i for i in range(size) if present[i]]
    surprise = {i: float(success[i]) - float(v[i]) for i in live}
    mean = sum(surprise.values()) / len(live)
    std = math.sqrt(sum((x - mean) ** 2 for x in surprise.values()) / len(live))
    want = [(surprise[i] - mean) / std if i in surprise else 0.0 for i in range(size)]
    got = np.asarray(tracked_advantages(success, v, present))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert not np.any(got[~present])
    order = rng.permutation(size)
    moved = tracked_advantages(success[order], v[order], present[order])
    np.testing.assert_allclose(moved, got[order], **CLOSE)
    for poison in (np.nan, np.inf, -np.inf):
        bad = np.where(present, success, poison), np.where(present, v, poison)
        np.testing.assert_array_equal(tracked_advantages(*bad, present), got)


@pytest.mark.parametrize("v", [0.1, 0.37, 0.5, 0.944])
@pytest.mark.parametrize("r", [True, False])
def test_tracked_advantages_are_exactly_zero_when_nothing_varies(v, r):
    # The fp32 mean of seven equal numbers leaves a residue that the std would blow up to 1.
    present = np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    args = np.where(present, r, not r), np.where(present, np.float32(v), 0.9)
    assert not np.any(np.asarray(tracked_advantages(*args, present)))
    one = np.arange(8) == 3
    assert not np.any(np.asarray(tracked_advantages(*args, one)))
    assert not np.any(np.asarray(tracked_advantages(*args, np.zeros(8, bool))))


def test_a_surprise_weighs_more_than_an_expected_success():
    got = tracked_advantages(np.ones(2, bool), np.array([0.1, 0.9]), np.ones(2, bool))
    np.testing.assert_allclose(got, [1.0, -1.0], rtol=1e-6)
