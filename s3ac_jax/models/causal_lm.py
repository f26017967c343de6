"""A whole language model as one NNX module: tokens in, logits out."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from s3ac_jax.core.types import PyTree
from s3ac_jax.models.decoder import Decoder
from s3ac_jax.models.spec import DecoderSpec


def positions_of(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Place of each token within its segment, from 0; padding counts as a segment of its own.

    Source: ours: a packed segment is what it would be alone in a row.
    """
    places = jnp.arange(segment_ids.shape[1])
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts = jnp.where(segment_ids != before, places, 0)
    return places - jax.lax.cummax(starts, axis=1)


class CausalLM(nnx.Module):
    """A decoder with its LM head.

    origin: where the weights came from and how they were laid out there (`io/hf_weights.py`), None
    for a model born here.
    """

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, origin: Any = None):
        self.decoder = Decoder(spec, rngs=rngs)
        self.origin = origin

    @property
    def spec(self) -> DecoderSpec:
        """What the model looks like. Source: ours."""
        return self.decoder.spec

    @staticmethod
    def from_params(spec: DecoderSpec, params: PyTree, origin: Any = None) -> "CausalLM":
        """The model with these weights, nested dicts as in `models/network.py`; no copy is made.

        Source: ours.
        """
        model = nnx.eval_shape(lambda: CausalLM(spec, rngs=nnx.Rngs(0), origin=origin))
        graphdef, _ = nnx.split(model)
        return nnx.merge(graphdef, nnx.State({"decoder": params}))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits, float32. segment_ids: 0 is padding, None one segment per row; positions: from 0
        within each segment when None. A segment is in one piece, without padding inside.

        Source: Qwen2 technical report (2407.10671).
        """
        tokens = jnp.asarray(tokens)
        segment_ids = jnp.ones_like(tokens) if segment_ids is None else jnp.asarray(segment_ids)
        positions = positions_of(segment_ids) if positions is None else jnp.asarray(positions)
        hidden, _ = self.decoder(tokens, positions, segment_ids)
        return self.decoder.logits(hidden)
