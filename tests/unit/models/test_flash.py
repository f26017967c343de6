"""Attention in chunks against loops in float64, and what it must not keep or spend."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.models.attention import attend_rows
from s3ac_jax.models.flash import chunked

# Packed, left-padded, right-padded, one segment, an id that comes back, and padding alone.
PACKED = [1] * 9 + [2] * 14 + [3] * 5 + [0] * 9
LEFT = [0] * 11 + [1] * 26
RIGHT = [1] * 20 + [0] * 17
WHOLE = [1] * 37
RETURNS = [1] * 8 + [0] * 3 + [2] * 12 + [1] * 14
NOTHING = [0] * 37
ROWS = np.array([PACKED, LEFT, RIGHT, WHOLE, RETURNS, NOTHING])


def oracle(q, k, v, ids, weights):
    """Results and gradients of sum(weights * result), one token and head at a time."""
    q, k, v, weights = (np.asarray(x, np.float64) for x in (q, k, v, weights))
    group, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[3])
    out, dq, dk, dv = np.zeros(q.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, h, t in np.ndindex(*q.shape[:3]):
        read = [s for s in range(t + 1) if ids[b, s] == ids[b, t] > 0]
        if not read:
            continue
        keys, values, upstream = k[b, h // group][read], v[b, h // group][read], weights[b, h, t]
        scores = keys @ q[b, h, t] * scale
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        out[b, h, t] = shares @ values
        dshares = values @ upstream
        dscores = shares * (dshares - shares @ dshares) * scale
        dq[b, h, t] = dscores @ keys
        dk[b, h // group, read] += dscores[:, None] * q[b, h, t]
        dv[b, h // group, read] += shares[:, None] * upstream
    return out, dq, dk, dv


def case(heads, kv_heads, dim, ids=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    rows, tokens = ids.shape
    q, weights = rng.normal(size=(2, rows, heads, tokens, dim))
    k, v = rng.normal(size=(2, rows, kv_heads, tokens, dim))
    return *(x.astype(np.float32) for x in (2 * q, k, v)), weights.astype(np.float32)


def with_gradients(attend, q, k, v, weights):
    def total(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "chunk"),
    [(2, 2, 16, 8), (2, 1, 64, 5), (7, 1, 8, 16), (4, 2, 128, 64), (14, 2, 4, 37), (1, 1, 256, 1)],
)
def test_values_and_gradients_oracle(heads, kv_heads, dim, chunk):
    q, k, v, weights = case(heads, kv_heads, dim)
    want = oracle(q, k, v, ROWS, weights)
    ids = jnp.asarray(ROWS)
    got = with_gradients(lambda *x: chunked(*x, ids, ids, 0, chunk), q, k, v, weights)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("kind", ["dense", "chunked"])
def test_the_door_oracle(kind):
    q, k, v, weights = case(4, 2, 8)
    want = oracle(q, k, v, ROWS, weights)
    ids = jnp.asarray(ROWS)
    got = with_gradients(lambda *x: attend_rows(*x, ids, kind=kind), q, k, v, weights)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (7, 8), (13, 37), (30, 37)])
def test_a_piece_of_the_queries_is_a_piece_of_the_result(start, stop):
    q, k, v, weights = case(4, 2, 8)
    want = oracle(q, k, v, ROWS, weights)[0][:, :, start:stop]
    piece = jax.jit(chunked, static_argnums=6)  # the offset is traced
    got = piece(q[:, :, start:stop], k, v, ROWS[:, start:stop], ROWS, start, 8)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_gradients_of_pieces_add_up():
    q, k, v, weights = case(4, 2, 8)
    want = oracle(q, k, v, ROWS, weights)
    ids = jnp.asarray(ROWS)

    def pieces(q, k, v):
        out = [chunked(q[:, :, a:b], k, v, ids[:, a:b], ids, a, 8) for a, b in ((0, 15), (15, 37))]
        return jnp.concatenate(out, axis=2)

    got = with_gradients(pieces, q, k, v, weights)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("kind", ["dense", "chunked"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_lies_in_padding_goes_nowhere(kind, poison):
    q, k, v, weights = case(4, 2, 8)
    padding = np.broadcast_to((ROWS == 0)[:, None, :, None], q.shape)
    ids = jnp.asarray(ROWS)

    def attend(*x):
        return attend_rows(*x, ids, kind=kind)

    clean = with_gradients(attend, q, k, v, weights)
    for x in (q, k, v):
        x[padding[:, : x.shape[1]]] = poison
    for one, other in zip(with_gradients(attend, q, k, v, weights), clean, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (np.asarray(clean[0])[padding] == 0).all()


def test_other_segments_have_no_influence():
    q, k, v, _ = case(4, 2, 8)
    ids = jnp.asarray(ROWS)
    before = np.asarray(chunked(q, k, v, ids, ids, 0, 8))
    for x in (q, k, v):
        x[:, :, 9:23] = 1e4  # segment 2 of the first row
    after = np.asarray(chunked(q, k, v, ids, ids, 0, 8))
    np.testing.assert_array_equal(after[0, :, :9], before[0, :, :9])
    np.testing.assert_array_equal(after[0, :, 23:28], before[0, :, 23:28])


def test_bfloat16_is_as_good_as_its_inputs():
    q, k, v, weights = (jnp.asarray(x, jnp.bfloat16) for x in case(4, 2, 64))
    want = oracle(q, k, v, ROWS, weights)
    ids = jnp.asarray(ROWS)
    got = with_gradients(lambda q, k, v: chunked(q, k, v, ids, ids, 0, 8), q, k, v, weights)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == jnp.bfloat16
        error = np.abs(np.asarray(one, np.float64) - other)
        # A few units of the last of 8 bits.
        assert error.max() < 0.03 * np.abs(other).max()
        assert error.mean() < 0.004 * np.abs(other).max()


def compiled(attend, tokens, segment):
    ids = jnp.asarray(1 + np.arange(tokens)[None] // segment)
    shape = jax.ShapeDtypeStruct((1, 2, tokens, 16), jnp.float32)
    weights = jnp.ones(shape.shape)
    step = jax.jit(lambda *x: with_gradients(lambda *y: attend(*y, ids), *x, weights))
    return step.lower(shape, shape, shape).compile()


def test_memory_grows_with_tokens_not_with_their_square():
    def temporaries(kind, tokens):
        program = compiled(lambda *x: attend_rows(*x, kind=kind), tokens, tokens)
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries("chunked", 8192) < temporaries("dense", 8192) / 50
    assert temporaries("chunked", 8192) < 2.5 * temporaries("chunked", 4096)


def test_packed_rows_cost_what_their_segments_cost():
    # Values far away are never touched: were they, NaN times a weight of 0 would show.
    tokens, segment = 64, 16
    ids = np.array([[1] * segment + [2] * segment + [3] * 32])
    q, k, v, _ = case(2, 1, 8, ids)
    v[:, :, :segment] = np.nan
    out = chunked(q, k, v, ids, ids, 0, 16)
    assert np.isfinite(np.asarray(out)[:, :, segment:]).all()
    v[:, :, :segment], v[:, :, tokens - 16 :] = 1.0, np.nan
    out = chunked(q, k, v, ids, ids, 0, 16)
    assert np.isfinite(np.asarray(out)[:, :, : tokens - 16]).all()
