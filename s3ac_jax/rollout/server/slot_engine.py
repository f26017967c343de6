"""JetStream's engine interface over our engine: what JetStream's drivers and ours run.

Rows of a result are tokens | valid | length | log-prob bits | version | finish, so that JetStream's
own code finds its columns where it looks for them, and reads several tokens per step as
speculations of which the last may be invalid.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Int32

from s3ac_jax.rollout.backend import RolloutError, Sampling, seeded_sampling
from s3ac_jax.rollout.engine import Block, DecodeState, Engine, Prefix
from s3ac_jax.rollout.jetstream import engine_api, token_utils, tokenizer_api, tokenizer_pb2
from s3ac_jax.rollout.server.store import ParamStore
from s3ac_jax.rollout.wire import LENGTH, STOP

# JetStream pads prompts to these and no others, and dies on a limit that is not among them.
_STOCK_WIDTHS = tuple(1 << n for n in range(4, 16))
RUNNING = -1


class PromptWithSettings(NamedTuple):
    """A prompt with its settings, one row: what may stand for a prompt's padded tokens.

    Source: ours: JetStream's driver hands on whatever its own hook returned.
    """

    tokens: Int32[np.ndarray, "T"]
    sampling: Sampling


@struct.dataclass
class Prefilled:
    """Prefilled prompts, a pytree as JetStream's prefixes are.

    prefix: what the engine made. prompts: the tokens, to do it again under other weights.
    sampling: settings, where the prompts came with some. serial: of the weights it was made with.
    Source: ours.
    """

    prefix: Prefix
    prompts: tuple[np.ndarray, ...]
    sampling: Sampling | None
    serial: int = struct.field(pytree_node=False)

    def routing(self, row: int) -> np.ndarray | None:
        """Experts of prompt `row` but its last token [tokens, L, k]; None when not recorded.

        Source: ours.
        """
        if self.prefix.routing is None:
            return None
        return np.asarray(self.prefix.routing[row, : len(self.prompts[row]) - 1])


@struct.dataclass
class RolloutTokens(engine_api.ResultTokens):
    """JetStream's result with the experts beside it: [slots, steps, L, k] on the device, or None.

    Source: ours.
    """

    routing: Any = None


class Columns(NamedTuple):
    """A result's columns on the host, k steps. finish: RUNNING, STOP or LENGTH.

    Source: ours.
    """

    tokens: np.ndarray  # [B, k]
    valid: np.ndarray  # [B, k]
    logp: np.ndarray  # [B, k]
    version: int
    finish: np.ndarray  # [B]


def columns(data: np.ndarray, steps: int) -> Columns:
    """Reads a result's rows on the host, without copying the tokens. Source: ours."""
    logp = np.ascontiguousarray(data[:, 2 * steps + 1 : 3 * steps + 1]).view(np.float32)
    valid = data[:, steps : 2 * steps] != 0
    return Columns(data[:, :steps], valid, logp, int(data[0, -2]), data[:, -1])


@jax.jit
def _rows(block: Block, made: jax.Array, version: jax.Array) -> jax.Array:
    finish = jnp.where(block.finished, jnp.where(block.stopped, STOP, LENGTH), RUNNING)
    parts = [
        block.tokens, block.valid.astype(jnp.int32), made[:, None],
        jax.lax.bitcast_convert_type(block.logp.astype(jnp.float32), jnp.int32),
        jnp.broadcast_to(version, made.shape)[:, None], finish[:, None],
    ]  # fmt: skip
    return jnp.concatenate([part.astype(jnp.int32) for part in parts], axis=1)


