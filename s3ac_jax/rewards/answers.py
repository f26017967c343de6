"""The verifier of questions with known answers: text in, verdicts of a grader out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from s3ac_jax.core.types import Rollout, Scored
from s3ac_jax.data.problems import Problem
from s3ac_jax.data.tokenizer import Tokenizer
from s3ac_jax.rewards.verdict import REASONS, Verdict
from s3ac_jax.rewards.verdict import UNJUDGED as HUNG
from s3ac_jax.rewards.verifier import Share

NO_BOX = frozenset({"no_box", "empty_box", "unterminated_box", "unfinished_think"})
# Not looked at: a response that met its limit.
TRUNCATED = "truncated"
# A fixed width, so that batches join.
_CODE = f"U{max(map(len, [TRUNCATED, *REASONS]))}"


class Grader(Protocol):
    """Whoever compares answers: `rewards.pool.GraderPool`, or a stand-in. Source: ours."""

    def grade(self, items: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """A verdict for each (response, gold, kind). Source: ours."""
        ...


@dataclasses.dataclass(frozen=True)
class AnswerVerifier:
    """Grades responses to `problems`; `rollout.prompt.index` says which problem each answers.

    Source: ours: reward in {-1, +1}; a truncated response is a wrong one, as S3AC (2610.35518)
    has no bootstrap at the limit, and so is one whose grading hung or died.
    """

    problems: Sequence[Problem]
    tokenizer: Tokenizer
    grader: Grader

    def grade(self, rollout: Rollout) -> Scored:
        """+1 iff the response stopped by itself and the grader calls it right, else -1.

        `reasons` says why; not valid: where a grader of the user's own raised an error.
        Source: ours.
        """
        rows = len(rollout.num_tokens)
        stopped = np.flatnonzero(rollout.stopped)
        texts = self.tokenizer.decode_all(
            rollout.tokens[row, : rollout.num_tokens[row] - 1] for row in stopped
        )
        asked = [self.problems[index] for index in rollout.prompt.index[stopped]]
        verdicts = self.grader.grade(
            [(text, one.answer, one.kind) for text, one in zip(texts, asked, strict=True)]
        )
        success, reasons = np.zeros(rows, bool), np.full(rows, TRUNCATED, _CODE)
        success[stopped] = [verdict.correct for verdict in verdicts]
        reasons[stopped] = [verdict.reason for verdict in verdicts]
        reward = np.where(success, 1.0, -1.0).astype(np.float32)
        return Scored(rollout, reward, success, reasons != "grader_error", reasons)

    def shares(self, scored: Scored) -> dict[str, Share]:
        """no_box: responses without an answer in a box. hung: whose grading hung or died.

        Source: ours.
        """
        every = np.ones(len(scored.success), bool)
        reasons = np.asarray(scored.reasons)
        return {
            name: Share(np.isin(reasons, list(among)), every)
            for name, among in (("no_box", NO_BOX), ("hung", HUNG))
        }

    def remark(self, outcome: Mapping[str, float]) -> str:
        """How many answers were not in a box, and how many could not be graded. Source: ours."""
        remark = f"{100 * outcome['no_box']:.1f} % stopped without an answer in a box"
        if outcome["hung"]:
            remark += f", {100 * outcome['hung']:.1f} % whose grading hung or died"
        return remark
