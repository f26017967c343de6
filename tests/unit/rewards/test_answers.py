"""Rewards of questions with known answers: what the grader says, and what it is not asked."""

import jax
import numpy as np

from s3ac_jax.core.types import Prompt, Rollout
from s3ac_jax.data.problems import Problem
from s3ac_jax.data.tokenizer import ByteTokenizer
from s3ac_jax.rewards.answers import AnswerVerifier
from s3ac_jax.rewards.verdict import REASONS, Verdict

TOKENIZER = ByteTokenizer()
PROBLEMS = [Problem("a", "?", "7"), Problem("b", "?", "B", kind="choice")]


class Scripted:
    """Says what it is told to, and remembers what it was asked."""

    def __init__(self, *verdicts):
        self.verdicts, self.asked = verdicts, []

    def grade(self, items):
        self.asked += items
        return [Verdict(correct, reason, 0.0) for correct, reason in self.verdicts]


def rollout(texts, index, stopped, width=24):
    tokens = np.zeros((len(texts), width), np.int32)
    lengths = []
    for row, (text, ends) in enumerate(zip(texts, stopped, strict=True)):
        ids = TOKENIZER.encode(text) + [1] * ends
        tokens[row, : len(ids)] = ids
        lengths.append(len(ids))
    prompt = Prompt(np.array(index), np.zeros((len(texts), 2), np.int32), np.full(len(texts), 2))
    zeros = np.zeros(tokens.shape, np.float32)
    return Rollout(
        prompt, tokens, np.array(lengths), zeros, np.array(stopped), zeros.astype(np.int32)
    )


def test_each_response_goes_to_the_grader_with_its_own_gold():
    grader = Scripted((True, "string"), (False, "choice"))
    scored = AnswerVerifier(PROBLEMS, TOKENIZER, grader).grade(
        rollout([r"so \boxed{7}", r"\boxed{A}"], [0, 1], [True, True])
    )
    assert grader.asked == [(r"so \boxed{7}", "7", "math"), (r"\boxed{A}", "B", "choice")]
    assert scored.reward.tolist() == [1.0, -1.0]
    assert scored.success.tolist() == [True, False]
    assert scored.valid.all()
    assert scored.reasons.tolist() == ["string", "choice"]


def test_a_truncated_response_is_wrong_and_not_looked_at():
    grader = Scripted((True, "string"))
    scored = AnswerVerifier(PROBLEMS, TOKENIZER, grader).grade(
        rollout([r"\boxed{7}", r"\boxed{7}"], [0, 0], [False, True])
    )
    assert len(grader.asked) == 1
    assert scored.reward.tolist() == [-1.0, 1.0]
    assert scored.reasons.tolist() == ["truncated", "string"]


def test_hung_is_wrong_and_counted_and_a_failing_users_grader_is_not_valid():
    grader = Scripted((False, "deadline"), (False, "grader_error"), (False, "no_box"))
    verifier = AnswerVerifier(PROBLEMS, TOKENIZER, grader)
    scored = verifier.grade(rollout(["a", "b", "c"], [0, 0, 0], [True] * 3))
    assert scored.reward.tolist() == [-1.0] * 3
    assert scored.valid.tolist() == [True, False, True]
    shares = {name: share.of() for name, share in verifier.shares(scored).items()}
    assert shares == {"no_box": 1 / 3, "hung": 2 / 3}
    assert verifier.remark(shares) == (
        "33.3 % stopped without an answer in a box, 66.7 % whose grading hung or died"
    )
    assert verifier.remark({"no_box": 0.0, "hung": 0.0}) == (
        "0.0 % stopped without an answer in a box"
    )


def test_batches_join_whatever_their_reasons():
    longest = max(REASONS, key=len)
    parts = [
        AnswerVerifier(PROBLEMS, TOKENIZER, Scripted((False, reason))).grade(
            rollout(["x"], [0], [True])
        )
        for reason in ("no_box", longest)
    ]
    both = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    assert both.reasons.tolist() == ["no_box", longest]
