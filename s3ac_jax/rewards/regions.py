"""Sets of real numbers: what intervals a union, an inequality or an exclusion consists of."""

import itertools
import re

from s3ac_jax.rewards import names, numbers, shapes
from s3ac_jax.rewards.shapes import Shape

_REALS = shapes.read("(-\\infty,\\infty)")
_MIRROR = {"<": ">", ">": "<", "l": "g", "g": "l"}
# All real numbers but a few: \bbR\setminus\{1,2\}.
_WITHOUT = re.compile(r"\\bbR ?(?:\\(?:setminus|backslash|smallsetminus)|-) ?\\\{(.+)\\\}")


def pieces(shape: Shape) -> tuple[str, list[Shape]] | None:
    """(variable, intervals and other sets) of a union, an interval or an inequality.

    Source: ours: x != 2 is the union of two intervals.
    """
    parts = shape.items if shape.kind in ("union", "list") else (shape,)
    name, found = "", []
    for part in parts:
        if part.kind == "relation":
            piece = _except(part) or _interval(part)
            if piece is None or (name and piece[0] != name):
                return None
            name = piece[0]
            found += piece[1]
        elif part.text == "\\bbR":
            found.append(_REALS)
        elif excluded := _WITHOUT.fullmatch(part.text):
            holes = _holes(shapes.split_commas(excluded.group(1)))
            if holes is None:
                return None
            found += holes
        elif part.kind in ("set", "value") or (
            part.kind == "tuple" and len(part.items) == 2 and part.marks != "<>"
        ):
            found.append(part)
        else:
            return None
    return name, found


def of_reals(shape: Shape) -> bool:
    """Is it the real numbers, whole or without some? Source: ours."""
    return shape.kind == "value" and bool(shape.text == "\\bbR" or _WITHOUT.fullmatch(shape.text))


def variable(shape: Shape) -> str:
    """The x of x < 1, x in S and x = 1; "" where nothing is said of a variable. Source: ours."""
    if names.assigned(shape) or names.assigned(shape, "i"):
        return shape.items[0].text
    if shape.kind == "list":
        return next(filter(None, map(variable, shape.items)), "")
    found = pieces(shape)
    return found[0] if found else ""


def _except(shape: Shape) -> tuple[str, list[Shape]] | None:
    """(variable, intervals) of x != 2."""
    if shape.marks != "n" or not shapes.NAME.fullmatch(shape.items[0].text):
        return None
    holes = _holes([shape.items[1].text])
    return None if holes is None else (shape.items[0].text, holes)


def _holes(points: list[str]) -> list[Shape] | None:
    """The intervals between points; None where their order is not plain."""
    points = [point.strip() for point in points]
    if len(points) > 1:
        order = {}
        for point in points:
            value = numbers.read(point)
            if value is None or value.mark:
                return None
            order[point] = value.value
        points.sort(key=order.__getitem__)
    ends = ["-\\infty", *points, "\\infty"]
    return [_open(low, high) for low, high in itertools.pairwise(ends)]


def _open(low: str, high: str) -> Shape:
    return Shape("tuple", f"({low},{high})", (Shape("value", low), Shape("value", high)), "()")


def _interval(shape: Shape) -> tuple[str, list[Shape]] | None:
    """(variable, interval) of a < x <= b, x > a, a >= x and the like."""
    items, signs = list(shape.items), shape.marks
    if any(sign not in _MIRROR for sign in signs) or len(signs) > 2:
        return None
    if signs[0] in ">g" and len(signs) == 2:
        items, signs = items[::-1], "".join(_MIRROR[sign] for sign in reversed(signs))
    if len(signs) == 1:
        if not shapes.NAME.fullmatch(items[0].text):
            items, signs = items[::-1], _MIRROR[signs]
        if not shapes.NAME.fullmatch(items[0].text):
            return None
        variable, bound = items
        low, high = ("", bound.text) if signs in "<l" else (bound.text, "")
        marks = ("(" + (")" if signs == "<" else "]")) if high else (
            ("(" if signs == ">" else "[") + ")"
        )  # fmt: skip
    else:
        if any(sign not in "<l" for sign in signs) or not shapes.NAME.fullmatch(items[1].text):
            return None
        variable, low, high = items[1], items[0].text, items[2].text
        marks = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    low, high = low or "-\\infty", high or "\\infty"
    ends = (Shape("value", low), Shape("value", high))
    piece = Shape("tuple", f"{marks[0]}{low},{high}{marks[1]}", ends, marks)
    return variable.text, [piece]
