"""Finished numbers, read exactly: no operator is evaluated, no float is made."""

import dataclasses
import functools
import re
from fractions import Fraction

from s3ac_jax.rewards.normalise import Refused

MAX_DIGITS = 400
_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INT}\.?|(?:{_INT})?\.[0-9]+)"
# Groups of three with spaces are a number of their own, never the start of a mixed one.
_PLAIN = re.compile(rf"({_DECIMAL}|[0-9]{{1,3}}(?: [0-9]{{3}})+(?:\.[0-9]+)?)")
_REPEATING = re.compile(
    r"([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot)(?:\{([0-9]+)\}|([0-9]))|\(([0-9]+)\))"
)
_SCIENTIFIC = re.compile(rf"({_DECIMAL})\*10\^(?:\{{(-?[0-9]+)\}}|\(?(-?[0-9]+)\)?)")
_POWER_OF_TEN = re.compile(r"10\^(?:\{(-?[0-9]+)\}|(-?[0-9]+))")
_EXPONENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)")
_FRACTION = re.compile(
    rf"(?:({_INT}) ?)?\\frac(?:\{{(-?{_INT})\}}|([0-9]))\s?(?:\{{(-?{_INT})\}}|([0-9]))"
)
_PART = rf"(?:\((-?{_INT})\)|\{{(-?{_INT})\}}|(-?{_INT}))"
_SLASH = re.compile(rf"{_PART}/{_PART}")
_MIXED = re.compile(rf"({_INT}) ({_INT})/({_INT})")
# k\pi  \frac{k\pi}{n}  \frac{k}{n}\pi  k\pi/n, with an optional multiplication sign.
_PI = re.compile(r"\*?\\pi")
_PI_OVER = re.compile(r"\(([0-9]*\*?\\pi)\)/\(?([0-9]+)\)?")


@dataclasses.dataclass(frozen=True)
class Number:
    """value: exact. mark: "" | "%" | "deg" | "pi" (value times pi).

    Source: ours.
    """

    value: Fraction
    mark: str = ""


@functools.lru_cache(maxsize=8192)
def read(text: str) -> Number | None:
    """The number that a canonical line is, or None; raises Refused for one of too many digits.

    Integers, decimals, thousands groups, quotients of integers, mixed numbers, repeating decimals,
    powers of ten, per cent, degrees, rational multiples of pi.
    Source: ours.
    """
    sign, body = 1, text
    while body.startswith("{") and body.endswith("}") and body.count("{") == 1:
        body = body[1:-1]
    if body[:1] in ("-", "+"):
        sign, body = (-1 if body[0] == "-" else 1), body[1:].lstrip()
    if not body or body[0] not in "0123456789.\\({":
        return None
    mark = ""
    for ending, name in (("\\deg", "deg"), ("%", "%")):
        if body.endswith(ending):
            body, mark = body[: -len(ending)].rstrip(), name
            break
    if not mark and "\\pi" in body:
        body, mark = _without_pi(body), "pi"
    value = _unsigned(body) if body else None
    return None if value is None else Number(sign * value, mark)


def _without_pi(body: str) -> str:
    if body.count("\\pi") != 1:
        return ""
    if found := _PI_OVER.fullmatch(body):
        body = "/".join(found.groups())
    if body == "\\pi" or body.startswith("\\pi/"):
        return "1" + body[3:]
    if body.startswith("\\frac{\\pi}"):
        return "\\frac{1}" + body[len("\\frac{\\pi}") :]
    return _PI.sub("", body)


def _unsigned(body: str) -> Fraction | None:
    if len(body) > 2 * MAX_DIGITS or sum(sign.isdigit() for sign in body) > MAX_DIGITS:
        if re.fullmatch(r"[0-9.,]+", body):
            raise Refused("guard_digits")
        return None
    if _PLAIN.fullmatch(body):
        return _decimal(body)
    if found := _FRACTION.fullmatch(body):
        whole, *parts = found.groups()
        return _quotient(whole, parts[0] or parts[1], parts[2] or parts[3])
    if found := _MIXED.fullmatch(body):
        return _quotient(*found.groups())
    if found := _SLASH.fullmatch(body):
        over, under = (part for part in found.groups() if part)
        return _quotient(None, over, under)
    if found := _SCIENTIFIC.fullmatch(body):
        return _shifted(_decimal(found.group(1)), found.group(2) or found.group(3))
    if found := _POWER_OF_TEN.fullmatch(body):
        return _shifted(Fraction(1), found.group(1) or found.group(2))
    if found := _EXPONENT.fullmatch(body):
        return _shifted(Fraction(found.group(1)), found.group(2))
    if found := _REPEATING.fullmatch(body):
        whole, fixed, digits = (
            found.group(1) or "0",
            found.group(2),
            found.group(found.lastindex or 0),
        )
        value = Fraction(int(whole + fixed), 10 ** len(fixed))
        return value + Fraction(int(digits), (10 ** len(digits) - 1) * 10 ** len(fixed))
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def _shifted(value: Fraction, exponent: str) -> Fraction:
    if len(exponent.lstrip("+-0")) > 3 or abs(int(exponent)) > MAX_DIGITS:
        raise Refused("guard_power")
    return value * Fraction(10) ** int(exponent)


def _quotient(whole: str | None, over: str, under: str) -> Fraction | None:
    top, bottom = (int(part.replace(",", "")) for part in (over, under))
    if bottom == 0:
        return None
    value = Fraction(top, bottom)
    if whole is None:
        return value
    if not 0 < value < 1 or bottom < 0:
        return None
    return int(whole.replace(",", "")) + value


def same(gold: Number, answer: Number) -> bool:
    """Are these one number, with the marks that a question leaves open?

    Per cent: what is 28 %, 28 or 0.28 where the right answer has the sign; where the right answer
    has none, 28 % is 28 (the question asked for per cent) and 28 % is 0.28, never 0.28 %. Degrees:
    30° is 30 and pi/6.
    Source: ours: one reading per size of number, so that no answer is right twice.
    """
    marks = gold.mark, answer.mark
    if marks == ("%", ""):
        return answer.value in (gold.value, gold.value / 100)
    if marks == ("", "%"):
        return answer.value == (gold.value if abs(gold.value) > 1 else 100 * gold.value)
    if marks in (("deg", "pi"), ("pi", "deg")):
        factor = Fraction(1, 180)
        first, second = (
            number.value * (factor if number.mark == "deg" else 1) for number in (gold, answer)
        )
        return first == second
    if "pi" in marks or "%" in marks:
        return gold.mark == answer.mark and gold.value == answer.value
    return gold.value == answer.value
