"""Mismatch weights and rejections: golden vectors, loops, pack = pad, and total rejection."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos import offpolicy
from s3ac_jax.algos.guards import (
    BinaryKlMask,
    GeometricMeanMask,
    MaskedImportance,
    MismatchGuard,
    NoGuard,
    ProductMask,
    TruncatedImportance,
)
from s3ac_jax.algos.recipe import Cispo
from s3ac_jax.core import masked

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "objectives.json").read_text())
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
GUARDS = [
    MismatchGuard(),
    TruncatedImportance(),
    MaskedImportance(),
    GeometricMeanMask(low=0.8, high=1.25),
    ProductMask(low=0.5, high=2.0),
    NoGuard(),
    BinaryKlMask(delta=0.2),
]


def random_case(rows, tokens, seed, spread=1.0):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, (rows, tokens))
    train = np.minimum(rollout + spread * rng.normal(size=rollout.shape), -1e-3)
    mask = rng.random((rows, tokens)) < 0.7
    return train.astype(np.float32), rollout.astype(np.float32), mask


def oracle(train, rollout, mask, low, high, veto, delta):
    """All answers from one loop over rows in float64."""
    weights, keep = np.zeros(mask.shape), np.zeros(mask.shape, bool)
    whole, kl, log_sum, count = [], [], [], []
    for b in range(mask.shape[0]):
        live = [t for t in range(mask.shape[1]) if mask[b, t]]
        rho = {t: math.exp(float(train[b, t]) - float(rollout[b, t])) for t in live}
        for t in live:
            weights[b, t] = min(max(rho[t], low), high)
            keep[b, t] = low <= rho[t] <= high
        whole.append(all(rho[t] <= veto for t in live))
        terms = []
        for t in live:
            p, q = (min(max(math.exp(float(x[b, t])), 1e-6), 1 - 1e-6) for x in (rollout, train))
            terms.append(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
        kl.append(sum(terms) / max(len(terms), 1))
        log_sum.append(sum(math.log(rho[t]) for t in live))
        count.append(max(len(live), 1))
    kl = np.array(kl)
    return weights, keep, np.array(whole), kl, kl <= delta, np.array(log_sum), np.array(count)


@pytest.mark.parametrize("case", GOLDEN["offpolicy"])
def test_golden(case):
    args = [np.array(case[k]) for k in ("logp_train", "logp_rollout", "mask")]
    band = {"low": case["low"], "high": case["high"]}
    weights = offpolicy.token_weights(*args, **band)
    keep = offpolicy.token_keep(*args, **band)
    whole = offpolicy.sequence_keep(*args, veto=case["veto"])
    kl, kl_keep = offpolicy.binary_kl_keep(*args, delta=case["flash_delta"])
    np.testing.assert_allclose(kl, case["want_binary_kl"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(kl_keep, case["want_flash_keep"])
    np.testing.assert_array_equal(whole, case["want_sequence_keep"])
    # The file's keep is the default guard's: token band and sequence veto together.
    np.testing.assert_array_equal(np.asarray(keep) & np.asarray(whole)[:, None], case["want_keep"])
    np.testing.assert_allclose(weights, case["want_weights"], rtol=2e-6, atol=1e-6)
    guard = MismatchGuard(low=case["low"], high=case["high"], veto=case["veto"])
    np.testing.assert_array_equal(guard.weigh(*args)[1], case["want_keep"])


@pytest.mark.parametrize(("rows", "tokens", "seed"), [(1, 1, 0), (3, 6, 1), (5, 17, 2)])
def test_oracle(rows, tokens, seed):
    args = random_case(rows, tokens, seed, spread=1.5)
    weights, keep, whole, kl, kl_keep, log_sum, count = oracle(*args, 0.5, 5.0, 20.0, 0.2)
    band = {"low": 0.5, "high": 5.0}
    np.testing.assert_allclose(offpolicy.token_weights(*args, **band), weights, **CLOSE)
    np.testing.assert_array_equal(offpolicy.token_keep(*args, **band), keep)
    np.testing.assert_array_equal(offpolicy.sequence_keep(*args, veto=20.0), whole)
    got_kl, got_keep = offpolicy.binary_kl_keep(*args, delta=0.2)
    np.testing.assert_allclose(got_kl, kl, **CLOSE)
    np.testing.assert_array_equal(got_keep, kl_keep)
    for function, logs in (
        (offpolicy.geometric_mean_keep, log_sum / count),
        (offpolicy.product_keep, log_sum),
    ):
        want = (np.log(0.8) <= logs) & (logs <= np.log(1.25))
        np.testing.assert_array_equal(function(*args, low=0.8, high=1.25), want)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("guard", GUARDS, ids=lambda g: type(g).__name__)
def test_padding_has_no_influence(guard, poison):
    train, rollout, mask = random_case(4, 9, 3)
    want = guard.weigh(train, rollout, mask)
    bad = np.where(mask, train, poison), np.where(mask, rollout, -poison), mask
    for a, b in zip(guard.weigh(*bad), want, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(
        offpolicy.binary_kl_keep(*bad, delta=0.1),
        offpolicy.binary_kl_keep(train, rollout, mask, delta=0.1),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda g: type(g).__name__)
def test_pack_equals_pad_and_rows_permute(guard):
    train, rollout, mask = random_case(4, 6, 4)
    weights, keep = (np.asarray(x) for x in guard.weigh(train, rollout, mask))
    ids = np.repeat(np.arange(1, 5), 6)[None]
    packed = guard.weigh(
        train.reshape(1, -1), rollout.reshape(1, -1), mask.reshape(1, -1), segment_ids=ids
    )
    np.testing.assert_allclose(packed[0], weights.reshape(1, -1), rtol=1e-6)
    np.testing.assert_array_equal(packed[1], keep.reshape(1, -1))
    order = np.array([2, 0, 3, 1])
    moved = guard.weigh(train[order], rollout[order], mask[order])
    np.testing.assert_array_equal(moved[1], keep[order])


def test_sequence_answers_per_segment():
    train, rollout, mask = random_case(3, 5, 5, spread=0.1)
    rollout[1, 2], mask[1, 2] = train[1, 2] - 2.0, True
    flat = [x.reshape(1, -1) for x in (train, rollout, mask)]
    ids = np.repeat(np.arange(1, 4), 5)[None]
    whole = np.asarray(offpolicy.sequence_keep(train, rollout, mask, veto=3.0))
    kl, keep = offpolicy.binary_kl_keep(train, rollout, mask, delta=0.05)
    np.testing.assert_array_equal(whole, [True, False, True])
    assert 0 < np.sum(np.asarray(keep)) < 3
    got = offpolicy.sequence_keep(*flat, veto=3.0, segment_ids=ids)
    np.testing.assert_array_equal(got[0], np.repeat(whole, 5))
    got_kl, got_keep = offpolicy.binary_kl_keep(*flat, delta=0.05, segment_ids=ids)
    np.testing.assert_allclose(got_kl[0], np.repeat(kl, 5), rtol=1e-6)
    np.testing.assert_array_equal(got_keep[0], np.repeat(keep, 5))


@pytest.mark.parametrize("guard", GUARDS, ids=lambda g: type(g).__name__)
def test_equal_policies_and_bypass_weigh_one(guard):
    _, rollout, mask = random_case(3, 7, 6)
    weights, keep = guard.weigh(rollout, rollout, mask)
    np.testing.assert_array_equal(weights, mask.astype(np.float32))
    np.testing.assert_array_equal(keep, mask)
    np.testing.assert_array_equal(guard.counted(keep, mask), mask)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda g: type(g).__name__)
def test_weights_are_constants(guard):
    train, rollout, mask = random_case(2, 5, 7)

    def total(train, rollout):
        return jnp.sum(guard.weigh(train, rollout, mask)[0])

    for g in jax.grad(total, argnums=(0, 1))(train, rollout):
        assert not np.any(np.asarray(g))


@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_everything_rejected_is_zero_loss_and_zero_gradient(denominator):
    guard = MismatchGuard(denominator=denominator)
    rollout = jnp.full((2, 3), -30.0)
    mask = jnp.ones((2, 3), bool)

    def loss(logp):
        weights, keep = guard.weigh(jnp.zeros_like(logp), rollout, mask)
        token_loss = Cispo().token_loss(logp, logp, jnp.ones_like(logp), keep)
        tokens = jnp.maximum(jnp.sum(guard.counted(keep, mask)), 1.0)
        return masked.total(weights * token_loss, keep) / tokens

    got, gradient = jax.value_and_grad(loss)(jnp.full((2, 3), -1.0))
    assert got == 0.0
    assert not np.any(np.asarray(gradient))
    _, keep = guard.weigh(jnp.zeros((2, 3)), rollout, mask)
    assert jnp.sum(guard.counted(keep, mask)) == {"kept": 0, "all": 6}[denominator]


def test_nan_at_a_trainable_token_drops_the_response():
    rollout = np.full((2, 3), -1.0)
    train = rollout.copy()
    train[0, 1] = np.nan
    weights, keep = MismatchGuard().weigh(train, rollout, np.ones((2, 3), bool))
    np.testing.assert_array_equal(keep, [[False] * 3, [True] * 3])
    np.testing.assert_array_equal(weights, [[0.0] * 3, [1.0] * 3])


def test_the_three_rules_of_the_default_guard():
    rollout = np.full((1, 4), -5.0)
    rho = np.array([[0.4, 0.6, 4.0, 19.0]])
    every = np.ones((1, 4), bool)
    weights, keep = MismatchGuard().weigh(rollout + np.log(rho), rollout, every)
    np.testing.assert_array_equal(keep, [[False, True, True, False]])
    np.testing.assert_allclose(weights, [[0.0, 0.6, 4.0, 0.0]], rtol=1e-5)
    rho[0, 3] = 21.0
    weights, keep = MismatchGuard().weigh(rollout + np.log(rho), rollout, every)
    assert not np.any(np.asarray(keep))
    assert not np.any(np.asarray(weights))
    weights, keep = TruncatedImportance(cap=2.0).weigh(rollout + np.log(rho), rollout, every)
    np.testing.assert_allclose(weights, [[0.4, 0.6, 2.0, 2.0]], rtol=1e-5)
    weights, _ = MaskedImportance().weigh(rollout + np.log(rho), rollout, every)
    np.testing.assert_allclose(weights, [[0.0, 0.6, 4.0, 0.0]], rtol=1e-5)


def test_guard_refuses_an_unknown_denominator():
    with pytest.raises(ValueError, match="denominator"):
        MismatchGuard(denominator="some")


def test_binary_kl_near_certainty():
    # 1 - exp(-1e-5) in fp32 keeps two digits; the answer needs more.
    got, _ = offpolicy.binary_kl_keep(
        np.array([[-2e-5]]), np.array([[-1e-5]]), np.ones((1, 1), bool), delta=1.0
    )
    p, q = math.exp(-1e-5), math.exp(-2e-5)
    want = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    np.testing.assert_allclose(got, [want], rtol=1e-4)


@pytest.mark.parametrize(("shape", "seed"), [((1,), 0), ((3, 8), 1), ((40,), 2)])
def test_effective_sample_size(shape, seed):
    rng = np.random.default_rng(seed)
    weights, mask = rng.random(shape) + 0.1, rng.random(shape) < 0.7
    mask.flat[0] = True
    live = [float(w) for w in weights[mask]]
    want = sum(live) ** 2 / sum(w * w for w in live)
    got = offpolicy.effective_sample_size(np.where(mask, weights, np.nan), mask)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(
        offpolicy.effective_sample_size(np.ones(shape), mask), mask.sum(), rtol=1e-6
    )
    assert offpolicy.effective_sample_size(weights, np.zeros(shape, bool)) == 0.0
