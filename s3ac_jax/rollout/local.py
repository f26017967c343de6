"""Rollouts in the trainer's own process: a single-threaded, deterministic batching loop."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from s3ac_jax.core.types import Prompt, PyTree, Rollout
from s3ac_jax.models.network import Network
from s3ac_jax.parallel.hosts import keep_pace
from s3ac_jax.parallel.mesh import shardings
from s3ac_jax.parallel.regrid import Regrid
from s3ac_jax.rollout.assemble import Assembly, tally
from s3ac_jax.rollout.backend import RolloutError, Sampling, digest_of, hex_digest
from s3ac_jax.rollout.engine import Block, Engine
from s3ac_jax.rollout.limits import settings_fault


class LocalRollout:
    """Continuous batching over an Engine: a finished slot is refilled at the next look.

    insert_batch: requests prefilled and inserted per call. max_prompt_tokens,
    max_response_tokens: limits of one request. Admission is longest prompt first, so that the
    long responses do not all start last. On several hosts every one of them makes the same calls
    in the same order: what is decided here follows from the requests and the blocks alone.
    mesh: where responses are made, None for the mesh in context. move: brings weights there in the
    compute dtype, None if they lie there.
    Source: ours, on JetStream's engine interface; the protocol is that of `rollout/backend.py`.
    """

    def __init__(
        self, engine: Engine, *, insert_batch: int, max_prompt_tokens: int,
        max_response_tokens: int, mesh: Mesh | None = None,
        move: Callable[[PyTree], PyTree] | None = None,
    ):  # fmt: skip
        if engine.cache_tokens < max_prompt_tokens + max_response_tokens:
            raise ValueError(
                f"the engine's cache holds {engine.cache_tokens} tokens a slot; prompt "
                f"({max_prompt_tokens}) plus response ({max_response_tokens}) do not fit"
            )
        self.engine = engine
        self.insert_batch = insert_batch
        self.mesh = mesh
        self._move = move or engine.network.in_compute_dtype
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        # Made once, or every new set of slots would be compiled anew.
        self._empty = jax.jit(engine.init_decode_state)
        self.version = -1
        self._params: PyTree = None
        self._state = None
        self._digest: jax.Array | None = None
        self._counts = {"requests": 0, "tokens": 0, "aborted": 0}
        # Held by a call in progress, so that closing waits for its end.
        self._busy = threading.Lock()
        self._change = threading.Condition()
        self._paused = self._cut = self._closed = False

    def update_weights(self, params: PyTree, version: int) -> None:
        """The weights of all later tokens, made ready once.

        What needs no change is shared, not copied. Source: ours.
        """
        params = self._move(params)
        with self._on_mesh():
            # Now, for the trainer may donate the weights later; but nobody waits for it.
            self._digest = digest_of(params)
            self._params, self.version = self.engine.load_params(params), version

    def _on_mesh(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def generate(self, prompt: Prompt, sampling: Sampling, *, keep_routing: bool = True) -> Rollout:
        """One response for each of the B prompts, in their order.

        keep_routing: False leaves out what the engine may have recorded, for responses that nobody
        trains on.
        Raises ValueError when a prompt or a limit exceeds what the engine was built for, and
        RolloutError before the first `update_weights` and after `close`.
        Source: ours.
        """
        with self._busy:
            if self._closed:
                raise RolloutError("this rollout is closed; make another one")
            if self._params is None:
                raise RolloutError("no weights: call update_weights(params, version) first")
            check_request(prompt, sampling, self.max_prompt_tokens, self.max_response_tokens)
            self._cut = False
            with self._on_mesh():
                return self._generate(prompt, sampling, keep_routing)

    def _generate(self, prompt: Prompt, sampling: Sampling, keep_routing: bool) -> Rollout:
        if self._state is None:
            self._state = self._empty(self._params)
        shape = self.engine.routing_shape if keep_routing else None
        made = Assembly(prompt, self.max_response_tokens, shape)
        # The request in each slot, -1 for none.
        owner = np.full(self.engine.slots, -1)
        waiting = np.argsort(-np.asarray(prompt.num_tokens), kind="stable")
        while (waiting.size or (owner >= 0).any()) and self._goes_on():
            waiting = self._admit(sampling, waiting, owner, made)
            self._state, block = self.engine.generate(self._params, self._state)
            kept = block if keep_routing else block._replace(routing=None)
            _take(made, owner, jax.device_get(kept))
        if made.aborted.any():
            self._state = self.engine.release(self._state, np.ones(self.engine.slots, bool))
        if not np.isfinite(made.logp).all():
            # A NaN in a slot's cache outlives the weights that made it: 0 times NaN is NaN.
            self._state = None
        rollout = made.finish(self.version)
        for name, count in tally(rollout).items():
            self._counts[name] += count
        return rollout

    def rest(self) -> None:
        """Gives up slots and weights, until the next `update_weights`. Source: ours."""
        with self._busy:
            self._params = self._state = None

    def abort(self) -> None:
        """From another thread: a call in progress returns at its next look. Source: ours."""
        self._tell(cut=True)

    def pause(self) -> None:
        """From another thread: a call in progress waits at its next look. Source: ours."""
        self._tell(paused=True)

    def resume(self) -> None:
        """Ends a pause. Source: ours."""
        self._tell(paused=False)

    def _tell(self, **changes: bool) -> None:
        with self._change:
            for name, value in changes.items():
                setattr(self, f"_{name}", value)
            self._change.notify_all()

    def _goes_on(self) -> bool:
        """Whether a call in progress is to make more tokens, once no pause holds it."""
        with self._change:
            self._change.wait_for(lambda: self._cut or not self._paused)
            return not self._cut

    def stats(self) -> dict[str, Any]:
        """requests, tokens and aborted responses so far; the weights' version and fingerprint.

        Source: ours.
        """
        found = None if self._digest is None else hex_digest(self._digest)
        return {**self._counts, "version": self.version, "fingerprint": found}

    def close(self) -> None:
        """Cuts a call in progress and gives up the weights and the cache. Source: ours."""
        self.abort()
        with self._busy:
            self._closed = True
            self._params = self._state = self._digest = None

    def _admit(
        self, sampling: Sampling, waiting: np.ndarray, owner: np.ndarray, made: Assembly
    ) -> np.ndarray:
        prompt, free = made.prompt, np.flatnonzero(owner < 0)
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
            if made.routing is not None:
                read = np.arange(prompt.tokens.shape[1]) < prompt.num_tokens[taken, None] - 1
                found = np.asarray(prefix.routing)[row]
                made.routing[taken, : read.shape[1]] = np.where(read[..., None, None], found, -1)
            self._state = keep_pace(self.engine.insert(
                prefix,
                self._state,
                np.pad(row, (0, spare)).astype(np.int32),
                np.pad(slots, (0, spare), constant_values=self.engine.slots).astype(np.int32),
                Sampling(*(np.asarray(field)[padded] for field in sampling)),
            ))  # fmt: skip
        return waiting


class Mover:
    """params -> as a forward pass reads them, on another mesh of the same devices.

    mesh: that they come from. program: what is run, with `grids.between` in context. places: where
    its results are in the end.
    Source: ours: cast first, so that half the bytes travel; one program, on however many hosts.
    """

    def __init__(self, network: Network, mesh: Mesh, grids: Regrid):
        self.grids = grids
        here = shardings(network.axes, network.abstract, mesh)
        self.places = shardings(network.axes, network.abstract, grids.target, whole=True)
        cast = jax.eval_shape(network.in_compute_dtype, network.abstract)
        dtypes = jax.tree.map(lambda x: x.dtype, cast)
        self.program = jax.jit(lambda params: grids.moved(params, here, self.places, dtypes))

    def __call__(self, params: PyTree) -> PyTree:
        """The weights there. Source: ours."""
        with jax.set_mesh(self.grids.between):
            moved = self.program(params)
        return self.grids.after(moved, self.places)


def sender(network: Network, mesh: Mesh) -> Callable[[PyTree], PyTree]:
    """params -> as a forward pass reads them, on the devices of another mesh. Source: ours."""
    places = shardings(network.axes, network.abstract, mesh, whole=True)
    return lambda params: jax.device_put(network.in_compute_dtype(params), places)


def _take(made: Assembly, owner: np.ndarray, block: Block) -> None:
    """One vectorised write for a whole block: no Python per token."""
    slot, step = np.nonzero(block.valid & (owner >= 0)[:, None])
    request = owner[slot]
    place = made.num_tokens[request] + step
    made.tokens[request, place] = block.tokens[slot, step]
    made.logp[request, place] = block.logp[slot, step]
    if made.routing is not None and block.routing is not None:
        read = made.prompt.num_tokens[request] - 1 + place
        made.routing[request, read] = block.routing[slot, step]
    busy = np.flatnonzero(owner >= 0)
    made.num_tokens[owner[busy]] += block.valid[busy].sum(axis=1, dtype=np.int32)
    done = busy[block.finished[busy]]
    made.stopped[owner[done]] = block.stopped[done]
    made.aborted[owner[done]] = False
    owner[done] = -1


def check_request(
    prompt: Prompt, sampling: Sampling, max_prompt_tokens: int, max_response_tokens: int
) -> None:
    """Raises ValueError, naming the config field, on what a rollout was not built for.

    Source: ours.
    """
    width = prompt.tokens.shape[1]
    if width > max_prompt_tokens:
        raise ValueError(
            f"prompts are padded to {width} tokens, the limit is rollout.max_prompt_tokens = "
            f"{max_prompt_tokens}"
        )
    if np.any(np.asarray(prompt.num_tokens) < 1):
        raise ValueError(f"prompt {int(np.argmin(prompt.num_tokens))} is empty, it has no token")
    room = np.full(len(sampling.max_tokens), max_response_tokens)
    if (fault := settings_fault(sampling, room)) is not None:
        raise ValueError(f"{fault} (rollout.max_response_tokens = {max_response_tokens})")
