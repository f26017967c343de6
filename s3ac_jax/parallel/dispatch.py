"""Programs of several threads on the same devices, handed to all of them in one order."""

import threading
from collections.abc import Callable
from typing import Any

# Of the whole process: programs that share devices must share it.
_turn = threading.RLock()


class InOrder:
    """A compiled program that is handed to its devices while no other such program is.

    Two programs with collectives, handed over by two threads, might come in one order on one
    device and in another on the next, and then each waits for the other. Only handing over is
    waited for, not the program.
    Source: ours.
    """

    def __init__(self, program: Callable[..., Any]):
        self.program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the program gives. Source: ours."""
        with _turn:
            return self.program(*args, **kwargs)


def in_order(program: Any) -> Any:
    """The program as InOrder; what is one already, or no program, as it is. Source: ours."""
    wrapped = isinstance(program, InOrder) or not callable(program)
    return program if wrapped else InOrder(program)
