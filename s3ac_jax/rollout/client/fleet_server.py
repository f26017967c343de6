"""What a fleet remembers of each server, and what it tells people about those in trouble."""

import dataclasses
import enum
import sys
from collections.abc import Callable, Sequence
from typing import Any

from s3ac_jax.rollout.client.link import Link

# Between two lines about servers that the rest of the fleet does without, at most.
_SELDOM_S = 600.0


class State(enum.Enum):
    """UNKNOWN: to be looked at. STALE: there, without the current weights. PAUSED: by others.

    Source: ours.
    """

    UNKNOWN = enum.auto()
    STALE = enum.auto()
    READY = enum.auto()
    PAUSED = enum.auto()
    DOWN = enum.auto()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds. patience: without any progress before a call is given up. retry: first and longest
    wait for a server that is busy or lost. beat: between looks at a server that is at work.
    notice: before a person is told of a server in trouble, and until told again.

    tries: of one piece of work on servers that fail it.
    Source: ours.
    """

    patience: float = 300.0
    retry: tuple[float, float] = (0.2, 10.0)
    beat: float = 15.0
    notice: tuple[float, float] = (3.0, 30.0)
    tries: int = 10


@dataclasses.dataclass(eq=False)
class Server:
    """One server. flying: futures of its pieces of work -> number and start of each.

    look, update: a check or a refresh under way. lost: its weights can't be relied on. known: it
    has worked before. refused: it is there and does not want to. fine_at: when it last was as it
    should be.
    Source: ours.
    """

    link: Link
    state: State = State.UNKNOWN
    lost: bool = True
    known: bool = False
    refused: bool = False
    flying: dict[Any, tuple[int, float]] = dataclasses.field(default_factory=dict)
    load: int = 0
    look: Any = None
    update: Any = None
    update_since: float = 0.0
    rest_until: float = 0.0
    delay: float = 0.0
    heard: float = 0.0
    fine_at: float = 0.0
    error: str = ""
    attempts: int = 0
    missed: int = 0

    def says(self) -> str:
        """Address and state, for people. Source: ours."""
        said = self.error or ("answers" if self.heard > 0 else "no answer yet")
        if self.update is not None:
            said = "takes in the weights" + (f" ({self.error})" if self.error else "")
        return f"{self.link.address}: {said}"

    def fine(self) -> bool:
        """Whether it works, or would. Source: ours."""
        return self.state is State.READY and bool(self.flying or not self.error)


def to_stderr(line: str) -> None:
    """Shows a line to whoever sits at the console. Source: ours."""
    print(line, file=sys.stderr, flush=True)


class Notices:
    """Tells people which servers are in trouble, soon and then now and then.

    say: takes a line. after: seconds of trouble before it is worth one. every: seconds between
    lines while nothing goes on; between those about servers that the others replace it doubles.
    Source: ours.
    """

    def __init__(self, say: Callable[[str], None], after: float, every: float):
        self._say, self._after, self._every = say, after, every
        self._named: set[str] = set()
        self._again, self._pause = 0.0, every

    def begin(self, servers: Sequence[Server], now: float) -> None:
        """A call begins: what happened between calls is nobody's trouble. Source: ours."""
        for server in servers:
            if server.state not in (State.DOWN, State.PAUSED):
                server.fine_at = now

    def look(self, servers: Sequence[Server], now: float, patience: float) -> None:
        """Says what there is to say. Source: ours."""
        bad = []
        for server in servers:
            if server.fine():
                server.fine_at = now
                if server.link.address in self._named:
                    self._named.discard(server.link.address)
                    self._say(f"rollout server {server.link.address} is there again")
            elif now - server.fine_at > self._after:
                bad.append(server)
        names = {server.link.address for server in bad}
        stuck = not any(server.fine() for server in servers)
        if not bad or (names <= self._named and now < self._again):
            return
        if stuck or not names <= self._named:
            self._pause = self._every
        else:
            self._pause = min(2 * self._pause, max(_SELDOM_S, self._every))
        self._again = now + self._pause
        self._named |= names
        found = "; ".join(f"{server.says()} (for {now - server.fine_at:.0f} s)" for server in bad)
        if stuck:
            # A server that takes in weights has a limit of its own.
            limit = (
                "" if any(one.update is not None for one in bad) else f" ({patience:g} s at most)"
            )
            self._say(f"waiting for a rollout server{limit}: {found}")
        else:
            self._say(f"rollouts go on without some servers: {found}")
