"""Work spread over several servers that may be slow, busy, restarted or dead.

One loop in the caller's thread decides everything; answers reach it through a queue. Work is cut
into pieces, a server that has finished one takes the next, and the piece of a server that dies
goes to another. A server that was away gets the current weights before it gets work.
"""

import collections
import dataclasses
import enum
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from s3ac_jax.rollout.backend import RolloutError

# How often what is being aborted is named to its server again: the first time may come too early.
_ABORT_AGAIN_S = 0.5
# A server that answered this recently needs no look before it gets work: none restarts so fast.
_RECENT_S = 0.1
# A piece that was with its server for longer was not simply refused.
_AT_WORK_S = 5.0


class Verdict(enum.Enum):
    """What a failed call means: ask again later; try again; the server is lost; give up.

    Source: ours.
    """

    BUSY = enum.auto()
    RETRY = enum.auto()
    DOWN = enum.auto()
    FATAL = enum.auto()


class Link(Protocol):
    """The way to one server. Futures are grpc's or concurrent.futures'.

    Source: ours.
    """

    address: str

    def check(self) -> Any:
        """Future of whether the server has the current weights; None when it can't tell."""
        ...

    def refresh(self) -> Any:
        """Future of giving the server the current weights."""
        ...

    def refreshed(self, reply: Any) -> None:
        """Looks at what `refresh` came to; RolloutError when it is not as it should be."""
        ...

    def send(self, work: Any) -> Any:
        """Future of the server's answer to a piece of work."""
        ...

    def read(self, work: Any, reply: Any) -> Any:
        """The result in an answer; RolloutError when it is not as it should be."""
        ...

    def abort(self, works: list[Any]) -> None:
        """Asks the server to answer these with what there is; does not wait."""
        ...

    def verdict(self, error: Exception) -> tuple[Verdict, str]:
        """What an error of one of the futures means, and a line that says it."""
        ...


class _State(enum.Enum):
    UNKNOWN = enum.auto()  # to be looked at
    STALE = enum.auto()  # there, without the current weights
    READY = enum.auto()
    DOWN = enum.auto()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds. patience: without any progress before a call is given up. retry: first and longest
    wait for a server that is busy or lost. beat: between looks at a server that is at work.

    tries: of one piece of work on servers that fail it.
    Source: ours.
    """

    patience: float = 300.0
    retry: tuple[float, float] = (0.2, 10.0)
    beat: float = 15.0
    tries: int = 10


@dataclasses.dataclass(eq=False)
class _Server:
    link: Link
    state: _State = _State.UNKNOWN
    lost: bool = True  # its weights can't be relied on
    flying: dict[Any, tuple[int, float]] = dataclasses.field(default_factory=dict)
    load: int = 0
    asked: tuple[str, Any] | None = None  # a look or a refresh under way
    rest_until: float = 0.0
    delay: float = 0.0
    heard: float = -1e9
    error: str = "not tried yet"
    attempts: int = 0


class _Run:
    """One call's pieces of work. results: None for a piece that an abort left undone."""

    def __init__(self, works: Sequence[Any], costs: Sequence[int]):
        self.works, self.costs = works, costs
        self.waiting = collections.deque(range(len(works)))
        self.results: list[Any] = [None] * len(works)
        self.open = len(works)
        self.tries = [0] * len(works)
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.progress = time.monotonic()
        self.cut = False
        self.name_again = 0.0


