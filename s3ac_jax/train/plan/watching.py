"""XLA's compilers may end the process from within C++: so they work in a child, and this tells."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from s3ac_jax.train.plan.logs import WORDS
from s3ac_jax.train.plan.target import PlanError

_FOLDER = "S3AC_JAX_PLAN"
_STEP, _WORDS = "step", "words"
_FATAL = re.compile(r"^F\d{4} .*?\] ?(.*)$", re.MULTILINE)


def watched() -> bool:
    """Runs this command once more as a child; True when that did the work, False in the child.

    Exits as the child does. Raises PlanError when a signal ended it.
    Source: ours: a failed check of a compiler is no exception that Python could catch.
    """
    if _FOLDER in os.environ:
        return False
    with tempfile.TemporaryDirectory() as folder:
        told = {_FOLDER: folder, WORDS: str(Path(folder) / _WORDS)}
        child = subprocess.run([sys.executable, *sys.orig_argv[1:]], env=os.environ | told)
        if child.returncode < 0:
            raise PlanError(_what_ended(Path(folder), -child.returncode))
    if child.returncode:
        sys.exit(child.returncode)
    return True


def note(step: str) -> None:
    """What is compiled now. Source: ours."""
    if folder := os.environ.get(_FOLDER):
        (Path(folder) / _STEP).write_text(step)


def _what_ended(folder: Path, number: int) -> str:
    said = {name: _read(folder / name) for name in (_STEP, _WORDS)}
    step = said[_STEP] or "the first step"
    if number == signal.SIGKILL:
        return f"the plan was killed at {step}: most likely this machine has too little memory"
    fatal = _FATAL.search(said[_WORDS])
    words = f" ({fatal[1].strip()})" if fatal else ""
    return (
        f"XLA's compiler ended itself by {signal.Signals(number).name} at {step}{words}: a bug of "
        "its own; another mesh, or --full, may do"
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
