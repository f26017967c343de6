"""Names that answers give to values: x = 5, 5 = x, x_1 = 1, (x, y) = (1, 2), f(n) = 2n."""

import dataclasses
import re
from collections.abc import Sequence

from s3ac_jax.rewards import shapes
from s3ac_jax.rewards.shapes import Shape

_APPLIED = re.compile(r"([a-zA-Z])\(([a-zA-Z])\)")
_SIGN = re.compile(r'\\[a-zA-Z]+|"[^"]*"|.', re.DOTALL)


def assigned(shape: Shape, sign: str = "=") -> bool:
    """Is it name = something, name ≈ something, or (x, y) = something? Source: ours."""
    if shape.kind != "relation" or shape.marks not in (sign, sign.replace("=", "a")):
        return False
    left = shape.items[0]
    named = left.items if left.kind == "tuple" else (left,)
    return all(shapes.NAME.fullmatch(part.text) for part in named)


def unnamed(shape: Shape) -> Shape:
    """The value of x = value; any other shape as it is. Source: ours."""
    return shape.items[1] if assigned(shape) else shape


def name_of(shape: Shape) -> str:
    """The x of x = value, "" for none. Source: ours."""
    return shape.items[0].text if assigned(shape) else ""


def by_name(items: Sequence[Shape]) -> list[Shape]:
    """The values of x = 1, y = 2 as (x, y) has them; nothing where the names have no order.

    Source: ours: letters next to each other have the order of the alphabet, others as they come.
    """
    names = [name_of(item) for item in items]
    if any(names):
        order = sorted(names)
        neighbours = len("".join(names)) == len(names) == ord(order[-1]) - ord(order[0]) + 1
        if len(set(names)) < len(names) or (names != order and not neighbours):
            return []
        items = sorted(items, key=name_of)
    return [unnamed(item) for item in items]


def named_first(shape: Shape) -> Shape:
    """5 = x as x = 5. Source: ours."""
    if shape.kind == "relation" and shape.marks == "=" and not assigned(shape):
        left, right = shape.items
        swapped = dataclasses.replace(shape, text=f"{right.text}={left.text}", items=(right, left))
        if assigned(swapped) and right.kind == "value":
            return swapped
    return shape


def same_variable(gold: Shape, answer: Shape) -> Shape:
    """f(n) = 2n as f(x) = 2x where the gold calls the variable x. Source: ours."""
    heads = [_APPLIED.fullmatch(shape.items[0].text) for shape in (gold, answer)]
    if not heads[0] or not heads[1] or heads[0].group(1) != heads[1].group(1):
        return answer
    (_, new), (_, old) = (head.groups() for head in heads if head)
    signs = _SIGN.findall(answer.text)
    if new == old or new in signs:
        return answer
    return shapes.read("".join(new if sign == old else sign for sign in signs))
