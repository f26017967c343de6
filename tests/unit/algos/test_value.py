"""The critic's loss and diagnostics."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.advantages import gae, monte_carlo_returns
from s3ac_jax.algos.value import (
    actor_target_ev,
    clip_binds,
    clipped_mse,
    explained_variance,
    mean_error,
    r_squared,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "objectives.json").read_text())


def variance(xs):
    mean = sum(xs) / len(xs)
    return sum((x - mean) ** 2 for x in xs) / len(xs)


def random_case(shape, seed):
    rng = np.random.default_rng(seed)
    values, old = rng.normal(size=(2, *shape)).astype(np.float32)
    returns = np.where(rng.random(shape) < 0.5, 1.0, -1.0).astype(np.float32)
    mask = rng.random(shape) < 0.7
    mask.flat[:2], returns.flat[:2] = True, (1.0, -1.0)
    return values, old, returns, mask


@pytest.mark.parametrize("case", GOLDEN["value"])
def test_golden(case):
    values, old, returns = (np.array(case[k]) for k in ("values", "values_old", "returns"))
    got = clipped_mse(values, old, returns, clip=case["clip"])
    np.testing.assert_allclose(got, case["want"], rtol=2e-6, atol=1e-6)
    got = explained_variance(values, returns, np.array(case["mask"]))
    np.testing.assert_allclose(got, case["want_explained_variance"], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("shape", "seed"), [((2,), 0), ((3, 5), 1), ((4, 21), 2)])
@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_clipped_mse_oracle(shape, seed, clip):
    values, old, returns, _ = random_case(shape, seed)
    want = np.zeros(shape)
    for i in np.ndindex(*shape):
        v, o, r = float(values[i]), float(old[i]), float(returns[i])
        near = v if clip is None else o + min(max(v - o, -clip), clip)
        want[i] = max((v - r) ** 2, (near - r) ** 2)
    got = clipped_mse(values, old, returns, clip=clip)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "seed"), [((2,), 0), ((3, 5), 1), ((4, 21), 2)])
def test_diagnostics_oracle_and_poison(shape, seed):
    values, advantages, returns, mask = random_case(shape, seed)
    v, a, r = ([float(x) for x in y[mask]] for y in (values, advantages, returns))
    close = {"rtol": 1e-5, "atol": 1e-5}
    want = 1 - variance([y - x for x, y in zip(v, r, strict=True)]) / variance(r)
    want_actor = 1 - variance(a) / variance([x + y for x, y in zip(v, a, strict=True)])
    want_error = sum(x - y for x, y in zip(v, r, strict=True)) / len(v)
    for poison in (0.0, np.nan, np.inf):
        values, advantages, returns = (
            np.where(mask, x, poison) for x in (values, advantages, returns)
        )
        np.testing.assert_allclose(explained_variance(values, returns, mask), want, **close)
        np.testing.assert_allclose(actor_target_ev(advantages, values, mask), want_actor, **close)
        np.testing.assert_allclose(mean_error(values, returns, mask), want_error, **close)
    order = np.random.default_rng(seed).permutation(shape[0])
    got = explained_variance(values[order], returns[order], mask[order])
    np.testing.assert_allclose(got, want, **close)


def test_perfect_and_constant_critics():
    _, _, returns, mask = random_case((4, 8), 3)
    assert explained_variance(returns, returns, mask) == 1.0
    np.testing.assert_allclose(explained_variance(0 * returns, returns, mask), 0.0, atol=1e-6)
    # A bias leaves explained variance alone; the mean error shows it.
    np.testing.assert_allclose(explained_variance(returns + 0.5, returns, mask), 1.0, atol=1e-6)
    np.testing.assert_allclose(mean_error(returns + 0.5, returns, mask), 0.5, rtol=1e-6)


def test_constant_target_is_not_available():
    values, _, _, mask = random_case((4, 500), 4)
    # The fp32 mean of 0.37 is not 0.37: a variance test would see 1e-16 and report -1e16.
    assert math.isnan(explained_variance(values, np.full_like(values, 0.37), mask))
    assert math.isnan(explained_variance(values, values, np.zeros_like(mask)))
    rewards = np.zeros_like(values)
    rewards[:, -1] = 1.0
    every = np.ones_like(mask)
    advantages = gae(values, rewards, every, lam=1.0)
    assert math.isnan(actor_target_ev(advantages, values, every))


def test_explained_variance_survives_a_large_offset():
    # One-pass E[x^2] - E[x]^2 in fp32 has lost everything at 1000 + noise.
    rng = np.random.default_rng(5)
    returns = (1000 + rng.normal(size=(8, 64))).astype(np.float32)
    values = (returns + 0.5 * rng.normal(size=returns.shape)).astype(np.float32)
    r, v = returns.astype(np.float64), values.astype(np.float64)
    got = explained_variance(values, returns, np.ones_like(r, bool))
    np.testing.assert_allclose(got, 1 - np.var(r - v) / np.var(r), rtol=1e-3)


def test_gradient_is_twice_the_error_and_zero_where_clipped():
    def total(v, old, r):
        return jnp.sum(clipped_mse(v, old, r, clip=0.2))

    got = jax.grad(total)(jnp.array([0.1, 0.5]), jnp.zeros(2), jnp.ones(2))
    # The second has moved 0.5 towards its target: clipped, no push beyond.
    np.testing.assert_allclose(got, [2 * (0.1 - 1.0), 0.0], rtol=1e-6)


def test_trap_9_no_clip_and_detached_targets():
    values = jnp.array([[0.3, -0.2, 0.6]])
    rewards, mask = jnp.array([[0.0, 0.0, 1.0]]), jnp.ones((1, 3), bool)

    def with_gae_targets(values):
        # Undetached, d(V - (A + V)) / dV = 0 at lambda 1 and the critic never learns.
        returns = gae(values, rewards, mask, lam=1.0) + values
        return jnp.sum(clipped_mse(values, values, returns, clip=None))

    def with_returns(values):
        returns = monte_carlo_returns(rewards, mask)
        return jnp.sum(clipped_mse(values, jnp.zeros_like(values), returns, clip=None))

    got = jax.grad(with_gae_targets)(values)
    np.testing.assert_allclose(got, 2 * (values - 1.0), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(with_returns)(values), got, rtol=1e-5)
    poisoned = clipped_mse(values, jnp.full_like(values, jnp.nan), 1.0, clip=None)
    np.testing.assert_allclose(poisoned, jnp.square(values - 1.0), rtol=1e-6)


def test_old_values_are_constants():
    def total(old, returns):
        return jnp.sum(clipped_mse(jnp.array([0.9, -0.9]), old, returns, clip=0.2))

    for g in jax.grad(total, argnums=(0, 1))(jnp.zeros(2), jnp.ones(2)):
        assert not np.any(np.asarray(g))


@pytest.mark.parametrize(("shape", "seed"), [((2,), 0), ((3, 5), 1), ((4, 21), 2)])
def test_r_squared_oracle_and_poison(shape, seed):
    values, _, returns, mask = random_case(shape, seed)
    v, r = ([float(x) for x in y[mask]] for y in (values, returns))
    want = 1 - sum((x - y) ** 2 for x, y in zip(v, r, strict=True)) / len(r) / variance(r)
    close = {"rtol": 1e-5, "atol": 1e-5}
    for poison in (0.0, np.nan, np.inf):
        values, returns = (np.where(mask, x, poison) for x in (values, returns))
        np.testing.assert_allclose(r_squared(values, returns, mask), want, **close)
    order = np.random.default_rng(seed).permutation(shape[0])
    got = r_squared(values[order], returns[order], mask[order])
    np.testing.assert_allclose(got, want, **close)


def test_r_squared_counts_a_bias():
    _, _, returns, mask = random_case((4, 8), 3)
    r = returns[mask].astype(float)
    assert r_squared(returns, returns, mask) == 1.0
    np.testing.assert_allclose(
        r_squared(np.full_like(returns, r.mean()), returns, mask), 0, atol=1e-6
    )
    # Off by b: worse by b²/Var(R), which explained variance does not see.
    np.testing.assert_allclose(
        r_squared(returns + 0.5, returns, mask), 1 - 0.25 / np.var(r), rtol=1e-5
    )
    np.testing.assert_allclose(r_squared(-returns, returns, mask), 1 - 4 / np.var(r), rtol=1e-5)


def test_r_squared_of_equal_outcomes_is_not_available():
    values, _, _, mask = random_case((4, 500), 4)
    assert math.isnan(r_squared(values, np.full_like(values, 0.37), mask))
    assert math.isnan(r_squared(values, values, np.zeros_like(mask)))


@pytest.mark.parametrize("clip", [0.2, 0.5, 3.0, None])
def test_the_clip_binds_where_the_gradient_is_gone_and_the_error_is_not(clip):
    values, old, returns, _ = random_case((16, 40), 6)

    def total(v):
        return jnp.sum(clipped_mse(v, old, returns, clip=clip))

    slope = np.asarray(jax.grad(total)(jnp.asarray(values)))
    assert np.all(values != returns)
    got = np.asarray(clip_binds(values, old, returns, clip=clip))
    assert got.dtype == bool
    np.testing.assert_array_equal(got, slope == 0)
    # 3.0 is beyond nearly all moves; without a clip there is nothing to bind.
    assert (0.05 < got.mean() < 0.6) if clip in (0.2, 0.5) else got.mean() < 0.05
    assert clip is not None or not got.any()


def test_the_clip_binds_only_beyond_it_and_away_from_v_old():
    # V_old 0, R 1: towards it within the clip, towards it beyond, away from it, past it.
    values, old = np.array([0.2, 0.3, -0.5, 1.9], np.float32), np.zeros(4, np.float32)
    got = clip_binds(values, old, np.ones(4, np.float32), clip=0.25)
    np.testing.assert_array_equal(got, [False, True, False, False])
    assert not np.any(clip_binds(old, old, np.ones(4), clip=0.25))
    assert not np.any(clip_binds(values, np.full(4, np.nan), np.ones(4), clip=None))
