"""Files of one JSON object per line: appended to while a run goes on, cut back when it resumes."""

import json
import os
import pathlib
from collections.abc import Callable, Collection
from typing import Any, TextIO

from s3ac_jax.core.errors import RunError


class LinesError(RunError, ValueError):
    """A file of lines that can't be read; the message is one line for the user.

    Source: ours: a run that stops has to say in one line what to do.
    """


class LineFile:
    """The file at `path`, made with its first line; a last line torn by a kill is cut off.

    writes: False for a process that is not to touch the file, for another one writes it. Its
    methods raise OSError if the file can't be written.
    Source: ours: a text file that any tool reads, whole lines only.
    """

    def __init__(self, path: str | os.PathLike[str], *, writes: bool = True):
        self.path = pathlib.Path(path)
        self._writes = writes
        self._file: TextIO | None = None
        if writes and self.path.exists():
            whole = self.path.read_bytes().rpartition(b"\n")
            os.truncate(self.path, len(whole[0]) + len(whole[1]))

    def append(self, line: dict[str, Any]) -> None:
        """Writes one line and flushes. Raises ValueError for a NaN, which JSON has not.

        Source: ours: what is written survives a kill of this process.
        """
        if not self._writes:
            return
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def keep(
        self, wanted: Callable[[dict[str, Any]], bool], needed: Collection[str] = ("tick",)
    ) -> None:
        """Drops the lines that are not wanted: a resumed run writes them again.

        needed: keys that each line must have. Raises LinesError when the file is damaged.
        Source: ours: kill and resume must leave the file of an uninterrupted run.
        """
        if not (self._writes and self.path.exists()):
            return
        kept = [line for line in read_lines(self.path, needed) if wanted(line)]
        self.close()
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def close(self) -> None:
        """Closes the file. Source: ours."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(
    path: str | os.PathLike[str], needed: Collection[str] = ("tick",)
) -> list[dict[str, Any]]:
    """The objects of a file, oldest first; null becomes None. No file: no lines.

    needed: keys that each line must have. A last line torn by a kill is left out.
    Raises LinesError naming another line that is damaged.
    Source: ours: a log must be readable while it is written and after any crash.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            one = json.loads(line)
            if not (isinstance(one, dict) and one.keys() >= set(needed)):
                raise ValueError("another kind of line")
            found.append(one)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise LinesError(
                    f"{path}, line {number} is no line of {path.stem}; delete that line"
                ) from error
    return found
