"""Work spread over several servers that may be slow, busy, paused, restarted or dead.

One loop in the caller's thread decides everything; answers reach it through a queue. Work is cut
into pieces, a server that has finished one takes the next, and the piece of a server that dies
goes to another. A server that was away gets the current weights before it gets work. What ails one
server ends nothing as long as another works.
"""

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.client.fleet_server import Notices, Server, State, Timing, to_stderr
from s3ac_jax.rollout.client.link import Link, Verdict

# How often what is being aborted is named to its server again: the first time may come too early.
_ABORT_AGAIN_S = 0.5
# A server that answered this recently needs no look before it gets work: none restarts so fast.
_RECENT_S = 0.1
# A piece that was with its server for longer was not simply refused.
_AT_WORK_S = 5.0
# `sync` goes on without a server that is there and could not be updated in so many tries.
_SYNC_TRIES = 3
# A server that takes in weights may miss looks; when it misses so many in turn, it is lost.
_MISSED = 3


class _Run:
    """One call's pieces of work. results: None for a piece that an abort left undone.

    failed: the servers that have failed a piece.
    """

    def __init__(self, works: Sequence[Any], costs: Sequence[int]):
        self.works, self.costs = works, costs
        self.waiting = collections.deque(range(len(works)))
        self.results: list[Any] = [None] * len(works)
        self.open = len(works)
        self.tries = [0] * len(works)
        self.failed: list[set[Server]] = [set() for _ in works]
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.progress = time.monotonic()
        self.cut = False
        self.name_again = 0.0


