"""Masked reductions: loops, poison, empty masks, constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core import masked


def random_case(shape, seed):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=shape).astype(np.float32), rng.random(shape) < 0.6
    mask.flat[:2] = True
    return x, mask


@pytest.mark.parametrize(("shape", "seed"), [((2,), 0), ((3, 7), 1), ((2, 3, 11), 2)])
@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
def test_oracle(shape, seed, poison):
    x, mask = random_case(shape, seed)
    live = [float(v) for v in x[mask]]
    mean = sum(live) / len(live)
    var = sum((v - mean) ** 2 for v in live) / len(live)
    x = np.where(mask, x, poison)
    np.testing.assert_allclose(masked.total(x, mask), sum(live), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(masked.mean(x, mask), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(masked.var(x, mask), var, rtol=1e-5)
    want = np.where(mask, (np.where(mask, x, 0.0) - mean) / var**0.5, 0.0)
    np.testing.assert_allclose(masked.whiten(x, mask), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [masked.total, masked.mean, masked.var, masked.whiten])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_reaches_no_gradient(function, poison):
    x, mask = random_case((4, 5), 3)

    def total(x):
        return jnp.sum(jnp.square(function(x, mask)) * jnp.arange(1.0, 6.0))

    want = jax.grad(total)(jnp.asarray(x))
    got = jax.grad(total)(jnp.where(mask, x, poison))
    np.testing.assert_array_equal(got, want)
    assert not np.any(np.asarray(got)[~mask])
    assert np.any(np.asarray(got)[mask])


@pytest.mark.parametrize("function", [masked.total, masked.mean, masked.var, masked.whiten])
def test_empty_mask_is_zero_in_value_and_gradient(function):
    x, mask = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool)
    assert not np.any(np.asarray(function(x, mask)))
    assert not np.any(np.asarray(jax.grad(lambda x: jnp.sum(function(x, mask)))(x)))


@pytest.mark.parametrize("level", [0.0, 0.37, -1.0, 1e4, 1e-4])
def test_whitening_a_constant_is_exactly_zero(level):
    x, mask = np.full((7, 1000), level, np.float32), np.ones((7, 1000), bool)
    x[0, 0] = np.nextafter(x[0, 0], np.float32(2 * level))  # What rounding leaves of a constant.
    assert masked.is_constant(x, mask)
    assert not np.any(np.asarray(masked.whiten(x, mask)))
    assert not np.any(np.asarray(jax.grad(lambda x: jnp.sum(masked.whiten(x, mask)))(x)))
    assert not masked.is_constant(x + np.linspace(0, 1, 1000, dtype=np.float32), mask)


def test_one_position_is_constant():
    assert masked.whiten(np.array([3.0, 5.0]), np.array([True, False])).tolist() == [0.0, 0.0]


def test_permuting_positions_permutes_the_result():
    x, mask = random_case((12,), 4)
    order = np.random.default_rng(5).permutation(12)
    want = masked.whiten(x, mask)[order]
    np.testing.assert_allclose(masked.whiten(x[order], mask[order]), want, rtol=1e-5, atol=1e-6)


def test_two_passes_and_fp32():
    x = (1000 + np.random.default_rng(6).normal(size=4096)).astype(np.float32)
    every = np.ones(4096, bool)
    np.testing.assert_allclose(masked.var(x, every), np.var(x.astype(np.float64)), rtol=1e-4)
    half = masked.mean(jnp.full(4096, 1.0, jnp.bfloat16), every)
    assert half.dtype == jnp.float32
    assert half == 1.0
    assert masked.mean(np.array([0, 1, 1]), np.ones(3, bool)) == np.float32(2 / 3)


def test_nan_inside_the_mask_stays_visible():
    x, mask = np.array([1.0, np.nan]), np.ones(2, bool)
    assert np.isnan(masked.mean(x, mask))
    assert np.all(np.isnan(masked.whiten(x, mask)))
