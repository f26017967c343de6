"""What decoding remembers of each row: keys and values, and the states of linear attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from s3ac_jax.models.delta import LinearState
from s3ac_jax.models.spec import DecoderSpec


class KVCache(NamedTuple):
    """Keys and values of the layers that attend in full; entry s holds position s of its row."""

    keys: Float[Array, "L B K S d"]
    values: Float[Array, "L B K S d"]


class Cache(NamedTuple):
    """All that a row's next token depends on. None where the model has no such layer."""

    kv: KVCache | None
    linear: LinearState | None


def empty_cache(spec: DecoderSpec, rows: int, tokens: int) -> Cache:
    """A zeroed cache of `tokens` positions for each of `rows` rows.

    In the model's dtype, but float32 on CPU: XLA:CPU widens a whole bfloat16 array to scatter one
    column into it, which made a decode step of 135M weights 3 times slower (measured).
    Source: ours: [B, K, S, d] order, measured faster than [B, S, K, d] on CPU.
    """
    on_cpu = jax.default_backend() == "cpu"
    dtype, kv, linear = jnp.dtype("float32" if on_cpu else spec.dtype), None, None
    if full := len(spec.layers_with("attn")):
        shape = (full, rows, spec.num_kv_heads, tokens, spec.head_dim)
        kv = KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    if (count := len(spec.layers_with("linear_attn"))) and (one := spec.linear_attention):
        key = (count, rows, one.conv_width - 1, one.key_heads, one.key_dim)
        value = (count, rows, one.conv_width - 1, one.value_heads, one.value_dim)
        memory = (count, rows, one.value_heads, one.key_dim, one.value_dim)
        q, k, v = (jnp.zeros(shape, dtype) for shape in (key, key, value))
        linear = LinearState(q, k, v, jnp.zeros(memory, jnp.float32))
    return Cache(kv, linear)


def insert(cache: Cache, new: Cache, rows: Int[Array, "N"], slots: Int[Array, "N"]) -> Cache:
    """Row rows[i] of `new` in place of row slots[i] of `cache`; a slot out of range is skipped.

    `new` may hold fewer positions; the others stay as they are and must not be read.
    Source: ours.
    """

    def positions(old: Array, one: Array) -> Array:
        new = one[:, rows].astype(old.dtype)
        return old.at[:, slots, :, : one.shape[3]].set(new, mode="drop")

    def whole(old: Array, one: Array) -> Array:
        return old.at[:, slots].set(one[:, rows].astype(old.dtype), mode="drop")

    return Cache(
        jax.tree.map(positions, cache.kv, new.kv), jax.tree.map(whole, cache.linear, new.linear)
    )
