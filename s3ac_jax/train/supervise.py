"""The process above one of several: it waits, and says in one line how that one ended.

When a process of a run is lost, jax ends the others from within C++, where no line of Python runs
any more. So the run is a child of a process that never uses a device. Neither outlives the other:
the child ends when the pipe that its supervisor holds is closed.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.core.errors import RunError
from s3ac_jax.io.damage import committed_steps
from s3ac_jax.parallel.hosts import HostError
from s3ac_jax.train.interrupt import Interrupted, resume_command

_PIPES = "S3AC_JAX_SUPERVISOR"
# From here on jax's coordination tells why it ends the process, at length and with a stack.
_LAST_WORDS = re.compile(rb"[EF]\d{4} [\d:.]+ +\d+ (coordination_service|client\.h)")
_LOST = re.compile(r"stopped sending heartbeats\):\s*((?:\d+\s+)+)|Task (\d+) heartbeat timeout")
# The signal after these two ends the child whatever it does.
_POLITE_SIGNALS = 2


class Link:
    """The child's side: what it tells its supervisor. Source: ours."""

    def __init__(self, life: int, say: int):
        self._life, self._say = life, say
        for descriptor in (life, say):
            os.set_inheritable(descriptor, False)
        threading.Thread(target=self._end_with_supervisor, daemon=True).start()

    def _end_with_supervisor(self) -> None:
        os.read(self._life, 1)  # nothing is ever written: it returns when the other end is closed
        os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, **facts: Any) -> None:
        """Facts (JSON) for the supervisor. Source: ours."""
        with contextlib.suppress(OSError):
            os.write(self._say, json.dumps(facts).encode() + b"\n")


def link_to_supervisor() -> Link | None:
    """The link of a supervised process, None in any other. Source: ours."""
    pipes = os.environ.pop(_PIPES, None)
    return Link(*map(int, pipes.split(","))) if pipes else None


def supervise(workdir: str, heartbeat_s: int, join_s: int, address: str | None) -> None:
    """Runs this command again as a child and waits for its end.

    Returns when the child did its work. Raises HostError, Interrupted or CommandLineError with the
    line that the child told, or that says what became of it, SystemExit after a traceback.
    address: of the coordinator, None where it is found by itself, for messages.
    Source: ours.
    """
    child = _Child()
    code = child.wait()
    told = child.told
    if (ended := told.get("ended")) is not None:
        child.show(only_asked=True)
        raise _error(ended["line"], ended["code"])
    if code == 0:
        child.show()
        return
    words = child.last_words
    if code == -signal.SIGABRT and words:
        child.show(only_asked=True)
        if "joined" not in told:
            raise HostError(_not_joined(words, told, join_s, address))
        lost = _lost(words)
        raise HostError(
            f"{lost} of this run was lost (not heard of for {heartbeat_s} s, or its connection "
            f"broke), so every process ends; {_go_on(workdir)}"
        )
    child.show()
    if code < 0:
        named = signal.Signals(-code).name
        memory = " (on Linux often: no memory was left)" if code == -signal.SIGKILL else ""
        who = "this process, which had not joined the others,"
        if "joined" in told:
            who = f"process {told['joined']} of this run"
        raise HostError(
            f"{who} was ended by {named}{memory}; the others end within {heartbeat_s} s; "
            f"{_go_on(workdir)}"
        )
    sys.exit(code)


def _error(line: str, code: int) -> RunError:
    kinds = {kind.exit_code: kind for kind in (HostError, CommandLineError, Interrupted)}
    return kinds.get(code, HostError)(line)


def _lost(words: str) -> str:
    found = _LOST.findall(words)
    numbers = sorted({int(n) for pair in found for part in pair for n in part.split()})
    if numbers:
        return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    if "Failed to send RPC to coordination service" in words:
        return "process 0, the coordinator,"
    return "a process"


def _not_joined(words: str, told: dict[str, Any], join_s: int, address: str | None) -> str:
    process = told.get("joining", {}).get("process_id")
    at = address or "the coordinator that was found"
    if "newer incarnation" in words or "ALREADY_EXISTS" in words:
        return f"another process came with --process_id={process} too; give each its own"
    if "INVALID_ARGUMENT" in words:
        return (
            f"process 0 at {at} does not expect --process_id={process}; give all processes the "
            "same --num_processes"
        )
    if process == 0:
        return (
            f"not all processes joined within {join_s} s (--join_s); start the same command with "
            f"every --process_id, and see that the others reach {at}"
        )
    return (
        f"process 0 was not reached at {at}, or not all processes joined, within {join_s} s "
        "(--join_s); see that it runs, that the address is right and no firewall is between"
    )


def _go_on(workdir: str) -> str:
    saved = max(committed_steps(Path(workdir) / "checkpoints"), default=None)
    what = "no tick is saved yet" if saved is None else f"tick {saved} is saved"
    hosts = "on every host (each has a --process_id of its own)"
    return f"{what}; go on with, {hosts}: {resume_command()}"


class _Child:
    """This command once more, in a session of its own. last_words: what jax said at its end."""

    def __init__(self):
        life, self._alive = os.pipe()
        heard, say = os.pipe()
        # Signals are handed on by hand: a terminal's Ctrl-C would else come to both.
        self._process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=os.environ | {_PIPES: f"{life},{say}"},
            pass_fds=(life, say),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(life)
        os.close(say)
        self.told: dict[str, Any] = {}
        self._held: list[bytes] = []
        self._signals = 0
        self._readers = [
            threading.Thread(target=self._hear, args=(os.fdopen(heard, "rb"),), daemon=True),
            threading.Thread(target=self._sift, args=(self._process.stderr,), daemon=True),
        ]

    def wait(self) -> int:
        """The child's exit status, negative for a signal."""
        with self._handing_on():
            for reader in self._readers:
                reader.start()
            code = self._process.wait()
        for reader in self._readers:
            reader.join(5)  # its own children may hold the pipes for a moment longer
        return code

    @property
    def last_words(self) -> str:
        return b"".join(self._held).decode(errors="replace")

    def show(self, only_asked: bool = False) -> None:
        """Prints what was held back. only_asked: with --traceback."""
        asked = any(re.fullmatch("--?traceback(=true)?", word) for word in sys.argv)
        if self._held and (asked or not only_asked):
            sys.stderr.write(self.last_words)
            sys.stderr.flush()

    def _hear(self, pipe: BinaryIO) -> None:
        with pipe:
            for line in pipe:
                self.told |= json.loads(line)

    def _sift(self, pipe: BinaryIO) -> None:
        with pipe:
            for line in pipe:
                if self._held or _LAST_WORDS.match(line):
                    self._held.append(line)
                else:
                    sys.stderr.write(line.decode(errors="replace"))
                    sys.stderr.flush()

    @contextlib.contextmanager
    def _handing_on(self) -> Generator[None]:
        before = {
            number: signal.signal(number, self._hand_on)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hand_on(self, number: int, _: Any) -> None:
        self._signals += 1
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(
                number if self._signals <= _POLITE_SIGNALS else signal.SIGKILL
            )
