"""Two answers of any shape, part by part; values that need algebra are asked of `leaf`."""

from collections.abc import Callable, Sequence

from s3ac_jax.rewards import choices, guard, numbers, shapes, words
from s3ac_jax.rewards.expression import parse
from s3ac_jax.rewards.normalise import Refused
from s3ac_jax.rewards.shapes import Shape

# (the verdict so far, its reason); None is a verdict that only algebra can give.
Found = tuple[bool | None, str]
# Asks of two expressions that no exact rule decided: "same" or "equation" (gold, answer).
Leaf = Callable[[str, str, str], Found]
UNKNOWN: Found = (None, "math_verify")


def ask_later(how: str, gold: str, answer: str) -> Found:
    """The leaf of the trainer's side: algebra happens elsewhere. Source: ours."""
    del how, gold, answer
    return UNKNOWN


def compare(gold: str, answer: str, leaf: Leaf = ask_later) -> Found:
    """Are two canonical lines one answer? None where `leaf` has to say and did not.

    Source: ours.
    """
    answer = words.opened(answer) if '"' not in gold else answer
    if _plain(gold) == _plain(answer):
        return True, "string"
    if "\\dots" in gold or "\\dots" in answer:
        return False, "text"
    first, second = shapes.read(gold), shapes.read(answer)
    if first.kind == "value" == second.kind:
        return values(gold, answer, leaf)
    return _shaped(first, second, leaf)


def _plain(text: str) -> str:
    """For comparing as text: one spelling of words."""
    bare = text.replace('"', "")
    return bare.lower() if len(bare) > 3 and bare.replace(" ", "").isalpha() else bare


def values(gold: str, answer: str, leaf: Leaf) -> Found:
    """Two single values: text, units, exact numbers, then expressions. Source: ours."""
    gold, answer = _bare(gold), _bare(answer)
    if _plain(gold) == _plain(answer):
        return True, "string"
    if len(gold) == 1 and "A" <= gold <= "Z" and len(answer) <= 4:
        return gold in answer and choices.letter(answer) == gold, "choice"
    (gold, gold_unit), (answer, unit) = words.unit_of(gold), words.unit_of(answer)
    if gold_unit and unit and gold_unit != unit:
        return False, "text"
    gold, answer = _bare(gold), _bare(answer)
    if gold == answer:
        return True, "string"
    number, other = numbers.read(gold), numbers.read(answer)
    if number:
        return _number(number, other)
    # AB and BA are segments or words before they are products.
    if '"' in gold or '"' in answer or (gold.isalpha() and gold.isupper()):
        return False, "text"
    if "\\pm" in gold or "\\pm" in answer or "\\mp" in gold or "\\mp" in answer:
        return _signs(gold, answer, leaf)
    if ":" in gold or ":" in answer:
        return False, "text"
    return _expressions("same", gold, answer, leaf)


def _bare(text: str) -> str:
    text = text.strip()
    while len(text) > 1 and text[0] in "({" and text[-1] in ")}" and shapes.enclosed(text):
        text = text[1:-1].strip()
    return text


def _number(gold: numbers.Number, answer: numbers.Number | None) -> Found:
    """A finished number asks for one too: 37*48, 2^10 and sqrt(16) are work undone, a quotient of
    integers is a number as it stands."""
    if answer is None:
        return False, "unevaluated"
    marks = {gold.mark, answer.mark}
    reason = "percent" if len(marks) > 1 and "%" in marks else "number"
    return numbers.same(gold, answer), reason


def _expressions(how: str, gold: str, answer: str, leaf: Leaf) -> Found:
    """Two expressions, after what costs nothing: grammar, variables, functions, sizes."""
    try:
        first = [parse(part) for part in gold.split("=")]
    except Refused:
        return False, "text"  # a gold that the grammar can't read is matched as text only
    second = [parse(part) for part in answer.split("=")]
    for node in (*first, *second):
        guard.check(node)
    names = (
        frozenset().union(*map(guard.variables, first)),
        frozenset().union(*map(guard.variables, second)),
    )
    if names[0] != names[1]:
        return False, "structure"
    if any(all(guard.unevaluated(node, part) for node in first) for part in second):
        return False, "unevaluated"
    return leaf(how, gold, answer)


