"""One letter counts, however it is dressed; two letters, or one taken back, do not."""

import pytest

from s3ac_jax.rewards.choices import letter
from s3ac_jax.rewards.math_answers import decide

B = [
    "B", "b", "(B)", "[B]", "B.", "B)", "B:", "$B$", "**B**", "{B}", "\\text{B}", "\\mathrm{B}",
    "\\textbf{(B)}", "\\textbf{(B) }42", "B. 42", "B) 42", "(B) 42", "B: The cat", "B. A cat",
    "Option B", "The answer is B", "The correct answer is (B)", "B. \\text{42}", "(B) A and so on",
    "B. 4 or 5", "B. x \\text{ and } y", "\\boxed{B}", '"B"', "`B`", "\\left(B\\right)",
    "\\textcircled{B}",
]  # fmt: skip
NONE = [
    "", "42", "A or B", "B or A", "ABCD", "BB", "Bob", "not B", "A, B", "B, A", "B/A", "B & C",
    "B;C",
    "B|C", "C, not B", "B. or C", "B) C)", "(B)(C)", "B (or C)", "B and C", "B. C.", "B. maybe (D)",
    "neither B", "because A is bad", "\\neg B", "\\cancel{B}", "B^c", "B'", "B: C", "B. nor C",
    "B.C.D", "B or c", "A because B", "Answer: B or C", "B?", "x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("answer", B)
def test_the_letter(answer):
    assert letter(answer) == "B"


@pytest.mark.parametrize("answer", NONE)
def test_no_one_letter(answer):
    assert letter(answer) is None


def test_a_verdict_on_a_letter():
    assert decide("\\boxed{(C) 42}", "C", kind="choice").correct
    assert not decide("\\boxed{42}", "C", kind="choice").correct
    assert not decide("C", "C", kind="choice").correct
