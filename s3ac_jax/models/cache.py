"""What decoding remembers of each row: keys and values, and the states of linear attention."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from s3ac_jax.models.delta import LinearState
from s3ac_jax.models.spec import DecoderSpec, KVDtype
from s3ac_jax.models.stack import PerLayer
from s3ac_jax.parallel.mesh import constrain, platform
from s3ac_jax.parallel.slots import put_rows

_AXES = ("rows", "kv_heads", None, None)
# Axes that keys, values and their scales have in one layer.
_OWN = (4, 4, 3, 3)


Stack = Array | PerLayer


class KVCache(NamedTuple):
    """Keys and values of the layers that attend in full; entry s holds position s of its row.

    [L, B, K, S, d], or PerLayer of [B, K, S, d], as the weights are that it is used with.
    key_scale, value_scale: what one unit of an int8 key or value is worth, likewise without d; None
    where they are floating-point numbers.
    """

    keys: Stack
    values: Stack
    key_scale: Stack | None = None
    value_scale: Stack | None = None

    @property
    def tokens(self) -> int:
        """Positions that a row has room for. Source: ours."""
        return self.keys[0].shape[2]

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

        def put(old: Stack, new: Array) -> Stack:
            if isinstance(old, PerLayer):
                one = old[layer].at[rows, :, positions]
                return old.replaced(layer, one.set(new.astype(old[layer].dtype), mode="drop"))
            return old.at[layer, rows, :, positions].set(new.astype(old.dtype), mode="drop")

        return KVCache(*map(put, *self._matching(key, value)))

    def write_span(self, layer: Any, start: Any, key: Array, value: Array):
        """Keys and values [B, K, T, d] of all rows from one position on. Source: ours."""

        def put(old: Stack, new: Array) -> Stack:
            at = (0, 0, start, 0)[: new.ndim]
            if isinstance(old, PerLayer):
                one = old[layer]
                one = jax.lax.dynamic_update_slice(one, new.astype(one.dtype), at)
                return old.replaced(layer, one)
            return jax.lax.dynamic_update_slice(old, new[None].astype(old.dtype), (layer, *at))

        return KVCache(*map(put, *self._matching(key, value)))

    def insert(self, new: "KVCache", rows: Int[Array, "N"], slots: Int[Array, "N"]) -> "KVCache":
        """Row rows[i] of the unquantised `new` in place of row slots[i], quantised if this is.

        A slot out of range is skipped. `new` may hold fewer positions; the others stay as they are.
        Source: ours.
        """
        tokens = min(new.tokens, self.tokens)
        pairs = zip(*self._matching(*new[:2]), _OWN, strict=False)

        def put(own: int, old: Array, one: Array) -> Array:
            one = jax.lax.slice_in_dim(one, 0, tokens, axis=one.ndim - own + 2)
            return put_rows(old, one, rows, slots, (None,) * (old.ndim - own) + _AXES[:own])

        return KVCache(*(
            jax.tree.map(functools.partial(put, own), old, one) for old, one, own in pairs
        ))  # fmt: skip

    def _matching(self, key: Stack, value: Stack) -> tuple[list[Stack], list[Stack]]:
        """The arrays of this cache, and what to write into each."""
        if self.key_scale is None:
            return [self.keys, self.values], [key, value]
        split = [
            jax.tree.map(lambda x, n=n: quantize(x)[n], y) for n in (0, 1) for y in (key, value)
        ]
        return [*self], split


class Cache(NamedTuple):
    """All that a row's next token depends on. None where the model has no such layer."""

    kv: KVCache | None
    linear: LinearState | None

    def linear_layer(self, number: Any) -> LinearState:
        """The state of one linear layer. Source: ours."""
        assert self.linear is not None
        return LinearState(*(stack[number] for stack in self.linear))

    def with_linear(self, number: Any, state: LinearState) -> "Cache":
        """The cache with another state of one linear layer. Source: ours."""
        assert self.linear is not None

        def put(old: Stack, new: Array) -> Stack:
            if isinstance(old, PerLayer):
                return old.replaced(number, new)
            return old.at[number].set(new)

        return self._replace(linear=LinearState(*map(put, self.linear, state)))


