"""Prefill, insert, generate over slots: JetStream's engine interface in the large and the small.

Prefill computes keys and values of whole prompts; insert copies them into free slots; generate
advances every slot by several tokens in one dispatch. All shapes are static. A token depends on
(weights, prompt, settings, its place in the response) and on nothing else: not on the slot, the
other requests, or the order of admission.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int16, Key

from s3ac_jax.core.types import PyTree
from s3ac_jax.models.cache import Cache, empty_cache, hold_cache, insert
from s3ac_jax.models.int8 import WeightsDtype, check_available
from s3ac_jax.models.network import Network, is_unstacked
from s3ac_jax.models.spec import KVDtype
from s3ac_jax.parallel.mesh import constrain, for_host
from s3ac_jax.rollout.backend import MAX_STOP_IDS, Sampling

# Numbers of noise made before a dispatch's first token rather than at each: a third of a step of
# 0.1 M weights is spent on starting the generator (measured). More would be held for too long.
_NOISE_AHEAD = 1 << 20


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


def nucleus(
    logits: Float[Array, "B V"], top_p: Float[Array, "B"], top_k: Int[Array, "B"]
) -> Bool[Array, "B V"]:
    """Tokens left to be drawn: the likeliest that together reach top_p, at most top_k.

    At least one; tokens as likely as the last of them stay with it. top_k 0: any number.
    Source: The curious case of neural text degeneration (1904.09751), section 3.1; Hierarchical
    neural story generation (1805.04833), section 5.3, for top_k.
    """
    falling = -jnp.sort(-logits, axis=-1)
    share = jax.nn.softmax(falling, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    taken = jnp.cumsum(share, axis=-1) - share < top_p[:, None]
    taken &= (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    last = jnp.maximum(jnp.sum(taken, axis=-1), 1) - 1
    return logits >= jnp.take_along_axis(falling, last[:, None], axis=-1)


def gumbel(keys: Key[Array, "B"], places: Int[Array, "B"], vocab_size: int) -> Float[Array, "B V"]:
    """The noise that decides each row's token at its place in the response. Source: ours."""
    keys = jax.vmap(jax.random.fold_in)(keys, places)
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))(keys)


