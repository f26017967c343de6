"""The verifier against text read by a regular expression."""

import re

import numpy as np
import pytest

from s3ac_jax.core.types import Rollout
from s3ac_jax.data import arithmetic
from s3ac_jax.data.prompts import arithmetic_prompts
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier

ENCODE, STOP = arithmetic.TOKENIZER.encode, 1
# `7+4-9=`: 7+4=1, 1-9=2. `3*7=`: 1.
PROBLEMS = arithmetic.Problems(np.array([2, 1]), np.array([7, 3]), np.array([[3, 17], [19, 0]]))


def rollout_of(responses, *, index=None, garbage=0):
    """`$` at the end of a response is the stop token; garbage fills the padding."""
    index = np.zeros(len(responses), np.int64) if index is None else np.array(index)
    width = max(map(len, responses)) + 2
    tokens = np.full((len(responses), width), garbage, np.int32)
    for row, text in enumerate(responses):
        ids = ENCODE(text.rstrip("$")) + [STOP] * text.endswith("$")
        tokens[row, : len(ids)] = ids
    return Rollout(
        arithmetic_prompts(PROBLEMS).take(index), tokens,
        np.array([len(text) for text in responses], np.int32), np.zeros(tokens.shape, np.float32),
        np.array([text.endswith("$") for text in responses]), np.zeros(tokens.shape, np.int32),
    )  # fmt: skip


def test_the_problems_are_what_the_tests_say():
    tokens, lengths = arithmetic.prompt_tokens(PROBLEMS)
    shown = [arithmetic.TOKENIZER.decode(row[:n]) for row, n in zip(tokens, lengths, strict=True)]
    assert shown == ["7+4-9=", "3*7="]


@pytest.mark.parametrize(
    ("response", "success"),
    [
        ("+4=1-9=2#2$", True),
        ("#2$", True),  # no step is asked for
        ("+4=9#2$", True),  # nor a right one
        ("#7#2$", True),  # the last word counts
        ("+4=1-9=2#2", False),  # right, but cut at the length limit
        ("+4=1-9=2#1$", False),
        ("#2#7$", False),
        ("+4=1-9=2$", False),  # no mark
        ("#22$", False),
        ("2$", False),
        ("$", False),
        ("#$", False),
        ("#2+$", False),
        ("2", False),
    ],
)
@pytest.mark.parametrize("garbage", [0, 1, 4])
def test_grade(response, success, garbage):
    # Other rows and the padding have no say, whatever they hold.
    verifier = ArithmeticVerifier(PROBLEMS)
    rollout = rollout_of(["+4=1-9=2+1=3#3$", response, "#2"], garbage=garbage)
    scored = verifier.grade(rollout)
    assert scored.success[1] == success
    assert scored.reward[1] == (1.0 if success else -1.0)
    assert scored.reward.dtype == np.float32
    assert scored.valid.all()
    assert scored.rollout is rollout


def test_the_answer_is_the_digit_behind_the_mark():
    responses = {
        "+4=1-9=2#2$": "2", "#7#3$": "3", "#0$": "0", "#2": None, "+4=1-9=2$": None, "#22$": None,
        "2$": None, "$": None, "#$": None, "#2+$": None, "#+$": None, "##$": None,
    }  # fmt: skip
    for garbage in (0, 1, 4):
        rollout = rollout_of(list(responses), garbage=garbage)
        assert ArithmeticVerifier(PROBLEMS).answers(rollout) == list(responses.values())


def test_each_response_is_graded_against_its_own_problem():
    scored = ArithmeticVerifier(PROBLEMS).grade(rollout_of(["#1$", "#1$", "#2$"], index=[1, 0, 0]))
    assert scored.success.tolist() == [True, False, True]


def test_demonstrations_of_all_kinds_are_graded_right():
    rng = np.random.default_rng(0)
    problems = arithmetic.make_problems(0, 600, max_steps=4, held_out=False)
    tokens, lengths = arithmetic.demonstrations(problems, rng, quit_rate=0.5)
    index = rng.permutation(600)
    rollout = Rollout(
        arithmetic_prompts(problems).take(index), tokens[index], lengths[index],
        np.zeros(tokens.shape, np.float32), rng.random(600) < 0.8,
        np.zeros(tokens.shape, np.int32),
    )  # fmt: skip
    verifier = ArithmeticVerifier(problems)
    scored, counts = verifier.grade(rollout), verifier.count_steps(rollout)
    for row, n in enumerate(index):
        prompt, lengths_n = rollout.prompt, rollout.num_tokens[row]
        value = int(prompt.tokens[row, 0]) - ENCODE("0")[0]
        shown = arithmetic.TOKENIZER.decode(prompt.tokens[row, : prompt.num_tokens[row]])
        for operator, operand in re.findall(r"([+\-*])(\d)", shown):
            value = {"+": value + int(operand), "-": value - int(operand)}.get(
                operator, value * int(operand)
            ) % 10
        response = arithmetic.TOKENIZER.decode(tokens[n, :lengths_n])
        assert scored.success[row] == (rollout.stopped[row] and response[-1] == str(value))
        assert counts.written[row] == counts.right[row] == response.index("#") // 4
        assert counts.required[row] == shown.count("+") + shown.count("-") + shown.count("*")


@pytest.mark.parametrize(
    ("response", "written", "right"),
    [
        ("+4=1-9=2#2$", 2, 2),
        ("+4=1#2$", 1, 1),
        ("#2$", 0, 0),
        ("+4=2-9=2#2$", 2, 1),  # wrong result, then a right step in its place
        ("-9=2+4=1#1$", 2, 0),  # right steps out of place
        ("+4=1-9=2*7=4#4$", 3, 2),  # one step too many
        ("+4=1-9=", 1, 1),  # cut in the middle of a step
        ("+4=1-9=2", 2, 2),  # cut after it, without an answer
        ("+4=1-9=2+", 2, 2),
    ],
)
def test_count_steps(response, written, right):
    for other in ("+4=1-9=2#2$", "+4=1-9=2+4=6+4=0#0$"):
        # The widths of the rollout may be smaller or larger than a careful response.
        counts = ArithmeticVerifier(PROBLEMS).count_steps(rollout_of([response, other]))
        assert counts.required.tolist() == [2, 2]
        assert counts.right[0] == right
        assert counts.written[0] == min(written, 2)  # a ladder of two steps counts no further


def test_right_steps_of_a_short_problem_end_with_it():
    # Problem 1 has one step; what stands in the place of a second is not among its steps.
    counts = ArithmeticVerifier(PROBLEMS).count_steps(rollout_of(["*7=1+1=2#2$"], index=[1]))
    assert (counts.required[0], counts.right[0]) == (1, 1)
