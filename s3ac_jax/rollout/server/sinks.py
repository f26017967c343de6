"""Where a driver puts what it made: for threads and for asyncio, and what may go wrong instead."""

import asyncio
import collections
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float32, Int16, Int32

from s3ac_jax.rollout.backend import RolloutError


class BadRequest(RolloutError):
    """A request that no retry makes right; the message says what and which limit.

    Source: ours.
    """


class QueueFull(RolloutError):
    """As many requests wait as may; a later retry is welcome. Source: ours."""


class EngineFailed(RolloutError):
    """The engine raised and no request of this server can be served any more. Source: ours."""


class StandsStill(RolloutError):
    """Somebody has paused the server, and what was asked can't be until `resume`. Source: ours."""


class Stopped(RolloutError):
    """The server is going down or is down. Source: ours."""


class Piece(NamedTuple):
    """Some tokens of a response, in order; all of them where a sink does not stream.

    logp: nats. version: of the weights behind each token. finish: STOP, LENGTH or ABORT of
    `rollout.wire` in the last piece of a response, which may have no tokens, else None.
    routing: experts of prompt and response, in the last piece and where recorded.
    Source: ours.
    """

    tokens: Int32[np.ndarray, "N"]
    logp: Float32[np.ndarray, "N"]
    version: Int32[np.ndarray, "N"]
    finish: int | None
    routing: Int16[np.ndarray, "M L k"] | None = None


class Sink(Protocol):
    """Takes the responses of one submission, which are numbered from 0, from the driver's thread.

    streams: pieces as they are made; otherwise one piece per response, when it has ended.
    Neither method may block or raise.
    Source: ours.
    """

    streams: bool

    def put(self, sample: int, piece: Piece) -> None:
        """A piece of response `sample`. Source: ours."""
        ...

    def fail(self, error: RolloutError) -> None:
        """Nothing more will come, of no response. Source: ours."""
        ...


class WholeSink:
    """Collects `count` whole responses; `done`, where given, is called once after the last.

    Source: ours.
    """

    streams = False

    def __init__(self, count: int, done: Callable[[], None] | None = None):
        self._pieces: dict[int, Piece] = {}
        self._count, self._done = count, done
        self._error: RolloutError | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        if not count:
            self._end(None)

    def put(self, sample: int, piece: Piece) -> None:
        """Response `sample`. Source: ours."""
        self._pieces[sample] = piece
        if len(self._pieces) == self._count:
            self._end(None)

    def fail(self, error: RolloutError) -> None:
        """What `result` raises. Source: ours."""
        self._end(error)

    def _end(self, error: RolloutError | None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
        if self._done is not None:
            self._done()

    def result(self, timeout: float | None = None) -> list[Piece]:
        """All responses, in order, once they are there.

        Raises the error that ended them, or TimeoutError after `timeout` seconds.
        Source: ours.
        """
        if not self._ended.wait(timeout):
            missing = self._count - len(self._pieces)
            raise TimeoutError(f"{missing} responses are missing after {timeout} s")
        if self._error is not None:
            raise self._error.with_traceback(None)
        return [self._pieces[sample] for sample in range(self._count)]


class AsyncSink:
    """Pieces for a coroutine, which asks with `ready` until all `count` responses have ended.

    Made in the loop that reads it. A loop that is closed meanwhile has nobody who waits.
    Source: ours.
    """

    def __init__(self, count: int = 1, *, streams: bool = True):
        self.streams = streams
        self._loop = asyncio.get_running_loop()
        self._pieces: collections.deque[tuple[int, Piece] | RolloutError] = collections.deque()
        self._some = asyncio.Event()
        self._asked = False
        self._left = count

    def put(self, sample: int, piece: Piece) -> None:
        """A piece of response `sample`, from any thread. Source: ours."""
        self._pieces.append((sample, piece))
        self._wake()

    def fail(self, error: RolloutError) -> None:
        """What the reader gets raised, after all pieces before it. Source: ours."""
        self._pieces.append(error)
        self._wake()

    def _wake(self) -> None:
        # One call into the loop per look of the reader, however many pieces come meanwhile.
        if not self._asked:
            self._asked = True
            try:
                self._loop.call_soon_threadsafe(self._some.set)
            except RuntimeError:
                return

    async def ready(self) -> list[tuple[int, Piece]]:
        """All pieces that came since the last look, waiting for the first; empty after the last.

        Raises the error that ended them.
        Source: ours.
        """
        found: list[tuple[int, Piece]] = []
        while self._left and not found:
            await self._some.wait()
            self._some.clear()
            # From here on a new piece wakes again; those before it are read below.
            self._asked = False
            while self._pieces:
                head = self._pieces.popleft()
                if isinstance(head, RolloutError):
                    if not found:
                        raise head.with_traceback(None)
                    self._pieces.appendleft(head)
                    self._some.set()
                    break
                found.append(head)
                self._left -= head[1].finish is not None
        return found
