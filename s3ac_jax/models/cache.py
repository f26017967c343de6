"""What decoding remembers of each row: keys and values, and the states of linear attention."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from s3ac_jax.models.delta import LinearState
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import constrain

KVDtype = Literal["auto", "float32", "bfloat16", "int8"]

_AXES = (None, "rows", "kv_heads", None, None)


class KVCache(NamedTuple):
    """Keys and values of the layers that attend in full; entry s holds position s of its row.

    key_scale, value_scale: what one unit of an int8 key or value is worth; None where they are
    floating-point numbers.
    """

    keys: Array  # [L, B, K, S, d]
    values: Array
    key_scale: Float[Array, "L B K S"] | None = None
    value_scale: Float[Array, "L B K S"] | None = None

    @property
    def tokens(self) -> int:
        """Positions that a row has room for. Source: ours."""
        return self.keys.shape[3]

    def layer(self, number: Any) -> tuple[Any, ...]:
        """Keys, values and their scales, None if not quantised, of one layer. Source: ours."""
        keys, values = self.keys[number], self.values[number]
        if self.key_scale is None or self.value_scale is None:
            return keys, values, None
        return keys, values, (self.key_scale[number], self.value_scale[number])

    def write_column(self, layer: Any, positions: Int[Array, "B"], key: Array, value: Array):
        """One new key and value [B, K, d] per row at its own position; none beyond the cache.

        Source: ours.
        """
        rows = jnp.arange(len(positions))

        def put(old: Array, new: Array) -> Array:
            return old.at[layer, rows, :, positions].set(new.astype(old.dtype), mode="drop")

        return KVCache(*map(put, *self._matching(key, value)))

    def write_span(self, layer: Any, start: Any, key: Array, value: Array):
        """Keys and values [B, K, T, d] of all rows from one position on. Source: ours."""

        def put(old: Array, new: Array) -> Array:
            at = (layer, 0, 0, start, 0)[: old.ndim]
            return jax.lax.dynamic_update_slice(old, new[None].astype(old.dtype), at)

        return KVCache(*map(put, *self._matching(key, value)))

    def insert(self, new: "KVCache", rows: Int[Array, "N"], slots: Int[Array, "N"]) -> "KVCache":
        """Row rows[i] of the unquantised `new` in place of row slots[i], quantised if this is.

        A slot out of range is skipped. `new` may hold fewer positions; the others stay as they are.
        Source: ours.
        """
        tokens = min(new.tokens, self.tokens)

        def put(old: Array, one: Array) -> Array:
            return old.at[:, slots, :, :tokens].set(one.astype(old.dtype), mode="drop")

        taken = (x[:, rows, :, :tokens] for x in new[:2])
        return KVCache(*map(put, *self._matching(*taken)))

    def _matching(self, key: Array, value: Array) -> tuple[list[Array], list[Array]]:
        """The arrays of this cache, and what to write into each."""
        if self.key_scale is None:
            return [self.keys, self.values], [key, value]
        key, key_scale = quantize(key)
        value, value_scale = quantize(value)
        return [*self], [key, value, key_scale, value_scale]


class Cache(NamedTuple):
    """All that a row's next token depends on. None where the model has no such layer."""

    kv: KVCache | None
    linear: LinearState | None

    def with_linear(self, layer: Any, state: LinearState) -> "Cache":
        """The cache with another state of one linear layer. Source: ours."""
        linear = jax.tree.map(lambda old, new: old.at[layer].set(new), self.linear, state)
        return self._replace(linear=linear)


def quantize(x: Float[Array, "... d"]) -> tuple[Array, Float[Array, "..."]]:
    """int8 of the vectors along the last axis, and what one unit of each is worth, float32.

    Source: KVQuant (2401.18079), section 3, in its plainest form: per token and head, symmetric.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    unit = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(x / unit[..., None]).astype(jnp.int8), scale


def empty_cache(spec: DecoderSpec, rows: int, tokens: int, dtype: KVDtype = "auto") -> Cache:
    """A zeroed cache of `tokens` positions for each of `rows` rows, over the mesh if there is one.

    dtype: of keys and values; "auto" is the model's, but float32 on CPU: XLA:CPU widens a whole
    bfloat16 array to scatter one column into it, which made a decode step of 135M weights 3 times
    slower (measured).
    Source: ours: [B, K, S, d] order, measured faster than [B, S, K, d] on CPU.
    """
    floats = "float32" if jax.default_backend() == "cpu" else spec.dtype
    kept = jnp.dtype(floats if dtype == "auto" else dtype)
    kv = linear = None
    if full := len(spec.layers_with("attn")):
        shape = (full, rows, spec.num_kv_heads, tokens, spec.head_dim)
        keys, values = (constrain(jnp.zeros(shape, kept), *_AXES) for _ in range(2))
        scales = ()
        if kept == jnp.int8:
            scales = (constrain(jnp.zeros(shape[:-1]), *_AXES[:-1]) for _ in range(2))
        kv = KVCache(keys, values, *scales)
    if (count := len(spec.layers_with("linear_attn"))) and (one := spec.linear_attention):
        key = (count, rows, one.conv_width - 1, one.key_heads, one.key_dim)
        value = (count, rows, one.conv_width - 1, one.value_heads, one.value_dim)
        memory = (count, rows, one.value_heads, one.key_dim, one.value_dim)
        q, k, v = (jnp.zeros(shape, floats) for shape in (key, key, value))
        linear = LinearState(q, k, v, jnp.zeros(memory, jnp.float32))
    return Cache(kv, linear)


def insert(cache: Cache, new: Cache, rows: Int[Array, "N"], slots: Int[Array, "N"]) -> Cache:
    """Row rows[i] of `new` in place of row slots[i] of `cache`; a slot out of range is skipped.

    `new` is not quantised and may hold fewer positions; the others must not be read.
    Source: ours.
    """

    def whole(old: Array, one: Array) -> Array:
        return old.at[:, slots].set(one[:, rows].astype(old.dtype), mode="drop")

    kv = None
    if cache.kv is not None and new.kv is not None:
        kv = cache.kv.insert(new.kv, rows, slots)
    return Cache(kv, jax.tree.map(whole, cache.linear, new.linear))
