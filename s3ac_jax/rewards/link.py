"""The pipes to one grading process, and its end."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import weakref
from typing import Any

_START_SECONDS = 180.0
_END_SECONDS = 5.0
_CHUNK = 1 << 16


class Lost(Exception):
    """The grading process is gone or does not answer. Source: ours."""


class Link:
    """A running supervisor. It is ended with this object at the latest, and with the interpreter.

    Source: ours.
    """

    def __init__(self, workers: int, deadline: float):
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        command = [sys.executable, "-m", "s3ac_jax.rewards.supervisor", str(workers), str(deadline)]
        self.process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            bufsize=0,
        )
        self._end = weakref.finalize(self, _end, self.process, os.getpid())
        self._buffer = b""
        self._missing: str | None = None

    def ready(self) -> str:
        """Waits until it can grade; why it can't do algebra, or "". Source: ours."""
        if self._missing is None:
            self._missing = str(self.receive(_START_SECONDS).get("missing", ""))
        return self._missing

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message; raises Lost. Source: ours."""
        stdin = self.process.stdin
        assert stdin is not None
        data = memoryview((json.dumps(message) + "\n").encode())
        try:
            while data:
                data = data[stdin.write(data) or 0 :]
        except (OSError, ValueError) as error:
            raise Lost from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message; raises Lost at the end, for nonsense, and after `seconds`.

        Source: ours.
        """
        stdout = self.process.stdout
        assert stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            poll = select.poll()  # select() itself fails on descriptors above 1023
            poll.register(stdout, select.POLLIN | select.POLLHUP)
            if left <= 0 or not poll.poll(1000 * left):
                raise Lost
            data = os.read(stdout.fileno(), _CHUNK)
            if not data:
                raise Lost
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise Lost from error
        if not isinstance(message, dict):
            raise Lost
        return message

    def end(self) -> None:
        """Ends the process and waits for it; twice is fine. Source: ours."""
        self._end()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the trainer has a copy of this object, not the process
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