@jax.named_scope("sample")
def sample(logits: Float[Array, "B V"], noise: Float[Array, "B V"], sampling: Sampling):
    """A token for each row and its log-prob under softmax(logits / temperature), fp32.

    The log-prob is that of the whole distribution, also where top_p or top_k leave out a part of
    it: a trainer reads the same.
    Source: Gumbel-max trick (Maddison et al. 2014, A* sampling, section 2).
    """
    greedy = sampling.temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    # Sorting a vocabulary takes longer than all else here: only if somebody asks for it.
    cuts = ~greedy & ((sampling.top_p < 1) | (sampling.top_k > 0))
    left = jax.lax.cond(
        cuts.any(),
        lambda: jnp.where(nucleus(scaled, sampling.top_p, sampling.top_k), scaled, -jnp.inf),
        lambda: scaled,
    )
    drawn = jnp.where(greedy[:, None], scaled, left + noise)
    # argmax, but of two passes that XLA:CPU can vectorise.
    place = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    best = drawn == jnp.max(drawn, axis=-1, keepdims=True)
    tokens = jnp.min(jnp.where(best, place, logits.shape[-1] - 1), axis=-1)
    chosen = jnp.sum(jnp.where(place == tokens[:, None], scaled, 0.0), axis=-1)
    return tokens, chosen - jax.nn.logsumexp(scaled, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """Decode slots over a policy network.

    slots: responses in flight. cache_tokens: longest prompt plus response. steps_per_dispatch:
    tokens per slot between two looks by the host. stop_ids: what ends a response whose request
    does not say. record_routing: return the experts of each token; nothing for a model without
    experts. kv_dtype: of keys and values in the slots. prefill_chunk: tokens of a prompt that are
    read at a time, 0 for all. scan_layers: weights stay stacked, which compiles faster, takes no
    second copy of a float32 model and samples more slowly. weights: "int8" rounds the matrices of
    the layers when they are loaded, so that what samples is no longer what is trained; they stay
    stacked.
    Source: JetStream engine API (google/JetStream, engine_api.py, 0.2.2): prefill, insert,
    generate; batched prefill and insert as its later bulk_insert.
    """

    network: Network
    slots: int
    cache_tokens: int
    steps_per_dispatch: int
    stop_ids: tuple[int, ...]
    record_routing: bool = False
    kv_dtype: KVDtype = "auto"
    prefill_chunk: int = 0
    scan_layers: bool = False
    weights: WeightsDtype = "model"

    def __post_init__(self):
        if self.weights == "int8":
            check_available()

    @property
    def routing_shape(self) -> tuple[int, int] | None:
        """Layers with experts, experts per token; None when not recorded. Source: ours."""
        return self.network.spec.routing_shape if self.record_routing else None

    def init_decode_state(self, params: PyTree) -> DecodeState:
        """Empty slots for weights like these. Source: JetStream engine API."""
        zeros = jnp.zeros(self.slots, jnp.int32)
        seeds, floats = jnp.zeros(self.slots, jnp.uint32), jnp.zeros(self.slots)
        stops = jnp.full((self.slots, MAX_STOP_IDS), -1)
        cache = empty_cache(
            self.network.spec, self.slots, self.cache_tokens, self.kv_dtype,
            per_layer=is_unstacked(params),
        )  # fmt: skip
        return _held(DecodeState(
            cache=cache, token=zeros, position=zeros, made=zeros, active=zeros > 0,
            keys=jax.vmap(jax.random.key)(seeds),
            sampling=Sampling(seeds, floats, zeros, floats, zeros, stops),
        ))  # fmt: skip

    def load_params(self, params: PyTree) -> PyTree:
        """The weights as the other methods take them: cast; then rounded, or layer by layer.

        Source: JetStream engine API; ours: a loop over layers widens the int8 of one at a time,
        where XLA:CPU otherwise widens those of all before the first token (measured).
        """
        params = self.network.in_compute_dtype(params)
        if self.weights == "int8":
            return self.network.in_int8(params)
        return params if self.scan_layers else self.network.unstacked(params)

    @functools.partial(jax.jit, static_argnums=0)
    def prefill(self, params: PyTree, tokens: Int[Array, "P T"], lengths: Int[Array, "P"]):
        """What right-padded prompts leave behind; read chunk by chunk up to the longest one's end.

        Source: JetStream engine API, batched; Sarathi (2308.16369), section 4, for the chunks.
        """
        rows, width = tokens.shape
        chunk = min(self.prefill_chunk or width, width)
        turns = -(-width // chunk)
        padded = jnp.pad(tokens, ((0, 0), (0, turns * chunk - width)))
        recorded = self.routing_shape
        cache = empty_cache(self.network.spec, rows, turns * chunk, per_layer=is_unstacked(params))
        routing = jnp.zeros((*padded.shape, *recorded), jnp.int16) if recorded else None
        model = self.network.bind(params)

        def turn(carry):
            number, cache, routing = carry
            start = number * chunk
            part = jax.lax.dynamic_slice_in_dim(padded, start, chunk, axis=1)
            # A recurrent state can't be rewritten like a key: the last token is left for decoding.
            real = start + jnp.arange(chunk) < lengths[:, None] - 1
            cache, chosen = model.extend(part, start, real, cache, keep_routing=bool(recorded))
            if routing is not None:
                routing = jax.lax.dynamic_update_slice_in_dim(routing, chosen, start, axis=1)
            return number + 1, cache, routing

        def more(carry):
            return carry[0] * chunk < jnp.max(lengths) - 1

        carry = (jnp.int32(0), cache, routing)
        _, cache, routing = turn(carry) if turns == 1 else jax.lax.while_loop(more, turn, carry)
        routing = None if routing is None else for_host(routing[:, :width])
        return Prefix(hold_cache(cache), tokens, lengths, routing)

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
        return _held(DecodeState(
            cache=insert(state.cache, prefix.cache, rows, slots),
            token=put(state.token, prefix.tokens[rows, last]),
            position=put(state.position, last),
            made=put(state.made, 0),
            active=put(state.active, True),
            keys=put(state.keys, jax.vmap(jax.random.key)(sampling.seed)),
            sampling=Sampling(*map(put, state.sampling, sampling)),
        ))  # fmt: skip

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def release(self, state: DecodeState, slots: Bool[Array, "B"]) -> DecodeState:
        """Ends the responses in these slots. Source: ours; JetStream's later free_resource."""
        return _held(state._replace(active=state.active & ~slots))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def generate(self, params: PyTree, state: DecodeState) -> tuple[DecodeState, Block]:
        """Up to `steps_per_dispatch` tokens for every active slot; ends early when none is left.

        Source: JetStream engine API, several steps per call.
        """
        model = self.network.bind(params)
        shape, vocab, ahead = (self.steps_per_dispatch, self.slots), model.spec.vocab_size, None
        if math.prod(shape) * vocab <= _NOISE_AHEAD:
            places = state.made + jnp.arange(self.steps_per_dispatch)[:, None]
            ahead = jax.vmap(lambda at: gumbel(state.keys, at, vocab))(places)
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
            noise = gumbel(state.keys, state.made, vocab) if ahead is None else ahead[number]
            tokens, logp = sample(model.logits(hidden), noise, state.sampling)
            made = state.made + state.active
            stops = jnp.any(tokens[:, None] == state.sampling.stop_ids, axis=1)
            stopped = state.active & stops
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
        return _held(state), for_host(by_slot)


def _held(state: DecodeState) -> DecodeState:
    """The slots where they always lie, so that no later call is compiled anew."""
    rest = state._replace(cache=Cache(None, None))
    rest = jax.tree.map(lambda x: constrain(x, "rows", *(None,) * (x.ndim - 1)), rest)
    return rest._replace(cache=hold_cache(state.cache))
