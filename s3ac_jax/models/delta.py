"""Gated DeltaNet: linear attention with a decaying state that is corrected, not only added to.

Per head, with S [dk, dv] in float32:  S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;
o = S^T q. Training runs it in chunks of tokens, decoding token by token; the two agree to rounding
(tested). A new segment starts from S = 0, and padding leaves S as it is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from s3ac_jax.models.block import Block, filled, normal
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.layout import flatten, unflatten
from s3ac_jax.parallel.mesh import constrain

_EXACT = jax.lax.Precision.HIGHEST
# Tokens of a row whose chunks are prepared together: there and back, 32,768 tokens of 32 heads of
# width 128 take 12.8 GiB at once and 3.8 in such parts (XLA:CPU's count).
_AT_ONCE = 4096
_NORM_EPS = 1e-6  # of the unit length of q and k, fixed in the reference


class LinearState(NamedTuple):
    """What decoding carries: the last W - 1 columns before the convolution, and S in float32.

    Stacked over the linear layers, L first, wherever more than one layer is meant.
    """

    q: Float[Array, "B W Hk dk"]
    k: Float[Array, "B W Hk dk"]
    v: Float[Array, "B W Hv dv"]
    memory: Float[Array, "B Hv dk dv"]


def runs(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Number of the segment that each token belongs to, counted along the row.

    A segment is in one piece: an id that comes back after padding is a new one. Padding counts to
    the segment before it, so that the state outlives it.
    Source: ours: state resets where a segment starts, whatever its id.
    """
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum((segment_ids > 0) & (segment_ids != before), axis=1)


def unit_lower_inverse(strict: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """(1 + strict)^-1 for a strictly lower triangular matrix of a size that is a power of two.

    Two inverted blocks on the diagonal give the inverse of the block that holds both, so that
    log2(C) rounds of products do.
    Source: block inversion; ours: a triangular solve per chunk is a BLAS call on CPU, whose threads
    wait for each other: 20 to 1,600 ms for what takes 5 this way (measured). A product of powers
    would cancel digits where keys repeat.
    """
    lead, size = strict.shape[:-2], strict.shape[-1]
    inverse, half = jnp.ones((*lead, size, 1, 1), strict.dtype), 1
    while half < size:
        pairs = size // (2 * half)
        blocks = strict.reshape(*lead, pairs, 2, half, pairs, 2, half)
        corner = jnp.diagonal(blocks[..., 1, :, :, 0, :], axis1=-4, axis2=-2)
        corner = jnp.moveaxis(corner, -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = jnp.matmul(second, jnp.matmul(corner, first, precision=_EXACT), precision=_EXACT)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([-below, second], axis=-1)], axis=-2)
        half *= 2
    return inverse[..., 0, :, :]