class Fleet:
    """Servers that share the work. max_in_flight: cost of what one of them has at a time.

    `run` and `sync` belong to one thread; `abort`, `pause`, `resume`, `close` to any.
    Source: ours; work stealing as in Blumofe 1999 (Scheduling multithreaded computations).
    """

    def __init__(self, links: Iterable[Link], *, max_in_flight: int, timing: Timing):
        self.servers = [_Server(link) for link in links]
        self.max_in_flight = max_in_flight
        self.timing = timing
        self.counts = dict.fromkeys(("pieces", "retries", "lost_servers", "refreshes"), 0)
        self._run: _Run | None = None
        self._closed = False
        self._paused = False
        self._one = threading.Lock()

    def run(self, works: Sequence[Any], costs: Sequence[int]) -> list[Any]:
        """The result of every piece, in order; None for those that an abort left undone.

        Raises RolloutError when a server refuses a piece, when none can be reached for
        `timing.patience` seconds, and when the fleet is closed.
        Source: ours.
        """
        run = _Run(works, costs)
        self._loop(run, lambda: run.open == 0)
        return run.results

    def sync(self) -> None:
        """Brings the current weights to every server that can be reached, at least to one.

        Raises RolloutError as `run` does.
        Source: ours.
        """
        for server in self.servers:
            server.lost, server.attempts, server.rest_until = True, 0, 0.0
            if server.state is not _State.DOWN:
                server.state = _State.UNKNOWN

        def settled() -> bool:
            ready = [server.state is _State.READY for server in self.servers]
            away = [server.state is _State.DOWN and server.attempts for server in self.servers]
            return any(ready) and all(a or b for a, b in zip(ready, away, strict=True))

        self._loop(_Run((), ()), settled)

    def abort(self) -> None:
        """Ends a `run` in progress; its servers answer with what there is. Source: ours."""
        if run := self._run:
            run.cut = True
            run.events.put(None)

    def pause(self) -> None:
        """Nothing more is sent until `resume`. Source: ours."""
        self._paused = True

    def resume(self) -> None:
        """Ends a pause. Source: ours."""
        self._paused = False
        if run := self._run:
            run.progress = time.monotonic()
            run.events.put(None)

    def close(self) -> None:
        """Ends a `run` in progress with RolloutError; there is none after it. Source: ours."""
        self._closed = True
        if run := self._run:
            run.events.put(None)
            # Its calls are cancelled before the connections they need are closed.
            if self._one.acquire(timeout=5):
                self._one.release()

    def _loop(self, run: _Run, finished: Callable[[], bool]) -> None:
        with self._one:
            self._run = run
            self._work(run, finished)

    def _work(self, run: _Run, finished: Callable[[], bool]) -> None:
        try:
            while not finished():
                if self._closed:
                    raise RolloutError("the connection to the rollout servers was closed")
                now = time.monotonic()
                for server in self.servers:
                    self._attend(server, run, now)
                if run.cut:
                    self._cut(run, now)
                elif not self._paused:
                    self._hand_out(run, now)
                self._give_up(run, now)
                if not finished():
                    self._listen(run, now)
        finally:
            self._run = None
            for server in self.servers:
                self._recall(server)
                if server.asked:
                    server.asked[1].cancel()
                    server.asked, server.state = None, _State.UNKNOWN

    def _attend(self, server: _Server, run: _Run, now: float) -> None:
        """Starts the look or the refresh that a server needs next."""
        if server.asked or now < server.rest_until:
            return
        idle = not server.flying
        if server.state is _State.READY:
            limit = _RECENT_S if idle and run.waiting else self.timing.beat
            if now - server.heard > limit and (run.waiting or not idle):
                if idle:
                    server.state = _State.UNKNOWN
                self._ask(server, run, "check", server.link.check)
        elif server.state is _State.STALE:
            self._ask(server, run, "refresh", server.link.refresh)
        else:
            self._ask(server, run, "check", server.link.check)

    def _ask(self, server: _Server, run: _Run, what: str, call: Callable[[], Any]) -> None:
        future = call()
        server.asked = what, future
        future.add_done_callback(lambda future: run.events.put((server, future)))

    def _hand_out(self, run: _Run, now: float) -> None:
        """Pieces to the servers that have least, while there are pieces and room."""
        while run.waiting:
            number = run.waiting[0]
            cost = run.costs[number]
            free = [
                server
                for server in self.servers
                if server.state is _State.READY
                and now >= server.rest_until
                and (not server.flying or server.load + cost <= self.max_in_flight)
            ]
            if not free:
                return
            server = min(free, key=lambda server: server.load)
            run.waiting.popleft()
            future = server.link.send(run.works[number])
            server.flying[future] = number, now
            server.load += cost
            self.counts["pieces"] += 1
            future.add_done_callback(lambda future, server=server: run.events.put((server, future)))

    def _cut(self, run: _Run, now: float) -> None:
        run.open -= len(run.waiting)
        run.waiting.clear()
        if now < run.name_again:
            return
        run.name_again = now + _ABORT_AGAIN_S
        for server in self.servers:
            if server.flying:
                server.link.abort([run.works[number] for number, _ in server.flying.values()])

    def _give_up(self, run: _Run, now: float) -> None:
        """RolloutError when nothing is under way and nothing has come of it for too long."""
        waits = any(
            server.flying or (server.asked and server.asked[0] == "refresh")
            for server in self.servers
        )
        if waits or self._paused or now - run.progress <= self.timing.patience:
            return
        found = "; ".join(f"{server.link.address}: {server.error}" for server in self.servers)
        raise RolloutError(
            f"no rollout server to be had for {self.timing.patience:g} s ({found}): start one, or "
            "correct the addresses"
        )

    def _listen(self, run: _Run, now: float) -> None:
        """Waits for an answer, or until a server's time has come."""
        times = [server.rest_until for server in self.servers if server.rest_until > now]
        times += [
            server.heard + self.timing.beat
            for server in self.servers
            if server.state is _State.READY and server.flying and not server.asked
        ]
        times.append(run.name_again if run.cut else now + self.timing.patience)
        try:
            event = run.events.get(timeout=max(min(times) - now, 0.01))
            while event or not run.events.empty():
                if event:
                    self._hear(run, *event)
                event = run.events.get_nowait()
        except queue.Empty:
            pass

    def _hear(self, run: _Run, server: _Server, future: Any) -> None:
        now = time.monotonic()
        if server.asked and server.asked[1] is future:
            what, server.asked = server.asked[0], None
            try:
                reply = future.result()
                if what == "refresh":
                    server.link.refreshed(reply)
            except RolloutError:
                raise
            except Exception as error:
                self._failed(run, server, error, now)
                return
            self._heard(server, now)
            if what == "refresh":
                server.state, server.lost, run.progress = _State.READY, False, now
                self.counts["refreshes"] += 1
            else:
                current = reply if reply is not None else not server.lost
                server.state = _State.READY if current else _State.STALE
                server.lost = server.lost and not current
        elif future in server.flying:
            number, since = server.flying.pop(future)
            server.load -= run.costs[number]
            try:
                run.results[number] = server.link.read(run.works[number], future.result())
            except RolloutError:
                raise
            except Exception as error:
                run.waiting.appendleft(number)
                if now - since > _AT_WORK_S:
                    run.progress = now  # it was at work until now
                self._failed(run, server, error, now, number)
                return
            self._heard(server, now)
            run.open -= 1
            run.progress = now

    def _heard(self, server: _Server, now: float) -> None:
        server.heard, server.delay, server.error = now, 0.0, "answers"

    def _failed(
        self, run: _Run, server: _Server, error: Exception, now: float, number: int | None = None
    ) -> None:
        verdict, server.error = server.link.verdict(error)
        if verdict is Verdict.FATAL:
            raise RolloutError(f"{server.link.address}: {server.error}")
        first, longest = self.timing.retry
        server.delay = min(max(2 * server.delay, first), longest)
        server.rest_until = now + server.delay
        if number is not None:
            self.counts["retries"] += 1
            if verdict is not Verdict.BUSY:
                self._tried(run, server, number)
        if verdict is Verdict.DOWN:
            server.attempts += 1
            if server.state is not _State.DOWN:
                self.counts["lost_servers"] += 1
            server.state, server.lost = _State.DOWN, True
            for number in self._recall(server):
                self.counts["retries"] += 1
                run.waiting.appendleft(number)
                self._tried(run, server, number)
        elif verdict is Verdict.RETRY and number is None:
            server.state = _State.UNKNOWN

    def _tried(self, run: _Run, server: _Server, number: int) -> None:
        run.tries[number] += 1
        if run.tries[number] >= self.timing.tries:
            raise RolloutError(
                f"a piece of work failed {run.tries[number]} times, last on "
                f"{server.link.address}: {server.error}"
            )

    def _recall(self, server: _Server) -> list[int]:
        """Cancels what a server has, and returns which pieces that was."""
        flying, server.flying, server.load = server.flying, {}, 0
        for future in flying:
            future.cancel()
        return [number for number, _ in flying.values()]
