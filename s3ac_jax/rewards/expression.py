"""A small, unambiguous grammar of mathematical expressions: what it can't read is not graded.

Readings that people differ on are refused rather than chosen: two numerals side by side, 1/2x,
f(x) as a product, sin 2x y.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

from s3ac_jax.rewards.normalise import Refused

MAX_LENGTH, MAX_DEPTH = 512, 24
_GREEK = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi
chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell
"""
GREEK = frozenset(_GREEK.split())
TRIG = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))
_OTHERS = ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "exp")
FUNCTIONS = TRIG.union(_OTHERS)
_PAIRS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_INSIDE = {"\\lfloor": "floor", "\\lceil": "ceil"}
# Letters that name functions: f(x+1) is no product.
_APPLIED = frozenset("fghFGHPQT")
_TOKEN = re.compile(r"\s*([0-9]+\.[0-9]+|\.[0-9]+|[0-9]+|\\[a-zA-Z]+|[a-zA-Z]|[-+*/^_(){}\[\]|!])")


@dataclasses.dataclass(frozen=True)
class Node:
    """op: "num" | "sym" | "const" | "add" | "mul" | "div" | "pow" | "neg" | "root" or a function.

    text: of a leaf. args: the parts.
    Source: ours.
    """

    op: str
    args: tuple["Node", ...] = ()
    text: str = ""

    def walk(self) -> Iterator["Node"]:
        """This node and all below it. Source: ours."""
        yield self
        for arg in self.args:
            yield from arg.walk()


@functools.lru_cache(maxsize=2048)
def parse(text: str) -> Node:
    """The expression that a canonical line is; raises Refused where there is none, or two.

    Source: ours: precedence climbing, implicit products of what can't be misread.
    """
    if len(text) > MAX_LENGTH:
        raise Refused("guard_length")
    tokens, place = [], 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if not found:
            raise Refused("guard_form")
        tokens.append(found.group(1))
        place = found.end()
    reader = _Reader(tokens)
    node = reader.sum()
    if reader.place != len(tokens):
        raise Refused("guard_form")
    return node


def _ends_plainly(node: Node) -> bool:
    """Would digits right behind it join it? x2, 1 2, 1/2 3."""
    return node.op in ("num", "sym", "const") or all(
        part.op in ("num", "div", "neg") for part in node.walk()
    )


