"""What has one reading is parsed, what has two is refused."""

import pytest

from s3ac_jax.rewards.expression import Node, parse
from s3ac_jax.rewards.normalise import Refused


def shown(node: Node) -> str:
    """The tree in one line, every bracket written."""
    if not node.args:
        return node.text
    return f"{node.op}({','.join(shown(arg) for arg in node.args)})"


TREES = {
    "1+2*3": "add(1,mul(2,3))",
    "1-2-3": "add(1,neg(2),neg(3))",
    "-x^2": "neg(pow(x,2))",
    "6/2*3": "mul(div(6,2),3)",
    "2xy": "mul(mul(2,x),y)",
    "2^{n-1}m": "mul(pow(2,add(n,neg(1))),m)",
    "x^10": "pow(x,10)",
    "x^-1": "pow(x,neg(1))",
    "\\frac12": "div(1,2)",
    "\\frac{a}{b}c": "mul(div(a,b),c)",
    "\\sqrt2": "root(2,2)",
    "\\sqrt[3]{x}": "root(x,3)",
    "n!": "factorial(n)",
    "(n-2)2^n": "mul(add(n,neg(2)),pow(2,n))",
    "\\cos^2\\frac{\\pi}{2n}": "pow(cos(div(pi,mul(2,n))),2)",
    "\\log_2a": "log(a,2)",
    "|x-1|": "abs(add(x,neg(1)))",
    "\\lfloor\\frac{p}{9}\\rfloor": "floor(div(p,9))",
    "\\binom{2k}{k}": "binom(mul(2,k),k)",
    "x_1x_{12}": "mul(x_1,x_12)",
    "\\alpha r": "mul(\\alpha,r)",
    "a(a-1)": "mul(a,add(a,neg(1)))",
}
REFUSED = [
    "", "+", "1 2", "x2", "\\frac{1}{2}3", "2\\frac{1}{3}x", "1/2x", "f(x+1)", "n!!", "x^2^3", "(x",
    "x)", "[x)", "\\sin^{-1}x", "\\sin(x)^2", "\\sin x(x+1)", "x,y", "x=1", "\\frac{1}",
    "\\sqrt[3]12",
    "\\frac123", "\\int x", "\\sum_{k}k", "\\foo{x}", "\\overline{x}", '"even"', "x''", "2516_8",
    "I(0)", "x(2)", "\\sqrt", "x^", "||", "\\begin{pmatrix}1\\end{pmatrix}", "\\mathbb{R}", "x<1",
]  # fmt: skip


@pytest.mark.parametrize(("text", "tree"), TREES.items())
def test_trees(text, tree):
    assert shown(parse(text)) == tree


@pytest.mark.parametrize("text", REFUSED)
def test_no_single_reading(text):
    with pytest.raises(Refused, match="guard_form"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("(" * 100 + "x" + ")" * 100, "guard_depth"), ("x+" * 300 + "x", "guard_length"),
     ("2^{" * 60 + "2" + "}" * 60, "guard_depth")],
)  # fmt: skip
def test_limits(text, reason):
    with pytest.raises(Refused, match=reason):
        parse(text)
