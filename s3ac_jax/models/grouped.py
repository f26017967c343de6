"""Products of rows with the matrix of their expert: native, in blocks, or all with all."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from s3ac_jax.models.int8 import Int8Matrix
from s3ac_jax.parallel.mesh import platform

# Rows, and the inner and outer width of a matrix, that a kernel holds at a time.
_TILE = (512, 1024, 512)


class Laid(NamedTuple):
    """Where assignments (token n's j-th expert is number n k + j) lie among rows sorted by expert.

    slots [N, k]: row of each assignment, R for one of no expert. sources [R]: assignment of each
    row, N k for a row that only fills up. sizes [E]: assignments of each expert. block_expert: of
    each block of rows, None for rows without blocks.
    """

    slots: Int[Array, "N k"]
    sources: Int[Array, "R"]
    sizes: Int[Array, "E"]
    block_expert: Int[Array, "b"] | None


def block_rows(assignments: int, num_experts: int) -> int:
    """Rows of a block: a power of two near an eighth of the mean group, 8 to 128.

    Source: ours: each group is filled up to whole blocks, so large blocks waste rows; of 16 to 256
    rows at a mean of 256, 32 were fastest on CPU (measured).
    """
    eighth = max(1, assignments // (8 * num_experts))
    return min(128, max(8, 1 << (eighth - 1).bit_length()))


def lay_out(experts: Int[Array, "N k"], num_experts: int, block: int | None) -> Laid:
    """Rows sorted by expert, each group filled up to whole blocks of `block` rows, if any.

    An expert number out of range means none. The number of blocks is the most that any routing
    needs.
    Source: MegaBlocks (2211.15841), section 5: no capacity, no dropped token.
    """
    flat = experts.reshape(-1)
    count = flat.shape[0]
    key = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    sizes = jnp.sum(key[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    order = jnp.argsort(key, stable=True)
    ends, places = jnp.cumsum(sizes), jnp.arange(count)
    if block is None:
        rows, block_expert, row = count, None, places
    else:
        rows = (count // block + min(num_experts, count)) * block
        block_ends = jnp.cumsum(-(-sizes // block))
        block_expert = jnp.searchsorted(block_ends, jnp.arange(rows // block), side="right")
        block_expert = jnp.minimum(block_expert, num_experts - 1)
        expert = jnp.minimum(key[order], num_experts - 1)
        first = (block_ends - (-(-sizes // block)))[expert] * block
        row = first + places - (ends - sizes)[expert]
    row = jnp.where(places < ends[-1], row, rows)
    slots = jnp.zeros(count, jnp.int32).at[order].set(row.astype(jnp.int32))
    sources = jnp.full(rows, count, jnp.int32).at[row].set(order.astype(jnp.int32), mode="drop")
    return Laid(slots.reshape(experts.shape), sources, sizes, block_expert)


def _taken(x: Array, index: Array) -> Array:
    """x[index] along the first axis, 0 where the index is beyond it."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


# Going out and coming back are each other's gradient, and both are gathers: left to itself, the
# gradient of a gather is a scatter, which XLA:CPU does row by row.


@jax.custom_vjp
def spread(
    x: Float[Array, "N D"], slots: Int[Array, "N k"], sources: Int[Array, "R"]
) -> Float[Array, "R D"]:
    """Tokens laid out in the rows of their assignments, 0 in rows that fill up. Source: ours."""
    return _taken(x, sources // slots.shape[1])


def _spread_forward(x: Array, slots: Array, sources: Array):
    return spread(x, slots, sources), slots


def _spread_backward(slots: Array, dy: Array):
    return jnp.sum(_taken(dy, slots), axis=1), None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collect(
    rows: Float[Array, "R D"], slots: Int[Array, "N k"], sources: Int[Array, "R"]
) -> Float[Array, "N k D"]:
    """What the rows say of each token's assignments, 0 for one of no expert. Source: ours."""
    return _taken(rows, slots)


def _collect_forward(rows: Array, slots: Array, sources: Array):
    return collect(rows, slots, sources), sources


def _collect_backward(sources: Array, dy: Array):
    return _taken(dy.reshape(-1, dy.shape[-1]), sources), None, None


collect.defvjp(_collect_forward, _collect_backward)


@jax.custom_vjp
def block_matmul(
    x: Float[Array, "R D"], w: Float[Array, "E D F"], block_expert: Int[Array, "N"]
) -> Float[Array, "R F"]:
    """Each block of rows times the matrix of its expert.

    The gradient of w is summed in place, block by block: that of a plain loop would add a whole
    [E, D, F] per block.
    Source: MegaBlocks (2211.15841), section 5.1.
    """
    return _forward(x, w, block_expert)[0]


def _blocks(x: Array, block_expert: Array) -> Array:
    return x.reshape(block_expert.shape[0], -1, x.shape[-1])


def _forward(x: Array, w: Array, block_expert: Array):
    def turn(_, xs):
        rows, expert = xs
        # Of int8, one expert at a time is widened.
        return None, rows @ w[expert].astype(rows.dtype)

    _, y = jax.lax.scan(turn, None, (_blocks(x, block_expert), block_expert))
    return y.reshape(x.shape[0], -1), (x, w, block_expert)


def _backward(saved: tuple[Array, Array, Array], dy: Array):
    x, w, block_expert = saved

    def turn(dw, xs):
        rows, cotangent, expert = xs
        new = jnp.einsum("rd,rf->df", rows, cotangent, preferred_element_type=jnp.float32)
        return dw.at[expert].add(new), cotangent @ w[expert].T

    xs = _blocks(x, block_expert), _blocks(dy, block_expert), block_expert
    dw, dx = jax.lax.scan(turn, jnp.zeros(w.shape, jnp.float32), xs)
    return dx.reshape(x.shape), dw.astype(w.dtype), None


block_matmul.defvjp(_forward, _backward)


def _tiled(
    rows: Float[Array, "R D"], w: Float[Array, "E D F"], sizes: Int[Array, "E"]
) -> Float[Array, "R F"]:
    """Rows sorted by expert times the matrix of their expert; 0 in rows behind all groups.

    Source: megablox, JAX's kernels for TPU, whose gradient of w is one too: that of
    jax.lax.ragged_dot copies masked rows (64 experts, 262,144 rows of width 2,048, there and back:
    3.8 GiB of temporaries on v5p against 1.8, by its compiler).
    """
    # Not above: only a TPU needs it.
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    count = rows.shape[0]
    tile = min(_TILE[0], max(8, 1 << (count - 1).bit_length()))
    padded = jnp.pad(rows, ((0, -count % tile), (0, 0)))
    tiling = (tile, *(min(most, size) for most, size in zip(_TILE[1:], w.shape[1:], strict=True)))
    y = gmm(padded, w, sizes, rows.dtype, tiling, interpret=platform() != "tpu")
    # What no group has is left as it was in memory.
    within = jnp.arange(count) < jnp.sum(sizes)
    return jnp.where(within[:, None], y[:count], 0)


def expert_outputs(
    x: Float[Array, "N D"],
    experts: Int[Array, "N k"],
    weights: Any,
    feed: Callable[[Array, Any, Callable[[Array, Any], Array]], Array],
    matmul: str,
) -> Float[Array, "N k D"]:
    """feed(rows, weights, product) of each token's experts; 0 where the number is out of range.

    weights: arrays [E, ...] that `product(rows, w)` multiplies rows with, or Int8Matrix, of which
    "ragged" widens all experts. matmul: "ragged", "megablox" or "blocked".
    Source: MegaBlocks (2211.15841), section 5; jax.lax.ragged_dot.
    """
    num_experts = jax.tree.leaves(weights)[0].shape[0]
    block = block_rows(experts.size, num_experts) if matmul == "blocked" else None
    laid = lay_out(experts, num_experts, block)

    def product(rows: Array, w: Any) -> Array:
        if isinstance(w, Int8Matrix):
            expert = _taken(experts.reshape(-1), laid.sources)
            y = plain(rows, w.values).astype(jnp.float32) * w.scale[expert, 0]
            return y.astype(rows.dtype)
        return plain(rows, w)

    def plain(rows: Array, w: Array) -> Array:
        if matmul == "megablox":
            return _tiled(rows, w.astype(rows.dtype), laid.sizes)
        if laid.block_expert is None:
            return jax.lax.ragged_dot(rows, w.astype(rows.dtype), laid.sizes)
        return block_matmul(rows, w, laid.block_expert)

    y = feed(spread(x, laid.slots, laid.sources), weights, product)
    return collect(y, laid.slots, laid.sources)