def quantize(x: Float[Array, "... d"]) -> tuple[Array, Float[Array, "..."]]:
    """int8 of the vectors along the last axis, and what one unit of each is worth, float32.

    Source: KVQuant (2401.18079), section 3, in its plainest form: per token and head, symmetric.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    unit = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(x / unit[..., None]).astype(jnp.int8), scale


def empty_cache(
    spec: DecoderSpec,
    rows: int,
    tokens: int,
    dtype: KVDtype = "auto",
    *,
    per_layer: bool = False,
) -> Cache:
    """A zeroed cache of `tokens` positions for each of `rows` rows, over the mesh if there is one.

    per_layer: for weights that are. dtype: of keys and values; "auto" is the model's, but float32
    on CPU: XLA:CPU widens a whole bfloat16 array to scatter one column into it, which made a decode
    step of 135M weights 3 times slower (measured).
    Source: ours: [B, K, S, d] order, measured faster than [B, S, K, d] on CPU.
    """
    floats = "float32" if platform() == "cpu" else spec.dtype
    kept = jnp.dtype(floats if dtype == "auto" else dtype)
    kv = linear = None

    def zeros(layers: int, shape: tuple[int, ...], dtype: Any) -> Stack:
        def one(*lead: int) -> Array:
            axes = (None,) * len(lead) + _AXES[: len(shape)]
            return constrain(jnp.zeros((*lead, *shape), dtype), *axes)

        return PerLayer([one() for _ in range(layers)]) if per_layer else one(layers)

    if full := len(spec.layers_with("attn")):
        shape = (rows, spec.num_kv_heads, tokens, spec.head_dim)
        parts = [(shape, kept)] * 2 + [(shape[:-1], jnp.float32)] * 2 * (kept == jnp.int8)
        kv = KVCache(*(zeros(full, *part) for part in parts))
    if (count := len(spec.layers_with("linear_attn"))) and (one := spec.linear_attention):
        key = (rows, one.conv_width - 1, one.key_heads, one.key_dim)
        value = (rows, one.conv_width - 1, one.value_heads, one.value_dim)
        memory = (rows, one.value_heads, one.key_dim, one.value_dim)
        parts = [(key, floats), (key, floats), (value, floats), (memory, jnp.float32)]
        linear = LinearState(*(zeros(count, *part) for part in parts))
    return Cache(kv, linear)


def hold_cache(cache: Cache) -> Cache:
    """Inside a jitted function: the cache where `empty_cache` put it. Source: ours."""

    def hold(x: Array, own: int) -> Array:
        # Stacked over layers, or of one.
        lead = (None,) * (x.ndim - own)
        return constrain(x, *lead, *_AXES[: x.ndim - len(lead)])

    kv = linear = None
    if cache.kv is not None:
        kv = KVCache(*(
            jax.tree.map(lambda x, own=own: hold(x, own), part)
            for part, own in zip(cache.kv, _OWN, strict=True)
        ))  # fmt: skip
    if cache.linear is not None:
        linear = LinearState(*(jax.tree.map(lambda x: hold(x, 4), part) for part in cache.linear))
    return Cache(kv, linear)


def insert(cache: Cache, new: Cache, rows: Int[Array, "N"], slots: Int[Array, "N"]) -> Cache:
    """Row rows[i] of `new` in place of row slots[i] of `cache`; a slot out of range is skipped.

    `new` is not quantised and may hold fewer positions; the others must not be read.
    Source: ours.
    """

    kv = linear = None
    if cache.kv is not None and new.kv is not None:
        kv = cache.kv.insert(new.kv, rows, slots)
    if cache.linear is not None and new.linear is not None:

        def put(old: Array, one: Array) -> Array:
            axes = (None,) * (old.ndim - 4) + _AXES
            return put_rows(old, one, rows, slots, axes)

        linear = jax.tree.map(put, cache.linear, new.linear)
    return Cache(kv, linear)
