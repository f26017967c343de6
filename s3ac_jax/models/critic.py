"""The critic: the same backbone and a bias-free float32 value head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from s3ac_jax.models.block import normal
from s3ac_jax.models.decoder import Decoder
from s3ac_jax.models.spec import DecoderSpec


class Critic(nnx.Module):
    """V(s) = w . h, no bias.

    head_std: standard deviation of w at the start; None is 1/(hidden_size + 1).
    Source: S3AC (2610.35518), stabilised critic.
    """

    def __init__(self, spec: DecoderSpec, *, head_std: float | None = None, rngs: nnx.Rngs):
        std = 1.0 / (spec.hidden_size + 1) if head_std is None else head_std
        self.backbone = Decoder(spec, lm_head=False, rngs=rngs)
        self.value_head = normal(rngs, std, (spec.hidden_size,), (None,))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """The value read at each token's hidden state, float32; not yet aligned (see `values`).

        Source: S3AC (2610.35518): linear head on the last hidden state.
        """
        hidden, _ = self.backbone(tokens, positions, segment_ids)
        with jax.named_scope("value_head"):
            return hidden.astype(jnp.float32) @ self.value_head[...]