class SlotTokenizer(tokenizer_api.Tokenizer):
    """JetStream's tokenizer interface over ours. No stop tokens: the engine ends responses.

    Source: JetStream tokenizer API (tokenizer_api.py, 0.2.2).
    """

    def __init__(self, tokenizer: Any, bos_id: int | None):
        self._tokenizer, self._bos_id = tokenizer, bos_id

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        """Padded ids of a text and their number. Source: JetStream tokenizer API."""
        if self._tokenizer is None:
            raise RolloutError("this server has no tokenizer: send token ids")
        tokens = np.asarray(self._tokenizer.encode(s), np.int32)
        # Whether a text begins with a BOS is the tokenizer's own affair.
        return token_utils.pad_tokens(
            tokens, self.bos_id, self.pad_id, **kwargs | {"is_bos": False}
        )

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Text of the ids. Source: JetStream tokenizer API."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        """What fills unused places. Source: JetStream tokenizer API."""
        return 0

    @property
    def eos_id(self) -> int:
        """No token: a request's stop ids end it. Source: JetStream tokenizer API."""
        return -1

    @property
    def bos_id(self) -> int:
        """What stands before prompts of token ids. Source: JetStream tokenizer API."""
        return 0 if self._bos_id is None else self._bos_id

    @property
    def stop_tokens(self) -> set[int]:
        """None. Source: JetStream tokenizer API."""
        return set()