class _Reader:
    """A cursor over tokens."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.place, self.depth, self.bars = tokens, 0, 0, 0

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            raise Refused("guard_form")
        self.place += 1
        return token

    def sum(self) -> Node:
        """expr := ['-'] term (('+'|'-') term)*"""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused("guard_depth")
        sign = self.take() if self.peek() in ("+", "-") else "+"
        terms = [self.signed(sign, self.term())]
        while self.peek() in ("+", "-"):
            sign = self.take()
            terms.append(self.signed(sign, self.term()))
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    @staticmethod
    def signed(sign: str, node: Node) -> Node:
        return node if sign == "+" else Node("neg", (node,))

    def term(self) -> Node:
        """term := power (('*'|'/') power | power)*, left to right."""
        node = last = self.power()
        divided = False
        while True:
            token = self.peek()
            if token in ("*", "/"):
                self.take()
                last, divided = self.power(), token == "/"
                node = Node("div" if divided else "mul", (node, last))
            elif self.begins(token):
                # 1/2x is read both ways; a numeral after a factor may be a slip of the pen.
                numeral = token[0] in "0123456789." and _ends_plainly(last)
                if divided or numeral or (last.op == "num" and self.numeric_fraction()):
                    raise Refused("guard_form")
                last = self.power()
                node = Node("mul", (node, last))
            else:
                return node

    def numeric_fraction(self) -> bool:
        """Is what follows \\frac of two numerals? After a numeral it is a mixed number."""
        ahead = self.tokens[self.place : self.place + 7]
        return ahead[:1] == ["\\frac"] and not any(
            token[0].isalpha() or (token[0] == "\\" and token != "\\frac") for token in ahead
        )

    def begins(self, token: str) -> bool:
        if token == "|":
            return not self.bars
        if token.startswith("\\"):
            name = token[1:]
            return name in GREEK or name in FUNCTIONS or name in (
                "frac", "sqrt", "binom", "pi", "infty", "lfloor", "lceil", "bar", "hat", "tilde"
            )  # fmt: skip
        return bool(token) and (token.isalnum() or token[0] in "([{.")

    def power(self) -> Node:
        """power := primary ['!'] ['^' exponent] ['!']"""
        node = self.primary()
        while self.peek() in ("!", "^", "\\deg"):
            token = self.take()
            if token == "!":
                if self.peek() == "!" or node.op == "factorial":
                    raise Refused("guard_form")  # n!! is not (n!)!
                node = Node("factorial", (node,))
            elif token == "\\deg":
                half = Node("num", text="180")
                node = Node("div", (Node("mul", (node, Node("const", text="pi"))), half))
            else:
                if node.op == "pow":
                    raise Refused("guard_form")
                node = Node("pow", (node, self.exponent()))
        return node

    def exponent(self) -> Node:
        if self.peek() == "-":
            self.take()
            return Node("neg", (self.primary(),))
        return self.primary()

    def primary(self) -> Node:
        token = self.take()
        if token[0] in "0123456789.":
            return Node("num", text=token)
        if token in _PAIRS:
            inside = self.sum()
            self.take(_PAIRS[token])
            return Node(_INSIDE[token], (inside,)) if token in _INSIDE else inside
        if token == "|":
            self.bars += 1
            inside = self.sum()
            self.take("|")
            self.bars -= 1
            return Node("abs", (inside,))
        if token.isalpha():
            return self.symbol(token)
        return self.command(token[1:]) if token[0] == "\\" else self.refuse()

    def refuse(self) -> Node:
        raise Refused("guard_form")

    def symbol(self, name: str) -> Node:
        if self.peek() == "_":
            self.take()
            if self.peek() == "{":
                end = self.tokens.index("}", self.place) if "}" in self.tokens[self.place :] else -1
                if end < 0:
                    self.refuse()
                subscript = "".join(self.tokens[self.place + 1 : end])
                self.place = end + 1
            else:
                subscript = self.take()
            return Node("sym", text=f"{name}_{subscript}")
        if name in ("e", "i"):
            return Node("const", text=name)
        ahead = self.tokens[self.place : self.place + 3]
        numeral = ahead[:1] + ahead[2:] == ["(", ")"] and ahead[1][0].isdigit()
        if (name in _APPLIED and ahead[:1] == ["("]) or numeral:
            self.refuse()  # I(0) is no product with zero
        return Node("sym", text=name)

    def command(self, name: str) -> Node:
        if name in ("pi", "infty"):
            return Node("const", text=name)
        if name in GREEK:
            return self.symbol("\\" + name)
        if name in ("bar", "hat", "tilde"):
            inside = self.argument()
            if inside.op != "sym":
                self.refuse()
            return Node("sym", text=f"\\{name}{{{inside.text}}}")
        if name in ("frac", "binom"):
            over, under = self.argument(), self.argument()
            return Node("div" if name == "frac" else "binom", (over, under))
        if name == "sqrt":
            return self.root()
        if name in FUNCTIONS:
            return self.function(name)
        return self.refuse()

    def argument(self) -> Node:
        """A group in braces, or one character as in \\frac12."""
        if self.peek() == "{":
            return self.primary()
        token = self.peek()
        if token.isdigit() and len(token) > 1:
            # \frac12: one digit each.
            self.tokens[self.place : self.place + 1] = list(token)
            if len(token) > 2:
                self.refuse()
        return self.primary()

    def root(self) -> Node:
        two = Node("num", text="2")
        degree = two
        if self.peek() == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        token = self.peek()
        if token.isdigit() and len(token) > 1 and degree is not two:
            self.refuse()
        return Node("root", (self.primary(), degree))

    def function(self, name: str) -> Node:
        power = base = None
        if name == "log" and self.peek() == "_":
            self.take()
            base = self.argument()
        if self.peek() == "^":
            self.take()
            power = self.exponent()
            if power.op == "neg":
                self.refuse()  # sin^{-1}: inverse or reciprocal
        if self.peek() in ("(", "{", "["):
            inside = self.primary()
            if self.peek() in ("^", "!"):
                self.refuse()  # sin(x)^2
        else:
            inside = self.power()
            while self.begins(self.peek()) and self.peek()[1:] not in FUNCTIONS:
                if self.peek() in ("(", "[", "{"):
                    self.refuse()  # sin x (x+1)
                inside = Node("mul", (inside, self.power()))
            if self.peek() == "/":
                self.refuse()
        node = Node(name, (inside, base) if base else (inside,))
        return Node("pow", (node, power)) if power else node
