"""Attention and rotary positions against loops in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.models.attention import attend, rope


def attend_oracle(q, k, v, mask):
    out = np.zeros(q.shape, np.float64)
    group = q.shape[1] // k.shape[1]
    for b, h, t in np.ndindex(*q.shape[:3]):
        read = np.flatnonzero(mask[b, t])
        keys, values = (x[b, h // group].astype(np.float64) for x in (k, v))
        if not read.size:
            out[b, h, t] = values.mean(axis=0)
            continue
        scores = [float(q[b, h, t].astype(float) @ keys[s]) / math.sqrt(q.shape[3]) for s in read]
        weights = [math.exp(score - max(scores)) for score in scores]
        for weight, s in zip(weights, read, strict=True):
            out[b, h, t] += weight / sum(weights) * values[s]
    return out


def random_case(seed, batch=2, heads=6, kv=2, queries=4, keys=5, dim=8):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, heads, queries, dim))
    k, v = rng.normal(size=(2, batch, kv, keys, dim))
    mask = rng.random((batch, queries, keys)) < 0.6
    mask[0, 0] = False
    mask[0, 1], mask[0, 1, 2] = False, True
    return *(x.astype(np.float32) for x in (3 * q, k, v)), mask


@pytest.mark.parametrize("kv", [1, 2, 3, 6])
def test_attend_oracle(kv):
    q, k, v, mask = random_case(kv, kv=kv)
    want = attend_oracle(q, k, v, mask)
    np.testing.assert_allclose(attend(q, k, v, mask), want, rtol=1e-5, atol=1e-6)


def test_a_row_that_reads_nothing_is_finite_and_so_is_its_gradient():
    q, k, v, mask = random_case(0)
    mask[1] = False
    out, pullback = jax.vjp(lambda *x: attend(*x, mask), q, k, v)
    assert np.isfinite(out).all()
    assert all(np.isfinite(grad).all() for grad in pullback(jnp.ones_like(out)))


def test_what_is_masked_has_no_influence():
    q, k, v, mask = random_case(1)
    mask = mask | (np.arange(mask.shape[2]) == 0)  # every row reads something
    mask[:, :, 3] = False
    k2, v2 = k.copy(), v.copy()
    k2[:, :, 3], v2[:, :, 3] = 1e4, -1e4
    np.testing.assert_array_equal(attend(q, k2, v2, mask), attend(q, k, v, mask))


def test_scores_are_float32_under_bfloat16():
    # Two keys whose scores differ by 0.1 around 64, where bfloat16 steps by 0.5.
    q = jnp.ones((1, 1, 1, 2), jnp.bfloat16) * 64
    k = jnp.array([[[[1.0, 0.4140625], [1.0, 0.416015625]]]], jnp.bfloat16)
    v = jnp.array([[[[0.0, 0.0], [1.0, 1.0]]]], jnp.bfloat16)
    out = attend(q, k, v, jnp.ones((1, 1, 2), bool))
    gap = 64 * (0.416015625 - 0.4140625) / math.sqrt(2)
    np.testing.assert_allclose(np.float32(out[0, 0, 0, 0]), 1 / (1 + math.exp(-gap)), atol=3e-3)


@pytest.mark.parametrize("theta", [10000.0, 50.0])
def test_rope_oracle(theta):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 3, 4, 10)).astype(np.float32)
    positions = rng.integers(300, size=(2, 4))
    want = np.zeros(x.shape)
    for b, h, t, i in np.ndindex(2, 3, 4, 5):
        # Component i of the first half and i of the second are one complex number.
        angle = positions[b, t] * theta ** (-2 * i / 10)
        z = complex(x[b, h, t, i], x[b, h, t, i + 5])
        z *= complex(math.cos(angle), math.sin(angle))
        want[b, h, t, i], want[b, h, t, i + 5] = z.real, z.imag
    np.testing.assert_allclose(rope(x, positions, theta), want, rtol=0, atol=1e-4)


def test_rope_keeps_lengths_and_depends_on_distances_only():
    rng = np.random.default_rng(3)
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(at, other):
        turned = (rope(x, np.array([[p]]), 100.0) for x, p in ((q, at), (k, other)))
        return float(jnp.vdot(*turned))

    np.testing.assert_allclose(score(9, 4), score(25, 20), rtol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3
    turned = rope(q, np.array([[77]]), 100.0)
    np.testing.assert_allclose(jnp.vdot(turned, turned), np.vdot(q, q), rtol=1e-5)
    np.testing.assert_array_equal(rope(q, np.array([[0]]), 100.0), q)


def test_rope_angles_are_float32_under_bfloat16():
    x = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
    got = rope(x, np.array([[1001]]), 10000.0)  # bfloat16 has no 1001
    want = [math.cos(1001) - math.sin(1001), math.cos(1001) + math.sin(1001)]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got[0, 0, 0].astype(jnp.float32), want, atol=1e-2)
