"""JetStream's driver with what reinforcement learning asks of it.

Of JetStream's threads two are left. The generate thread alone decides: it admits, steps, frees,
aborts, pauses and exchanges weights, so that none of these can meet another half-way. The
detokenize thread hands tokens to whoever waits for them. Prefill happens at admission, with the
weights of that moment.
"""

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from s3ac_jax.core.types import PyTree
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.jetstream import orchestrator
from s3ac_jax.rollout.limits import Limits
from s3ac_jax.rollout.server.delivery import Delivery, Made
from s3ac_jax.rollout.server.requests import Handle, Job, check_requests, to_jobs
from s3ac_jax.rollout.server.sinks import (
    BadRequest,
    EngineFailed,
    QueueFull,
    Sink,
    StandsStill,
    Stopped,
)
from s3ac_jax.rollout.server.slot_engine import JetStreamEngine
from s3ac_jax.rollout.server.slots import Slots
from s3ac_jax.rollout.server.store import ParamStore, StoredWeights, WrongFingerprint
from s3ac_jax.rollout.server.threads import firm_future, next_of
from s3ac_jax.rollout.wire import FINISH_NAMES, Requests

# Seconds that `stop` waits for a step of the engine.
_PATIENCE = 1.0


class _Update(NamedTuple):
    """renumber: only the version is new, whatever the weights are by then."""

    weights: StoredWeights
    renumber: bool
    in_flight: bool
    done: Future


