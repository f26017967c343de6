"""From a block of all slots to the pieces of each response, without Python per token."""

from typing import NamedTuple

import numpy as np

from s3ac_jax.rollout.server.requests import Job
from s3ac_jax.rollout.server.sinks import Piece
from s3ac_jax.rollout.server.slot_engine import Columns

_NO_INTS, _NO_FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class Begun(NamedTuple):
    """A response that got a slot. prompt_routing: experts of its prompt but the last token
    [tokens, L, k], under the weights it began with; None where not asked for.

    Source: ours.
    """

    slot: int
    job: Job
    sample: int
    prompt_routing: np.ndarray | None


class Ended(NamedTuple):
    """A response that is over, for the reason `finish`. slot: it had, None if it never began.

    Source: ours.
    """

    slot: int | None
    job: Job
    sample: int
    finish: int


class Made(NamedTuple):
    """What happened to the slots since the last one of these, in this order.

    begun: responses that got a slot. columns, routing: what one step made; None when none ran.
    ended: responses over since then.
    Source: ours.
    """

    begun: list[Begun]
    columns: Columns | None
    routing: np.ndarray | None
    ended: list[Ended]


class Delivery:
    """Holds the responses in the slots, and puts into sinks what is due.

    stream_tokens: how many tokens a sink that streams waits for, after the first.
    Source: ours.
    """

    def __init__(
        self,
        slots: int,
        cache_tokens: int,
        stream_tokens: int,
        routing_shape: tuple[int, int] | None,
    ):
        shape = slots, cache_tokens
        self._tokens = np.zeros(shape, np.int32)
        self._logp = np.zeros(shape, np.float32)
        self._version = np.zeros(shape, np.int32)
        self._routing = None
        if routing_shape is not None:
            self._routing = np.full((*shape, *routing_shape), -1, np.int16)
        self._count = np.zeros(slots, np.int64)
        self._sent = np.zeros(slots, np.int64)
        self._streams = np.zeros(slots, bool)
        self._owner: list[tuple[Job, int] | None] = [None] * slots
        self._stream_tokens = stream_tokens

    def take(self, made: Made) -> None:
        """Stores a block, and puts into the sinks what is due after it. Source: ours."""
        for slot, job, sample, prompt_routing in made.begun:
            self._owner[slot] = job, sample
            self._streams[slot] = job.sink.streams
            self._count[slot] = self._sent[slot] = 0
            if prompt_routing is not None and self._routing is not None:
                before = len(prompt_routing)
                self._routing[slot, :before] = prompt_routing
                self._routing[slot, before:] = -1
        if made.columns is not None:
            self._store(made.columns, made.routing)
        for slot, job, sample, finish in made.ended:
            job.left -= 1
            if slot is None:
                job.sink.put(sample, self._nothing(job, finish))
                continue
            self._streams[slot] = False
            job.sink.put(sample, self._piece(slot, finish))
            self._owner[slot] = None
        if self._streams.any():
            fresh = self._count - self._sent
            due = (fresh >= self._stream_tokens) | ((self._sent == 0) & (fresh > 0))
            for slot in np.flatnonzero(self._streams & due).tolist():
                if (owner := self._owner[slot]) is not None:
                    owner[0].sink.put(owner[1], self._piece(slot, None))

    def _store(self, columns: Columns, routing: np.ndarray | None) -> None:
        slot, step = np.nonzero(columns.valid)
        place = self._count[slot] + step
        self._tokens[slot, place] = columns.tokens[slot, step]
        self._logp[slot, place] = columns.logp[slot, step]
        self._version[slot, place] = columns.version
        if routing is not None and self._routing is not None:
            before = np.array([len(o[0].prompt) - 1 if o else 0 for o in self._owner])
            self._routing[slot, before[slot] + place] = routing[slot, step]
        self._count += columns.valid.sum(axis=1)

    def _nothing(self, job: Job, finish: int) -> Piece:
        """A response that never began; its prompt was asked for all the same."""
        routing = None
        if job.want_routing and self._routing is not None:
            routing = np.full((len(job.prompt), *self._routing.shape[2:]), -1, np.int16)
        return Piece(_NO_INTS, _NO_FLOATS, _NO_INTS, finish, routing)

    def _piece(self, slot: int, finish: int | None) -> Piece:
        # Slots are filled again while the reader still holds the piece, hence the copies.
        start, end = self._sent[slot], self._count[slot]
        self._sent[slot] = end
        tokens, logp, version = (
            array[slot, start:end].copy() for array in (self._tokens, self._logp, self._version)
        )
        routing = None
        owner = self._owner[slot]
        if finish is not None and owner and owner[0].want_routing and self._routing is not None:
            routing = self._routing[slot, : len(owner[0].prompt) + end].copy()
        return Piece(tokens, logp, version, finish, routing)
