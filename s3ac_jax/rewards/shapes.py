"""The outer form of an answer: a value, a list, a tuple, a set, intervals, a matrix, a relation."""

import dataclasses
import functools
import re
from collections.abc import Iterator

from s3ac_jax.rewards.expression import GREEK
from s3ac_jax.rewards.normalise import Refused

MAX_ITEMS = 64
_OPEN, _CLOSE = frozenset(("(", "[", "{", "\\langle")), frozenset((")", "]", "}", "\\rangle"))
_ORDER = re.compile(r"\\(?:le|ge|ne|in|approx)(?![a-zA-Z])|[<>=]")
_SIGNS = {"\\le": "l", "\\ge": "g", "\\ne": "n", "\\in": "i", "\\approx": "a"}
_MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|array|cases)\}(.*)\\end\{\1\}")
# The same with its brackets outside.
_BRACKETED = re.compile(
    r"([(\[|])\\begin\{(array|(?:small)?matrix)\}(.*)\\end\{\2\}[)\]|]", re.DOTALL
)
_COLUMNS = re.compile(r"\s*\{\"?[clr| ]+\"?\}")
_CONNECTIVE = re.compile(r',? ?"(?:and|or)" ?,?|,? ?\\(?:vee|text\{or\})(?![a-zA-Z])')
_COMMAND = re.compile(r"\\[a-zA-Z]+|\\[{}\\]|.", re.DOTALL)
_GREEK = "|".join(sorted(GREEK))
# A name that an answer may give its value: x, x_1, \theta, f(x), P(A), AB, |AB|, AB/CD, \angle A.
# Not \log(x) or |x|: to name these is to leave the last step undone.
NAME = re.compile(
    r"\|[A-Z]{2}\||\\frac\{[A-Z]{2}\}\{[A-Z]{2}\}|[A-Z]{2}[/:][A-Z]{2}|"
    r"(?:m?\\(?:angle|triangle) ?)?(?:[a-zA-Z]|[A-Z]{2,3}|\\(?:" + _GREEK + r"))"
    r"(?:_(?:\{(?:[a-zA-Z0-9, ]+|\"[a-z ]+\")\}|[a-zA-Z0-9]|\"[a-z ]+\"))?"
    r"(?:\((?:[a-zA-Z0-9, ]{1,12}|\"[a-z ]+\")\))?"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """kind: "value" | "list" | "tuple" | "set" | "union" | "interval" | "matrix" | "relation".

    text: the canonical line. items: the parts. marks: brackets of a tuple or an interval, widths
    of a matrix, signs of a relation.
    Source: ours.
    """

    kind: str
    text: str
    items: tuple["Shape", ...] = ()
    marks: str = ""


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Shape:
    """The shape of a canonical line; parts deeper than a few levels are values. Source: ours."""
    return _read(text, 0)


def _read(text: str, depth: int) -> Shape:
    text = text.strip()
    while len(text) > 1 and text[0] == "{" and enclosed(text):
        text = text[1:-1].strip()
    if depth > 4:
        return Shape("value", text)
    if found := _BRACKETED.fullmatch(text):
        bracket, name, body = found.groups()
        outer = "vmatrix" if bracket == "|" else "pmatrix"
        body = _COLUMNS.sub("", body, count=1) if name == "array" else body
        text = f"\\begin{{{outer}}}{body}\\end{{{outer}}}"
    if found := _MATRIX.fullmatch(text):
        return _matrix(text, found, depth)
    if len(parts := _listed(text)) > 1:
        return _made("list", text, parts, depth)
    if len(parts := split(text, "\\cup")) > 1:
        return _made("union", text, parts, depth)
    parts, signs = _relation(text)
    if signs:
        return Shape("relation", text, tuple(_read(part, depth + 1) for part in parts), signs)
    if text.startswith("\\{") and text.endswith("\\}") and enclosed(text):
        inside = text[2:-2].strip()
        if re.search(r"[|:]|\"such that\"", inside):
            return _condition(text, inside, depth)
        return _made("set", text, _listed(inside) if inside else [], depth)
    if text.startswith("\\langle") and text.endswith("\\rangle"):
        parts = _listed(text[len("\\langle") : -len("\\rangle")])
        return _made("tuple", text, parts, depth, "<>")
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and enclosed(text):
        parts = split(text[1:-1], ",")
        if len(parts) == 1:
            parts = split(text[1:-1], ";")
        if len(parts) > 1:
            return _made("tuple", text, parts, depth, text[0] + text[-1])
        if text[0] == "(" and text[-1] == ")":
            return _read(text[1:-1], depth + 1)
    return Shape("value", text)


def _made(kind: str, text: str, parts: list[str], depth: int, marks: str = "") -> Shape:
    if len(parts) > MAX_ITEMS:
        raise Refused("guard_length")
    if any(not part.strip() for part in parts):
        return Shape("value", text)
    return Shape(kind, text, tuple(_read(part, depth + 1) for part in parts), marks)


def _condition(text: str, inside: str, depth: int) -> Shape:
    """{x | x > 3} as x > 3, for real x; other sets with conditions are matched as text."""
    found = re.fullmatch(r"([a-zA-Z])(?:\\in ?\\bbR)?(?:[|:]|\"such that\")([^|:]+)", inside)
    if found:
        shape = _read(found.group(2), depth + 1)
        if shape.kind == "relation" and any(part.text == found.group(1) for part in shape.items):
            return shape
    return Shape("value", text)


def _matrix(text: str, found: re.Match[str], depth: int) -> Shape:
    name, body = found.groups()
    if name in ("cases", "array") or "\\begin" in body:
        return Shape("value", text)
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", body) if row.strip()]
    cells = [row.split("&") for row in rows]
    if sum(map(len, cells)) > MAX_ITEMS:
        raise Refused("guard_length")
    # A determinant's bars are no brackets.
    bars = name[0] if name[0] in "vV" else ""
    marks = bars + ",".join(str(len(row)) for row in cells)
    items = tuple(_read(cell, depth + 1) for row in cells for cell in row)
    return Shape("matrix", text, items, marks)


def enclosed(text: str) -> bool:
    """Does the bracket that opens `text` close at its very end? Half-open intervals count.

    Source: ours.
    """
    level, pieces = 0, _COMMAND.findall(text)
    for place, piece in enumerate(pieces):
        if piece in ("\\{", "\\}"):
            piece = piece[1]
        if piece in _OPEN:
            level += 1
        elif piece in _CLOSE:
            level -= 1
            if level == 0:
                return place == len(pieces) - 1
    return False


def split(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators outside brackets; words in quotes stay whole.

    Source: ours.
    """
    if separator not in text:
        return [text]
    parts, start = [], 0
    for piece, place, level in _unquoted(text):
        if piece == separator and level == 0:
            parts.append(text[start:place])
            start = place + len(piece)
    return [*parts, text[start:]]


def _unquoted(text: str) -> Iterator[tuple[str, int, int]]:
    """(piece, its place, brackets around it) of what is neither a bracket nor in quotes."""
    level, place, quoted = 0, 0, False
    for piece in _COMMAND.findall(text):
        if piece == '"':
            quoted = not quoted
        bracket = piece[1] if piece in ("\\{", "\\}") else piece
        if quoted:
            pass
        elif bracket in _OPEN:
            level += 1
        elif bracket in _CLOSE:
            level -= 1
        else:
            yield piece, place, level
        place += len(piece)


def _listed(text: str) -> list[str]:
    """Parts of an unordered list: 1,2 and 3; x=1 or x=2; 1;2."""
    text = _CONNECTIVE.sub(";", text)
    parts = [part for piece in split(text, ";") for part in split_commas(piece)]
    return [part for part in parts if part.strip()] if len(parts) > 1 else parts


def split_commas(text: str) -> list[str]:
    """The parts between commas; a comma without a space before three digits belongs to a number.

    43,47,2021 is a list all the same: not every group has three digits. Source: ours.
    """
    parts = split(text, ",")
    if len(parts) == 1:
        return parts
    if re.fullmatch(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?[^0-9,]*", text.strip()):
        return [text]
    if any(part.startswith(" ") for part in parts[1:]):
        joined = [parts[0]]
        for part in parts[1:]:
            glued = re.match(r"[0-9]{3}(?![0-9])", part)
            if glued and re.search(r"(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})*$", joined[-1]):
                joined[-1] += "," + part
            else:
                joined.append(part)
        return joined
    return parts


def _relation(text: str) -> tuple[list[str], str]:
    """(parts, signs) at the outer level; signs is "" where there is no relation."""
    if not _ORDER.search(text):
        return [], ""
    parts, signs, start = [], "", 0
    for piece, place, level in _unquoted(text):
        if level <= 0 and _ORDER.fullmatch(piece):
            parts.append(text[start:place])
            signs += _SIGNS.get(piece, piece)
            start = place + len(piece)
    if not signs:
        return [], ""
    parts.append(text[start:])
    return ([], "") if any(not part.strip() for part in parts) else (parts, signs)
