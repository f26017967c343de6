"""Finished numbers are read exactly, unfinished ones not at all."""

from fractions import Fraction

import pytest

from s3ac_jax.rewards.normalise import Refused
from s3ac_jax.rewards.numbers import Number, read, same

NUMBERS = {
    "42": 42, "-42": -42, "+42": 42, "004": 4, "42.0": 42, ".5": "1/2", "5.": 5, "1,234": 1234,
    "1,234,567.5": "2469135/2", "\\frac{1}{2}": "1/2", "\\frac12": "1/2", "1/2": "1/2",
    "-\\frac{1}{-2}": "1/2", "\\frac{-3}{4}": "-3/4", "1\\frac{1}{2}": "3/2", "1 1/2": "3/2",
    "-1 1/2": "-3/2", "0.\\overline{3}": "1/3", "0.1\\overline{6}": "1/6", "0.\\bar3": "1/3",
    "1.5*10^6": 1500000, "1.5*10^{-3}": "3/2000", "10^3": 1000, "1.5e3": 1500, "1e-3": "1/1000",
    "{42}": 42, "1 000": 1000, "12 345 678": 12345678, "1e5": 100000, "0.(3)": "1/3",
    "(1)/(2)": "1/2", "{1}/{2}": "1/2", "-(1)/(2)": "-1/2",
}  # fmt: skip
NONE = [
    "1 0 0 0", "10 00", "1 000 00", "1 (1)/(2)", "2(3)", "(5)",
    "", "-", "x", "5x", "1 2", "12,34", "1,2345", "1,23,456", "5!", "2+3", "2*3", "5-", "--5",
    "5^2",
    "\\frac{1}{0}", "1/0", "\\frac{1}{2}3", "1/2/3", "\\frac{0.5}{2}", "\\frac{x}{2}",
    "1\\frac{5}{2}",
    "1 3/2", "5_2", "0x1f", "\\sqrt{4}", "٣", "1.2.3", "1..2", "5%%", "\\frac{1}", "3*10",
    "\\pi\\pi", "\\frac{\\pi}{\\pi}", "2*5", "(5",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers(text, value):
    number = read(text)
    assert number is not None
    assert (number.value, number.mark) == (Fraction(value), "")


@pytest.mark.parametrize("text", NONE)
def test_no_finished_number(text):
    assert read(text) is None


def test_marks():
    assert read("28%") == Number(Fraction(28), "%")
    assert read("30\\deg") == Number(Fraction(30), "deg")
    for text in (
        "(2\\pi)/3",
        "\\frac{2\\pi}{3}",
        "\\frac{2}{3}\\pi",
        "2\\pi/3",
        "\\frac{2*\\pi}{3}",
    ):
        assert read(text) == Number(Fraction(2, 3), "pi")
    assert read("\\pi/6") == read("\\frac{\\pi}{6}") == Number(Fraction(1, 6), "pi")


def test_quotients_are_numbers_reduced_or_not():
    assert read("48/2") == read("24") == Number(Fraction(24))
    assert read("\\frac{6}{4}") == read("1.5") == Number(Fraction(3, 2))


@pytest.mark.parametrize("text", ["7" * 401, "1," + "000," * 200 + "000"])
def test_too_many_digits(text):
    with pytest.raises(Refused, match="guard_digits"):
        read(text)


@pytest.mark.parametrize("text", ["10^{99999999999}", "1.5*10^{401}", "1e-1000"])
def test_too_large_a_power(text):
    with pytest.raises(Refused, match="guard_power"):
        read(text)


# gold, answer, one number?
MARKED = [
    ("28%", "28", True), ("28%", "0.28", True), ("28%", "2800", False), ("28%", "28%", True),
    ("28", "28%", True), ("28", "2800%", False), ("28", "0.28%", False), ("0.28", "28%", True),
    ("0.28", "0.28%", False), ("1", "100%", True), ("1", "1%", False), ("90\\deg", "90", True),
    ("30\\deg", "\\pi/6", True), ("\\pi/6", "30\\deg", True), ("30", "\\pi/6", False),
    ("\\pi", "3.14159265358979", False), ("\\pi", "180", False), ("0.1", "0.1000001", False),
    ("1/3", "0.3333333333", False), ("28%", "28\\deg", False), ("28%", "28\\pi", False),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer", "equal"), MARKED)
def test_same(gold, answer, equal):
    assert same(read(gold), read(answer)) is equal
