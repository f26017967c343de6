"""The one door to attention: causal, grouped, segment-aware, softmax in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Large enough that exp() of it is exactly 0, small enough that a fully masked row stays finite.
_MASKED = -1e30


def rope(x_BHTd: Float[Array, "B H T d"], positions: Int[Array, "B T"], theta: float):
    """Rotates the two halves of each head by position; angles in float32.

    Source: RoFormer (2104.09864), eq. 34, in the half-split order of the Qwen2 checkpoints.
    """
    half = x_BHTd.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, :, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = jnp.split(x_BHTd.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_BHTd.dtype)


def packed_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """True where query token i may read key token j: same segment, j <= i; padding reads itself.

    Source: ours: one mask serves packed, left-padded and right-padded rows.
    """
    tokens = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same & jnp.tril(jnp.ones((tokens, tokens), bool))


def attend(
    q_BHTd: Float[Array, "B H T d"],
    k_BKSd: Float[Array, "B K S d"],
    v_BKSd: Float[Array, "B K S d"],
    mask_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B H T d"]:
    """Grouped-query attention; a query row with nothing to read returns a finite mean of values.

    Source: Attention is all you need (1706.03762), eq. 1; GQA (2305.13245).
    """
    batch, heads, tokens, dim = q_BHTd.shape
    kv_heads = k_BKSd.shape[1]
    group = heads // kv_heads
    # Query heads of one key head are folded into its token axis, so that both products are
    # plain batched matmuls [B*K, group*T, d] x [B*K, d, S].
    q = q_BHTd.reshape(batch, kv_heads, group * tokens, dim) * (dim**-0.5)
    scores = jnp.einsum("bkqd,bksd->bkqs", q, k_BKSd, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, group, tokens, -1)
    scores = jnp.where(mask_BTS[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BKSd.dtype)
    weights = weights.reshape(batch, kv_heads, group * tokens, -1)
    return jnp.einsum("bkqs,bksd->bkqd", weights, v_BKSd).reshape(batch, heads, tokens, dim)
