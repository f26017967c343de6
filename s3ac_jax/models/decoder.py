"""The decoder of the Qwen families: layers of a static kind each, scanned.

Weights are stacked by kind of block (`models/stack.py`), so that compile time does not grow with
depth. Between blocks the activations are [B*T, D]: on XLA:CPU the gradient of a dense layer ran
3.4 times faster on [N, D] than on [B, T, D].
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Int16

from s3ac_jax.models import attention
from s3ac_jax.models.block import MLP, base_dtype, filled, normal, rms_norm
from s3ac_jax.models.cache import Cache
from s3ac_jax.models.delta import LinearAttention
from s3ac_jax.models.moe import MoE
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.models.stack import LAYER_INPUT, is_per_layer, scan_layers, unrolled_layers
from s3ac_jax.parallel.layout import flatten, gathered, hold, unflatten
from s3ac_jax.parallel.vocab import look_up


class Kept(NamedTuple):
    """What a forward pass was asked to keep; None for the rest.

    layers: output of each layer. routing: experts of each token, L the MoE layers; int16.
    """

    layers: Float[Array, "L B T D"] | None
    routing: Int16[Array, "B T L k"] | None


class Layers(nnx.Module):
    """The blocks of all layers, stacked by kind, and the norms before them."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        shape, axes = (spec.num_layers, spec.hidden_size), ("layers", None)
        one = 0.0 if spec.zero_centred_norms else 1.0
        blocks = {"attn": attention.Attention, "linear_attn": LinearAttention, "mlp": MLP,
                  "moe": MoE}  # fmt: skip
        # Whole on every device: a gather for each of them would take longer than it saves bytes.
        self.attn_norm = filled(one, shape, axes)
        self.mlp_norm = filled(one, shape, axes)
        for name, block in blocks.items():
            if spec.layers_with(name):
                setattr(self, name, block(spec, rngs=rngs))


