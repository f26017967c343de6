"""What a compiler says on stderr, kept from the person's terminal."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Generator

# Names the file that they are kept in.
WORDS = "S3AC_JAX_PLAN_WORDS"
_LOG_LINE = re.compile(r"^[IWEF]\d{4} |^WARNING: All log messages")


@contextlib.contextmanager
def stderr_lines(lines: list[str]) -> Generator[None]:
    """Collects what the compiler writes to the process's stderr; all but its log is handed on.

    Where somebody watches, it is kept for them: a compiler may end the process.
    Source: ours: its log is for those who write compilers, and not through Python.
    """
    sys.stderr.flush()
    kept, path = os.dup(2), os.environ.get(WORDS)
    with open(path, "w+b") if path else tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
            for line in lines:
                if not _LOG_LINE.match(line):
                    print(line, file=sys.stderr)
