"""Ctrl-C and SIGTERM end a run between two ticks, so that it can save and be resumed."""

import signal
from types import FrameType, TracebackType
from typing import Self

from s3ac_jax.core.errors import RunError


class Interrupted(RunError):
    """The run was asked to stop; the message says what is saved and how to go on.

    Source: ours: exit code 130, as shells report Ctrl-C.
    """

    exit_code = 130
    prefix = ""


class StopRequest:
    """While entered, the first SIGINT or SIGTERM only sets `asked`; a second one ends at once.

    signals: other ones than these two.
    Source: ours: learner arrays are donated inside a tick, so only between ticks is there a state
    to save.
    """

    def __init__(self, *signals: signal.Signals):
        self.asked = False
        self._signals = signals or (signal.SIGINT, signal.SIGTERM)
        self._before: dict[int, object] = {}

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
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
