"""Attention of whole rows in chunks: no [T, T] array, and work only where segments overlap."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Below any score, and so far below _NONE that exp() of the difference is exactly 0.
_MASKED, _NONE = -1e30, -1e20
_LARGE = jnp.iinfo(jnp.int32).max
CHUNK = 256


class _Row(NamedTuple):
    """One row, cut into chunks of queries; keys and values in one piece.

    q: scaled, n chunks, the G query heads of a key head side by side. first, last: the chunks of
    keys that a chunk of queries has to look at, `last` not included.
    """

    q: Float[Array, "n K GC d"]
    k: Float[Array, "K S d"]
    v: Float[Array, "K S d"]
    q_ids: Int[Array, "n C"]
    k_ids: Int[Array, "S"]
    first: Int[Array, "n"]
    last: Int[Array, "n"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def chunked(
    q_BHTd: Float[Array, "B H T d"],
    k_BKSd: Float[Array, "B K S d"],
    v_BKSd: Float[Array, "B K S d"],
    q_ids_BT: Int[Array, "B T"],
    k_ids_BS: Int[Array, "B S"],
    offset: Int[Array, ""] | int,
    chunk: int = CHUNK,
) -> Float[Array, "B H T d"]:
    """Query t, which stands at place offset + t, reads the keys of its segment up to its place.

    Ids of 0 are padding: read by nobody, and they give 0. The softmax is float32; kept for the
    gradient are the result and one number per query. Rows go one after another, so that each skips
    what is empty for it.

    Source: FlashAttention (2205.14135), algorithm 1; online softmax (1805.02867), algorithm 3.
    """
    return _forward(q_BHTd, k_BKSd, v_BKSd, q_ids_BT, k_ids_BS, offset, chunk)[0]


def _forward(q, k, v, q_ids, k_ids, offset, chunk):
    args = (q, k, v, q_ids, k_ids)
    one = functools.partial(_row_forward, offset=offset, chunk=chunk)
    out, total = jax.lax.map(one, args)
    return out, (*args, jnp.asarray(offset, jnp.int32), out, total)


def _backward(chunk, kept, grad):
    q, k, v, q_ids, k_ids, offset, out, total = kept
    one = functools.partial(_row_backward, offset=offset, chunk=chunk)
    dq, dk, dv = jax.lax.map(one, (q, k, v, q_ids, k_ids, out, total, grad))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


chunked.defvjp(_forward, _backward)


def _pad(x: Array, axis: int, size: int) -> Array:
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pads)


def _sizes(queries: int, keys: int, chunk: int) -> tuple[int, int]:
    return min(chunk, queries), min(chunk, keys)


def _fold(x: Float[Array, "H T d"], kv_heads: int, size: int) -> Float[Array, "n K GC d"]:
    """The chunks of x, with the query heads of one key head side by side."""
    heads, tokens, dim = x.shape
    turns = -(-tokens // size)
    x = _pad(x, 1, turns * size).reshape(kv_heads, heads // kv_heads, turns, size, dim)
    return x.transpose(2, 0, 1, 3, 4).reshape(turns, kv_heads, -1, dim)


def _unfold(x: Float[Array, "n K GC d"], shape: tuple[int, int, int]) -> Float[Array, "H T d"]:
    """The inverse of `_fold` for H, T, d."""
    heads, tokens, dim = shape
    turns, kv_heads = x.shape[:2]
    x = x.reshape(turns, kv_heads, heads // kv_heads, -1, dim).transpose(1, 2, 0, 3, 4)
    return x.reshape(heads, -1, dim)[:, :tokens]


def _range(ids: Int[Array, "n C"]) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """Least and greatest id of each chunk; of padding alone an empty range."""
    return jnp.min(jnp.where(ids > 0, ids, _LARGE), 1), jnp.max(ids, 1)


def _cut(q, k, v, q_ids, k_ids, offset, chunk: int) -> _Row:
    kv_heads, keys = k.shape[:2]
    q_size, k_size = _sizes(q.shape[1], keys, chunk)
    q_turns, k_turns = -(-q.shape[1] // q_size), -(-keys // k_size)
    q_ids = _pad(q_ids, 0, q_turns * q_size).reshape(q_turns, q_size)
    k_ids = _pad(k_ids, 0, k_turns * k_size)
    # Chunks whose ids do not overlap have no segment in common.
    q_low, q_high = _range(q_ids)
    k_low, k_high = _range(k_ids.reshape(k_turns, k_size))
    common = (q_low[:, None] <= k_high) & (k_low <= q_high[:, None])
    greatest = offset + (1 + jnp.arange(q_turns)) * q_size - 1
    common &= jnp.arange(k_turns) * k_size <= greatest[:, None]
    first = jnp.argmax(common, axis=1)
    last = k_turns - jnp.argmax(common[:, ::-1], axis=1)
    return _Row(
        _fold(q * q.shape[-1] ** -0.5, kv_heads, q_size),
        _pad(k, 1, k_turns * k_size), _pad(v, 1, k_turns * k_size), q_ids, k_ids,
        first, jnp.where(jnp.any(common, axis=1), last, first),
    )  # fmt: skip


def _keys(row: _Row, turn: Array, size: int) -> tuple[Array, Array, Array]:
    """Keys, values and ids of one chunk of keys."""
    k = jax.lax.dynamic_slice_in_dim(row.k, turn * size, size, 1)
    v = jax.lax.dynamic_slice_in_dim(row.v, turn * size, size, 1)
    return k, v, jax.lax.dynamic_slice_in_dim(row.k_ids, turn * size, size)


def _scores(q: Array, k: Array, readable: Array) -> Float[Array, "K G C S"]:
    """Of one chunk of queries with one chunk of keys, float32."""
    scores = jnp.einsum("kqd,ksd->kqs", q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(len(k), -1, *readable.shape)
    return jnp.where(readable, scores, _MASKED)


def _readable(
    q_ids: Int[Array, "C"], q_start: Array, k_ids: Int[Array, "S"], k_start: Array
) -> Bool[Array, "C S"]:
    before = (k_start + jnp.arange(len(k_ids))) <= (q_start + jnp.arange(len(q_ids)))[:, None]
    return before & (q_ids[:, None] == k_ids) & (q_ids > 0)[:, None]


def _row_forward(args: tuple[Array, ...], *, offset: Array | int, chunk: int):
    """Result [H, T, d] of one row, and log of the sum of exponentials by chunk [n, K, G, C]."""
    q, k, v, q_ids, k_ids = args
    row = _cut(q, k, v, q_ids, k_ids, offset, chunk)
    q_size, k_size = _sizes(q.shape[1], k.shape[1], chunk)
    kv_heads, group = k.shape[0], q.shape[0] // k.shape[0]

    def look(number, turn, state):
        most, total, out = state
        keys, values, ids = _keys(row, turn, k_size)
        readable = _readable(row.q_ids[number], offset + number * q_size, ids, turn * k_size)
        scores = _scores(row.q[number], keys, readable)
        higher = jnp.maximum(most, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - higher[..., None])
        shrink = jnp.exp(most - higher)
        total = total * shrink + jnp.sum(weights, axis=-1)
        flat = weights.astype(values.dtype).reshape(kv_heads, -1, k_size)
        added = jnp.einsum("kqs,ksd->kqd", flat, values, preferred_element_type=jnp.float32)
        return higher, total, out * shrink.reshape(kv_heads, -1, 1) + added

    def one(number):
        shape = (kv_heads, group, q_size)
        state = (
            jnp.full(shape, _NONE, jnp.float32), jnp.zeros(shape, jnp.float32),
            jnp.zeros((kv_heads, group * q_size, q.shape[2]), jnp.float32),
        )  # fmt: skip
        look_at = functools.partial(look, number)
        most, total, out = jax.lax.fori_loop(row.first[number], row.last[number], look_at, state)
        # Only padding reads nothing.
        total = jnp.where(total > 0, total, 1.0)
        out = out / total.reshape(kv_heads, -1, 1)
        return out.astype(v.dtype), most + jnp.log(total)

    out, total = jax.lax.map(one, jnp.arange(len(row.q)))
    return _unfold(out, q.shape), total


def _row_backward(args: tuple[Array, ...], *, offset: Array, chunk: int):
    """Gradients of one row: dq in chunks one after another, dk and dv gathered in float32."""
    q, k, v, q_ids, k_ids, out, total, grad = args
    row = _cut(q, k, v, q_ids, k_ids, offset, chunk)
    q_size, k_size = _sizes(q.shape[1], k.shape[1], chunk)
    kv_heads = k.shape[0]
    # Sum over keys of weight times gradient of the weight.
    inner = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1, keepdims=True)
    inner = _fold(inner, kv_heads, q_size).reshape(total.shape)
    grad = _fold(grad, kv_heads, q_size)

    def look(number, turn, state):
        dq, dk, dv = state
        keys, values, ids = _keys(row, turn, k_size)
        readable = _readable(row.q_ids[number], offset + number * q_size, ids, turn * k_size)
        scores = _scores(row.q[number], keys, readable)
        weights = jnp.exp(scores - total[number][..., None])
        upstream = grad[number]
        dweights = jnp.einsum("kqd,ksd->kqs", upstream, values, preferred_element_type=jnp.float32)
        dscores = weights * (dweights.reshape(weights.shape) - inner[number][..., None])
        dscores = dscores.astype(keys.dtype).reshape(kv_heads, -1, k_size)
        weights = weights.astype(upstream.dtype).reshape(kv_heads, -1, k_size)
        dq += jnp.einsum("kqs,ksd->kqd", dscores, keys, preferred_element_type=jnp.float32)
        new_k = jnp.einsum(
            "kqs,kqd->ksd", dscores, row.q[number], preferred_element_type=jnp.float32
        )
        new_v = jnp.einsum("kqs,kqd->ksd", weights, upstream, preferred_element_type=jnp.float32)
        return dq, _add(dk, new_k, turn * k_size), _add(dv, new_v, turn * k_size)

    def one(gathered, number):
        state = (jnp.zeros(row.q.shape[1:], jnp.float32), *gathered)
        look_at = functools.partial(look, number)
        dq, *gathered = jax.lax.fori_loop(row.first[number], row.last[number], look_at, state)
        return tuple(gathered), (dq * q.shape[-1] ** -0.5).astype(q.dtype)

    start = (jnp.zeros(row.k.shape, jnp.float32), jnp.zeros(row.v.shape, jnp.float32))
    (dk, dv), dq = jax.lax.scan(one, start, jnp.arange(len(row.q)))
    keys = k.shape[1]
    return _unfold(dq, q.shape), dk[:, :keys].astype(k.dtype), dv[:, :keys].astype(v.dtype)


def _add(whole: Array, part: Array, start: Array) -> Array:
    old = jax.lax.dynamic_slice_in_dim(whole, start, part.shape[1], 1)
    return jax.lax.dynamic_update_slice_in_dim(whole, old + part, start, 1)
