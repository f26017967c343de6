"""Rollouts in the trainer's own process: a single-threaded, deterministic batching loop."""

import jax
import jax.numpy as jnp
import numpy as np

from s3ac_jax.core.types import Prompt, PyTree, Rollout
from s3ac_jax.rollout.engine import Engine, Sampling


class LocalRollout:
    """Continuous batching over an Engine: a finished slot is refilled at the next look.

    insert_batch: requests prefilled and inserted per call. max_prompt_tokens,
    max_response_tokens: limits of one request. Admission is longest prompt first, so that the
    long responses do not all start last.
    Source: ours, on JetStream's engine interface.
    """

    def __init__(
        self, engine: Engine, *, insert_batch: int, max_prompt_tokens: int, max_response_tokens: int
    ):
        if engine.cache_tokens < max_prompt_tokens + max_response_tokens:
            raise ValueError(
                f"the engine's cache holds {engine.cache_tokens} tokens a slot; prompt "
                f"({max_prompt_tokens}) plus response ({max_response_tokens}) do not fit"
            )
        self.engine = engine
        self.insert_batch = insert_batch
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self._params: PyTree = None
        self._state = None
        self.version = -1

    def update_weights(self, params: PyTree, version: int) -> None:
        """The weights of all later tokens, cast once to the dtype they are used in.

        What needs no cast is shared, not copied. Source: ours.
        """
        self._params, self.version = self.engine.network.in_compute_dtype(params), version

    def generate(self, prompt: Prompt, sampling: Sampling, *, keep_routing: bool = True) -> Rollout:
        """One response for each of the B prompts, in their order.

        keep_routing: False leaves out what the engine may have recorded, for responses that nobody
        trains on.
        Raises ValueError when a prompt or a limit exceeds what the engine was built for, and
        RuntimeError before the first `update_weights`.
        Source: ours.
        """
        self._check(prompt, sampling)
        if self._state is None:
            self._state = jax.jit(self.engine.init_decode_state)(self._params)
        rows = len(prompt.index)
        tokens = np.zeros((rows, self.max_response_tokens), np.int32)
        logp = np.zeros((rows, self.max_response_tokens), np.float32)
        made = np.zeros(rows, np.int32)
        stopped = np.zeros(rows, bool)
        routing = self._no_routing(rows, prompt.tokens.shape[1]) if keep_routing else None
        waiting = np.argsort(-np.asarray(prompt.num_tokens), kind="stable")
        owner = np.full(self.engine.slots, -1)
        while waiting.size or (owner >= 0).any():
            waiting = self._admit(prompt, sampling, waiting, owner, routing)
            self._state, block = self.engine.generate(self._params, self._state)
            block = jax.device_get(block if keep_routing else block._replace(routing=None))
            # One vectorised write for the whole block: no Python per token.
            slot, step = np.nonzero(block.valid & (owner >= 0)[:, None])
            request = owner[slot]
            place = made[request] + step
            tokens[request, place] = block.tokens[slot, step]
            logp[request, place] = block.logp[slot, step]
            if routing is not None:
                read = prompt.num_tokens[request] - 1 + place
                routing[request, read] = block.routing[slot, step]
            busy = np.flatnonzero(owner >= 0)
            made[owner[busy]] += block.valid[busy].sum(axis=1, dtype=np.int32)
            done = busy[block.finished[busy]]
            stopped[owner[done]] = block.stopped[done]
            owner[done] = -1
        if not np.isfinite(logp).all():
            # A NaN in a slot's cache outlives the weights that made it: 0 times NaN is NaN.
            self._state = None
        version = np.full(rows, self.version, np.int32)
        return Rollout(prompt, tokens, made, logp, stopped, version, routing)

    def _no_routing(self, rows: int, prompt_tokens: int) -> np.ndarray | None:
        shape = self.engine.routing_shape
        if shape is None:
            return None
        return np.full((rows, prompt_tokens + self.max_response_tokens, *shape), -1, np.int16)

    def _admit(
        self,
        prompt: Prompt,
        sampling: Sampling,
        waiting: np.ndarray,
        owner: np.ndarray,
        routing: np.ndarray | None,
    ) -> np.ndarray:
        free = np.flatnonzero(owner < 0)
        while waiting.size and free.size:
            count = min(self.insert_batch, waiting.size, free.size)
            taken, waiting = waiting[:count], waiting[count:]
            slots, free = free[:count], free[count:]
            owner[slots] = taken
            # Samples of one prompt stand side by side in `waiting`, so they share its prefill.
            _, first, row = np.unique(prompt.index[taken], return_index=True, return_inverse=True)
            spare = self.insert_batch - count
            padded = np.pad(taken, (0, spare), mode="edge")
            shown = np.pad(taken[first], (0, self.insert_batch - len(first)), mode="edge")
            prefix = self.engine.prefill(
                self._params, prompt.tokens[shown], prompt.num_tokens[shown]
            )
            if routing is not None:
                read = np.arange(prompt.tokens.shape[1]) < prompt.num_tokens[taken, None] - 1
                found = np.asarray(prefix.routing)[row]
                routing[taken, : read.shape[1]] = np.where(read[..., None, None], found, -1)
            self._state = self.engine.insert(
                prefix,
                self._state,
                np.pad(row, (0, spare)).astype(np.int32),
                np.pad(slots, (0, spare), constant_values=self.engine.slots).astype(np.int32),
                Sampling(*(np.asarray(field)[padded] for field in sampling)),
            )
        return waiting

    def _check(self, prompt: Prompt, sampling: Sampling) -> None:
        if self._params is None:
            raise RuntimeError("no weights yet: call update_weights(params, version) first")
        width = prompt.tokens.shape[1]
        if width > self.max_prompt_tokens:
            raise ValueError(
                f"prompts are padded to {width} tokens, the limit is rollout.max_prompt_tokens = "
                f"{self.max_prompt_tokens}"
            )
        wrong = (sampling.max_tokens < 1) | (sampling.max_tokens > self.max_response_tokens)
        if np.any(wrong):
            raise ValueError(
                f"max_tokens must be in 1..{self.max_response_tokens} "
                f"(rollout.max_response_tokens), got {int(sampling.max_tokens[np.argmax(wrong)])}"
            )


def make_sampling(key: jax.Array, rows: int, *, temperature: float, max_tokens: int) -> Sampling:
    """Settings for `rows` requests, a seed for each drawn from `key`.

    Source: ours.
    """
    seeds = jax.random.bits(key, (rows,), jnp.uint32)
    return Sampling(
        np.asarray(seeds),
        np.full(rows, temperature, np.float32),
        np.full(rows, max_tokens, np.int32),
    )