class JetStreamEngine(engine_api.Engine):
    """An Engine as a JetStream engine, its weights read from a ParamStore at each step.

    max_prompt_tokens: longest prompt. insert_batch: prompts prefilled, and responses begun, in one
    call. tokenizer: for text through JetStream's own driver; bos_id: likewise, for token ids.
    mesh: that the weights are sharded over, None for one device.
    prompt_widths: prompts are padded to one of these or to the longest, powers of two when None;
    each is one compilation. With none but the longest, () here, log-probs have the very bits of
    LocalRollout's.
    Source: JetStream engine API (google/JetStream, engine_api.py, 0.2.2).
    """

    def __init__(
        self,
        engine: Engine,
        store: ParamStore,
        *,
        max_prompt_tokens: int,
        insert_batch: int,
        tokenizer: Any = None,
        bos_id: int | None = None,
        mesh: jax.sharding.Mesh | None = None,
        prompt_widths: Sequence[int] | None = None,
    ):
        if not 0 < max_prompt_tokens < engine.cache_tokens:
            raise RolloutError(
                f"max_prompt_tokens must be in 1..{engine.cache_tokens - 1}: the engine's cache "
                f"holds {engine.cache_tokens} tokens a slot, got {max_prompt_tokens}"
            )
        self.engine, self.store = engine, store
        self.max_prompt_tokens, self.insert_batch = max_prompt_tokens, insert_batch
        self.cache_tokens, self.steps = engine.cache_tokens, engine.steps_per_dispatch
        self.vocab_size = engine.network.spec.vocab_size
        self.routing_shape = engine.routing_shape
        self.stop_ids = engine.stop_ids
        self._tokenizer, self._mesh = SlotTokenizer(tokenizer, bos_id), mesh
        if prompt_widths is None:
            prompt_widths = [width for width in _STOCK_WIDTHS if width < max_prompt_tokens]
        self.prompt_widths = sorted({*prompt_widths, max_prompt_tokens})

    def load_params(self, *args: Any, **kwargs: Any) -> ParamStore:
        """The store of the weights. Source: JetStream engine API."""
        return self.store

    def _on_mesh(self) -> contextlib.AbstractContextManager:
        # A thread has a context of its own, and JetStream's threads know of no mesh.
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """Empty slots. Source: JetStream engine API."""
        with self._on_mesh():
            return jax.jit(self.engine.init_decode_state)(self.store.get().params)

    def prefill(
        self,
        *,
        params: ParamStore,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
    ) -> Prefilled:
        """One prompt, of which the last tokens are kept where it is too long.

        padded_tokens: token ids, which get greedy decoding up to the end of the cache, or a
        PromptWithSettings.
        Source: JetStream engine API.
        """
        if existing_prefix is not None:
            raise RolloutError("prefill from an existing prefix is not supported")
        asked = padded_tokens if isinstance(padded_tokens, PromptWithSettings) else None
        tokens = np.asarray(asked.tokens if asked else padded_tokens, np.int32)
        # JetStream cuts a prompt that is too long but goes on counting what it cut.
        tokens = tokens[: max(true_length, 1)][-self.max_prompt_tokens :]
        if asked is None:
            room = self.cache_tokens - len(tokens)
            sampling = seeded_sampling([0], temperature=0, max_tokens=room, stop_ids=self.stop_ids)
        else:
            sampling = asked.sampling
        return dataclasses.replace(self.prefill_many(params, [tokens]), sampling=sampling)

    def prefill_many(self, params: ParamStore, prompts: Sequence[np.ndarray]) -> Prefilled:
        """Up to `insert_batch` prompts in one call; every prompt one row. Source: ours."""
        weights = params.get()
        longest = max(map(len, prompts))
        width = next(width for width in self.prompt_widths if width >= longest)
        tokens = np.zeros((self.insert_batch, width), np.int32)
        lengths = np.ones(self.insert_batch, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        with self._on_mesh():
            prefix = self.engine.prefill(weights.params, tokens, lengths)
        return Prefilled(prefix, tuple(prompts), None, weights.serial)

    def insert(self, prefix: Prefilled, decode_state: DecodeState, slot: int) -> DecodeState:
        """Begins the response of a prompt prefilled alone. Source: JetStream engine API."""
        if prefix.sampling is None:
            raise RolloutError("a prefix of several prompts is for insert_many")
        return self.insert_many(prefix, decode_state, [0], [slot], prefix.sampling)[1]

    def insert_many(
        self,
        prefix: Prefilled,
        decode_state: DecodeState,
        rows: Sequence[int],
        slots: Sequence[int],
        sampling: Sampling,
    ) -> tuple[Prefilled, DecodeState]:
        """Begins up to `insert_batch` responses: prefix row `rows[i]` in slot `slots[i]`.

        A prefix made under other weights is made anew, and returned, so that no response begins
        with keys and values that are not its weights' own.
        Source: ours.
        """
        if prefix.serial != self.store.get().serial:
            prefix = self.prefill_many(self.store, prefix.prompts)
        spare = self.insert_batch - len(rows)
        row_of, slot_of = (np.asarray(numbers, np.int32) for numbers in (rows, slots))
        settings = [
            np.pad(field, [(0, spare)] + [(0, 0)] * (field.ndim - 1), mode="edge")
            for field in map(np.asarray, sampling)
        ]
        with self._on_mesh():
            state = self.engine.insert(
                prefix.prefix, decode_state, np.pad(row_of, (0, spare)),
                np.pad(slot_of, (0, spare), constant_values=self.engine.slots),
                Sampling(*settings),
            )  # fmt: skip
        return prefix, state

    def generate(
        self, params: ParamStore, decode_state: DecodeState
    ) -> tuple[DecodeState, RolloutTokens]:
        """`steps` tokens for every slot with a response in it. Source: JetStream engine API."""
        weights, k = params.get(), self.steps
        with self._on_mesh():
            state, block = self.engine.generate(weights.params, decode_state)
            data = _rows(block._replace(routing=None), state.made, np.int32(weights.version))
        result = RolloutTokens(
            data=data, tokens_idx=(0, k), valid_idx=(k, 2 * k), length_idx=(2 * k, 2 * k + 1),
            samples_per_slot=1, routing=block.routing,
        )  # fmt: skip
        return state, result

    def release(self, decode_state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Ends the responses in these slots. Source: ours; JetStream's later free_resource."""
        mask = np.zeros(self.engine.slots, bool)
        mask[list(slots)] = True
        with self._on_mesh():
            return self.engine.release(decode_state, mask)

    def get_prefix_destination_sharding(self) -> None:
        """Wherever the prefix is. Source: JetStream engine API."""
        return None

    def get_tokenizer(self) -> Any:
        """Nothing: `build_tokenizer` knows. Source: JetStream engine API."""
        return vars(tokenizer_pb2)["TokenizerParameters"]()

    def build_tokenizer(self, metadata: Any = None) -> SlotTokenizer:
        """The tokenizer. Source: JetStream engine API."""
        return self._tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots. Source: JetStream engine API."""
        return self.engine.slots

    @property
    def samples_per_slot(self) -> int:
        """One: samples of a prompt are responses with one prefix. Source: JetStream engine API."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The width JetStream pads the longest prompts to. Source: JetStream engine API."""
        return next(width for width in _STOCK_WIDTHS if width >= self.max_prompt_tokens)

    @property
    def mesh(self) -> Any:
        """What the weights are sharded over. Source: JetStream engine API."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """None. Source: JetStream engine API."""
        return None
