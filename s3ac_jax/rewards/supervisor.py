"""The grading process: forks workers, ends those that take too long, forks new ones.

  python -m s3ac_jax.rewards.supervisor WORKERS DEADLINE_SECONDS PARENT_PID

Started by pool.GraderPool, one per pool. It has one thread and nothing of jax in it, so forking is
safe and cheap. Lines of JSON in and out; it ends when its input does, or when its parent is gone.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import sys
import time
from collections import deque
from typing import Any

from s3ac_jax.rewards import workers

# Wall time is the second bound, for a worker that waits instead of computing. Five times the CPU
# time: on two cores with four busy processes, three times it ended a worker before its CPU limit.
WALL = 5.0
# A user's module may import a lot before its first item.
IMPORT_SECONDS = 60.0
# Caches and fragmentation of sympy end with the worker.
ITEMS_PER_WORKER = 1000
_CHUNK = 1 << 16


@dataclasses.dataclass
class _Worker:
    """One child. pid, the pipe to it, the pipe from it, and the item that it has."""

    pid: int
    to: int
    source: int
    item: dict[str, Any] | None = None
    until: float = 0.0
    served: int = 0
    ended: bool = False
    kinds: set[str] = dataclasses.field(default_factory=set)
    buffer: bytes = b""


class Supervisor:
    """Keeps `count` workers at work until its input ends. Source: ours."""

    def __init__(self, count: int, deadline: float, source: int, target: int):
        self.count, self.deadline, self.source, self.target = count, deadline, source, target
        self.waiting: deque[dict[str, Any]] = deque()
        self.workers: list[_Worker] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(source, selectors.EVENT_READ)
        self.buffer = b""

    def run(self, parent: int, missing: str) -> None:
        """Serves until the input ends or the parent does. missing: why there is no algebra.

        Source: ours.
        """
        self._say({"ready": True, "missing": missing})
        try:
            while os.getppid() == parent:
                for key, _ in self.selector.select(self._patience()):
                    if key.fd != self.source:
                        self._hear(key.data)
                    elif not self._listen():
                        return
                self._end_late()
                self._hand_out()
        finally:
            for worker in list(self.workers):
                self._bury(worker)

    def _patience(self) -> float:
        ends = [worker.until for worker in self.workers if worker.item]
        return max(0.0, min([time.monotonic() + 1.0, *ends]) - time.monotonic())

    def _listen(self) -> bool:
        """Takes what came from the trainer; False at its end."""
        data = os.read(self.source, _CHUNK)
        if not data:
            return False
        *lines, self.buffer = (self.buffer + data).split(b"\n") if b"\n" in data else (
            [self.buffer + data]
        )  # fmt: skip
        self.waiting.extend(json.loads(line) for line in lines)
        return True

    def _hand_out(self) -> None:
        while self.waiting:
            worker = next((worker for worker in self.workers if worker.item is None), None)
            if worker is None:
                if len(self.workers) >= self.count:
                    return
                worker = self._fork()
            item = self.waiting.popleft()
            worker.item = item
            worker.until = time.monotonic() + WALL * self.deadline
            if ":" in item["kind"] and item["kind"] not in worker.kinds:
                worker.until += IMPORT_SECONDS
                worker.kinds.add(item["kind"])
            # A worker that died a moment ago is met in _hear.
            with contextlib.suppress(BrokenPipeError):
                _write(worker.to, (json.dumps(item) + "\n").encode())

    def _fork(self) -> _Worker:
        (inner, to), (source, outer) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for other in self.workers:
                    os.close(other.to)
                    os.close(other.source)
                for fd in (to, source, self.source, self.target):
                    os.close(fd)
                workers.serve(inner, outer, self.deadline)
                code = 0
            finally:
                os._exit(code)
        os.close(inner)
        os.close(outer)
        worker = _Worker(pid, to, source)
        self.workers.append(worker)
        self.selector.register(source, selectors.EVENT_READ, worker)
        return worker

    def _hear(self, worker: _Worker) -> None:
        """A verdict, or the end of a worker."""
        if worker not in self.workers:
            return
        data = os.read(worker.source, _CHUNK)
        if not data:
            self._died(worker, self._bury(worker))
            return
        worker.buffer += data
        if not worker.buffer.endswith(b"\n"):
            return
        item, worker.item = worker.item, None
        line, worker.buffer = worker.buffer, b""
        if item is not None:
            self._say(_checked(line, item["id"]))
        worker.served += 1
        if worker.served >= ITEMS_PER_WORKER:
            self._bury(worker)

    def _died(self, worker: _Worker, status: int) -> None:
        """An item whose worker someone else ended gets a second one, then it counts as wrong."""
        item = worker.item
        if item is None:
            return
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            self._say(_unjudged(item, "deadline", self.deadline))
        elif item.get("again"):
            self._say(_unjudged(item, "died", 0.0))
        else:
            self.waiting.appendleft({**item, "again": True})

    def _end_late(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers):
            if worker.item is not None and worker.until <= now:
                item = worker.item
                self._bury(worker)
                self._say(_unjudged(item, "deadline", WALL * self.deadline))

    def _bury(self, worker: _Worker) -> int:
        """Ends a worker for good and returns its exit status."""
        self.workers.remove(worker)
        self.selector.unregister(worker.source)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        os.close(worker.to)
        os.close(worker.source)
        return os.waitpid(worker.pid, 0)[1]

    def _say(self, message: dict[str, Any]) -> None:
        _write(self.target, (json.dumps(message) + "\n").encode())


def _unjudged(item: dict[str, Any], reason: str, seconds: float) -> dict[str, Any]:
    return {"id": item["id"], "correct": False, "reason": reason, "seconds": seconds}


def _checked(line: bytes, number: int) -> dict[str, Any]:
    """A worker's line, if it is one: a process that has read model output is not believed."""
    try:
        reply = json.loads(line)
        if reply["id"] == number:
            return reply
    except (ValueError, KeyError, TypeError):
        pass
    return {"id": number, "correct": False, "reason": "error", "seconds": 0.0}


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def main(arguments: list[str]) -> None:
    """Runs a supervisor on standard input and output. Source: ours."""
    count, deadline, parent = int(arguments[0]), float(arguments[1]), int(arguments[2])
    # What a user's grader prints must not stand between two verdicts.
    target = os.dup(1)
    os.dup2(2, 1)
    source = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    algebra = ""
    try:
        # Once, before any fork: the import and the first expressions take over a second.
        from s3ac_jax.rewards.algebra import warm

        warm()
    except ImportError as error:
        algebra = str(error)
    with contextlib.suppress(BrokenPipeError):
        Supervisor(count, deadline, source, target).run(parent, algebra)


if __name__ == "__main__":
    main(sys.argv[1:])
