"""Names beside values: the same name, none, or names in an order."""

import pytest

from s3ac_jax.rewards import names
from s3ac_jax.rewards.normalise import normalise
from s3ac_jax.rewards.shapes import read


def shape(text):
    return read(normalise(text))


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [("x = 5", "x", "5"), ("x \\approx 5", "x", "5"), ("f(x) = 2x", "f(x)", "2x"), ("5", "", "5"),
     ("2x = 5", "", "2x=5"), ("v_{\\text{max}} = 5", 'v_{"max"}', "5"), ("x < 5", "", "x<5"),
     ("AB:CD = 5", "AB:CD", "5"), ("P(\\text{red}) = 5", 'P("red")', "5")],
)  # fmt: skip
def test_a_name_and_its_value(text, name, value):
    assert names.name_of(shape(text)) == name
    assert names.unnamed(shape(text)).text == value


@pytest.mark.parametrize(
    ("text", "values"),
    [("x=1, y=2", ["1", "2"]), ("y=2, x=1", ["1", "2"]), ("1, 2", ["1", "2"]),
     ("a=1, c=3, b=2", ["1", "2", "3"]), ("n=1, k=2", []), ("k=1, n=2", ["1", "2"]),
     ("x=1, x=2", []), ("AB=1, AC=2", ["1", "2"]), ("AC=1, AB=2", [])],
)  # fmt: skip
def test_values_in_the_order_of_their_names(text, values):
    assert [item.text for item in names.by_name(shape(text).items)] == values


def test_the_name_comes_first():
    assert names.named_first(shape("5 = x")) == shape("x = 5")
    for text in ("x = 5", "x+y = 5", "5 = 6", "5 = 6 = x"):
        assert names.named_first(shape(text)) == shape(text)


@pytest.mark.parametrize(
    ("gold", "answer", "renamed"),
    [("f(x)=2x", "f(n)=2n", "f(x)=2x"), ("f(x)=2x", "g(n)=2n", "g(n)=2n"), ("x=2", "y=2", "y=2"),
     ("f(x)=a+x", "f(t)=\\theta t", "f(x)=\\theta x"), ("f(x)=x", "f(a)=ax", "f(a)=ax")],
)  # fmt: skip
def test_the_variable_of_a_function_has_any_name(gold, answer, renamed):
    assert names.same_variable(shape(gold), shape(answer)).text == renamed