class RolloutDriver(orchestrator.Driver):
    """Serves requests from one engine's slots until `stop`; all methods may be called by anyone.

    max_waiting: responses that may wait for a slot. stream_tokens: tokens per piece for sinks that
    stream, after the first.
    Source: JetStream's Driver (google/JetStream, orchestrator.py, 0.2.2); the rest is ours.
    """

    # JetStream's queues, which hold our own jobs and results.
    _prefill_backlog: queue.Queue[Any]
    _detokenize_backlogs: list[queue.Queue[Any]]

    def __init__(
        self,
        engine: JetStreamEngine,
        store: ParamStore,
        *,
        max_waiting: int = 4096,
        stream_tokens: int = 8,
    ):
        slots = engine.max_concurrent_decodes
        self.engine, self.store, self.max_waiting = engine, store, max_waiting
        self.limits = Limits(engine.vocab_size, engine.max_prompt_tokens, engine.cache_tokens)
        self.error: RolloutError | None = None
        self._delivery = Delivery(slots, engine.cache_tokens, stream_tokens, engine.routing_shape)
        self._lock = threading.Lock()
        self._open: dict[int, Job] = {}
        self._waiting_rows = 0
        self._counts: collections.Counter[str] = collections.Counter()
        # What others ask of the generate thread; they put None into its queue to have it look.
        self._updates: collections.deque[_Update] = collections.deque()
        self._cancelled: collections.deque[Job] = collections.deque()
        self._pauses: list[tuple[Future, bool]] = []  # with whether it is to drain
        self._paused: str | None = None
        self._slots = Slots(engine, store)  # the generate thread's own
        super().__init__(generate_engines=[engine], generate_params=[store], interleaved_mode=True)

    # What others call.

    def submit(self, requests: Requests, sink: Sink) -> Handle:
        """A response to each of the B requests, numbered in `sink` as they are in the batch.

        Requests for one prompt share its prefill. A batch is taken whole or not at all.
        Raises BadRequest, QueueFull, WrongFingerprint where the batch is for other weights,
        EngineFailed or Stopped, and has taken nothing then.
        Source: ours.
        """
        try:
            check_requests(requests, self.limits)
            rows = len(requests.prompt_row)
            if rows > self.max_waiting:
                raise BadRequest(
                    f"a batch of {rows} requests never fits in the queue of {self.max_waiting}: "
                    "send it in parts"
                )
            jobs = to_jobs(requests, sink) if rows else []
            version = self._take(jobs, rows, requests.weights_fingerprint)
        except (BadRequest, QueueFull, WrongFingerprint):
            with self._lock:
                self._counts["refused"] += 1
            raise
        return Handle(jobs, self.cancel, version)

    def healthy(self) -> bool:
        """Whether requests are served. Source: ours."""
        return self.live and self.error is None

    def _take(self, jobs: list[Job], rows: int, fingerprint: str) -> int:
        """The version of the weights they are taken under."""
        with self._lock:
            self._check_alive()
            version = self.store.get().version
            if fingerprint:
                self.store.check(version, fingerprint)
            if self._waiting_rows + rows > self.max_waiting:
                raise QueueFull(
                    f"{self._waiting_rows} of at most {self.max_waiting} requests wait: try again "
                    "later"
                )
            self._waiting_rows += rows
            for job in jobs:
                self._open[id(job)] = job
                self.place_request_on_prefill_queue(job)
        return version

    def _check_alive(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)
        if not self.live:
            raise Stopped("the server is stopping")

    def cancel(self, jobs: Iterable[Job]) -> int:
        """Ends these responses as they are, with finish ABORT; how many were open. Source: ours."""
        count = 0
        with self._lock:
            for job in jobs:
                if not job.cancelled and id(job) in self._open:
                    job.cancelled = True
                    self._cancelled.append(job)
                    count += job.left
        if count:
            self._nudge()
        return count

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Ends the responses of these requests, or all; how many there were. Source: ours."""
        wanted = None if request_ids is None else set(request_ids)
        with self._lock:
            jobs = [j for j in self._open.values() if wanted is None or j.request_id in wanted]
        return self.cancel(jobs)

    def update(
        self, params: PyTree | None, version: int, *, in_flight: bool = False, fingerprint: str = ""
    ) -> StoredWeights:
        """As `begin_update`, and waits until the weights are in use. Source: ours."""
        return self.begin_update(
            params, version, in_flight=in_flight, fingerprint=fingerprint
        ).result()

    def begin_update(
        self, params: PyTree | None, version: int, *, in_flight: bool = False, fingerprint: str = ""
    ) -> Future:
        """New weights, or with None only a new version; the future holds them once in use.

        in_flight: from the next step on, in the middle of responses. Otherwise no response begins
        until those in the slots have ended, and no response has tokens of two versions.
        fingerprint: what the weights must have, "" for whatever they have; WrongFingerprint, at
        once, where they do not. The old weights stay in use then.
        Source: ours.
        """
        weights = self.store.ready(params, version, fingerprint)
        done = firm_future()
        with self._lock:
            self._check_alive()
            self._updates.append(_Update(weights, params is None, in_flight, done))
        self._nudge()
        return done

    def pause(self, drain: bool = False) -> None:
        """As `begin_pause`, and waits until it holds. Source: ours."""
        self.begin_pause(drain).result()

    def begin_pause(self, drain: bool = False) -> Future:
        """No token is made until `resume`; the future is done once that is so.

        drain: the responses in the slots are finished first. A server that stands still already
        goes on doing so, and they wait for `resume`, at which the future holds a RolloutError.
        Source: ours.
        """
        done = firm_future()
        with self._lock:
            self._check_alive()
            if self._paused != "freeze":
                self._paused = "drain" if drain else "freeze"
            self._pauses.append((done, drain))
        self._nudge()
        return done

    def resume(self) -> None:
        """Ends a pause. Source: ours."""
        with self._lock:
            self._paused = None
            pauses, self._pauses = self._pauses, []
        for done, _ in pauses:
            done.set_exception(RolloutError("resumed by somebody before the pause held"))
        self._nudge()

    def stats(self) -> dict[str, Any]:
        """Counts and seconds since the start, what waits and runs now, weights and limits.

        Source: ours.
        """
        weights, counts, slots = self.store.get(), self._counts, self._slots
        return {
            "requests": {name: counts[name] for name in (*FINISH_NAMES, "refused", "failed")},
            **{
                name: slots.counts[name]
                for name in ("prompt_tokens", "response_tokens", "steps", "prefills")
            },
            "step_seconds": slots.seconds["step"],
            "prefill_seconds": slots.seconds["prefill"],
            "waiting": self._waiting_rows,
            "slots_busy": int(slots.busy.sum()),
            "slots": len(slots.busy),
            "version": weights.version,
            "fingerprint": weights.fingerprint,
            "paused": self._paused is not None,
            "is_live": self.healthy(),
            "max_waiting": self.max_waiting,
            "max_prompt_tokens": self.limits.max_prompt_tokens,
            "cache_tokens": self.limits.cache_tokens,
        }

    def stop(self) -> None:
        """Fails what is open and ends the threads; later requests are refused.

        A step of the engine that takes longer than a second ends behind our back. Source: ours.
        """
        self._shut(Stopped("the server is stopping"))
        deadline = time.monotonic() + _PATIENCE
        for thread in self._all_threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))

    # What the threads do.

    def _nudge(self) -> None:
        self._prefill_backlog.put(None)

    def _shut(self, error: RolloutError) -> None:
        with self._lock:
            self.live = False
            jobs, self._open = list(self._open.values()), {}
            waits = [update.done for update in self._updates] + [done for done, _ in self._pauses]
            self._updates.clear()
            self._pauses = []
            self._counts["failed"] += sum(job.left for job in jobs)
            self._waiting_rows = 0
        for sink in {id(job.sink): job.sink for job in jobs}.values():
            sink.fail(error)
        for done in waits:
            done.set_exception(error)
        self._nudge()

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """What JetStream answers by killing the process reaches those who wait instead."""
        try:
            work(*args)
        except Exception as error:
            if not self.live:
                return  # the first failure is the one to tell, and after `stop` there is none
            said = " ".join(str(error).split())[:500]
            self.error = EngineFailed(f"engine failed: {type(error).__name__}: {said}")
            self._shut(self.error)

    def _generate_thread(self, idx: int) -> None:
        self._guarded(self._generate)
        self._detokenize_backlogs[idx].put(None)

    def _detokenize_thread(self, idx: int) -> None:
        backlog = self._detokenize_backlogs[idx]
        # To the end, whatever happens: the other thread may wait for room in here.
        while (made := next_of(backlog)) is not None:
            if self.live:
                self._guarded(self._deliver, made)
        self._shut(Stopped("the process ends"))

    def _generate(self) -> None:
        slots = self._slots
        while self.live:
            self._look(wait=self._nothing_to_do())
            if self._cancelled:
                self._end_cancelled()
            self._exchange()
            frozen = self._hold()
            if not (self._paused or self._updates or slots.has_nan):
                began = slots.admit()
                with self._lock:
                    self._waiting_rows = max(self._waiting_rows - began, 0)
            if slots.busy.any() and not frozen:
                self._hand(slots.step())
            elif slots.has_nan and not slots.busy.any():
                slots.renew()

    def _nothing_to_do(self) -> bool:
        slots, paused = self._slots, self._paused
        busy = slots.busy.any()
        told = any(not (drain and busy) for _, drain in self._pauses)
        if self._updates or self._cancelled or told:
            return False
        if busy:
            return paused == "freeze"
        return not slots.has_nan and (not slots.queue or paused is not None)

    def _look(self, wait: bool) -> None:
        """Takes new jobs in; waits for the first, or for a nudge."""
        try:
            job = self._prefill_backlog.get(block=wait)
            while True:
                if job is not None:
                    self._slots.queue.append(job)
                job = self._prefill_backlog.get(block=False)
        except queue.Empty:
            return

    def _end_cancelled(self) -> None:
        jobs = []
        while self._cancelled:
            jobs.append(self._cancelled.popleft())
        # They were queued before they were cancelled, so after this look they are in the slots or
        # in their queue.
        self._look(wait=False)
        made, unbegun = self._slots.cancel(jobs)
        with self._lock:
            self._waiting_rows = max(self._waiting_rows - unbegun, 0)
        self._hand(made)

    def _exchange(self) -> None:
        """Puts new weights in use as soon as they may be."""
        while True:
            with self._lock:
                if not self._updates:
                    return
                weights, renumber, in_flight, done = self._updates[0]
                busy = self._slots.busy.any() and not in_flight
                if busy and self._paused != "freeze":
                    return
                self._updates.popleft()
            if busy:
                done.set_exception(
                    StandsStill(
                        "paused with responses in the slots, which can't end before the update: "
                        "resume, abort them, or update in flight"
                    )
                )
                continue
            if renumber:
                weights = self.store.get()._replace(version=weights.version)
            self.store.set(weights)
            done.set_result(weights)

    def _hold(self) -> bool:
        """Whether to stand still; tells those who wait for it."""
        with self._lock:
            frozen, busy = self._paused == "freeze", self._slots.busy.any()
            still = [done for done, drain in self._pauses if not busy or (frozen and not drain)]
            self._pauses = [pause for pause in self._pauses if pause[0] not in still]
        for done in still:
            done.set_result(None)
        return frozen

    def _hand(self, made: Made) -> None:
        self._detokenize_backlogs[0].put(made)

    def _deliver(self, made: Made) -> None:
        self._delivery.take(made)
        if made.ended:
            with self._lock:
                for end in made.ended:
                    self._counts[FINISH_NAMES[end.finish]] += 1
                    if not end.job.left:
                        self._open.pop(id(end.job), None)
