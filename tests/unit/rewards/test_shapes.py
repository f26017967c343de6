"""The outer form of answers: lists, tuples, sets, unions, matrices, relations."""

import pytest

from s3ac_jax.rewards.normalise import Refused, normalise
from s3ac_jax.rewards.shapes import NAME, enclosed, read, split, split_commas

SHAPES = [
    ("5", "value", [], ""),
    ("(x+1)(x-1)", "value", [], ""),
    ("(5)", "value", [], ""),
    ("1,2,3", "list", ["1", "2", "3"], ""),
    ("1,2 \\text{ and } 3", "list", ["1", "2", "3"], ""),
    ("x=1 or x=2", "list", ["x=1", "x=2"], ""),
    ("1;2", "list", ["1", "2"], ""),
    ("(0,0),(1,1)", "list", ["(0,0)", "(1,1)"], ""),
    ("(1,2)", "tuple", ["1", "2"], "()"),
    ("[0,1)", "tuple", ["0", "1"], "[)"),
    ("\\langle 1,2\\rangle", "tuple", ["1", "2"], "<>"),
    ("\\{1,2\\}", "set", ["1", "2"], ""),
    ("(-\\infty,0)\\cup[1,2]", "union", ["(-\\infty,0)", "[1,2]"], ""),
    ("x=5", "relation", ["x", "5"], "="),
    ("0\\le x<1", "relation", ["0", "x", "1"], "l<"),
    ("x\\in[0,1)", "relation", ["x", "[0,1)"], "i"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "matrix", ["1", "2", "3", "4"], "2,2"),
    ("\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "matrix", ["1", "2", "3", "4"], "v2,2"),
    ("\\{x:x>0\\}", "relation", ["x", "0"], ">"),
    ("\\{n\\in\\mathbb{Z}:n>0\\}", "value", [], ""),
    ("1,,2", "list", ["1", "2"], ""),
]


@pytest.mark.parametrize(("text", "kind", "items", "marks"), SHAPES)
def test_shapes(text, kind, items, marks):
    shape = read(normalise(text))
    assert (shape.kind, [item.text for item in shape.items], shape.marks) == (kind, items, marks)


@pytest.mark.parametrize(
    ("text", "parts"),
    [("1,234", ["1,234"]), ("1, 234", ["1", " 234"]), ("43,47,2021", ["43", "47", "2021"]),
     ("4, 27, 3,125", ["4", " 27", " 3,125"]), ("\\frac{1,2}{3},4", ["\\frac{1,2}{3}", "4"])],
)  # fmt: skip
def test_commas_of_lists_and_of_numbers(text, parts):
    assert split_commas(text) == parts


def test_brackets_and_words_are_not_split():
    assert split('(1,2),"a,b",3', ",") == ["(1,2)", '"a,b"', "3"]
    assert enclosed("[0,1)")
    assert not enclosed("(0,1)(2,3)")


@pytest.mark.parametrize(
    "text", ["x", "x_1", "\\theta", "f(x)", "AB", "|AB|", "P(A)", "\\angle ABC"]
)
def test_names(text):
    assert NAME.fullmatch(text)


@pytest.mark.parametrize(
    "text", ["2x", "-x", "|x|", "\\log(x)", "x^2", "x!", "xy", "5", "x+y", "\\pm x"]
)
def test_no_names(text):
    assert not NAME.fullmatch(text)


def test_a_list_of_a_hundred_is_no_answer():
    with pytest.raises(Refused, match="guard_length"):
        read(", ".join(map(str, range(100))))
