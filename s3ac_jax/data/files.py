"""Problems from JSONL, JSON and CSV files, and the sets that come with the package."""

import csv
import io
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from s3ac_jax.data.fields import Fields, Number, shown_names
from s3ac_jax.data.problems import ProblemList, ProblemsError, shown

SETS = pathlib.Path(__file__).with_name("sets")
_BINARY = (".parquet", ".arrow", ".feather", ".gz", ".zip", ".zst", ".xz", ".bz2", ".xlsx", ".pkl")


def shipped() -> tuple[str, ...]:
    """Names of the sets that come with the package; sets/LICENCES.md says whose they are.

    Source: ours.
    """
    return tuple(sorted(path.stem for path in SETS.glob("*.jsonl")))


class FileProblems(ProblemList):
    """Problems of a file, or of a set that comes with the package (its name as `path`).

    The form follows from the ending: .json (an array of objects), .csv (the first line names the
    fields), anything else JSON lines. name: of the file without its ending when empty. limit: only
    so many from the start. The others: see `Fields`.
    Raises ProblemsError naming file, line and field.
    Source: ours: prompt sets fit into memory, and there JSON lines are read faster than any other.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        *,
        name: str = "",
        question: str = "prompt",
        answer: str = "answer",
        id: str = "id",
        options: str = "",
        kind: str = "math",
        answer_after: str = "",
        answer_is: str = "text",
        limit: int | None = None,
    ):
        fields = Fields(question, answer, id, options, kind, answer_after, answer_is)
        if limit is not None and limit < 1:
            raise ProblemsError(f"{path}: limit must be at least 1, got {limit}")
        file = _find(path)
        name = name or file.stem
        problems, first = [], {}
        for number, (where, row) in enumerate(itertools.islice(_rows(file), limit), start=1):
            problem = fields.problem(row, where, name, number)
            if (other := first.setdefault(problem.id, where)) is not where:
                raise ProblemsError(
                    f"{where}: field {id!r} has {shown(problem.id)} as {other} has; give each its "
                    "own, or use id='' to number them"
                )
            problems.append(problem)
        if not problems:
            raise ProblemsError(f"{file} holds no problems")
        super().__init__(name, problems)


def _find(path: str | pathlib.Path) -> pathlib.Path:
    if str(path) in shipped():
        return SETS / f"{path}.jsonl"
    fault = "is missing"
    try:
        file = pathlib.Path(path).expanduser()
        if file.is_dir():
            fault = "is a folder"
        elif file.is_file():
            fault = ""
        elif file.exists():
            fault = "is no file"
    except (OSError, RuntimeError, ValueError):  # too long, no such home, a NUL character
        file, fault = pathlib.Path(), "is no path"
    if not fault and file.suffix.lower() in _BINARY:
        raise ProblemsError(
            f"{file}: {file.suffix} can't be read here; write it as JSON lines (.jsonl)"
        )
    if not fault:
        return file
    raise ProblemsError(
        f"{shown(str(path), 200)} {fault}: give the path of a file (.jsonl, .json, .csv) or the "
        f"name of a set that comes with the package ({', '.join(shipped())})"
    )


def _rows(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) of each row."""
    try:
        match file.suffix.lower():
            case ".csv":
                yield from _csv_rows(file)
            case ".json":
                yield from _json_rows(file)
            case _:
                yield from _line_rows(file)
    except OSError as error:
        raise ProblemsError(f"{file} can't be read: {error.strerror}") from error


def _line_rows(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
    # Opened as bytes: str.splitlines would also split at U+2028 inside a question.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            text = _decoded(line, where, first=number == 1).strip()
            if text:
                yield where, _parsed(text, where)


def _json_rows(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
    text = _decoded(file.read_bytes(), str(file), first=True).strip()
    if text.startswith("{"):  # many a file with JSON lines is called .json
        yield from _line_rows(file)
        return
    if not text:
        return
    rows = _parsed(text, str(file))
    if not isinstance(rows, list):
        raise ProblemsError(f"{file}: must be an array of objects, got {shown(rows)}")
    for number, row in enumerate(rows, start=1):
        yield f"{file}, entry {number}", row


def _csv_rows(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
    text = _decoded(file.read_bytes(), str(file), first=True)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = next(reader, [])
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ProblemsError(f"{file}, line 1: field {twice[0]!r} is named twice")
        while True:
            where = f"{file}, line {reader.line_num + 1}"
            row = next(reader, None)
            if row is None:
                return
            if not row:  # an empty line
                continue
            if len(row) != len(names):
                raise ProblemsError(
                    f"{where}: {len(row)} values for {len(names)} fields "
                    f"({shown_names(names)}); put values with commas in quotes"
                )
            yield where, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise ProblemsError(f"{file}, line {reader.line_num}: no CSV ({error})") from error


def _decoded(data: bytes, where: str, *, first: bool) -> str:
    try:
        return data.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ProblemsError(
            f"{where}: not UTF-8 at byte {error.start + 1} ({error.reason}); save it as UTF-8"
        ) from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ProblemsError(
            f"{where}: no JSON ({said}); the line may be torn, or of another form"
        ) from error