def chunked(
    q: Float[Array, "B H T k"],
    k: Float[Array, "B H T k"],
    v: Float[Array, "B H T v"],
    log_decay: Float[Array, "B H T"],
    beta: Float[Array, "B H T"],
    run: Int[Array, "B T"],
    chunk: int,
    state: Float[Array, "B H k v"] | None = None,
) -> tuple[Float[Array, "B H T v"], Float[Array, "B H k v"]]:
    """Outputs of whole rows and the state after them, all float32.

    state: what the run of the first token has left so far, None at its start. Within a chunk the
    corrections d solve a unit lower triangular system; only S goes from chunk to chunk. Nothing is
    carried from one run to the next. What needs no S is made for `_AT_ONCE` tokens together, and
    again in the backward pass where a row is longer.
    Source: Parallelizing linear transformers with the delta rule (2406.06484), section 3, with the
    decay of Gated delta networks (2412.06464), eq. 10.
    """
    batch, heads, tokens, _ = q.shape
    # A power of two, for the inverse.
    size = 1 << (min(chunk, tokens) - 1).bit_length()
    turns, each = -(-tokens // size), max(1, _AT_ONCE // size)
    if turns > each:
        turns = -(-turns // each) * each

    def cut(x: Array) -> Array:
        """[B, H, T, ...] -> [turns, B, H, size, ...]; the filling decays and adds nothing."""
        pad = [(0, 0)] * x.ndim
        pad[2] = (0, turns * size - tokens)
        shape = (batch, x.shape[1], turns, size, *x.shape[3:])
        return jnp.moveaxis(jnp.pad(x, pad).reshape(shape), 2, 0)

    q, k, v, log_decay, beta = map(cut, (q, k, v, log_decay, beta))
    run = jnp.pad(run, ((0, 0), (0, turns * size - tokens)), mode="edge")
    run = jnp.moveaxis(run.reshape(batch, 1, turns, size), 2, 0)
    # No run has the number 0.
    first = jnp.zeros_like(run[:1, ..., :1]) if state is None else run[:1, ..., :1]
    entered = jnp.concatenate([first, run[:-1, ..., -1:]])

    if state is None:
        state = jnp.zeros((batch, heads, q.shape[-1], v.shape[-1]), jnp.float32)
    xs = (q, k, v, log_decay, beta, run, entered)
    if turns <= each:
        state, out = _chunks(state, xs)
    else:
        xs = jax.tree.map(lambda x: x.reshape(turns // each, each, *x.shape[1:]), xs)
        state, out = jax.lax.scan(jax.checkpoint(_chunks, prevent_cse=False), state, xs)
        out = out.reshape(turns, *out.shape[2:])
    out = jnp.moveaxis(out, 0, 2).reshape(batch, heads, turns * size, -1)
    return out[:, :, :tokens], state


def _chunks(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
    """The state after some chunks, [turns, B, H, C, ...], and their outputs; see `chunked`."""
    q, k, v, log_decay, beta, run, entered = xs
    size = q.shape[-2]
    total = jnp.cumsum(log_decay, axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    reads = lower & (run[..., :, None] == run[..., None, :])
    # where before exp: above the diagonal the difference is positive and may overflow.
    gap = jnp.where(reads, total[..., :, None] - total[..., None, :], 0.0)
    decay = jnp.where(reads, jnp.exp(gap), 0.0)
    carried = jnp.where(run == entered, jnp.exp(total), 0.0)
    left = jnp.where(run == run[..., -1:], jnp.exp(total[..., -1:] - total), 0.0)

    scaled_k, scaled_v = k * beta[..., None], v * beta[..., None]
    overlap = jnp.einsum("...ik,...jk->...ij", scaled_k, k, precision=_EXACT)
    system = jnp.tril(overlap * decay, -1)
    right = jnp.concatenate([scaled_v, scaled_k * carried[..., None]], axis=-1)
    solved = jnp.matmul(unit_lower_inverse(system), right, precision=_EXACT)
    new, removed = jnp.split(solved, [v.shape[-1]], axis=-1)
    within = jnp.einsum("...ik,...jk->...ij", q, k, precision=_EXACT) * decay

    def turn(state: Array, xs: tuple[Array, ...]):
        q, k, new, removed, within, kept_q, left, last = xs
        delta = new - jnp.einsum("bhik,bhkv->bhiv", removed, state, precision=_EXACT)
        out = jnp.einsum("bhik,bhkv->bhiv", q * kept_q[..., None], state, precision=_EXACT)
        out += jnp.einsum("bhij,bhjv->bhiv", within, delta, precision=_EXACT)
        added = jnp.einsum("bhjk,bhjv->bhkv", k * left[..., None], delta, precision=_EXACT)
        return state * last[..., None, None] + added, out

    xs = (q, k, new, removed, within, carried, left, carried[..., -1])
    return jax.lax.scan(turn, state, xs)


def step(
    q: Float[Array, "B H k"],
    k: Float[Array, "B H k"],
    v: Float[Array, "B H v"],
    log_decay: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H k v"],
) -> tuple[Float[Array, "B H v"], Float[Array, "B H k v"]]:
    """One token: its output and the state after it, float32.

    Source: Gated delta networks (2412.06464), eq. 8.
    """
    state = state * jnp.exp(log_decay)[..., None, None]
    delta = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state, precision=_EXACT))
    state = state + k[..., :, None] * delta[..., None, :]
    return jnp.einsum("bhk,bhkv->bhv", q, state, precision=_EXACT), state


def causal_conv(
    x: Float[Array, "B T H d"], taps: Float[Array, "W H d"], run: Int[Array, "B T"]
) -> Float[Array, "B T H d"]:
    """Depthwise causal convolution that reads nothing from before its own segment.

    Summed in float32 and rounded once, as decoding does.

    Source: Gated delta networks (2412.06464), section 3.4; ours: the reset.
    """
    width, tokens = taps.shape[0], x.shape[1]
    taps = taps.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32)
    for back in range(min(width, tokens) - 1, 0, -1):
        earlier = jnp.pad(x[:, :-back], ((0, 0), (back, 0), (0, 0), (0, 0)))
        same = run[:, back:] == run[:, :-back]
        same = jnp.pad(same, ((0, 0), (back, 0)))[..., None, None]
        y = y + jnp.where(same, earlier, 0.0) * taps[-1 - back]
    return (y + x * taps[-1]).astype(x.dtype)


def _unit(x: Array) -> Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _NORM_EPS)


class LinearAttention(Block):
    """Gated DeltaNet weights of all layers that have it, stacked."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        super().__init__(spec, "linear_attn")
        linear = spec.linear_attention
        assert linear is not None
        width = {"embed": spec.hidden_size}
        key = {"linear_heads": linear.key_heads, "head_dim": linear.key_dim}
        value = {"linear_heads": linear.value_heads, "head_dim": linear.value_dim}
        per_head = {"linear_heads": linear.value_heads}
        for name, outer in (("q", key), ("k", key), ("v", value), ("z", value)):
            self.matrix(rngs, name, width, outer)
        # Small, and decay is the exponential of an exponential of what they give.
        self.matrix(rngs, "b", width, per_head, exact=True)
        self.matrix(rngs, "a", width, per_head, exact=True)
        self.matrix(rngs, "out", value, width)
        taps = linear.conv_width
        for name, outer in (("conv_q", key), ("conv_k", key), ("conv_v", value)):
            shape = (self.layers, taps, *outer.values())
            setattr(self, name, normal(rngs, taps**-0.5, shape, ("layers", None, *outer)))
        shape = (self.layers, linear.value_heads)
        # In float32 and away from 0: log(0) is no decay rate.
        rate = jax.random.uniform(rngs.params(), shape, jnp.float32, 1.0, 16.0)
        self.A_log = nnx.Param(jnp.log(rate), axes=("layers", "linear_heads"))
        self.dt_bias = filled(1.0, shape, ("layers", "linear_heads"))
        self.norm = filled(1.0, (self.layers, linear.value_dim), ("layers", "head_dim"))

    def _taps(self) -> list[nnx.Param]:
        return [getattr(self, name) for name in ("conv_q", "conv_k", "conv_v")]

    def _columns(self, x: Float[Array, "N D"], shape: tuple[int, int]) -> tuple[Array, ...]:
        linear = self.spec.linear_attention
        assert linear is not None
        heads = {"q": linear.key_heads, "k": linear.key_heads, "v": linear.value_heads}
        return tuple(
            _by_heads(unflatten(self.times(name, x), shape).reshape(*shape, count, -1))
            for name, count in heads.items()
        )

    def _heads(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """After the convolution, [..., H, d]: unit keys and queries, one for each value head."""
        linear = self.spec.linear_attention
        assert linear is not None
        share = linear.value_heads // linear.key_heads
        q, k, v = (jax.nn.silu(x) for x in (q, k, v))
        q = _unit(q) * linear.key_dim**-0.5
        return jnp.repeat(q, share, -2), jnp.repeat(_unit(k), share, -2), v.astype(jnp.float32)

    def _rates(self, x: Float[Array, "N D"]) -> tuple[Array, Array]:
        """beta and g of each token and head, [N, Hv], float32."""
        beta = jax.nn.sigmoid(self.times("b", x).astype(jnp.float32))
        dt = jax.nn.softplus(self.times("a", x).astype(jnp.float32) + self.dt_bias[...])
        return beta, -jnp.exp(self.A_log[...]) * dt

    def _out(self, o: Float[Array, "N H v"], x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        """Normed, gated by silu(z), back to the model width."""
        o = o * jax.lax.rsqrt(jnp.mean(jnp.square(o), -1, keepdims=True) + self.spec.rms_norm_eps)
        o = self.norm[...].astype(x.dtype) * o.astype(x.dtype)
        z = self.times("z", x).reshape(o.shape).astype(jnp.float32)
        return self.times("out", (o * jax.nn.silu(z)).astype(x.dtype).reshape(len(o), -1))

    def __call__(
        self, x: Float[Array, "N D"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "N D"]:
        """Whole rows.

        Source: Gated delta networks (2412.06464), section 3.4, in the order of Qwen3.5's weights.
        """
        return self._rows(x, segment_ids > 0, runs(segment_ids), None)[0]

    def extend(
        self, x: Float[Array, "N D"], real: Bool[Array, "B T"], state: LinearState
    ) -> tuple[Float[Array, "N D"], LinearState]:
        """T more tokens of each row, right-padded, and the state after the last real one.

        Source: ours: `__call__` cut along the row; the two agree to rounding (tested).
        """
        out, after = self._rows(x, real, jnp.ones(real.shape, jnp.int32), state)
        assert after is not None
        return out, after

    def _rows(self, x: Array, real: Array, run: Array, state: LinearState | None):
        """Outputs, and the state after the last real token where there was one before."""
        linear = self.spec.linear_attention
        assert linear is not None
        shape = real.shape
        # Padding is silenced before the projections, or it bleeds through the convolution.
        x = jnp.where(flatten(real)[:, None], x, 0.0)
        columns = self._columns(x, shape)
        taps, before = self._taps(), 0 if state is None else linear.conv_width - 1
        if state is not None:
            columns = tuple(
                jnp.concatenate([old.astype(new.dtype), new], axis=1)
                for old, new in zip(state[:3], columns, strict=True)
            )
        long_real = jnp.pad(real, ((0, 0), (before, 0)), constant_values=True)
        long_run = jnp.pad(run, ((0, 0), (before, 0)), mode="edge")
        mixed = (
            causal_conv(column, tap[...], long_run)[:, before:]
            for column, tap in zip(columns, taps, strict=True)
        )
        q, k, v = (y.transpose(0, 2, 1, 3) for y in self._heads(*mixed))
        beta, log_decay = (
            jnp.where(real[:, None], _by_heads(unflatten(y, real.shape)).transpose(0, 2, 1), 0.0)
            for y in self._rates(x)
        )
        memory = None if state is None else state.memory
        out, memory = chunked(q, k, v, log_decay, beta, run, linear.chunk, memory)
        out = flatten(out.transpose(0, 2, 1, 3))
        if state is not None:
            q, k, v = (
                _latest(column, long_real, before).astype(old.dtype)
                for column, old in zip(columns, state[:3], strict=True)
            )
            state = LinearState(q, k, v, memory)
        return self._out(out, x), state

    def decode(
        self, x: Float[Array, "B D"], state: LinearState
    ) -> tuple[Float[Array, "B D"], LinearState]:
        """One token per row and the state after it.

        Source: ours: the decode half of `__call__`; the two agree to rounding (tested).
        """
        batch = len(x)
        columns = self._columns(x, (batch, 1))
        window = [
            jnp.concatenate([old, new.astype(old.dtype)], axis=1)
            for old, new in zip(state[:3], columns, strict=True)
        ]
        taps = self._taps()
        mixed = (
            jnp.sum(columns * tap[...].astype(jnp.float32), axis=1).astype(x.dtype)
            for columns, tap in zip(window, taps, strict=True)
        )
        q, k, v = self._heads(*mixed)
        beta, log_decay = self._rates(x)
        out, memory = step(q, k, v, log_decay, beta, state.memory)
        q, k, v = (columns[:, 1:] for columns in window)
        return self._out(out, x), LinearState(q, k, v, memory)


def _by_heads(x: Shaped[Array, "B T H ..."]) -> Shaped[Array, "B T H ..."]:
    """Devices that share out the tokens of a row share out its heads instead.

    Source: DeepSpeed Ulysses (2309.14509): the state goes through all tokens of a row, head by
    head, so that an exchange before and after it does.
    """
    return constrain(x, "rows", None, "whole_row_heads", *(None,) * (x.ndim - 3))


def _latest(columns: Array, real: Bool[Array, "B T"], count: int) -> Array:
    """The last `count` columns before the trailing padding of each row; it has as many."""
    places = jnp.sum(real, axis=1)[:, None] - count + jnp.arange(count)
    return jnp.take_along_axis(columns, places[..., None, None], axis=1)
