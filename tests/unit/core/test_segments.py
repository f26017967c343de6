"""Reductions over segments, against loops and against one row per segment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core.segments import first_masked, segment_any, segment_mean, segment_sum


def random_case(rows, tokens, seed):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=(rows, tokens)).astype(np.float32), rng.random((rows, tokens)) < 0.7
    ids = 1 + np.cumsum(rng.random((rows, tokens)) < 0.25, axis=1)
    ids = np.minimum(ids, tokens)
    return x, np.where(np.arange(tokens) < max(1, tokens - 2), ids, 0), mask


def oracle(x, ids, mask):
    total, mean, some = np.zeros(x.shape), np.zeros(x.shape), np.zeros(x.shape, bool)
    for b, t in np.ndindex(*x.shape):
        if ids[b, t]:
            live = [
                float(x[b, s]) for s in range(x.shape[1]) if mask[b, s] and ids[b, s] == ids[b, t]
            ]
            total[b, t] = sum(live)
            mean[b, t] = sum(live) / max(len(live), 1)
            some[b, t] = any(v > 0.5 for v in live)
    return total, mean, some


@pytest.mark.parametrize(("rows", "tokens", "seed"), [(1, 1, 0), (3, 8, 1), (4, 21, 2)])
@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("packed", [True, False])
def test_oracle(rows, tokens, seed, poison, packed):
    x, ids, mask = random_case(rows, tokens, seed)
    mask = mask & (ids > 0)
    total, mean, some = oracle(x, ids if packed else np.ones_like(ids), mask)
    args = (np.where(mask, x, poison), ids if packed else None, mask)
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(segment_sum(*args), total, **close)
    np.testing.assert_allclose(segment_mean(*args), mean, **close)
    np.testing.assert_array_equal(segment_any(args[0] > 0.5, *args[1:]), some)


def test_padding_is_zero_even_when_the_mask_covers_it():
    ids, every = np.array([[1, 1, 0]]), np.ones((1, 3), bool)
    np.testing.assert_array_equal(segment_sum(np.ones((1, 3)), ids, every), [[2, 2, 0]])
    np.testing.assert_array_equal(segment_any(every, ids, every), [[True, True, False]])


def test_gradient_is_confined_to_the_segment_and_the_mask():
    ids = np.array([[1, 1, 2, 2, 0]])
    mask = np.array([[True, False, True, True, False]])
    x = jnp.where(mask, 1.0, jnp.nan)
    got = jax.grad(lambda x: segment_sum(x, ids, mask)[0, 3])(x)
    np.testing.assert_array_equal(got, [[0, 0, 1, 1, 0]])


def test_the_ids_need_not_start_at_one_or_be_dense():
    x, mask = np.ones((1, 4)), np.ones((1, 4), bool)
    got = segment_sum(x, np.array([[2, 2, 2, 4]]), mask)
    np.testing.assert_array_equal(got, [[3, 3, 3, 1]])
    assert np.all(np.isnan(segment_sum(x, np.array([[9, 9, 9, 9]]), mask)))


@pytest.mark.parametrize(
    ("rows", "tokens", "seed"), [(1, 1, 0), (3, 8, 1), (4, 21, 2), (6, 40, 3), (2, 1, 4)]
)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.7, 1.0])
def test_first_masked_is_the_first_of_each_segment_that_has_one(rows, tokens, seed, share):
    _, ids, _ = random_case(rows, tokens, seed)
    mask = (np.random.default_rng(seed).random(ids.shape) < share) & (ids > 0)
    want, whole = np.zeros(ids.shape, bool), np.zeros(ids.shape, bool)
    for b in range(rows):
        seen = set()
        for t in range(tokens):
            if mask[b, t] and ids[b, t] not in seen:
                seen.add(ids[b, t])
                want[b, t] = True
        whole[b, np.flatnonzero(mask[b])[:1]] = True
    np.testing.assert_array_equal(first_masked(mask, ids), want)
    # Without ids a row is one segment.
    np.testing.assert_array_equal(first_masked(mask, None), whole)


def test_first_masked_of_segments_with_nothing_in_them():
    ids = np.array([[1, 1, 2, 2, 3, 3, 0], [1, 2, 2, 2, 0, 0, 0]])
    mask = np.array([[0, 1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]], bool)
    want = np.array([[0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(first_masked(mask, ids), want)
    np.testing.assert_array_equal(jax.jit(first_masked)(mask, ids), want)
