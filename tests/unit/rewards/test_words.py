"""A noun behind a number is its unit, unless it makes another number of it."""

import pytest

from s3ac_jax.rewards.normalise import normalise
from s3ac_jax.rewards.words import opened, unit_of

UNITS = [
    ("12\\text{ cm}^2", "12", "cm^2"), ("18 eggs", "18", "egg"), ("5 hours", "5", "hour"),
    ("5 hrs", "5", "hour"), ("60 km/h", "60", "km/h"), ("60\\text{ miles per hour}", "60",
     "mile per hour"), ("3\\text{m}", "3", "m"), ("2\\sqrt{3}\\text{ cm}", "2\\sqrt{3}", "cm"),
    ("5 classes", "5", "classe"), ("1 mass", "1", "mass"),
]  # fmt: skip
NO_UNITS = [
    "5 thousand", "5 million dollars", "5 or more", "12 pm", "5 and a half", "5 squared",
    "5 dozen eggs",
    "5 percentages or so", "n is prime", "2x apples", "5 less than ten", "not 5", "5 mod 7", "eggs",
    "5 a b c d e words too many here",
]  # fmt: skip


@pytest.mark.parametrize(("text", "body", "unit"), UNITS)
def test_units(text, body, unit):
    assert unit_of(normalise(text)) == (body, unit)


@pytest.mark.parametrize("text", NO_UNITS)
def test_words_that_are_no_unit(text):
    line = normalise(text)
    assert unit_of(line) == (line, "")


@pytest.mark.parametrize(
    ("text", "rest"),
    [("so 5", "5"), ("The answer is 5", "5"), ("Final answer: 5", "5"), ("not 5", '"not"5'),
     ("at least 5", '"at least"5'), ("answer", '"answer"')],
)  # fmt: skip
def test_openings(text, rest):
    assert opened(normalise(text)) == rest
