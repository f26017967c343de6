"""Ctrl-C and SIGTERM end a run between two ticks, so that it can save and be resumed."""

import os
import shlex
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Self

from s3ac_jax.core.errors import RunError
from s3ac_jax.parallel import hosts

# Some launchers signal a process and its supervisor, which hands the signal on: that is one wish.
_ONE_WISH_SECONDS = 0.5


def resume_command() -> str:
    """The command that goes on with this run: the one that began it. Source: ours."""
    flags = os.environ.get("XLA_FLAGS")
    prefix = f"XLA_FLAGS={shlex.quote(flags)} " if flags else ""
    return prefix + shlex.join([sys.executable, *sys.argv])


class Interrupted(RunError):
    """The run was asked to stop; the message says what is saved and how to go on.

    Source: ours: exit code 130, as shells report Ctrl-C.
    """

    exit_code = 130
    prefix = ""


class StopRequest:
    """While entered, the first SIGINT or SIGTERM only sets `asked`; a second one ends at once.

    signals: other ones than these two. In a run of several processes a wish to any of them counts
    for all, so they have to look at `asked` in the same places.
    Source: ours: learner arrays are donated inside a tick, so only between ticks is there a state
    to save.
    """

    def __init__(self, *signals: signal.Signals):
        self._wish: float | None = None
        self._signals = signals or (signal.SIGINT, signal.SIGTERM)
        self._before: dict[int, object] = {}

    @property
    def asked(self) -> bool:
        """Whether the run is to end. Source: ours."""
        return hosts.agreed("stop", self._wish is not None)

    def __enter__(self) -> Self:
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._wish is None:
            self._wish = now
        elif hosts.count() == 1 or now - self._wish > _ONE_WISH_SECONDS:
            raise KeyboardInterrupt
