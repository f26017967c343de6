"""What is turned away before anything is evaluated, by form and not by time."""

import math

from s3ac_jax.rewards import numbers
from s3ac_jax.rewards.expression import TRIG, Node
from s3ac_jax.rewards.normalise import Refused

# Bits of the largest constant that may come up: 2004! has 19,000.
MAX_BITS = 24_000
# Terms of an expanded product, and the largest power of one term.
MAX_EXPANSION, MAX_POWER = 200, 5000
_HARMLESS = frozenset(
    ("num", "sym", "const", "add", "mul", "div", "pow", "neg", "root", "abs", "exp")
)


def longest(gold: str) -> int:
    """Characters that an answer to `gold` may have before it is read. Source: ours."""
    return 512 + 4 * len(gold)


def check(node: Node) -> None:
    """Raises Refused where evaluating `node` could take long.

    Source: ours: an upper bound on the bits of every constant part and on the terms of every
    expanded power; the deadline of the workers is for what this does not foresee.
    """
    _bits(node)
    _terms(node)


def unevaluated(gold: Node, answer: Node) -> bool:
    """Does `answer` leave work to the grader that `gold` does not: a function or factorial more?

    Source: ours: sin(60°) is the question that sqrt(3)/2 answers. Roots, quotients and powers have
    many right forms, so these are free, and so is n(n+1)/2 as a binomial of n+1 and 2.
    """
    return not _functions(answer) <= _functions(gold)


def variables(node: Node) -> frozenset[str]:
    """Names of the free symbols. Source: ours."""
    return frozenset(part.text for part in node.walk() if part.op == "sym")


def _functions(node: Node) -> set[str]:
    ops = {
        part.op
        for part in node.walk()
        if part.op not in ("binom", "factorial") or not variables(part)
    } - _HARMLESS
    return {"trig" if op in TRIG else "log" if op == "ln" else op for op in ops}


def _number(node: Node) -> float | None:
    """About the value of a constant exponent of plain arithmetic, None for any other."""
    if node.op == "num":
        return float(node.text) if len(node.text) < 16 else math.inf
    if node.op == "const":
        return {"pi": math.pi, "e": math.e}.get(node.text)
    parts = [_number(arg) for arg in node.args]
    known = [part for part in parts if part is not None]
    if not parts or len(known) < len(parts):
        return None
    match node.op:
        case "neg":
            value = -known[0]
        case "add":
            value = sum(known)
        case "mul":
            value = known[0] * known[1]
        case "div" if known[1]:
            value = known[0] / known[1]
        case "root" if known[0] >= 0 and known[1] >= 1:
            value = known[0] ** (1 / known[1])
        case _:
            return None
    return value if math.isfinite(value) else math.inf


def _bits(node: Node) -> float:
    """An upper bound on |log2| of the value, with a symbol taken as 8."""
    parts = [_bits(arg) for arg in node.args]
    match node.op:
        case "num":
            if len(node.text) > numbers.MAX_DIGITS:
                raise Refused("guard_digits")
            bits = 4.0 * len(node.text)
        case "sym" | "const":
            bits = 3.0
        case "add":
            bits = max(parts) + len(parts)
        case "mul" | "div":
            bits = sum(parts)
        case "pow":
            bits = parts[0] * _largest(node.args[1], parts[1])
        case "factorial":
            top = _largest(node.args[0], parts[0])
            bits = top * max(math.log2(max(top, 2)), 1)
        case "binom":
            bits = _largest(node.args[0], parts[0]) + 1
        case "exp" | "sinh" | "cosh":
            bits = 1.5 * _largest(node.args[0], parts[0])
        case _:
            bits = max(parts) + 2
    if bits > MAX_BITS:
        raise Refused("guard_power")
    return bits


def _largest(node: Node, bits: float) -> float:
    """An upper bound on the size of an exponent."""
    value = _number(node)
    if value is not None:
        return abs(value)
    if bits > 40:
        raise Refused("guard_power")
    return 2.0**bits if not variables(node) else 64.0


def _terms(node: Node) -> int:
    """About how many terms the expanded form has."""
    parts = [_terms(arg) for arg in node.args]
    match node.op:
        case "add":
            terms = sum(parts)
        case "mul" | "div":
            terms = parts[0] * parts[1]
        case "pow":
            exponent = abs(_number(node.args[1]) or 1.0)
            if exponent > MAX_POWER:
                raise Refused("guard_power")
            # The n-th power of t terms has (n+t-1 choose t-1); a sum of numerals is one term.
            sums = any(part.op in ("sym", "root") for part in node.args[0].walk())
            count = min(parts[0], MAX_EXPANSION)
            terms = math.comb(math.ceil(exponent) + count - 1, count - 1) if sums else 1
        case _:
            terms = 1
    if terms > MAX_EXPANSION:
        raise Refused("guard_power")
    return terms
