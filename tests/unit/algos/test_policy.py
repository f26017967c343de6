"""Surrogates: golden vectors, loops, and the gradient each one is for."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.policy import banded, cispo, policy_gradient, ppo_clip

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "objectives.json").read_text())


def gradient(loss, logp, logp_old, advantages, **eps):
    def total(logp):
        return jnp.sum(loss(logp, logp_old, advantages, **eps))

    return jax.grad(total)(jnp.asarray(logp, jnp.float32))


@pytest.mark.parametrize("case", GOLDEN["policy"])
def test_golden(case):
    args = [np.array(case[k]) for k in ("logp", "logp_old", "advantages")]
    eps = {"eps_low": case["eps_low"], "eps_high": case["eps_high"]}
    tight = {"rtol": 2e-6, "atol": 1e-6}
    np.testing.assert_allclose(cispo(*args, **eps), case["want_cispo"], **tight)
    np.testing.assert_allclose(gradient(cispo, *args, **eps), case["want_cispo_grad"], **tight)
    np.testing.assert_allclose(ppo_clip(*args, **eps), case["want_ppo_clip"], **tight)


@pytest.mark.parametrize(("shape", "seed"), [((1,), 0), ((3, 5), 1), ((2, 17), 2)])
@pytest.mark.parametrize("eps", [(1.0, 4.0), (0.2, 0.28), (0.2, 0.2)])
def test_oracle(shape, seed, eps):
    rng = np.random.default_rng(seed)
    logp, logp_old = -rng.exponential(1.0, (2, *shape)).astype(np.float32)
    advantages = rng.normal(size=shape).astype(np.float32)
    low, high = 1 - eps[0], 1 + eps[1]
    want_cispo, want_ppo, want_ppo_grad = (np.zeros(shape) for _ in range(3))
    for i in np.ndindex(*shape):
        ratio = math.exp(min(20.0, max(-20.0, float(logp[i]) - float(logp_old[i]))))
        clipped, a = min(max(ratio, low), high), float(advantages[i])
        want_cispo[i] = -clipped * a * float(logp[i])
        want_ppo[i] = max(-ratio * a, -clipped * a)
        want_ppo_grad[i] = -ratio * a if -ratio * a >= -clipped * a else 0.0
    kwargs = {"eps_low": eps[0], "eps_high": eps[1]}
    args, close = (logp, logp_old, advantages), {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(cispo(*args, **kwargs), want_cispo, **close)
    np.testing.assert_allclose(ppo_clip(*args, **kwargs), want_ppo, **close)
    np.testing.assert_allclose(gradient(ppo_clip, *args, **kwargs), want_ppo_grad, **close)


def test_trap_8_cispo_gradient_is_minus_clipped_ratio_times_advantage():
    # r = 1.5, A = 1, logp = -2. Differentiating through r would give -1.5 (1 + logp) = +1.5.
    logp, old = np.array([-2.0]), np.array([-2.0 - math.log(1.5)])
    got = gradient(cispo, logp, old, np.array([1.0]), eps_low=1.0, eps_high=4.0)
    np.testing.assert_allclose(got, [-1.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage"), [(3.0, 1.0), (3.0, -1.0), (-3.0, 1.0), (-3.0, -1.0)]
)
def test_cispo_clips_the_weight_and_silences_no_token(log_ratio, advantage):
    eps = {"eps_low": 0.2, "eps_high": 0.28}
    got = gradient(cispo, np.array([-1.0]), np.array([-1.0 - log_ratio]), advantage, **eps)
    np.testing.assert_allclose(got, [-(1.28 if log_ratio > 0 else 0.8) * advantage], rtol=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "silent"),
    [(1.0, 1.0, True), (1.0, -1.0, False), (-1.0, -1.0, True), (-1.0, 1.0, False)],
)
def test_ppo_gradient_is_zero_once_clipped(log_ratio, advantage, silent):
    eps = {"eps_low": 0.2, "eps_high": 0.2}
    got = float(
        gradient(ppo_clip, np.array([-2.0]), np.array([-2.0 - log_ratio]), advantage, **eps)[0]
    )
    want = 0.0 if silent else -math.exp(log_ratio) * advantage
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("loss", [cispo, ppo_clip])
def test_on_policy_gradient_is_the_policy_gradient(loss):
    logp = -np.random.default_rng(3).random((2, 6))
    advantages = np.random.default_rng(4).normal(size=(2, 6))
    got = gradient(loss, logp, logp, advantages, eps_low=0.2, eps_high=0.2)
    np.testing.assert_allclose(got, -advantages, rtol=1e-5)


@pytest.mark.parametrize("loss", [cispo, ppo_clip])
def test_old_policy_and_advantages_are_constants(loss):
    def total(old, advantages):
        return jnp.sum(loss(jnp.array([-1.0, -0.5]), old, advantages, eps_low=0.2, eps_high=0.2))

    args = jnp.array([-1.1, -0.4]), jnp.array([1.0, -2.0])
    for g in jax.grad(total, argnums=(0, 1))(*args):
        assert not np.any(np.asarray(g))


@pytest.mark.parametrize("loss", [cispo, ppo_clip])
def test_extreme_ratios_stay_finite(loss):
    logp, old = np.array([0.0, -1e4]), np.array([-1e4, 0.0])
    for advantage in (1.0, -1.0):
        a = np.full(2, advantage)
        assert np.all(np.isfinite(loss(logp, old, a, eps_low=1.0, eps_high=4.0)))
        assert np.all(np.isfinite(gradient(loss, logp, old, a, eps_low=1.0, eps_high=4.0)))


@pytest.mark.parametrize("loss", [cispo, ppo_clip])
def test_permuted_tokens(loss):
    rng = np.random.default_rng(5)
    args = rng.normal(size=(3, 9)) - 2.0
    order = rng.permutation(9)
    want = loss(*args, eps_low=0.2, eps_high=0.28)[order]
    np.testing.assert_array_equal(loss(*args[:, order], eps_low=0.2, eps_high=0.28), want)


@pytest.mark.parametrize(("shape", "seed"), [((1,), 0), ((3, 5), 1), ((2, 17), 2)])
def test_policy_gradient_oracle_and_gradient(shape, seed):
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(1.0, shape).astype(np.float32)
    advantages = rng.normal(size=shape).astype(np.float32)
    want = np.zeros(shape)
    for i in np.ndindex(*shape):
        want[i] = -float(advantages[i]) * float(logp[i])
    np.testing.assert_allclose(policy_gradient(logp, advantages), want, rtol=1e-6)
    grads = jax.grad(lambda *x: jnp.sum(policy_gradient(*x)), argnums=(0, 1))(logp, advantages)
    np.testing.assert_array_equal(grads[0], -advantages)
    assert not np.any(np.asarray(grads[1]))
    assert policy_gradient(np.array([-1.5]), np.array([2])).dtype == jnp.float32
    order = rng.permutation(shape[-1])
    moved = policy_gradient(logp[..., order], advantages[..., order])
    np.testing.assert_array_equal(moved, policy_gradient(logp, advantages)[..., order])


@pytest.mark.parametrize(("shape", "seed"), [((1,), 0), ((3, 5), 1), ((2, 40), 2)])
@pytest.mark.parametrize("band", [(0.7, 6.0), (0.2, 4.0)])
def test_banded_oracle_and_gradient(shape, seed, band):
    rng = np.random.default_rng(seed)
    logp, rollout = -rng.exponential(1.0, (2, *shape)).astype(np.float32)
    advantages = rng.normal(size=shape).astype(np.float32)
    want, want_grad = np.zeros(shape), np.zeros(shape)
    for i in np.ndindex(*shape):
        ratio = math.exp(float(logp[i]) - float(rollout[i]))
        if band[0] < ratio < band[1]:
            want[i] = -ratio * float(advantages[i]) * float(logp[i])
            want_grad[i] = -ratio * float(advantages[i])
    kwargs, args = {"low": band[0], "high": band[1]}, (logp, rollout, advantages)
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(banded(*args, **kwargs), want, **close)
    np.testing.assert_allclose(gradient(banded, *args, **kwargs), want_grad, **close)
    if logp.size > 20:
        assert 0 < np.count_nonzero(want) < want.size
    order = rng.permutation(shape[-1])
    moved = banded(*(x[..., order] for x in args), **kwargs)
    np.testing.assert_array_equal(moved, banded(*args, **kwargs)[..., order])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_banded_silences_both_sides_whatever_the_sign_and_the_bounds_themselves(advantage):
    # Unlike PPO, which keeps the token whenever A pushes it back towards the interval.
    logp, rollout = np.array([-1.0, -1.0, -1.0]), np.array([-4.0, -0.5, -1.0])
    a, band = np.full(3, advantage), {"low": 0.7, "high": 6.0}
    np.testing.assert_allclose(banded(logp, rollout, a, **band), [0, 0, advantage])
    np.testing.assert_allclose(gradient(banded, logp, rollout, a, **band), [0, 0, -advantage])
    # exp(0) is exactly 1: on the bound is outside.
    for low, high in ((1.0, 6.0), (0.7, 1.0)):
        got = gradient(banded, logp[2:], rollout[2:], a[2:], low=low, high=high)
        np.testing.assert_array_equal(got, [0.0])


def test_banded_on_policy_is_the_policy_gradient():
    rng = np.random.default_rng(3)
    logp, advantages = -rng.random((2, 6)), rng.normal(size=(2, 6))
    got = gradient(banded, logp, logp, advantages, low=0.7, high=6.0)
    np.testing.assert_allclose(got, -advantages, rtol=1e-6)


def test_banded_rollout_and_advantages_are_constants():
    def total(rollout, advantages):
        return jnp.sum(banded(jnp.array([-1.0, -0.5]), rollout, advantages, low=0.7, high=6.0))

    args = jnp.array([-1.1, -0.4]), jnp.array([1.0, -2.0])
    for g in jax.grad(total, argnums=(0, 1))(*args):
        assert not np.any(np.asarray(g))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_banded_poison_outside_the_band_reaches_neither_loss_nor_gradient(poison):
    # Token 0 is inside; each other one is outside with one poisoned input.
    logp = np.array([-1.0, poison, -1.0, -1.0])
    rollout = np.array([-1.0, -1.0, poison, -9.0])
    advantages = np.array([2.0, 1.0, 1.0, poison])
    band = {"low": 0.7, "high": 6.0}
    np.testing.assert_array_equal(banded(logp, rollout, advantages, **band), [2, 0, 0, 0])
    got = gradient(banded, logp, rollout, advantages, **band)
    np.testing.assert_array_equal(got, [-2, 0, 0, 0])


def test_banded_extreme_ratios_stay_finite():
    logp, rollout = np.array([0.0, -1e4]), np.array([-1e4, 0.0])
    for advantage in (1.0, -1.0):
        a, wide = np.full(2, advantage), {"low": 0.0, "high": math.inf}
        assert np.all(np.isfinite(banded(logp, rollout, a, **wide)))
        np.testing.assert_allclose(
            gradient(banded, logp, rollout, a, **wide),
            [-math.exp(20.0) * advantage, -math.exp(-20.0) * advantage],
            rtol=1e-5,
        )