class Fleet:
    """Servers that share the work. max_in_flight: cost of what one of them has at a time.

    notice: gets a line now and then about servers in trouble, and while weights are waited for.
    `run` and `sync` belong to one thread; `abort`, `pause`, `resume`, `close` to any.
    Source: ours; work stealing as in Blumofe 1999 (Scheduling multithreaded computations).
    """

    def __init__(
        self,
        links: Iterable[Link],
        *,
        max_in_flight: int,
        timing: Timing,
        notice: Callable[[str], None] = to_stderr,
    ):
        self.servers = [Server(link) for link in links]
        self.max_in_flight = max_in_flight
        self.timing = timing
        self.counts = dict.fromkeys(("pieces", "retries", "lost_servers", "refreshes"), 0)
        self._notices = Notices(notice, *timing.notice)
        self._run: _Run | None = None
        self._closed = self._paused = False
        self._begun = False  # a call has ended well
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

        Raises RolloutError as `run` does; the first time also when any server refuses them.
        Source: ours.
        """
        for server in self.servers:
            server.lost, server.attempts, server.rest_until = True, 0, 0.0
            if server.state is not State.DOWN:
                server.state = State.UNKNOWN

        def settled() -> bool:
            ready = [server.state is State.READY for server in self.servers]
            away = [
                server.attempts
                >= (1 if server.state in (State.DOWN, State.PAUSED) else _SYNC_TRIES)
                for server in self.servers
            ]
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
            self._begun = True

    def _work(self, run: _Run, finished: Callable[[], bool]) -> None:
        try:
            self._notices.begin(self.servers, time.monotonic())
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
                self._notices.look(self.servers, now, self.timing.patience)
                self._give_up(run, now)
                if not finished():
                    self._listen(run, now)
        finally:
            self._run = None
            for server in self.servers:
                self._recall(server)
                for future in (server.look, server.update):
                    if future is not None:
                        future.cancel()
                        server.state = State.UNKNOWN
                server.look = server.update = None

    def _attend(self, server: Server, run: _Run, now: float) -> None:
        """Starts the look or the update that a server needs next."""
        if now < server.rest_until:
            return
        idle = not server.flying
        if server.update is not None:
            due = now - max(server.heard, server.update_since) > self.timing.beat
        elif server.state is State.READY:
            limit = _RECENT_S if idle and run.waiting else self.timing.beat
            due = now - server.heard > limit and bool(run.waiting or not idle)
        else:
            due = server.state is not State.STALE
        if due and server.look is None:
            if server.state is State.READY and idle:
                server.state = State.UNKNOWN
            server.look = self._ask(server, run, server.link.check)
        elif server.state is State.STALE and server.update is None and server.look is None:
            server.update, server.update_since = self._ask(server, run, server.link.refresh), now
            server.missed = 0

    def _ask(self, server: Server, run: _Run, call: Callable[[], Any]) -> Any:
        future = call()
        future.add_done_callback(lambda future: run.events.put((server, future)))
        return future

    def _hand_out(self, run: _Run, now: float) -> None:
        """Pieces to the servers that have least, while there are pieces and room."""
        kept = 0  # pieces at the front that are better off with a server that has no room yet
        while kept < len(run.waiting):
            number = run.waiting[kept]
            cost, failed = run.costs[number], run.failed[number]
            free = [
                server
                for server in self.servers
                if server.state is State.READY
                and now >= server.rest_until
                and (not server.flying or server.load + cost <= self.max_in_flight)
            ]
            if not free:
                return
            if not (better := [server for server in free if server not in failed]):
                if any(
                    server.state is State.READY and server.flying and server not in failed
                    for server in self.servers
                ):
                    kept += 1
                    continue
                better = free
            server = min(better, key=lambda server: server.load)
            del run.waiting[kept]
            future = self._ask(server, run, lambda s=server, n=number: s.link.send(run.works[n]))
            server.flying[future] = number, now
            server.load += cost
            self.counts["pieces"] += 1

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
            server.update is not None or (server.flying and server.state is not State.PAUSED)
            for server in self.servers
        )
        if waits or self._paused or now - run.progress <= self.timing.patience:
            return
        found = "; ".join(server.says() for server in self.servers)
        raise RolloutError(
            f"no rollout server to be had for {self.timing.patience:g} s ({found}): start one, or "
            "correct the addresses"
        )

    def _listen(self, run: _Run, now: float) -> None:
        """Waits for an answer, or until a server's time has come."""
        times = [server.rest_until for server in self.servers if server.rest_until > now]
        times += [
            max(server.heard, server.update_since) + self.timing.beat
            for server in self.servers
            if (server.update is not None or (server.state is State.READY and server.flying))
            and server.look is None
        ]
        if not all(server.fine() for server in self.servers):
            times.append(now + self.timing.notice[0])
        times.append(run.name_again if run.cut else now + self.timing.patience)
        try:
            event = run.events.get(timeout=max(min(times) - now, 0.01))
            while event or not run.events.empty():
                if event:
                    self._hear(run, *event)
                event = run.events.get_nowait()
        except queue.Empty:
            pass

    def _hear(self, run: _Run, server: Server, future: Any) -> None:
        now = time.monotonic()
        call, number, since = "send", None, now
        if future is server.look:
            call, server.look = "check", None
        elif future is server.update:
            call, server.update = "refresh", None
        elif future in server.flying:
            number, since = server.flying.pop(future)
            server.load -= run.costs[number]
        else:
            return  # it was recalled
        try:
            reply = future.result()
            if call == "refresh":
                server.link.refreshed(reply)
            elif number is not None:
                run.results[number] = server.link.read(run.works[number], reply)
        except Exception as error:
            if number is not None:
                run.waiting.appendleft(number)
                if now - since > _AT_WORK_S:
                    run.progress = now  # it was at work until now
            self._failed(run, server, error, now, call, number)
            return
        server.heard, server.error, server.missed = now, "", 0
        if call == "check":
            self._looked(server, reply)
            return
        # An answer to a look says little about work; after this the next failure is a new one.
        server.delay, run.progress = 0.0, now
        if call == "refresh":
            if server.look is not None:  # it may be of before
                server.look.cancel()
                server.look = None
            self._ready(server)
            self.counts["refreshes"] += 1
        else:
            run.open -= 1

    def _looked(self, server: Server, current: bool | None) -> None:
        if server.update is not None:
            return
        if current or (current is None and not server.lost):
            self._ready(server)
        else:
            server.state = State.STALE

    def _ready(self, server: Server) -> None:
        server.state, server.lost, server.known, server.refused = State.READY, False, True, False

    def _failed(
        self, run: _Run, server: Server, error: Exception, now: float, call: str, number: int | None
    ) -> None:
        if isinstance(error, RolloutError):
            verdict, text, final = Verdict.FATAL, str(error), error
        else:
            verdict, text = server.link.verdict(error, call)
            final = RolloutError(f"{server.link.address}: {text}")
        first, longest = self.timing.retry
        server.error = text
        server.delay = min(max(2 * server.delay, first), longest)
        server.attempts += 1
        if verdict is Verdict.FATAL:
            if call == "send" or not self._spare(server):
                raise final from None
            verdict, server.refused, server.delay = Verdict.DOWN, True, longest
        server.rest_until = now + server.delay
        if call == "check" and server.update is not None:
            server.missed += verdict is Verdict.DOWN
            if server.missed < _MISSED:
                return  # the update itself will say
        if number is not None:
            self.counts["retries"] += 1
            if verdict is not Verdict.BUSY:
                self._tried(run, server, number)
        if verdict is Verdict.DOWN:
            self.counts["lost_servers"] += server.state is not State.DOWN
            server.state, server.lost = State.DOWN, True
            if server.update is not None:
                server.update.cancel()
                server.update = None
            for number in self._recall(server):
                self.counts["retries"] += 1
                run.waiting.appendleft(number)
                self._tried(run, server, number)
        elif verdict is Verdict.PAUSED:
            server.state = State.PAUSED
            if any(other.state is State.READY for other in self.servers):
                back = self._recall(server)
                self.counts["retries"] += len(back)
                run.waiting.extendleft(back)
        elif verdict is Verdict.STALE:
            server.state, server.lost = State.UNKNOWN, True
        elif verdict is Verdict.RETRY and number is None:
            server.state = State.UNKNOWN

    def _spare(self, server: Server) -> bool:
        """Whether one that refuses can be done without: not at first, when all should be right."""
        return self._begun and any(
            other.known and not other.refused for other in self.servers if other is not server
        )

    def _tried(self, run: _Run, server: Server, number: int) -> None:
        run.tries[number] += 1
        run.failed[number].add(server)
        if run.tries[number] >= self.timing.tries:
            raise RolloutError(
                f"a piece of work failed {run.tries[number]} times, last on "
                f"{server.link.address}: {server.error}"
            )

    def _recall(self, server: Server) -> list[int]:
        """Cancels what a server has, and returns which pieces that was."""
        flying, server.flying, server.load = server.flying, {}, 0
        for future in flying:
            future.cancel()
        return [number for number, _ in flying.values()]