class Decoder(nnx.Module):
    """Token embedding, scanned layers, final norm and (tied or own) LM head."""

    def __init__(self, spec: DecoderSpec, *, lm_head: bool = True, rngs: nnx.Rngs):
        vocab, width, dtype = spec.vocab_size, spec.hidden_size, base_dtype(spec)
        self.spec = spec
        self.embed = normal(rngs, spec.init_std, (vocab, width), ("vocab", "embed"), dtype)
        self.layers = Layers(spec, rngs=rngs)
        one = 0.0 if spec.zero_centred_norms else 1.0
        self.final_norm = filled(one, (width,), (None,))
        if lm_head and not spec.tie_embeddings:
            axes = ("embed", "vocab")
            self.lm_head = normal(rngs, spec.init_std, (width, vocab), axes, dtype)

    def head(self) -> Float[Array, "D V"]:
        """The matrix from final hidden states to logits.

        Source: Using the output embedding (1608.05859) for the tied case.
        """
        return self.embed[...].T if self.spec.tie_embeddings else self.lm_head[...]

    @jax.named_scope("lm_head")
    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Of final hidden states, float32.

        Source: Using the output embedding (1608.05859) for the tied case; ours: a tied head is read
        where it lies, since a loop around a product with its transpose transposes it each time.
        """
        tied = self.spec.tie_embeddings
        head = self.embed[...] if tied else self.lm_head[...]
        axes = ("vocab", "embed") if tied else ("embed", "vocab")
        return jax.lax.dot_general(
            hidden, gathered(head.astype(hidden.dtype), axes),
            (((hidden.ndim - 1,), (1 if tied else 0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    @jax.named_scope("embed")
    def _lookup(self, tokens: Int[Array, "B T"]) -> Float[Array, "N D"]:
        dtype = jnp.dtype(self.spec.dtype)
        table, flat = self.embed[...], flatten(tokens)
        if self.spec.onehot_embedding:
            x = jax.nn.one_hot(flat, self.spec.vocab_size, dtype=dtype) @ table.astype(dtype)
        else:
            x = look_up(table, flat, dtype)
        return hold(x, tokens.shape)

    def _norm(self, x: Float[Array, "N D"], weight: Float[Array, "D"]) -> Float[Array, "N D"]:
        spec = self.spec
        return rms_norm(x, weight, spec.rms_norm_eps, zero_centred=spec.zero_centred_norms)

    def _scan(
        self, mix: Any, feed: Any, carry: Any, extra: dict[str, Any], shape: tuple[int, int], *,
        keep_layers: bool = False, indexed: bool = False,
    ):  # fmt: skip
        """x + mix(norm(x)), then x + feed(norm(x)), layer by layer.

        carry: (x, whatever mix carries). mix(kind, block, x, carry, given, number) -> (y, carry,
        kept); feed(kind, block, x, given) -> (y, kept). extra: arrays stacked over the layers of a
        kind, handed on as `given`. shape: rows and tokens of each.
        """
        defs, stacked = {}, {}
        norms = {"attn": self.layers.attn_norm[...], "mlp": self.layers.mlp_norm[...]}
        # In one order in every process: it shows in the program, and so in the compilation cache.
        for name in sorted({name for layer in self.spec.kinds for name in layer}):
            defs[name], weights = nnx.split(getattr(self.layers, name))
            stacked[name] = weights, extra.get(name)

        def step(kinds, carry, blocks, numbers):
            x, rest = carry
            x = checkpoint_name(hold(x, shape), LAYER_INPUT)
            mixer, forward = kinds
            norm = blocks["layer"]
            weights, given = blocks[mixer]
            block = nnx.merge(defs[mixer], weights)
            with jax.named_scope(mixer):
                y, rest, kept_mixer = mix(
                    mixer, block, self._norm(x, norm["attn"]), rest, given, numbers[mixer]
                )
            x = x + y
            weights, given = blocks[forward]
            block = nnx.merge(defs[forward], weights)
            with jax.named_scope(forward):
                y, kept_forward = feed(forward, block, self._norm(x, norm["mlp"]), given)
            x = x + y
            kept = {mixer: kept_mixer, forward: kept_forward, "layer": x if keep_layers else None}
            return (x, rest), {name: value for name, value in kept.items() if value is not None}

        stacked["layer"] = norms
        if is_per_layer(norms["attn"]):
            return unrolled_layers(self.spec.kinds, step, carry, stacked)
        remat = self.spec.remat_policy if self.spec.remat and not indexed else None
        return scan_layers(self.spec.kinds, step, carry, stacked, remat=remat, indexed=indexed)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        *,
        keep: tuple[str, ...] = (),
        routing: Int16[Array, "B T L k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Kept]:
        """Final-norm hidden states [B, T, D] of whole rows, and what `keep` names of `Kept`.

        routing: experts to use instead of the router's, -1 where not recorded.
        Raises ValueError when it is of another model's layers or experts per token.
        Source: Qwen2 technical report (2407.10671); Rollout routing replay (2510.11370).
        """
        kind, real = self.spec.attention, flatten(segment_ids) > 0
        shape = tokens.shape

        def mix(mixer, block, x, rest, given, number):
            if mixer == "linear_attn":
                return block(x, segment_ids), rest, None
            q, k, v = block.project(x, positions)
            return block.out(attention.attend_rows(q, k, v, segment_ids, kind=kind), x), rest, None

        feed = functools.partial(_feed, real=real, keep="routing" in keep)
        extra = {}
        if routing is not None and self.spec.moe is not None:
            want = self.spec.routing_shape
            if routing.shape[2:] != want:
                raise ValueError(
                    f"routing has {routing.shape[2:]} (layers, experts per token), the model {want}"
                )
            extra["moe"] = flatten(routing).transpose(1, 0, 2)
        carry = (self._lookup(tokens), None)
        (x, _), kept = self._scan(mix, feed, carry, extra, shape, keep_layers="layers" in keep)
        hidden = unflatten(self._norm(x, self.final_norm[...]), shape)
        layers = None
        if "layers" in keep:
            layers = jax.vmap(functools.partial(unflatten, shape=shape))(kept["layer"])
        return hidden, Kept(layers, _by_token(kept.get("moe"), shape))

    def extend(
        self,
        tokens: Int[Array, "B T"],
        start: Int[Array, ""],
        real: Bool[Array, "B T"],
        cache: Cache,
        *,
        keep_routing: bool = False,
    ) -> tuple[Cache, Int16[Array, "B T L k"] | None]:
        """The cache with the tokens of places start..start+T of all rows in it, and their experts.

        real: False for the padding behind a row's end, whose entries must not be read. start + T
        must not exceed the cache.
        Source: ours: `__call__` cut along the row, so that a long prompt needs scores of T rows at
        a time; the two agree to rounding (tested).
        """
        places = start + jnp.arange(tokens.shape[1])
        positions = jnp.broadcast_to(places, tokens.shape)
        mask = None
        if cache.kv is not None:
            mask = (jnp.arange(cache.kv.tokens) <= places[:, None])[None]

        def mix(kind, block, x, cache, given, number):
            if kind == "linear_attn":
                y, state = block.extend(x, real, cache.linear_layer(number))
                return y, cache.with_linear(number, state), None
            q, k, v = block.project(x, positions)
            kv = cache.kv.write_span(number, start, k, v)
            keys, values, scales = kv.layer(number)
            attended = attention.attend(q, keys, values, mask, scales)
            return block.out(attended.astype(x.dtype), x), cache._replace(kv=kv), None

        feed = functools.partial(_feed, real=flatten(real), keep=keep_routing)
        carry = (self._lookup(tokens), cache)
        (_, cache), kept = self._scan(mix, feed, carry, {}, tokens.shape, indexed=True)
        return cache, _by_token(kept.get("moe"), tokens.shape)

    def decode(
        self,
        tokens: Int[Array, "B"],
        positions: Int[Array, "B"],
        cache: Cache,
        *,
        keep_routing: bool = False,
    ) -> tuple[Float[Array, "B D"], Cache, Int16[Array, "B L k"] | None]:
        """One token per row: hidden states, the cache with that token in it, and its experts.

        The token at position p reads cache entries 0..p of its row, its own included. A position
        beyond the cache is not written. The cache is carried, not stacked, through the layer
        scan, so that XLA updates it in place.
        Source: ours: the decode half of `__call__`; the two agree to rounding (tested).
        """
        mask = None
        if cache.kv is not None:
            mask = jnp.arange(cache.kv.tokens)[None, None, :] <= positions[:, None, None]

        def mix(kind, block, x, cache, given, number):
            if kind == "linear_attn":
                y, state = block.decode(x, cache.linear_layer(number))
                return y, cache.with_linear(number, state), None
            q, k, v = block.project(x, positions[:, None])
            kv = cache.kv.write_column(number, positions, k[:, :, 0], v[:, :, 0])
            keys, values, scales = kv.layer(number)
            attended = attention.attend(q, keys, values, mask, scales)
            return block.out(attended.astype(x.dtype), x), cache._replace(kv=kv), None

        feed = functools.partial(_feed, real=jnp.ones(tokens.shape, bool), keep=keep_routing)
        column = tokens[:, None]
        carry = (self._lookup(column), cache)
        (x, cache), kept = self._scan(mix, feed, carry, {}, column.shape, indexed=True)
        routing = _by_token(kept.get("moe"), column.shape)
        routing = None if routing is None else routing[:, 0]
        return self._norm(x, self.final_norm[...]), cache, routing


def _feed(kind: str, block: Any, x: Array, given: Array | None, *, real: Array, keep: bool):
    if kind == "mlp":
        return block(x), None
    y, chosen = block(x, real, given)
    return y, chosen.astype(jnp.int16) if keep else None


def _by_token(routing: Array | None, shape: tuple[int, int]) -> Array | None:
    """[L, N, k] -> [B, T, L, k]."""
    return None if routing is None else unflatten(routing.transpose(1, 0, 2), shape)
