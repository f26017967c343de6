"""Bombs are told by their form; what people write in answers is not one."""

import pytest

from s3ac_jax.rewards.expression import parse
from s3ac_jax.rewards.guard import check, unevaluated, variables
from s3ac_jax.rewards.normalise import Refused

BOMBS = [
    "10^{10^{10}}", "9^{9^{9^9}}", "10^{-10^{10}}", "9999999!", "(10^9)!", "(5!)!!", "((5!)!)!",
    "2^{99999}", "(2^{5000})^{5000}", "(x+y+z+w)^{200}", "((x+y)^9)^9", "(x+1)^{300}", "x^{99999}",
    "2^{9*9999}", "2^{\\frac{1}{0.00001}}", "2^{99999-\\frac{1}{3}}", "2^{\\sqrt{9999999999}}",
    "\\binom{10^9}{5}", "e^{e^{e^{9}}}", "\\exp(99999)", "2^{2^{n}}", "\\frac{1}{10^{10^{10}}}",
    "(\\sqrt{2}+\\sqrt{3}+\\sqrt{5})^{60}",
]  # fmt: skip
FINE = [
    "3^{2025}", "2^{25}*26!", "\\frac{1}{2004!}", "\\frac{2^{2005}+1}{3*2^{2006}}", "12^{10}",
    "2^{2024}+1", "4*3^{2023}", "\\frac{2025^{101}+2025^2}{2026}", "(x+1)^{12}", "x^{2024}",
    "2^{u-2}", "10^{\\frac{\\sqrt{13}-5}{6}}", "2^{\\pi}", "e^{-\\frac{1}{12}}",
    "\\binom{2024}{1012}", "(n-2)!", "\\binom{2k}{k}^2", "e^{16}-1", "x^{1/2}",
    "\\lambda^8+36\\lambda^7+210\\lambda^6",
]  # fmt: skip


@pytest.mark.parametrize("text", BOMBS)
def test_bombs(text):
    with pytest.raises(Refused, match="guard"):
        check(parse(text))


@pytest.mark.parametrize("text", FINE)
def test_answers_of_real_problems_pass(text):
    check(parse(text))


@pytest.mark.parametrize(
    ("gold", "answer", "left"),
    [("\\frac{\\sqrt{3}}{2}", "\\sin(60)", True), ("\\cos(x)", "\\sin(x)", False),
     ("8\\sqrt{6}", "\\sqrt{384}", False), ("120x", "5!x", True), ("n!", "n!", False),
     ("2x", "|2x|", False), ("\\frac{n(n+1)}{2}", "\\binom{n+1}{2}", False),
     ("10n", "\\binom{5}{2}n", True), ("x", "\\lfloor x\\rfloor", True)],
)  # fmt: skip
def test_work_left_undone(gold, answer, left):
    assert unevaluated(parse(gold), parse(answer)) is left


def test_variables():
    assert variables(parse("a_1x+\\pi e+\\alpha")) == {"a_1", "x", "\\alpha"}
