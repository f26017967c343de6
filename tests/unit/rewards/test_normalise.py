"""One canonical line for each way to write the same; different numbers never meet in it."""

import pytest

from s3ac_jax.rewards.normalise import Refused, normalise

SPELLINGS = [
    ("1000", ["1{,}000", "1,\\!000", "1\\,000", "$1000$", "\\(1000\\)", "\\text{1000}", "**1000**",
              "\\textcolor{red}{1000}", "\\color{red}1000", "\\underline{1000}", "1000.", " 1000 ",
              "\\approx 1000", "{1000}", "１０００", "\\mathbf{1000}", "=1000", "1000,"]),
    ("\\frac{1}{2}", ["\\dfrac{1}{2}", "\\tfrac{1}{2}", "½", "\\displaystyle\\frac{1}{2}"]),
    ("x^2", ["x^{2}", "x²", "x ^ 2"]),
    ("x^{10}", ["x¹⁰"]),
    ("\\emptyset", ["∅", "\\varnothing", "\\{\\}"]),
    ("90\\deg", ["90^\\circ", "90^{\\circ}", "90°", "90 degrees", "90\\text{ degrees}"]),
    ("28%", ["28\\%", "28 %", "28 percent", "28\\text{ percent}"]),
    ('12"cm"^2', ["12\\text{ cm}^2", "12 cm^2", "12\\,\\mathrm{cm}^{2}", "12 cm²"]),
    ('12"pm"', ["12 pm", "12 PM", "12\\text{ p.m.}"]),
    ("-3", ["−3", "- 3", "–3"]),
    ("[0,1)", ["\\left[0,1\\right)", "\\big[0,1\\big)"]),
    ('"even"', ["even", "Even", "\\text{even}", "\\textbf{even}"]),
    ('10"dollars"', ["\\$10", "\\$ 10", "10 dollars", "10\\text{ dollars}"]),
    ('10"min"', ["10 min", "10\\text{ min}"]), ("\\min(x,y)", ["min(x,y)"]),
    ("\\infty", ["infinity"]), ('1.50"dollars"', ["\\$1.50", "\\$1.50.", "1.50 dollars"]),
    ("2x", ["2\\,x", "2\\;x", "2\\ x", "2~x"]),
    ("1111000", ["1,\\! 111,\\! 000", "1, \\! 111, \\! 000"]),
    ('3"meters"', ["3\\textbf{ meters}", "3\\textnormal{ meters}", "3\\emph{ meters}"]),
    ("\\bbR", ["ℝ", "all real numbers", "\\text{all reals}"]), ('"dne"', ["does not exist", "DNE"]),
    ("\\sin(x)", ["sin(x)", "\\sin (x)"]),
    ("0\\le x<1", ["0 \\leq x < 1", "0<=x<1", "0≤x<1"]),
]  # fmt: skip
# Pairs that a careless step would join.
APART = [
    ("1 2", "12"), ("5²", "52"), ("1½", "11/2"), ("1, 234", "1,234"), ("5⁰", "50"), ("3_1", "31"),
    ("all real numbers", "all real numbers except 2"),
    ("12 am", "12 pm"), ("AB", "BA"), ("x^{1}2", "x^{12}"), ("xy", "x"), ("\\pm 3", "3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "text"), [(line, text) for line, texts in SPELLINGS for text in [line, *texts]]
)
def test_spellings(line, text):
    assert normalise(text) == normalise(line) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [("30^\\circ C", '30"C"'), ("30^{\\circ}\\mathrm{C}", '30"C"'), ("30°F", '30"F"'),
     ("½\\text{ m}", '\\frac{1}{2}"m"'), ("10^{8}\\text{ m/s}", '10^8"m"/s')],
)  # fmt: skip
def test_units_of_one_letter(text, line):
    assert normalise(text) == line


@pytest.mark.parametrize(("one", "other"), APART)
def test_what_differs_stays_apart(one, other):
    assert normalise(one) != normalise(other)


@pytest.mark.parametrize("sign", ["\0", "\ud800", "\u202e", "\u200b", "\ue000", "\x1b"])
def test_characters_that_no_answer_has(sign):
    with pytest.raises(Refused, match="guard_characters"):
        normalise(f"4{sign}2")
