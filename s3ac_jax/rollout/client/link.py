"""What a fleet asks of the connection to one server, and what a failed call means."""

import enum
import time
from collections.abc import Callable
from typing import Any, Protocol

from s3ac_jax.rollout.backend import RolloutError

# Between two looks for a first server.
_AGAIN_S = 1.0


class Verdict(enum.Enum):
    """What a failed call means.

    BUSY: ask again later. RETRY: try again. STALE: the server has other weights than it should.
    PAUSED: it stands still, and not for us. DOWN: it is lost. FATAL: it will not do it.
    Source: ours.
    """

    BUSY = enum.auto()
    RETRY = enum.auto()
    STALE = enum.auto()
    PAUSED = enum.auto()
    DOWN = enum.auto()
    FATAL = enum.auto()


class CallFailed(Exception):
    """A call that failed, and what that means. Source: ours."""

    def __init__(self, verdict: Verdict, text: str):
        super().__init__(text)
        self.verdict = verdict


class Link(Protocol):
    """The way to one server. Futures are grpc's or concurrent.futures'.

    They, and `read` and `refreshed`, raise whatever `verdict` understands, or a RolloutError, which
    is FATAL.
    Source: ours.
    """

    address: str

    def check(self) -> Any:
        """Future of whether the server has the current weights; None when it can't tell.

        May be asked while `refresh` is under way.
        """
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

    def verdict(self, error: Exception, call: str) -> tuple[Verdict, str]:
        """What an error of "check", "refresh" or "send" means, and a line that says it."""
        ...


def raise_refusals(what: str, answers: dict[str, Any]) -> list[str]:
    """RolloutError naming the servers that were there and would not `what`.

    answers: what each address said, a CallFailed where it failed. Returns a line for each of those
    that could not be reached.
    Source: ours.
    """
    faults = {name: found for name, found in answers.items() if isinstance(found, CallFailed)}
    refused = [
        f"{name}: {fault}" for name, fault in faults.items() if fault.verdict is not Verdict.DOWN
    ]
    if refused:
        raise RolloutError(f"rollout servers that did not {what} ({'; '.join(refused)})")
    return [f"{name} did not {what}: {fault}" for name, fault in faults.items()]


def shown(answers: dict[str, Any]) -> dict[str, Any]:
    """The same with {"error": line} for a CallFailed. Source: ours."""
    return {
        name: {"error": str(found)} if isinstance(found, CallFailed) else found
        for name, found in answers.items()
    }


def first_answers(
    what: str,
    ask: Callable[[], dict[str, Any]],
    patience: float,
    notice: Callable[[str], None],
) -> dict[str, Any]:
    """What those servers answer that are there, as soon as one is.

    ask: one call to every server, as for `raise_refusals`. patience: seconds. notice: is told once
    that somebody waits.
    Raises RolloutError when one would not `what`, or none is to be had. Source: ours.
    """
    began, told = time.monotonic(), False
    while True:
        answers = ask()
        for name, found in answers.items():
            if isinstance(found, CallFailed) and found.verdict is Verdict.BUSY:
                answers[name] = CallFailed(Verdict.DOWN, str(found))
        away = raise_refusals(what, answers)
        found = {
            name: answer for name, answer in answers.items() if not isinstance(answer, CallFailed)
        }
        if found:
            return found
        if time.monotonic() - began > patience:
            raise RolloutError(
                f"no rollout server to be had for {patience:g} s ({'; '.join(away)}): start "
                "one, or correct the addresses"
            )
        if not told:
            notice(f"waiting for a rollout server ({patience:g} s at most): {'; '.join(away)}")
            told = True
        time.sleep(min(_AGAIN_S, patience))
