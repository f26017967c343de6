"""Records of an evaluation: a JSON line per response, from which every number can be had again."""

import json
import os
import pathlib
import types
import typing
from collections.abc import Iterable
from typing import Any, TypedDict

from s3ac_jax.core.errors import RunError


class RecordsError(RunError):
    """Records that can't be read or don't fit; the message is one line for the user.

    Source: ours.
    """


class Header(TypedDict):
    """The first line of a suite's file. suite: its name. weights: fingerprint of what answered.

    version: of these weights. made_with: what decides a response and its verdict, apart from the
    number of samples. config: of the suite as it was when the file was begun, for people. problems:
    asked; dropped: ids of those whose prompts were too long.
    """

    suite: str
    weights: str
    version: int
    made_with: dict[str, Any]
    config: dict[str, Any]
    problems: int
    dropped: list[str]


class Record(TypedDict):
    """One response. seed: of its sampling. tokens: how many, the stop token included.

    finish: "stop", or "length" at the limit. answer: as extracted, None for none. correct, reason:
    the verdict and its code. same_as: number of the first sample of this problem with the same
    answer, by the verifier; None without an answer. letters: the order in which the options were
    shown, None for a question without. response: its text.
    """

    problem: str
    sample: int
    seed: int
    tokens: int
    finish: str
    answer: str | None
    correct: bool
    reason: str
    same_as: int | None
    letters: str | None
    response: str


class RecordFile:
    """The records of one suite at `path`, to be gone on with; made when there is none.

    header: None before `begin`. A last line torn by a kill is cut off.
    Raises RecordsError for a file of another kind, OSError for one that can't be read or written.
    Source: ours.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        # Before anything is cut off: it may be somebody's file of another kind.
        self.header, self.records = read(self.path)
        if self.path.exists():
            whole = self.path.read_bytes().rpartition(b"\n")
            os.truncate(self.path, len(whole[0]) + len(whole[1]))
        self._file = self.path.open("a", encoding="ascii")

    def begin(self, header: Header) -> None:
        """Forgets what the file holds and writes its first line. Source: ours."""
        self._file.truncate(0)
        self.header, self.records = header, []
        self._write([header])

    def append(self, records: list[Record]) -> None:
        """Writes lines that are on disk when this returns. Source: ours."""
        self._write(records)
        self.records += records

    def _write(self, lines: Iterable[Any]) -> None:
        # ASCII: a lone surrogate, which a model may well write, has no UTF-8.
        self._file.writelines(json.dumps(line) + "\n" for line in lines)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. Source: ours."""
        self._file.close()


def read(path: str | os.PathLike[str]) -> tuple[Header | None, list[Record]]:
    """Header and records of a file, in its order; (None, []) for none. A torn end is left out.

    Raises RecordsError naming the line that is damaged. Source: ours.
    """
    path = pathlib.Path(path)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    header: Any = None
    records: list[Any] = []
    kinds = _kinds(Header)
    for number, line in enumerate(lines, start=1):
        try:
            found = _checked(json.loads(line), kinds)
        except (ValueError, RecursionError) as error:
            fix = (
                "it has to say what was evaluated: restore it, or use another --workdir"
                if number == 1
                else "delete that line, or the file to begin anew"
            )
            raise RecordsError(f"{path}, line {number} is no record ({error}); {fix}") from error
        if number == 1:
            header, kinds = found, _kinds(Record)
        else:
            records.append(found)
    return header, records


def _kinds(form: Any) -> dict[str, tuple[type, ...]]:
    """What each field of a line may be."""
    return {
        name: tuple(typing.get_origin(one) or one for one in _among(hint))
        for name, hint in typing.get_type_hints(form).items()
    }


def _among(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)


def _checked(found: Any, kinds: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    """The line, whose fields are as they should be; ValueError naming one that is not."""
    if not isinstance(found, dict):
        raise ValueError("not an object")
    for name, allowed in kinds.items():
        # Not isinstance: True is no number of a sample.
        if name not in found or type(found[name]) not in allowed:
            what = f"has {name} {found[name]!r:.40}" if name in found else f"lacks {name}"
            raise ValueError(what)
    return found
