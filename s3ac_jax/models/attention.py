"""Attention: projections, rotation, and the one door to attending (causal, grouped, segments)."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.models import kernels
from s3ac_jax.models.block import Block, filled, rms_norm
from s3ac_jax.models.flash import chunked
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.context import over_parts
from s3ac_jax.parallel.layout import flatten, unflatten
from s3ac_jax.parallel.mesh import platform

# Rows of so many tokens and less have their scores in one piece.
DENSE_UP_TO = 512
# Large enough that exp() of it is exactly 0, small enough that a fully masked row stays finite.
_MASKED = -1e30


def rope(
    x_BHTd: Float[Array, "B H T d"],
    positions: Int[Array, "B T"],
    theta: float,
    rotary_dim: int | None = None,
):
    """Rotates the halves of the first rotary_dim numbers (all if None) of each head by position.

    Angles in float32.
    Source: RoFormer (2104.09864), eq. 34, in the half-split order of the Qwen2 checkpoints.
    """
    dim = x_BHTd.shape[-1] if rotary_dim is None else rotary_dim
    half = dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, :, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2, rest = jnp.split(x_BHTd, (half, dim), axis=-1)
    x1, x2 = x1.astype(jnp.float32), x2.astype(jnp.float32)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x_BHTd.dtype), rest], axis=-1)


def attend(
    q_BHTd: Float[Array, "B H T d"],
    k_BKSd: Float[Array, "B K S d"],
    v_BKSd: Float[Array, "B K S d"],
    mask_BTS: Bool[Array, "B T S"],
    scales_BKS: tuple[Float[Array, "B K S"], Float[Array, "B K S"]] | None = None,
) -> Float[Array, "B H T d"]:
    """Grouped-query attention; a query row with nothing to read returns a finite mean of values.

    Scores and softmax are float32, the result has the dtype of the values, of the queries where
    keys and values are quantised. scales_BKS: what one unit of each key and value is worth; it is
    applied to scores and weights, which are smaller than what it belongs to.

    Source: Attention is all you need (1706.03762), eq. 1; GQA (2305.13245).
    """
    batch, heads, tokens, dim = q_BHTd.shape
    kv_heads = k_BKSd.shape[1]
    group = heads // kv_heads
    # Query heads of one key head are folded into its token axis, so that both products are
    # plain batched matmuls [B*K, group*T, d] x [B*K, d, S].
    q = q_BHTd.reshape(batch, kv_heads, group * tokens, dim) * (dim**-0.5)
    if scales_BKS is not None:
        k_BKSd, v_BKSd = k_BKSd.astype(q.dtype), v_BKSd.astype(q.dtype)
    scores = jnp.einsum("bkqd,bksd->bkqs", q, k_BKSd, preferred_element_type=jnp.float32)
    if scales_BKS is not None:
        scores = scores * scales_BKS[0][:, :, None]
    scores = scores.reshape(batch, kv_heads, group, tokens, -1)
    scores = jnp.where(mask_BTS[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).reshape(batch, kv_heads, group * tokens, -1)
    if scales_BKS is not None:
        weights = weights * scales_BKS[1][:, :, None]
    weights = weights.astype(v_BKSd.dtype)
    return jnp.einsum("bkqs,bksd->bkqd", weights, v_BKSd).reshape(batch, heads, tokens, dim)


def attend_rows(
    q_BHTd: Float[Array, "B H T d"],
    k_BKTd: Float[Array, "B K T d"],
    v_BKTd: Float[Array, "B K T d"],
    segment_ids_BT: Int[Array, "B T"],
    *,
    kind: str = "auto",
) -> Float[Array, "B H T d"]:
    """Attention of whole rows: each token reads its segment up to itself.

    Padding (segment 0) is read by nobody and gives 0, whatever lies in it. kind: "dense",
    "chunked", "splash" or "cudnn"; "auto" takes what suits the platform and the rows.
    Source: Attention is all you need (1706.03762), eq. 1; ours: one door to every kernel.
    """
    real = (segment_ids_BT > 0)[:, None, :, None]
    q, k, v = (jnp.where(real, x, 0) for x in (q_BHTd, k_BKTd, v_BKTd))
    return over_parts(functools.partial(_attend_part, kind=kind), q, k, v, segment_ids_BT)


def choose(q_BHTd: Float[Array, "B H T d"], k_BKSd: Float[Array, "B K S d"]) -> str:
    """The kind of attention that "auto" is, for the queries and keys on one device.

    Source: ours: on CPU chunks of 256 took a quarter of the time of whole scores at 1,024 tokens,
    and as long at 256 (measured); the kernels are for what is worth a kernel.
    """
    if k_BKSd.shape[2] <= DENSE_UP_TO:
        return "dense"
    on = platform()
    if on == "tpu" and kernels.splash_takes(q_BHTd, k_BKSd):
        return "splash"
    return "cudnn" if on == "cuda" and kernels.cudnn_takes(q_BHTd, k_BKSd) else "chunked"


def _attend_part(q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array, offset, *, kind: str):
    """Attention of what one device has; query t stands at place offset + t of the row."""
    kind = choose(q, k) if kind == "auto" else kind
    on = platform()
    if kind == "dense":
        return attend(q, k, v, kernels.readable(q_ids, k_ids, offset))
    if kind == "splash":
        return kernels.splash(q, k, v, q_ids, k_ids, offset, interpret=on != "tpu")
    if kind == "cudnn":
        return kernels.cudnn(q, k, v, q_ids, k_ids, offset)
    if kind == "chunked":
        return chunked(q, k, v, q_ids, k_ids, offset, 256 if on == "cpu" else 512)
    raise ValueError(f"unknown kind of attention {kind!r}")


class Attention(Block):
    """Projections of grouped-query attention for all layers that attend in full, stacked."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        super().__init__(spec, "attn")
        width, dim = {"embed": spec.hidden_size}, {"head_dim": spec.head_dim}
        q = {"heads": spec.num_heads, **dim}
        kv = {"kv_heads": spec.num_kv_heads, **dim}
        self.matrix(rngs, "q", width, q)
        self.matrix(rngs, "k", width, kv)
        self.matrix(rngs, "v", width, kv)
        self.matrix(rngs, "o", q, width)
        if spec.gated_attention:
            self.matrix(rngs, "gate", width, q)
        if spec.qkv_bias:
            for name, axes in (("q", q), ("k", kv), ("v", kv)):
                shape = (self.layers, *axes.values())
                setattr(self, f"{name}_bias", filled(0.0, shape, ("layers", *axes)))
        if spec.qk_norm:
            one = 0.0 if spec.zero_centred_norms else 1.0
            for name in ("q_norm", "k_norm"):
                norm = filled(one, (self.layers, spec.head_dim), ("layers", "head_dim"))
                setattr(self, name, norm)

    def project(self, x: Float[Array, "N D"], positions: Int[Array, "B T"]):
        """Rotated queries, rotated keys and values of one layer: [B, H, T, d], 2 x [B, K, T, d].

        Queries and keys are normed before the rotation, where the model norms them.
        Source: Qwen3 technical report (2505.09388), section 2; ours: heads before tokens, the
        faster order for batched matmuls on CPU and TPU.
        """
        spec = self.spec

        def heads(name: str) -> Array:
            y = self.times(name, x)
            if spec.qkv_bias:
                y = y + getattr(self, f"{name}_bias")[...].reshape(-1).astype(x.dtype)
            y = unflatten(y, positions.shape)
            y = y.reshape(*positions.shape, -1, spec.head_dim)
            if spec.qk_norm and name != "v":
                weight, eps = getattr(self, f"{name}_norm")[...], spec.rms_norm_eps
                y = rms_norm(y, weight, eps, zero_centred=spec.zero_centred_norms)
            y = y.transpose(0, 2, 1, 3)
            return y if name == "v" else rope(y, positions, spec.rope_theta, spec.rotary_dim)

        return heads("q"), heads("k"), heads("v")

    def out(
        self, attended_BHTd: Float[Array, "B H T d"], x: Float[Array, "N D"]
    ) -> Float[Array, "N D"]:
        """Back to the model width; times sigmoid of a gate from the block's input x, if gated.

        Source: Attention is all you need (1706.03762), section 3.2.2; Gated attention (2505.06708).
        """
        batch, heads, tokens, dim = attended_BHTd.shape
        flat = flatten(attended_BHTd.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * dim))
        if self.spec.gated_attention:
            flat = flat * jax.nn.sigmoid(self.times("gate", x))
        return self.times("o", flat)
