"""Prefill, insert, generate over slots: JetStream's engine interface in the large and the small.

Prefill computes keys and values of whole prompts; insert copies them into free slots; generate
advances every slot by several tokens in one dispatch. All shapes are static. A token depends on
(weights, prompt, seed, its place in the response) and on nothing else: not on the slot, the
other requests, or the order of admission.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int16, Key, UInt32

from s3ac_jax.core.types import PyTree
from s3ac_jax.models.cache import Cache, empty_cache, insert
from s3ac_jax.models.network import Network


class Sampling(NamedTuple):
    """Per-request settings, one entry each. temperature 0 is greedy. max_tokens: response tokens.

    Source: ours.
    """

    seed: UInt32[Array, "B"]
    temperature: Float[Array, "B"]
    max_tokens: Int[Array, "B"]


class Prefix(NamedTuple):
    """Prefilled prompts, right-padded: what to go on from, `tokens`, `lengths` of each real.

    cache: of all tokens but the last, which the first decode step reads. routing: their experts,
    None when not asked for.
    """

    cache: Cache
    tokens: Int[Array, "P T"]
    lengths: Int[Array, "P"]
    routing: Int16[Array, "P T L k"] | None


class DecodeState(NamedTuple):
    """All slots. token: next to be read, at `position`; made: response tokens so far."""

    cache: Cache
    token: Int[Array, "B"]
    position: Int[Array, "B"]
    made: Int[Array, "B"]
    active: Bool[Array, "B"]
    keys: Key[Array, "B"]
    sampling: Sampling


class Block(NamedTuple):
    """What one `generate` made, [slots, steps]; a slot's tokens are those where `valid`.

    logp: nats, of the tempered distribution that was sampled (untempered where greedy).
    stopped, finished: [slots], as of the end of the block. routing: experts of the token that was
    read to make this one, None when not asked for.
    """

    tokens: Int[Array, "B T"]
    logp: Float[Array, "B T"]
    valid: Bool[Array, "B T"]
    stopped: Bool[Array, "B"]
    finished: Bool[Array, "B"]
    routing: Int16[Array, "B T L k"] | None


def sample(logits: Float[Array, "B V"], keys: Key[Array, "B"], temperature: Float[Array, "B"]):
    """A token for each row and its log-prob under softmax(logits / temperature), fp32.

    Source: Gumbel-max trick (Maddison et al. 2014, A* sampling, section 2).
    """
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    tokens = jnp.argmax(jnp.where(greedy[:, None], scaled, scaled + noise), axis=-1)
    chosen = jnp.arange(logits.shape[-1]) == tokens[:, None]
    logp = jax.nn.log_softmax(scaled, axis=-1)
    return tokens.astype(jnp.int32), jnp.sum(jnp.where(chosen, logp, 0.0), axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """Decode slots over a policy network.

    slots: responses in flight. cache_tokens: longest prompt plus response. steps_per_dispatch:
    tokens per slot between two looks by the host. record_routing: return the experts of each
    token; nothing for a model without experts.
    Source: JetStream engine API (google/JetStream, engine_api.py, 0.2.2): prefill, insert,
    generate; batched prefill and insert as its later bulk_insert.
    """

    network: Network
    slots: int
    cache_tokens: int
    steps_per_dispatch: int
    stop_ids: tuple[int, ...]
    record_routing: bool = False

    @property
    def routing_shape(self) -> tuple[int, int] | None:
        """Layers with experts, experts per token; None when not recorded. Source: ours."""
        moe = self.network.spec.moe
        if moe is None or not self.record_routing:
            return None
        return len(self.network.spec.layers_with("moe")), moe.per_token

    def init_decode_state(self, params: PyTree) -> DecodeState:
        """Empty slots; `params` is there for the interface. Source: JetStream engine API."""
        zeros = jnp.zeros(self.slots, jnp.int32)
        seeds = jnp.zeros(self.slots, jnp.uint32)
        cache = empty_cache(self.network.spec, self.slots, self.cache_tokens)
        return DecodeState(
            cache=cache, token=zeros, position=zeros, made=zeros, active=zeros > 0,
            keys=jax.vmap(jax.random.key)(seeds),
            sampling=Sampling(seeds, zeros.astype(jnp.float32), zeros),
        )  # fmt: skip

    @functools.partial(jax.jit, static_argnums=0)
    def prefill(self, params: PyTree, tokens: Int[Array, "P T"], lengths: Int[Array, "P"]):
        """What right-padded prompts leave behind. Source: JetStream engine API, batched."""
        places = jnp.arange(tokens.shape[1])
        positions = jnp.broadcast_to(places, tokens.shape)
        # A recurrent state can't be rewritten like a key: the last token is left for decoding.
        segment_ids = (places < lengths[:, None] - 1).astype(jnp.int32)
        keep = ("cache", "routing") if self.routing_shape else ("cache",)
        _, kept = self.network.bind(params)(tokens, positions, segment_ids, keep=keep)
        return Prefix(kept.cache, tokens, lengths, kept.routing)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def insert(
        self,
        prefix: Prefix,
        state: DecodeState,
        rows: Int[Array, "N"],
        slots: Int[Array, "N"],
        sampling: Sampling,
    ) -> DecodeState:
        """Puts prefix row `rows[i]` into slot `slots[i]`; a slot number >= `slots` is skipped.

        Several requests may share one prefix row. The last prompt token is left for the first
        decode step, so that one sampler serves every token.
        Source: JetStream engine API, as its later bulk_insert.
        """

        def put(old, new):
            return old.at[slots].set(new, mode="drop")

        last = prefix.lengths[rows] - 1
        return DecodeState(
            cache=insert(state.cache, prefix.cache, rows, slots),
            token=put(state.token, prefix.tokens[rows, last]),
            position=put(state.position, last),
            made=put(state.made, 0),
            active=put(state.active, True),
            keys=put(state.keys, jax.vmap(jax.random.key)(sampling.seed)),
            sampling=Sampling(*map(put, state.sampling, sampling)),
        )

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def generate(self, params: PyTree, state: DecodeState) -> tuple[DecodeState, Block]:
        """Up to `steps_per_dispatch` tokens for every active slot; ends early when none is left.

        Source: JetStream engine API, several steps per call.
        """
        model = self.network.bind(params)
        head = model.head()
        shape = (self.steps_per_dispatch, self.slots)
        recorded = self.routing_shape
        block = Block(
            jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape, bool),
            jnp.zeros(self.slots, bool), ~state.active,
            jnp.zeros((*shape, *recorded), jnp.int16) if recorded else None,
        )  # fmt: skip

        def step(carry):
            number, state, block = carry
            hidden, cache, routing = model.decode(
                state.token, state.position, state.cache, keep_routing=bool(recorded)
            )
            logits = jnp.einsum(
                "bd,dv->bv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32
            )
            keys = jax.vmap(jax.random.fold_in)(state.keys, state.made)
            tokens, logp = sample(logits, keys, state.sampling.temperature)
            made = state.made + state.active
            stopped = state.active & jnp.isin(tokens, jnp.array(self.stop_ids))
            active = state.active & ~stopped & (made < state.sampling.max_tokens)
            block = Block(
                block.tokens.at[number].set(tokens), block.logp.at[number].set(logp),
                block.valid.at[number].set(state.active), block.stopped | stopped, ~active,
                block.routing.at[number].set(routing) if recorded else None,
            )  # fmt: skip
            position = state.position + state.active
            state = DecodeState(cache, tokens, position, made, active, state.keys, state.sampling)
            return number + 1, state, block

        def more(carry):
            number, state, _ = carry
            return (number < self.steps_per_dispatch) & state.active.any()

        _, state, block = jax.lax.while_loop(more, step, (0, state, block))
        by_slot = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, block)
        return state, by_slot
