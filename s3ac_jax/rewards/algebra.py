"""Expressions that only algebra can compare. Runs in worker processes, never in the trainer.

The one importer of math-verify and mpmath. What was found in math-verify 0.9 and
latex2sympy2_extended 1.11: text reaches Python's eval through sympy's parse_expr in one place,
the plain-expression extraction (ExprExtractionConfig), and sympify is called on sympy objects only.
Here neither sees model output: the LaTeX extraction alone is asked for, and its input is written
anew from our own syntax tree, in digits, the letters of _LETTERS and a dozen commands.
"""

import functools
import logging
from fractions import Fraction
from typing import Any

import mpmath
from math_verify import parse as parse_latex
from math_verify import verify
from math_verify.parser import LatexExtractionConfig
from mpmath import mp

from s3ac_jax.rewards import guard
from s3ac_jax.rewards.compare import Found
from s3ac_jax.rewards.expression import Node, parse

# No e, i, d (constants and differentials) and no letter that looks like a function.
_LETTERS = "xyzabcmnpqrstuvwk"
_WIDEST = 30_000
# Bits of a factor between two equations; more take minutes to write in decimals.
_LARGEST_FACTOR = 256
_LATEX = (LatexExtractionConfig(boxed_match_priority=-1),)
# It warns of every call without its own alarm, which works in seconds; ours is in supervisor.py.
logging.getLogger("math_verify").setLevel(logging.ERROR)


_WARM = (
    "x^{2}+2x+1", "\\sqrt{8}+\\pi", "\\frac{x}{y}", "\\sin(x)", "\\log(x)", "\\binom{n}{2}", "n!",
    "\\lfloor x\\rfloor", "|x|", "e^{x}",
)  # fmt: skip


def leaf(how: str, gold: str, answer: str) -> Found:
    """Are two expressions ("same") or equations ("equation") one? (bool, "math_verify")

    Their values at fixed points, to more digits than any cancellation takes away, refute nearly
    every wrong answer in a millisecond; what they don't refute, math-verify has to agree with.
    Source: ours: 1/2^99 and 1/2^98 are one number to math-verify 0.9, which rounds differences.
    """
    first, second = (_difference(text) for text in (gold, answer))
    names: list[str] = sorted(guard.variables(first) | guard.variables(second))
    if any(part.text == "infty" for node in (first, second) for part in node.walk()):
        return False, "math_verify"
    factor = _ratio(first, second, names)
    if factor is None or (how == "same" and factor != 1):
        return False, "math_verify"
    if len(names) > len(_LETTERS):
        return False, "guard_form"
    letters: dict[str, str] = dict(zip(names, _LETTERS, strict=False))
    written = [_latex(node, letters) for node in (first, second)]
    if factor != 1:
        sign = "-" if factor < 0 else ""
        scale = f"{sign}\\frac{{{abs(factor.numerator)}}}{{{factor.denominator}}}"
        written[0] = f"{scale} \\cdot \\left({written[0]}\\right)"
    return _agrees(*written), "math_verify"


def _agrees(gold: str, answer: str) -> bool:
    """What math-verify says of two lines of LaTeX."""
    # None: no alarm of its own. It would interrupt nothing but Python code, after whole seconds.
    unbounded: Any = None
    parsed = [
        parse_latex(f"${text}$", _LATEX, fallback_mode="no_fallback", parsing_timeout=unbounded)
        for text in (gold, answer)
    ]
    if not parsed[0] or not parsed[1]:
        return False
    return verify(parsed[0], parsed[1], numeric_precision=30, timeout_seconds=unbounded)


def _difference(text: str) -> Node:
    """An expression as it is, an equation as left minus right."""
    parts = [parse(part) for part in text.split("=")]
    return parts[0] if len(parts) == 1 else Node("add", (parts[0], Node("neg", (parts[1],))))


def _ratio(first: Node, second: Node, names: list[str]) -> Fraction | None:
    """second / first where it is one rational number at all points, else None."""
    ratios = []
    steps = any(part.op in ("floor", "ceil") for node in (first, second) for part in node.walk())
    for point in range(8 if names and steps else 3 if names else 1):
        values = _values(first, second, names, point)
        if values is None:
            return None
        one, other, tolerance = values
        if abs(one - other) <= tolerance * max(abs(one), abs(other)):
            ratios.append(Fraction(1))
            continue
        if not one or not other or not names:
            return None
        ratio = other / one
        if abs(mp.mag(ratio)) > _LARGEST_FACTOR:
            return None
        close = Fraction(str(mpmath.nstr(ratio.real, 30))).limit_denominator(10_000)
        if not close or abs(ratio * close.denominator - close.numerator) > abs(ratio) * 2**-80:
            return None
        ratios.append(close)
    return ratios[0] if len(set(ratios)) == 1 else None


def _values(first: Node, second: Node, names: list[str], point: int):
    """(value, value, relative tolerance) at one point, None where there is none.

    Evaluated twice: the sizes met the first time say how many bits the second time takes.
    """
    widest = [64]
    mp.prec = 96
    places = _place(names, point)
    for node in (first, second):
        if not _finite(_evaluate(node, places, widest)):
            return None
    if widest[0] > _WIDEST:
        return None
    mp.prec = 4 * widest[0] + 512
    places = _place(names, point)
    one, other = (_evaluate(node, places, widest) for node in (first, second))
    if not _finite(one) or not _finite(other):
        return None
    return one, other, mp.mpf(2) ** -(2 * widest[0] + 200)


