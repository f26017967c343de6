"""What runs in a grading worker: one item at a time, under limits that the kernel keeps.

A worker is forked from the supervisor, which has math-verify in memory already, so that a fresh
one costs milliseconds. It reads a line of JSON per item and writes one per verdict.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from s3ac_jax.rewards.math_answers import judge

MEMORY = 2 << 30
_PDEATHSIG = 1


def serve(source: int, target: int, deadline: float) -> None:
    """Answers items from `source` on `target` until it ends. deadline: CPU seconds per item.

    CPU time, so that a busy machine does not turn a right answer into a wrong one; the default
    action of the timer's signal ends the process even inside a C function.
    Source: ours.
    """
    _limit()
    grader = _Grader()
    with os.fdopen(source, "r") as lines:
        for line in lines:
            item = json.loads(line)
            reply = grader.prepare(item["kind"])
            if reply is None and "response" in item:
                signal.setitimer(signal.ITIMER_PROF, deadline)
                reply = grader.grade(item)
                signal.setitimer(signal.ITIMER_PROF, 0)
            reply = {"id": item["id"], **(reply or {})}
            os.write(target, (json.dumps(reply) + "\n").encode())
            if reply.get("reason") == "memory":
                return  # what a failed allocation leaves behind is nobody's business


def _limit() -> None:
    """Nothing outlives the supervisor, takes the machine's memory or leaves a core file."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


class _Grader:
    """Keeps users' functions between items."""

    def __init__(self):
        self.functions: dict[str, Callable[[str, str], Any]] = {}

    def prepare(self, kind: str) -> dict[str, Any] | None:
        """Imports a user's function; what is wrong with it, or None."""
        if ":" not in kind or kind in self.functions:
            return None
        module, _, name = kind.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (Exception, SystemExit) as error:
            return {"missing": f"{type(error).__name__}: {error}"}
        if not callable(function):
            return {"missing": f"{name} is no function"}
        self.functions[kind] = function
        return None

    def grade(self, item: dict[str, Any]) -> dict[str, Any]:
        """The verdict on one item, whatever happens on the way."""
        started = time.perf_counter()
        detail = ""
        try:
            if ":" in item["kind"]:
                correct, reason = (
                    self.functions[item["kind"]](item["response"], item["gold"]),
                    "grader",
                )
                if correct not in (True, False):
                    raise TypeError(f"it returned {correct!r:.40}, not True or False")
            else:
                correct, reason = _judge(item)
        except MemoryError:
            correct, reason = False, "memory"
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            correct, reason = False, "grader_error" if ":" in item["kind"] else "error"
            detail = f"{type(error).__name__}: {error}"[:200]
        seconds = time.perf_counter() - started
        return {
            "correct": correct is True or correct == 1,
            "reason": reason,
            "seconds": seconds,
            "detail": detail,
        }


def _judge(item: dict[str, Any]) -> tuple[bool, str]:
    # Only here: the supervisor imports it before it forks, the trainer never does.
    from s3ac_jax.rewards.algebra import leaf

    try:
        correct, reason = judge(item["response"], item["gold"], item["kind"], leaf)
    except BaseException as error:
        # math-verify's own timeout derives from BaseException.
        if isinstance(error, (MemoryError, SystemExit)):
            raise
        return False, "error"
    return bool(correct), reason
