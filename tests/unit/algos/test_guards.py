"""Guards: which tokens the denominator counts, and the two guards of the compared methods."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.guards import BinaryKlMask, Guard, MismatchGuard, NoGuard
from s3ac_jax.algos.policy import policy_gradient
from s3ac_jax.core import masked

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def random_case(rows, tokens, seed, spread=0.02):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, (rows, tokens))
    # Rows from nearly on policy to far off it, so that some are rejected.
    spread = spread * np.arange(1, rows + 1)[:, None]
    train = np.minimum(rollout + spread * rng.normal(size=rollout.shape), -1e-3)
    mask = rng.random((rows, tokens)) < 0.7
    return train.astype(np.float32), rollout.astype(np.float32), mask


def oracle_binary_kl(train, rollout, mask, delta):
    weights, keep = np.zeros(mask.shape), np.zeros(mask.shape, bool)
    for b in range(mask.shape[0]):
        live, terms = [t for t in range(mask.shape[1]) if mask[b, t]], []
        for t in live:
            p, q = (min(max(math.exp(float(x[b, t])), 1e-6), 1 - 1e-6) for x in (rollout, train))
            terms.append(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
        if sum(terms) / max(len(terms), 1) <= delta:
            for t in live:
                weights[b, t] = math.exp(float(train[b, t]) - float(rollout[b, t]))
                keep[b, t] = True
    return weights, keep


@pytest.mark.parametrize(("rows", "tokens", "seed"), [(1, 1, 0), (6, 9, 1), (8, 33, 2)])
def test_binary_kl_mask_oracle(rows, tokens, seed):
    args = random_case(rows, tokens, seed)
    weights, keep = BinaryKlMask(delta=1e-2).weigh(*args)
    want_weights, want_keep = oracle_binary_kl(*args, 1e-2)
    np.testing.assert_array_equal(keep, want_keep)
    np.testing.assert_allclose(weights, want_weights, **CLOSE)
    if rows > 1:
        assert 0 < want_keep.sum() < args[2].sum()


def test_binary_kl_mask_keeps_its_denominator_and_does_not_clip():
    guard = BinaryKlMask()
    assert (guard.delta, guard.denominator) == (3e-3, "all")
    # A rare token may be 50 times likelier: the binary KL stays small and rho is not clipped.
    rollout = np.array([[math.log(1e-5), -0.1], [-0.1, -2.0]])
    train = np.array([[math.log(5e-4), -0.1], [-2.0, -0.1]])
    weights, keep = guard.weigh(train, rollout, np.ones((2, 2), bool))
    np.testing.assert_array_equal(keep, [[True, True], [False, False]])
    np.testing.assert_allclose(weights, [[50.0, 1.0], [0.0, 0.0]], rtol=1e-5)
    assert np.all(np.asarray(guard.counted(keep, jnp.ones((2, 2), bool))))
    assert jnp.sum(dataclasses.replace(guard, denominator="kept").counted(keep, True)) == 2


def test_binary_kl_mask_extreme_ratios_and_nan():
    rollout = np.array([[-1e4, -1.0], [-1.0, np.nan], [-1.0, -1.0]])
    train = np.array([[-14.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    weights, keep = BinaryKlMask(delta=1.0).weigh(train, rollout, np.ones((3, 2), bool))
    np.testing.assert_array_equal(keep, [[True] * 2, [False] * 2, [True] * 2])
    np.testing.assert_allclose(weights, [[math.exp(20), 1], [0, 0], [1, 1]], rtol=1e-5)


def test_flashreinforce_end_to_end_against_a_loop():
    train, rollout, mask = random_case(6, 9, 3)
    mask[:, 0] = True
    advantages = np.random.default_rng(4).normal(size=6).astype(np.float32)
    want_weights, want_keep = oracle_binary_kl(train, rollout, mask, 1e-2)
    assert 0 < want_keep.any(1).sum() < 6
    want, want_grad = 0.0, np.zeros(mask.shape)
    for b in range(6):
        live = [t for t in range(9) if want_keep[b, t]]
        for t in live:
            factor = float(advantages[b]) * want_weights[b, t] / (mask[b].sum() * 6)
            want -= factor * float(train[b, t])
            want_grad[b, t] = -factor
    guard = BinaryKlMask(delta=1e-2)
    length = mask.sum(1, keepdims=True)

    def loss(logp):
        weights, keep = guard.weigh(logp, rollout, mask)
        per_token = weights * policy_gradient(logp, advantages[:, None]) / length
        return masked.total(per_token, mask) / masked.total(
            jnp.ones((6, 9)) / length, guard.counted(keep, mask)
        )

    got, gradient = jax.value_and_grad(loss)(jnp.asarray(train))
    np.testing.assert_allclose(got, want, **CLOSE)
    np.testing.assert_allclose(gradient, want_grad, **CLOSE)


def test_no_guard_does_not_read_the_policies():
    _, _, mask = random_case(3, 7, 5)
    nan = np.full(mask.shape, np.nan)
    weights, keep = NoGuard().weigh(nan, nan, mask)
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(weights, mask.astype(np.float32))
    np.testing.assert_array_equal(keep, mask)
    for denominator in ("kept", "all"):
        guard = NoGuard(denominator=denominator)
        np.testing.assert_array_equal(guard.counted(keep, mask), mask)


@pytest.mark.parametrize(("denominator", "want"), [("kept", [1, 0, 0]), ("all", [1, 1, 0])])
def test_counted(denominator, want):
    keep, mask = np.array([[1, 0, 0]], bool), np.array([[1, 1, 0]], bool)
    got = MismatchGuard(denominator=denominator).counted(keep, mask)
    assert got.dtype == bool
    np.testing.assert_array_equal(got, np.array([want], bool))


@pytest.mark.parametrize("delta", [0.0, -1e-3, math.nan])
def test_binary_kl_mask_refuses_a_delta_that_is_not_positive(delta):
    with pytest.raises(ValueError, match="delta must be positive"):
        BinaryKlMask(delta=delta)


def test_new_guards_are_hashable_values_of_the_union():
    for guard in (NoGuard(), BinaryKlMask()):
        assert isinstance(guard, Guard)
        assert hash(guard) == hash(dataclasses.replace(guard))
    with pytest.raises(TypeError):
        BinaryKlMask(3e-3, "kept")  # the denominator goes by name, as in every guard
    with pytest.raises(ValueError, match="denominator"):
        BinaryKlMask(denominator="some")
