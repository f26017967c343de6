"""GEPO: surprisal of groups, moving thresholds, scaling of advantages."""

import math

import numpy as np
import pytest

from s3ac_jax.algos.entropy import gepo_scale, group_surprisal, update_thresholds

NAN = np.float32(np.nan)
BETAS = {"beta_low": 0.2, "beta_high": 0.3, "rate": 0.01}


def oracle_surprisal(logp, mask, ids, groups):
    out = []
    for g in range(groups):
        terms = [-float(logp[i]) for i in np.ndindex(*mask.shape) if mask[i] and ids[i] == g]
        out.append(sum(terms) / len(terms) if terms else math.nan)
    return out


@pytest.mark.parametrize(
    ("rows", "tokens", "groups", "seed"), [(1, 1, 1, 0), (6, 5, 3, 1), (8, 11, 9, 2)]
)
def test_surprisal_oracle_poison_and_permutation(rows, tokens, groups, seed):
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(1.0, (rows, tokens)).astype(np.float32)
    mask, ids = rng.random((rows, tokens)) < 0.7, rng.integers(0, groups, rows)
    want = oracle_surprisal(logp, mask, ids[:, None] * np.ones((1, tokens), int), groups)
    poisoned = np.where(mask, logp, np.nan)
    np.testing.assert_allclose(
        group_surprisal(poisoned, mask, ids, groups), want, rtol=1e-5, equal_nan=True
    )
    order = rng.permutation(rows)
    got = group_surprisal(logp[order], mask[order], ids[order], groups)
    np.testing.assert_allclose(got, want, rtol=1e-5, equal_nan=True)


def test_surprisal_of_packed_rows_equals_padded():
    rng = np.random.default_rng(3)
    logp, mask = -rng.random((4, 6)), rng.random((4, 6)) < 0.8
    ids = np.array([0, 0, 1, 1])
    want = group_surprisal(logp, mask, ids, 2)
    # Padding carries -1, as `Packed.response` does.
    tail = np.full((1, 2), -1)
    packed_ids = np.concatenate([np.repeat(ids, 6)[None], tail], axis=1)
    packed = [
        np.concatenate([x.reshape(1, -1), tail.astype(x.dtype)], axis=1) for x in (logp, mask)
    ]
    packed[1][:, -2:] = False
    np.testing.assert_allclose(group_surprisal(*packed, packed_ids, 2), want, rtol=1e-6)


def test_thresholds_are_seeded_then_averaged():
    rng = np.random.default_rng(4)
    low = high = NAN
    want = None
    for _ in range(4):
        h = rng.random(7) + 0.5
        mean = sum(h) / 7
        sigma = math.sqrt(sum((x - mean) ** 2 for x in h) / 7)
        batch = (mean - 0.2 * sigma, mean + 0.3 * sigma)
        want = (
            batch
            if want is None
            else [0.99 * w + 0.01 * b for w, b in zip(want, batch, strict=True)]
        )
        low, high = update_thresholds(low, high, np.append(h, np.nan), **BETAS)
        np.testing.assert_allclose([low, high], want, rtol=1e-5)
    # A batch without groups changes nothing, seeded or not.
    same = update_thresholds(low, high, np.full(3, np.nan), **BETAS)
    np.testing.assert_array_equal(same, [low, high])
    assert np.all(np.isnan(update_thresholds(NAN, NAN, np.full(3, np.nan), **BETAS)))


@pytest.mark.parametrize(("shape", "seed"), [((1,), 0), ((4, 6), 1)])
def test_scale_oracle(shape, seed):
    rng = np.random.default_rng(seed)
    a, h = rng.normal(size=shape).astype(np.float32), rng.random(shape).astype(np.float32)
    want = np.zeros(shape)
    for i in np.ndindex(*shape):
        factor = 0.5 if a[i] > 0 and h[i] < 0.3 else 0.2 if a[i] < 0 and h[i] > 0.6 else 1.0
        want[i] = factor * float(a[i])
    kwargs = {"h_low": 0.3, "h_high": 0.6, "alpha_low": 0.5, "alpha_high": 0.2}
    got = gepo_scale(a, h, **kwargs)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    order = rng.permutation(shape[0])
    np.testing.assert_array_equal(gepo_scale(a[order], h[order], **kwargs), got[order])


def test_scale_limits():
    a = np.array([1.0, -1.0, 1.0, -1.0, 0.0])
    h = np.array([0.1, 0.1, 0.9, 0.9, 0.1])
    got = gepo_scale(a, h, h_low=0.3, h_high=0.6, alpha_low=0.5, alpha_high=0.2)
    np.testing.assert_allclose(got, [0.5, -1.0, 1.0, -0.2, 0.0], rtol=1e-6)
    kwargs = {"alpha_low": 0.5, "alpha_high": 0.2}
    np.testing.assert_array_equal(gepo_scale(a, h, h_low=NAN, h_high=NAN, **kwargs), a)
    np.testing.assert_array_equal(gepo_scale(a, h * NAN, h_low=0.3, h_high=0.6, **kwargs), a)
