"""The last box counts, whole, closed, and after the thinking; nothing else in a response does."""

import time

import pytest

from s3ac_jax.rewards.extract import final_answer

FOUND = [
    (r"so \boxed{42}", "42"),
    (r"\fbox{42}", "42"),
    (r"\boxed {42}", "42"),
    (r"\boxed{3}. No, it is \boxed{4}", "4"),
    (r"first \boxed{3}, wait, no: \boxed{4}", "4"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    (r"\boxed{3},\boxed{4},\boxed{5}", "3, 4, 5"),
    (r"\boxed{3} and $\boxed{4}$", "3, 4"),
    (r"\boxed{5}. \boxed{5}", "5"),
    (r"\boxed{840}., and here it is again.  **Final Answer** \boxed{840}", "840"),
    (r"<think>\boxed{3}</think> \boxed{4}", "4"),
    (r"\boxed{4 or \boxed{5}}", r"4 or \boxed{5}"),
    (r"a { stray brace, \boxed{5}", "5"),
    (r"stray } and \boxed{5}}", "5"),
    (r"put it into \boxed{ later: \boxed{5}", "5"),
    (r"\boxed{} \boxed{5}", "5"),
]
MISSING = [
    ("the answer is 42", "no_box"),
    ("", "no_box"),
    (r"boxed{42}", "no_box"),
    (r"\\boxed{42}", "no_box"),
    (r"\boxed{}", "empty_box"),
    (r"7 \boxed{  }", "empty_box"),
    (r"\boxed{7}, \boxed{}", "empty_box"),
    (r"\boxed{7", "unterminated_box"),
    (r"\boxed{7} and \boxed{", "unterminated_box"),
    (r"\boxed{7}, so \boxed{8", "unterminated_box"),
    (r"\boxed{3}, no: \boxed 4", "unterminated_box"),
    (r"<think> \boxed{7}", "unfinished_think"),
    (r"<think>a</think> \boxed{7} <think> hm", "unfinished_think"),
    (r"\boxed{7} </think> so it is", "no_box"),
]


@pytest.mark.parametrize(("response", "answer"), FOUND)
def test_the_last_box(response, answer):
    assert final_answer(response) == (answer, "")


@pytest.mark.parametrize(("response", "reason"), MISSING)
def test_no_final_answer(response, reason):
    assert final_answer(response) == (None, reason)


@pytest.mark.parametrize(
    "unit", ["{", "}", "{}", "\\boxed{", "\\boxed{5}", "\\boxed{5} ", "\\", "<think>", "\\boxed"]
)
def test_a_megabyte_takes_linear_time(unit):
    started = time.process_time()
    final_answer(unit * (1_000_000 // len(unit)))
    assert time.process_time() - started < 2