def _signs(gold: str, answer: str, leaf: Leaf) -> Found:
    """+-: the list of both values. One sign only; two could go together or apart."""
    lists = []
    for text in (gold, answer):
        if "\\mp" in text or text.count("\\pm") > 1:
            return False, "structure"
        before, sign, after = text.partition("\\pm")
        after = after.strip()
        plus = f"{before}+{after}" if before else after
        lists.append([plus, f"{before}-{after}"] if sign else [text])
    if len(lists[0]) != len(lists[1]):
        return False, "structure"
    return _matched(
        [Shape("value", t) for t in lists[0]], [Shape("value", t) for t in lists[1]], leaf
    )


def _shaped(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    """Two shapes of which at least one is no single value."""
    values_named = _relation_value(gold, answer)
    if values_named is None:
        return False, "structure"
    gold, answer = values_named
    kinds = gold.kind, answer.kind
    if kinds == ("value", "value"):
        return values(gold.text, answer.text, leaf)
    if gold.kind == "value" and set(answer.marks) == {"="} and answer.kind == "relation":
        return _chain(gold, answer, leaf)
    if "relation" in kinds or "union" in kinds or "\\bbR" in (gold.text, answer.text):
        return _regions(gold, answer, leaf)
    if kinds[0] in ("list", "value") and kinds[1] in ("list", "value"):
        return _lists(gold, answer, leaf)
    if kinds[0] in ("list", "set") and kinds[1] in ("list", "set", "value"):
        if gold.kind == "set" and answer.kind == "value":
            return False, "structure"
        return _matched(gold.items, answer.items, leaf)
    if kinds == ("value", "set"):
        return False, "structure"
    if kinds == ("tuple", "list") and gold.marks != "[)" and gold.marks != "(]":
        items = tuple(_unnamed(item) for item in answer.items)
        return _in_order(gold.items, items, leaf)
    if kinds[0] == kinds[1] and gold.marks == answer.marks:
        return _in_order(gold.items, answer.items, leaf)
    return False, "structure"


def _chain(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    """3/4 = 0.75, with or without a name before it: every part has to be right."""
    parts = answer.items[1:] if shapes.NAME.fullmatch(answer.items[0].text) else answer.items
    return _in_order([gold] * len(parts), parts, leaf)


def _unnamed(shape: Shape) -> Shape:
    return shape.items[1] if assigned(shape) else shape


def assigned(shape: Shape, sign: str = "=") -> bool:
    """Is it name = something, or (x, y) = something? Source: ours."""
    if shape.kind != "relation" or shape.marks != sign:
        return False
    left = shape.items[0]
    named = left.items if left.kind == "tuple" else (left,)
    return all(shapes.NAME.fullmatch(part.text) for part in named)


def _relation_value(gold: Shape, answer: Shape) -> tuple[Shape, Shape] | None:
    """Both without the name that one of them, or both alike, give to the value; None for two names.

    x = 5 and 5 are one answer, x = 5 and y = 5 are two. x in S is S.
    """
    gold, answer = (shape.items[1] if assigned(shape, "i") else shape for shape in (gold, answer))
    if assigned(gold) and assigned(answer):
        if gold.items[0].text != answer.items[0].text:
            return None
        return gold.items[1], answer.items[1]
    if assigned(gold) and answer.kind != "relation":
        return gold.items[1], answer
    if assigned(answer) and gold.kind != "relation":
        return gold, answer.items[1]
    return gold, answer


def _lists(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    """Unordered lists, of which one may be a single value such as +-3."""
    first, second = _spread(gold), _spread(answer)
    if len(first) != len(second):
        # 100,200,300 is a number or a list: a list beside a list.
        if gold.kind == "value" and len(parts := gold.text.split(",")) == len(second) > 1:
            first = [Shape("value", part) for part in parts]
        else:
            return False, "structure"
    # x = 1, 2 gives its name once.
    names = [{item.items[0].text if assigned(item) else "" for item in side}
             for side in (first, second)]  # fmt: skip
    if len(names[0]) > 1 and names[1] == {""}:
        return _in_order(first, second, leaf)
    if len(names[1] - {""}) > 1 and names[0] != names[1]:
        return False, "structure"
    return _matched(first, second, leaf)


def _spread(shape: Shape) -> list[Shape]:
    """The elements of a list; the two of a value with +-."""
    if shape.kind == "value" and shape.text.count("\\pm") == 1:
        before, _, after = shape.text.partition("\\pm")
        after = after.strip()
        plus = f"{before}+{after}" if before else after
        return [Shape("value", plus), Shape("value", f"{before}-{after}")]
    if shape.kind == "list":
        return [part for item in shape.items for part in _spread(item)]
    return [shape]


def _either(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    if gold.kind == "value" == answer.kind:
        return values(gold.text, answer.text, leaf)
    if _plain(gold.text) == _plain(answer.text):
        return True, "string"
    return _shaped(gold, answer, leaf)


def _in_order(gold: Sequence[Shape], answer: Sequence[Shape], leaf: Leaf) -> Found:
    if len(gold) != len(answer):
        return False, "structure"
    unknown = False
    for first, second in zip(gold, answer, strict=True):
        correct, reason = _either(first, second, leaf)
        if correct is False:
            return False, reason
        unknown |= correct is None
    return (None, "math_verify") if unknown else (True, "structure")


def _matched(gold: Sequence[Shape], answer: Sequence[Shape], leaf: Leaf) -> Found:
    """Is there a one-to-one match? Equality carries over, so the first partner will do."""
    if len(gold) != len(answer):
        return False, "structure"
    left, unknown = list(answer), False
    for first in gold:
        verdicts = []
        for second in left:
            verdicts.append(_either(first, second, leaf)[0])
            if verdicts[-1]:
                break
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            unknown = True
        else:
            return False, "structure"
    return (None, "math_verify") if unknown else (True, "structure")


def _regions(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    """Unions of intervals, inequalities, and equations."""
    if "=" in gold.marks + answer.marks and "union" not in (gold.kind, answer.kind):
        return _equations(gold, answer, leaf)
    first, second = _pieces(gold), _pieces(answer)
    if first is None or second is None:
        same = gold.kind == answer.kind and gold.marks == answer.marks
        return _in_order(gold.items, answer.items, leaf) if same else (False, "structure")
    if first[0] and second[0] and first[0] != second[0]:
        return False, "structure"
    return _matched(first[1], second[1], leaf)


def _equations(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    if gold.kind != "relation" or answer.kind != "relation" or gold.marks + answer.marks != "==":
        return False, "structure"
    # x = 1 and y = 2x + 1 are solved; 2x = 2 and 2x - y + 1 = 0 may be the question.
    if assigned(gold):
        return False, "unevaluated"
    return _expressions("equation", gold.text, answer.text, leaf)


def _pieces(shape: Shape) -> tuple[str, list[Shape]] | None:
    """(variable, intervals and other sets) of a union, an interval or an inequality."""
    parts = shape.items if shape.kind in ("union", "list") else (shape,)
    name, found = "", []
    for part in parts:
        if part.kind == "relation":
            piece = _interval(part)
            if piece is None or (name and piece[0] != name):
                return None
            name = piece[0]
            found.append(piece[1])
        elif part.text == "\\bbR":
            found.append(_REALS)
        elif part.kind in ("set", "value") or (
            part.kind == "tuple" and len(part.items) == 2 and part.marks != "<>"
        ):
            found.append(part)
        else:
            return None
    return name, found


_REALS = shapes.read("(-\\infty,\\infty)")
_MIRROR = {"<": ">", ">": "<", "l": "g", "g": "l"}


def _interval(shape: Shape) -> tuple[str, Shape] | None:
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
    ends = tuple(Shape("value", text) for text in (low or "-\\infty", high or "\\infty"))
    return variable.text, Shape("tuple", f"{marks[0]}{low},{high}{marks[1]}", ends, marks)
