"""Reductions over the segments of packed rows, handed back to every token of the segment.

Segment ids are 1, 2, ... up to T within a row and 0 at padding; without ids a row is one segment.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def segment_sum(
    x: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Sum of x over the masked tokens of each token's segment; 0 at padding. fp32.

    What stands outside the mask is not read; a token outside the mask still gets the sum of its
    segment. NaN comes back for an id above T.

    Source: ours: packed rows must give what padded rows give.
    """
    live = jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)
    if segment_ids is None:
        return jnp.broadcast_to(jnp.sum(live, axis=1, keepdims=True), live.shape)
    segment_ids = jnp.asarray(segment_ids)

    def of_row(row: Float[Array, "T"], ids: Int[Array, "T"]) -> Float[Array, "S"]:
        return jax.ops.segment_sum(row, ids, num_segments=row.shape[0] + 1)

    sums = jax.vmap(of_row)(live, segment_ids).at[:, 0].set(0.0)
    return jnp.take_along_axis(sums, segment_ids, axis=1)


def segment_mean(
    x: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Mean of x over the masked tokens of each token's segment; 0 for a segment without any.

    Source: ours: packed rows must give what padded rows give.
    """
    count = segment_sum(jnp.ones(jnp.shape(mask)), segment_ids, mask)
    return segment_sum(x, segment_ids, mask) / jnp.maximum(count, 1.0)


def segment_any(
    x: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    mask: Bool[Array, "B T"],
) -> Bool[Array, "B T"]:
    """Whether x holds at any masked token of each token's segment; False at padding.

    Source: ours: packed rows must give what padded rows give.
    """
    return segment_sum(x, segment_ids, mask) > 0


def first_masked(
    mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"] | None
) -> Bool[Array, "B T"]:
    """The first masked token of each segment that has one.

    Source: ours: where V(s_0) of a packed response stands.
    """
    if segment_ids is None:
        segment_ids = jnp.ones(jnp.shape(mask), jnp.int32)
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    earlier = jnp.cumsum(mask, axis=1) - mask
    # Masked tokens before this one in the same segment: none for the first.
    start = jnp.pad(~same, ((0, 0), (1, 0)), constant_values=True)
    return mask & (earlier == lax.cummax(jnp.where(start, earlier, 0), axis=1))
