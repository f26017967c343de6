"""The slots of an engine: who is in them, who comes next, one step. No threads in here."""

import collections
import time
from typing import Any

import numpy as np

from s3ac_jax.rollout.backend import Sampling
from s3ac_jax.rollout.server.delivery import Begun, Ended, Made
from s3ac_jax.rollout.server.requests import Job
from s3ac_jax.rollout.server.slot_engine import RUNNING, JetStreamEngine, columns
from s3ac_jax.rollout.server.store import ParamStore
from s3ac_jax.rollout.wire import ABORT

# Steps with a release of nobody after them, so that it is compiled before the first client leaves.
# Twice: on a mesh the slots lie as they will only after some steps.
_RELEASE_AFTER = (0, 3)


class Slots:
    """Slots and the queue in front of them. seconds: host time of steps and of admissions.

    busy [slots]: a response is in it. has_nan: a step gave one; admit nothing until all slots
    are free, then `renew`.
    Source: ours.
    """

    def __init__(self, engine: JetStreamEngine, store: ParamStore):
        slots = engine.max_concurrent_decodes
        self.queue: collections.deque[Job] = collections.deque()
        self.busy = np.zeros(slots, bool)
        self.has_nan = False
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds = {"step": 0.0, "prefill": 0.0}
        self._engine, self._store = engine, store
        self._owner: list[tuple[Job, int] | None] = [None] * slots
        self._free = list(range(slots))[::-1]
        self._begun: list[Begun] = []
        self._state: Any = None

    def renew(self) -> None:
        """Forgets the cache. Source: ours."""
        self._state, self.has_nan = None, False

    def admit(self) -> int:
        """Fills free slots from the queue; how many responses began. Source: ours."""
        began = 0
        while self._free and self.queue:
            began += self._admit_some()
        return began

    def _admit_some(self) -> int:
        """One prefill and one insert: what fits in a call and in the free slots."""
        if self._state is None:
            self._state = self._engine.init_decode_state()
        room = min(len(self._free), self._engine.insert_batch)
        wave: list[tuple[Job, int, int]] = []
        for job in self.queue:
            # A prompt whose samples did not all find a slot has its prefix already.
            if not room or (wave and (job.prefill_result or wave[0][0].prefill_result)):
                break
            count = min(room, job.rows - job.begun)
            room -= count
            wave.append((job, job.begun, job.begun + count))
        started = time.perf_counter()
        prefix = wave[0][0].prefill_result
        if prefix is None:
            prefix = self._engine.prefill_many(self._store, [job.prompt for job, _, _ in wave])
            for row, (job, _, _) in enumerate(wave):
                job.prefix_row = row
                self.counts["prompt_tokens"] += len(job.prompt)
            self.counts["prefills"] += 1
        rows = [job.prefix_row for job, start, end in wave for _ in range(start, end)]
        slots = [self._free.pop() for _ in rows]
        parts = [[field[start:end] for field in job.sampling] for job, start, end in wave]
        sampling = Sampling(*map(np.concatenate, zip(*parts, strict=True)))
        prefix, self._state = self._engine.insert_many(prefix, self._state, rows, slots, sampling)
        self.seconds["prefill"] += time.perf_counter() - started
        place = iter(slots)
        for job, start, end in wave:
            routing = None
            if job.want_routing and self._engine.routing_shape:
                routing = prefix.routing(job.prefix_row)
            for number in range(start, end):
                slot, sample = next(place), job.samples[number]
                self._owner[slot] = job, sample
                self._begun.append(Begun(slot, job, sample, routing))
            job.begun = end
            job.prefill_result = prefix if end < job.rows else None
            if end == job.rows:
                self.queue.popleft()
        self.busy[slots] = True
        return len(slots)

    def step(self) -> Made:
        """One step of the engine; responses that end in it leave their slots. Source: ours."""
        started = time.perf_counter()
        self._state, result = self._engine.generate(self._store, self._state)
        result.copy_to_host_async()
        made = columns(np.asarray(result.data), self._engine.steps)
        routing = None
        if self._engine.routing_shape and any(o and o[0].want_routing for o in self._owner):
            routing = np.asarray(result.routing)
        if self.counts["steps"] in _RELEASE_AFTER:
            self._state = self._engine.release(self._state, [])
        self.counts["steps"] += 1
        self.counts["response_tokens"] += int(np.count_nonzero(made.valid))
        self.seconds["step"] += time.perf_counter() - started
        # A NaN in a slot's cache outlives the weights that made it: 0 times NaN is NaN. What stands
        # where no token was made is nobody's.
        self.has_nan |= not np.isfinite(made.logp[made.valid & self.busy[:, None]]).all()
        slots = np.flatnonzero(self.busy & (made.finish != RUNNING)).tolist()
        return self._made(made, routing, [self._end(s, int(made.finish[s])) for s in slots])

    def cancel(self, jobs: list[Job]) -> tuple[Made, int]:
        """Ends these jobs; also how many of their responses had not begun. Source: ours."""
        ended, unbegun = [], 0
        for job in jobs:
            slots = [s for s, owner in enumerate(self._owner) if owner and owner[0] is job]
            ended += [self._end(slot, ABORT) for slot in slots]
            if slots:
                self._state = self._engine.release(self._state, slots)
            if job.begun < job.rows:
                self.queue.remove(job)
                rest = job.samples[job.begun :]
                unbegun += len(rest)
                ended += [Ended(None, job, sample, ABORT) for sample in rest]
                job.prefill_result = None
        return self._made(None, None, ended), unbegun

    def _end(self, slot: int, finish: int) -> Ended:
        owner = self._owner[slot]
        assert owner is not None  # `busy` says so
        self._owner[slot] = None
        self.busy[slot] = False
        self._free.append(slot)
        return Ended(slot, *owner, finish)

    def _made(self, columns: Any, routing: Any, ended: list[Ended]) -> Made:
        begun, self._begun = self._begun, []
        return Made(begun, columns, routing, ended)
