"""Two answers of any shape, part by part; values that need algebra are asked of `leaf`."""

import re
from collections.abc import Callable, Sequence

from s3ac_jax.rewards import choices, guard, names, numbers, regions, shapes, words
from s3ac_jax.rewards.expression import parse
from s3ac_jax.rewards.normalise import Refused
from s3ac_jax.rewards.shapes import Shape

# (the verdict so far, its reason); None is a verdict that only algebra can give.
Found = tuple[bool | None, str]
# Asks of two expressions that no exact rule decided: "same" or "equation" (gold, answer).
Leaf = Callable[[str, str, str], Found]
# The space after a comma means something before three digits only: 1, 234 is no 1,234.
_LOOSE = re.compile(r"(?<=,) (?![0-9]{3}(?![0-9]))|(?<=\\dots) ")
_ANGLES = re.compile(r"\\pi|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
# What f(x) = x says without it.
_UNIVERSAL = re.compile(
    r',? ?(?:"for (?:all|every|any)(?: real)?(?: numbers?)?"|\\forall) ?[a-zA-Z]'
    r"(?:\\in ?\\bb[A-Z])?$"
)
UNKNOWN: Found = (None, "math_verify")


def ask_later(how: str, gold: str, answer: str) -> Found:
    """The leaf of the trainer's side: algebra happens elsewhere. Source: ours."""
    del how, gold, answer
    return UNKNOWN


def compare(gold: str, answer: str, leaf: Leaf = ask_later) -> Found:
    """Are two canonical lines one answer? None where `leaf` has to say and did not.

    Source: ours.
    """
    gold, answer = _UNIVERSAL.sub("", gold), _UNIVERSAL.sub("", answer)
    if _plain(gold) in (_plain(answer), _plain(answer := words.opened(answer))):
        return True, "string"
    if "," not in gold and (number := numbers.read(gold)) and (other := numbers.read(answer)):
        return _number(number, other)
    if "\\dots" in gold or "\\dots" in answer:
        return False, "text"
    first, second = shapes.read(gold), shapes.read(answer)
    return _either(first, second, leaf)


def _plain(text: str) -> str:
    """For comparing as text: one spelling of words."""
    bare = _LOOSE.sub("", text.replace('"', ""))
    return bare.lower() if len(bare) > 3 and bare.replace(" ", "").isalpha() else bare


def values(gold: str, answer: str, leaf: Leaf) -> Found:
    """Two single values: text, units, exact numbers, then expressions. Source: ours."""
    gold, answer = _bare(gold), _bare(answer)
    if not gold or not answer:
        return False, "text"
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
    if ("\\deg" in gold) != ("\\deg" in answer) and not _ANGLES.search(gold + answer):
        # 180° - 2a as 180 - 2a; beside pi and under a sine the sign makes a number of it.
        gold, answer = gold.replace("\\deg", ""), answer.replace("\\deg", "")
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
    variables = [frozenset().union(*map(guard.variables, side)) for side in (first, second)]
    if variables[0] != variables[1]:
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
    for side in (gold, answer):
        if side.kind == "relation" and "a" in side.marks and not names.assigned(side):
            return _rounded(gold, answer, leaf)
    values_named = _relation_value(gold, answer)
    if values_named is None:
        return False, "structure"
    gold, answer = values_named
    kinds = gold.kind, answer.kind
    reals = regions.of_reals(gold) or regions.of_reals(answer)
    if kinds == ("value", "value") and not reals:
        return values(gold.text, answer.text, leaf)
    if gold.kind == "value" and set(answer.marks) == {"="} and answer.kind == "relation":
        return _chain(gold, answer, leaf)
    if "relation" in kinds or "union" in kinds or reals:
        return _regions(gold, answer, leaf)
    if set(kinds) <= {"list", "set", "value"}:
        # {5} is no 5, but {-5,5} is +-5.
        single = [side.kind == "value" and "\\pm" not in side.text for side in (gold, answer)]
        return (
            (False, "structure") if "set" in kinds and any(single) else _lists(gold, answer, leaf)
        )
    if kinds == ("tuple", "list") and gold.marks not in ("[)", "(]"):
        return _in_order(gold.items, names.by_name(answer.items), leaf)
    if kinds == ("list", "tuple") and answer.marks == "()" and all(map(names.assigned, gold.items)):
        return _in_order(names.by_name(gold.items), answer.items, leaf)
    if kinds[0] == kinds[1] and gold.marks == answer.marks:
        return _in_order(gold.items, answer.items, leaf)
    return False, "structure"


def _rounded(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    """x = sqrt(2) ≈ 1.41: one answer, the exact one where there are two.

    The decimal is the answer only to a gold that is one. Beside a number it has to round it, so
    that these are no two guesses. A gold cos(1) ≈ 0.54 asks for 0.54: the rest is the question.
    """
    first, second = _exact_and_rounded(gold), _exact_and_rounded(answer)
    if gold.kind == "relation" and not shapes.NAME.fullmatch(gold.items[0].text):
        first = first[-1:]
    labels = {
        shape.items[0].text
        for shape in (gold, answer)
        if shape.kind == "relation" and shapes.NAME.fullmatch(shape.items[0].text)
    }
    if not first or not second or len(labels) > 1:
        return False, "structure"
    if len(first) == len(second):
        return _in_order(first, second, leaf)
    if len(first) > 1:
        exact = _either(first[0], second[0], leaf)
        return exact if exact[0] is not False else _either(first[1], second[0], leaf)
    number, exact = _plain_number(first[0]), _plain_number(second[0])
    if exact and not _rounds(exact, second[1].text):
        return False, "structure"
    if number and not exact:
        constant = _is_constant(second[0].text)
        return _either(first[0], second[1], leaf) if constant else (False, "structure")
    found = _either(first[0], second[0], leaf)
    return _either(first[0], second[1], leaf) if number and found[0] is False else found


def _exact_and_rounded(shape: Shape) -> tuple[Shape, ...]:
    """(exact, rounded), (value,) of another shape, and () for anything longer."""
    if shape.kind != "relation" or "a" not in shape.marks:
        return (shape.items[1],) if names.assigned(shape) else (shape,)
    named = bool(shapes.NAME.fullmatch(shape.items[0].text))
    allowed = ("a", "=a") if named else ("a",)
    return shape.items[named:] if shape.marks in allowed else ()


def _is_constant(text: str) -> bool:
    try:
        return not guard.variables(parse(_unitless(text)))
    except Refused:
        return False


def _plain_number(shape: Shape) -> numbers.Number | None:
    number = numbers.read(_unitless(shape.text))
    return None if number and number.mark == "pi" else number


def _unitless(text: str) -> str:
    return _bare(words.unit_of(_bare(text))[0])


def _rounds(exact: numbers.Number, text: str) -> bool:
    """Is `text` a decimal that `exact` is rounded or cut off to?"""
    text = _unitless(text)
    rounded = numbers.read(text)
    if rounded is None or rounded.mark != exact.mark:
        return False
    decimals = len(text.partition(".")[2].rstrip("%"))
    return abs(rounded.value - exact.value) * 10**decimals < 1


def _chain(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    """3/4 = 0.75, with or without a name before it: every part has to be right."""
    parts = answer.items[1:] if shapes.NAME.fullmatch(answer.items[0].text) else answer.items
    return _in_order([gold] * len(parts), parts, leaf)


def _relation_value(gold: Shape, answer: Shape) -> tuple[Shape, Shape] | None:
    """Both without the name that one of them, or both alike, give to the value; None for two names.

    x = 5 and 5 are one answer, x = 5 and y = 5 are two. x in S is S.
    """
    member = [names.assigned(shape, "i") for shape in (gold, answer)]
    if any(member) and len({regions.variable(shape) for shape in (gold, answer)} - {""}) > 1:
        return None
    gold = gold.items[1] if member[0] else gold
    answer = answer.items[1] if member[1] else answer
    gold, answer = names.named_first(gold), names.named_first(answer)
    if names.assigned(gold) and names.assigned(answer):
        answer = names.same_variable(gold, answer)
        if gold.items[0].text != answer.items[0].text:
            return None
        return gold.items[1], answer.items[1]
    if names.assigned(gold) and answer.kind != "relation":
        return gold.items[1], answer
    if names.assigned(answer) and gold.kind != "relation":
        return gold, answer.items[1]
    return gold, answer


def _lists(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    """Unordered lists and sets, of which one may be a single value such as +-3."""
    first, second = _spread(gold), _spread(answer)
    if len(first) != len(second):
        # 100,200,300 is a number or a list: a list beside a list.
        if gold.kind == "value" and len(parts := gold.text.split(",")) == len(second) > 1:
            first = [Shape("value", part) for part in parts]
        else:
            return False, "structure"
    used = [{names.name_of(item) for item in side} for side in (first, second)]
    given = [side - {""} for side in used]
    stems = {name.partition("_")[0] for name in given[0] | given[1]}
    if max(map(len, given)) <= 1:
        # x = 1, 2 gives its name once.
        if len(given[0] | given[1]) > 1:
            return False, "structure"
    elif not (given[0] and given[1]) and len(stems) == 1 and "" not in used[not given[0]]:
        pass  # x_1 = 1, x_2 = 2 counts them
    elif not given[1]:
        return _in_order(first, second, leaf)
    elif used[0] != used[1]:
        return False, "structure"
    else:
        return _matched(first, second, leaf)
    return _matched([*map(names.unnamed, first)], [*map(names.unnamed, second)], leaf)


def _spread(shape: Shape) -> list[Shape]:
    """The elements of a list or a set; the two of a value with +-."""
    if shape.kind == "value" and shape.text.count("\\pm") == 1:
        before, _, after = shape.text.partition("\\pm")
        after = after.strip()
        plus = f"{before}+{after}" if before else after
        return [Shape("value", plus), Shape("value", f"{before}-{after}")]
    if shape.kind in ("list", "set"):
        return [
            part
            for item in shape.items
            for part in (_spread(item) if item.kind == "value" else (item,))
        ]
    return [shape]


def _either(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    if _plain(gold.text) == _plain(answer.text):
        return True, "string"
    if gold.kind == "value" == answer.kind and not regions.of_reals(gold):
        return values(gold.text, answer.text, leaf)
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
    first, second = regions.pieces(gold), regions.pieces(answer)
    if first is None or second is None:
        same = gold.kind == answer.kind and gold.marks == answer.marks and gold.kind != "value"
        return _in_order(gold.items, answer.items, leaf) if same else (False, "structure")
    if first[0] and second[0] and first[0] != second[0]:
        return False, "structure"
    return _matched(first[1], second[1], leaf)


def _equations(gold: Shape, answer: Shape, leaf: Leaf) -> Found:
    if gold.kind != "relation" or answer.kind != "relation" or gold.marks + answer.marks != "==":
        return False, "structure"
    # x = 1 and y = 2x + 1 are solved; 2x = 2 and 2x - y + 1 = 0 may be the question.
    if names.assigned(gold):
        return False, "unevaluated"
    return _expressions("equation", gold.text, answer.text, leaf)