def _place(names: list[str], point: int) -> dict[str, Any]:
    """Positive values for the symbols: above one, whole, below one; then larger ones, for steps.

    Whole numbers for binomials and factorials. Signs are left to math-verify, whose symbols are
    real.
    """
    if point % 2:
        return {name: mp.mpf(7 * point - 4 + 2 * place) for place, name in enumerate(names)}
    shift = mp.mpf(1 if point == 0 else 11 * (point - 2))
    return {
        name: shift + mp.frac(mp.sqrt(2) * (3 * place + 1) + mp.sqrt(3) * point)
        for place, name in enumerate(names)
    }


def _finite(value: Any) -> bool:
    return value is not None and mp.isfinite(value)


def _evaluate(node: Node, places: dict[str, Any], widest: list[int]) -> Any:
    """The value of `node`, None where it has none; widest[0] grows to the bits of the largest."""
    match node.op:
        case "num":
            value = mp.mpf(Fraction(node.text).numerator) / Fraction(node.text).denominator
        case "sym":
            value = places[node.text]
        case "const":
            value = {"pi": mp.pi, "e": mp.e}.get(node.text)
            value = mp.mpc(0, 1) if value is None else +value
        case _:
            parts = [_evaluate(arg, places, widest) for arg in node.args]
            if not all(_finite(part) for part in parts):
                return None
            try:
                value = _apply(node.op, parts)
            except (ArithmeticError, ValueError, TypeError):
                return None
    if _finite(value) and value:
        widest[0] = max(widest[0], abs(int(mp.mag(value))))
    return value


def _apply(op: str, parts: list[Any]) -> Any:
    match op:
        case "add":
            return functools.reduce(lambda one, other: one + other, parts)
        case "mul":
            return parts[0] * parts[1]
        case "div":
            return parts[0] / parts[1]
        case "neg":
            return -parts[0]
        case "abs":
            return abs(parts[0])
        case "pow":
            return mp.power(parts[0], _whole(parts[1]))
        case "root":
            return _root(parts[0], parts[1])
        case "log":
            return mp.log(parts[0]) / mp.log(parts[1]) if len(parts) > 1 else mp.log10(parts[0])
        case "floor" | "ceil":
            # A value within rounding of an integer is that integer.
            near = mp.nint(mp.re(parts[0]))
            if abs(parts[0] - near) < mp.mpf(2) ** -(mp.prec // 2):
                return near
            return (mp.floor if op == "floor" else mp.ceil)(parts[0])
        case "arcsin" | "arccos" | "arctan":
            return getattr(mp, "a" + op[3:])(parts[0])
        case "binom":
            return mp.binomial(*map(_whole, parts))
        case "factorial":
            return mp.factorial(_whole(parts[0]))
        case _:
            return getattr(mp, op)(parts[0])


def _whole(value: Any) -> Any:
    """An integer as one: powers and factorials of integers are exact and fast."""
    real = mp.re(value)
    if mp.im(value) == 0 and mp.isint(real) and abs(real) < 10**6:
        return int(real)
    return value


def _root(value: Any, degree: Any) -> Any:
    """The real root where there is one: the cube root of -8 is -2."""
    if mp.isint(degree) and int(degree) % 2 and mp.im(value) == 0 and mp.re(value) < 0:
        return -mp.root(-value, int(degree))
    return mp.power(value, 1 / mp.mpf(degree))


_INFIX = {"mul": " \\cdot ", "add": " + "}


def _latex(node: Node, letters: dict[str, str]) -> str:
    """The expression in LaTeX with every bracket written, so that it has one reading."""
    parts = [_latex(arg, letters) for arg in node.args]
    match node.op:
        case "num":
            # A decimal becomes a float in sympy, and 2^{0.5} no sqrt(2).
            whole, _, digits = node.text.partition(".")
            return f"\\frac{{{whole}{digits}}}{{1{'0' * len(digits)}}}" if digits else whole
        case "sym":
            return letters[node.text]
        case "const":
            return "\\pi" if node.text == "pi" else node.text
        case "add" | "mul":
            return _INFIX[node.op].join(f"\\left({part}\\right)" for part in parts)
        case "neg":
            return f"-\\left({parts[0]}\\right)"
        case "div":
            return f"\\frac{{{parts[0]}}}{{{parts[1]}}}"
        case "pow":
            return f"\\left({parts[0]}\\right)^{{{parts[1]}}}"
        case "root":
            square = node.args[1].text == "2"
            return f"\\sqrt{'' if square else '[' + parts[1] + ']'}{{{parts[0]}}}"
        case "abs":
            return f"\\left|{parts[0]}\\right|"
        case "floor" | "ceil":
            return f"\\l{node.op}{{{parts[0]}}}\\r{node.op}"
        case "binom":
            return f"\\binom{{{parts[0]}}}{{{parts[1]}}}"
        case "factorial":
            return f"\\left({parts[0]}\\right)!"
        case "log" if len(parts) > 1:
            return f"\\log_{{{parts[1]}}}\\left({parts[0]}\\right)"
        case _:
            return f"\\{node.op}\\left({parts[0]}\\right)"


def warm() -> None:
    """Makes math-verify build its tables: the first expression of each kind takes a second.

    Source: ours.
    """
    for text in _WARM:
        leaf("same", text, text + "+1-1")
    leaf("equation", "2x+4y=3", "x+2y=\\frac{3}{2}")
