"""Recipes are values; each column computes what its functions compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos import recipe as recipes
from s3ac_jax.algos.advantages import gae, length_adaptive_lambda, monte_carlo_returns
from s3ac_jax.algos.value import clipped_mse
from s3ac_jax.core import masked


def random_case(seed, rows=3, tokens=10):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, tokens)).astype(np.float32)
    rewards = np.zeros((rows, tokens), np.float32)
    mask = rng.random((rows, tokens)) < 0.8
    mask[:, 7], mask[:, 8:] = True, False
    rewards[:, 7] = np.where(rng.random(rows) < 0.5, 1.0, -1.0)
    length = np.broadcast_to(mask.sum(1, keepdims=True), mask.shape)
    return values, rewards, mask, length


def test_literals():
    assert dict(recipes.RECIPES) == {
        "s3ac_single": recipes.s3ac_single,
        "s3ac_group": recipes.s3ac_group,
    }
    assert recipes.s3ac_single.responses_per_prompt == 1
    assert recipes.s3ac_group == dataclasses.replace(recipes.s3ac_single, responses_per_prompt=16)


@pytest.mark.parametrize("name", sorted(recipes.RECIPES))
def test_recipes_are_frozen_hashable_values(name):
    recipe = recipes.RECIPES[name]
    assert hash(recipe) == hash(dataclasses.replace(recipe))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.critic = None
    with pytest.raises(TypeError):
        recipes.RECIPES[name] = recipe


def test_effective_interval_of_the_ratio():
    assert recipes.Cispo().interval == (0.0, 5.0)
    np.testing.assert_allclose(recipes.PpoClip().interval, (0.8, 1.2))


def test_select():
    value, s, n = np.array([-0.8, 0.0, np.nan]), np.zeros(3), np.zeros(3)
    np.testing.assert_allclose(recipes.Daps().acceptance(value, s, n), [0.424, 1, 1], rtol=1e-5)
    np.testing.assert_array_equal(recipes.Uniform().acceptance(value, s, n), [1, 1, 1])
    n = np.full(3, 2.0)
    since = np.array([0, 1, 2])
    np.testing.assert_allclose(
        recipes.Daps(decay=0.5).decayed(s, n, since)[1], [2, 1, 0.5], rtol=1e-6
    )
    np.testing.assert_array_equal(recipes.Uniform().decayed(s, n, since)[1], n)


def test_keep():
    got = recipes.KeepAll().responses(np.array([True, False]), np.array([0, 0]), num_groups=1)
    np.testing.assert_array_equal(got, [True, True])


def test_advantage():
    values, rewards, mask, length = random_case(0)
    lam = length_adaptive_lambda(length, alpha=1.5)
    raw = gae(values, rewards, mask, lam=lam)
    args = (np.where(mask, values, np.nan), rewards, mask, length)
    np.testing.assert_array_equal(recipes.LengthAdaptiveGae().advantages(*args), raw)
    np.testing.assert_array_equal(recipes.LengthAdaptiveGae().scaled(raw, mask), raw)
    whitened = recipes.LengthAdaptiveGae(whiten=True).scaled(raw, mask)
    np.testing.assert_array_equal(whitened, masked.whiten(raw, mask))
    np.testing.assert_allclose(np.mean(np.asarray(whitened)[mask]), 0.0, atol=1e-6)
    np.testing.assert_allclose(np.std(np.asarray(whitened)[mask]), 1.0, rtol=1e-5)


def test_advantage_of_packed_rows():
    values, rewards, mask, length = random_case(1)
    padded = recipes.LengthAdaptiveGae().advantages(values, rewards, mask, length)
    flat = [x.reshape(1, -1) for x in (values, rewards, mask, length)]
    ids = np.repeat(np.arange(1, 4), 10)[None]
    packed = recipes.LengthAdaptiveGae().advantages(*flat, ids)
    np.testing.assert_allclose(packed, np.asarray(padded).reshape(1, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("surrogate", [recipes.Cispo(), recipes.PpoClip()])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_padding_reaches_no_gradient(surrogate, poison):
    rng = np.random.default_rng(2)
    logp, old, advantages = rng.normal(size=(3, 2, 6)).astype(np.float32) - 2
    mask = rng.random((2, 6)) < 0.6

    def total(logp, old, advantages):
        loss = surrogate.token_loss(logp, old, advantages, mask)
        return masked.total(loss, mask), loss

    bad = [np.where(mask, x, poison) for x in (logp, old, advantages)]
    grad = jax.grad(total, has_aux=True)
    want, loss = grad(logp, old, advantages)
    got, bad_loss = grad(*bad)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(bad_loss, loss)
    assert np.all(np.isfinite(got))
    assert not np.any(np.asarray(got)[~mask])


def test_critic_targets():
    values, rewards, mask, _ = random_case(3)
    poisoned = np.where(mask, values, np.nan)
    at_one = recipes.CriticSpec(lam=1.0).returns(poisoned, rewards, mask)
    np.testing.assert_array_equal(at_one, monte_carlo_returns(rewards, mask))
    assert set(np.asarray(at_one)[mask].tolist()) <= {1.0, -1.0}
    near_one = recipes.CriticSpec(lam=0.999999).returns(poisoned, rewards, mask)
    np.testing.assert_allclose(near_one, at_one, atol=1e-4)
    below = recipes.CriticSpec(lam=0.5).returns(poisoned, rewards, mask)
    raw = gae(values, rewards, mask, lam=0.5)
    np.testing.assert_allclose(below, np.where(mask, raw + values, 0), rtol=1e-6)


def test_critic_loss_is_half_the_error_squared_and_ignores_padding():
    values, returns, mask, _ = random_case(4)
    spec, old = recipes.CriticSpec(clip=None), np.full_like(values, np.nan)
    bad = np.where(mask, values, np.nan)

    def total(v):
        return masked.total(spec.token_loss(v, old, returns, mask), mask)

    np.testing.assert_allclose(
        jax.grad(total)(jnp.asarray(bad)), np.where(mask, values - returns, 0), rtol=1e-6
    )
    spec, old = recipes.CriticSpec(clip=0.5), values + 0.7
    want = np.where(mask, 0.5 * clipped_mse(values, old, returns, clip=0.5), 0)
    np.testing.assert_allclose(spec.token_loss(bad, old, returns, mask), want, rtol=1e-6)


def test_entropy():
    gepo = recipes.Gepo()
    nan = jnp.float32(jnp.nan)
    low, high = gepo.update(nan, nan, np.array([0.0, 1.0]))
    np.testing.assert_allclose([low, high], [0.4, 0.65], rtol=1e-6)
    got = gepo.scale(np.array([1.0, -1.0, 1.0]), np.array([0.3, 0.7, 0.5]), low, high)
    np.testing.assert_allclose(got, [0.5, -0.2, 1.0], rtol=1e-6)


def test_a_recipe_is_a_static_argument():
    values, rewards, mask, length = random_case(5)

    def losses(recipe, values):
        a = recipe.advantage.advantages(values, rewards, mask, length)
        weights, keep = recipe.guard.weigh(values - 3, values - 3, mask)
        loss = weights * recipe.surrogate.token_loss(values - 3, values - 3, a, keep)
        return masked.total(loss, keep) / recipe.guard.num_tokens(keep, mask)

    jitted = jax.jit(losses, static_argnums=0)
    want = losses(recipes.s3ac_single, values)
    np.testing.assert_allclose(jitted(recipes.s3ac_single, values), want, rtol=1e-5)
