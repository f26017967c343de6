"""Which intervals inequalities, unions and exclusions consist of."""

import pytest

from s3ac_jax.rewards.normalise import normalise
from s3ac_jax.rewards.regions import pieces, variable
from s3ac_jax.rewards.shapes import read

WHOLE = "(-\\infty,\\infty)"
PIECES = [
    ("[0,1)", "", ["[0,1)"]),
    ("0 \\le x < 1", "x", ["[0,1)"]),
    ("1 > x \\ge 0", "x", ["[0,1)"]),
    ("3 < t", "t", ["(3,\\infty)"]),
    ("x \\le 3", "x", ["(-\\infty,3]"]),
    ("x < 0 or x > 1", "x", ["(-\\infty,0)", "(1,\\infty)"]),
    ("(-\\infty,0)\\cup\\{1\\}", "", ["(-\\infty,0)", "\\{1\\}"]),
    ("\\mathbb{R}", "", [WHOLE]),
    ("x \\ne 2", "x", ["(-\\infty,2)", "(2,\\infty)"]),
    ("x \\ne \\sqrt{2}", "x", ["(-\\infty,\\sqrt{2})", "(\\sqrt{2},\\infty)"]),
    ("\\mathbb{R}\\setminus\\{2\\}", "", ["(-\\infty,2)", "(2,\\infty)"]),
    ("\\mathbb{R} - \\{2,-1/2\\}", "", ["(-\\infty,-1/2)", "(-1/2,2)", "(2,\\infty)"]),
]


@pytest.mark.parametrize(("text", "name", "parts"), PIECES)
def test_pieces(text, name, parts):
    found = pieces(read(normalise(text)))
    assert found is not None
    assert (found[0], [part.text for part in found[1]]) == (name, parts)


@pytest.mark.parametrize(
    "text",
    ["x < 1 or y > 2", "1 < 2", "0 < x > 1", "(1,2,3)", "\\mathbb{R}\\setminus\\{\\sqrt{2},a\\}",
     "x+y \\ne 2"],
)  # fmt: skip
def test_no_region_of_one_variable(text):
    assert pieces(read(normalise(text))) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [("x < 1", "x"), ("0 \\le t \\le 1", "t"), ("x \\in [0,1]", "x"), ("x = 1", "x"), ("[0,1]", ""),
     ("x = 1, 2", "x"), ("1, 2", ""), ("\\{1,2\\}", ""), ("5", ""), ("x \\ne 1", "x")],
)  # fmt: skip
def test_the_variable(text, name):
    assert variable(read(normalise(text))) == name
