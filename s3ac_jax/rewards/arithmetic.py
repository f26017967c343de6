"""The verifier of the arithmetic ladder, on token ids: the answer decides, steps are counted."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from s3ac_jax.core.types import Rollout, Scored
from s3ac_jax.data import arithmetic
from s3ac_jax.rewards.verifier import Share


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """How B responses were worked. required, written, right: steps [B].

    A step is right when it stands in its place with the right operator, operand and result.
    Source: ours.
    """

    required: np.ndarray
    written: np.ndarray
    right: np.ndarray


@dataclasses.dataclass(frozen=True)
class ArithmeticVerifier:
    """Grades responses to `problems`; `rollout.prompt.index` says which problem each answers.

    Source: ours: reward in {-1, +1}; a truncated response is a wrong one, as S3AC (2610.35518)
    has no bootstrap at the limit.
    """

    problems: arithmetic.Problems

    def grade(self, rollout: Rollout) -> Scored:
        """+1 iff the response stopped by itself and ends with `#` and the right digit, else -1.

        Source: ours.
        """
        success = _digits(rollout) == self.problems.answers()[rollout.prompt.index]
        reward = np.where(success, 1.0, -1.0).astype(np.float32)
        return Scored(rollout, reward, success, np.ones(len(success), bool))

    def answers(self, rollout: Rollout) -> list[str | None]:
        """The digit behind `#` at the end of each response that stopped by itself. Source: ours."""
        return [str(digit) if digit >= 0 else None for digit in _digits(rollout).tolist()]

    def count_steps(self, rollout: Rollout) -> StepCounts:
        """Steps required, written (up to the first `#`) and right, per response. Source: ours."""
        problems = self.problems.take(rollout.prompt.index)
        careful, _ = arithmetic.demonstrations(problems, np.random.default_rng(0), quit_rate=0.0)
        steps = problems.moves.shape[1]
        width = 4 * steps
        tokens = np.zeros((len(problems), width), np.int32)
        shared = min(width, rollout.tokens.shape[1])
        tokens[:, :shared] = rollout.tokens[:, :shared]
        places = np.arange(width)
        mark = arithmetic.TOKENIZER.encode("#")[0]
        stops = (tokens == mark) | (places >= rollout.num_tokens[:, None])
        end = np.where(stops.any(axis=1), stops.argmax(axis=1), width)
        same = (tokens == careful[:, :width]) & (places < end[:, None])
        in_place = same.reshape(len(problems), steps, 4).all(axis=2)
        required = np.arange(steps) < problems.num_steps[:, None]
        return StepCounts(
            required=problems.num_steps,
            written=end // 4,
            right=(in_place & required).sum(axis=1),
        )

    def shares(self, scored: Scored) -> dict[str, Share]:
        """step_accuracy: of the steps required, those right. worked_answers: of the right answers,
        those with every step worked out.

        Source: ours.
        """
        counts = self.count_steps(scored.rollout)
        worked = (counts.right == counts.required) & scored.success
        return {
            "step_accuracy": Share(counts.right, counts.required, by_level=True),
            "worked_answers": Share(worked, scored.success),
        }

    def remark(self, outcome: Mapping[str, float]) -> str:
        """How many of the right answers were worked out. Source: ours."""
        return (
            f"{100 * outcome['worked_answers']:.1f} % of right answers with every step worked out "
            "(the rest guessed)"
        )


def _digits(rollout: Rollout) -> np.ndarray:
    """The digit that each response ends with, -1 where none stands there behind a `#`."""
    rows, length = np.arange(len(rollout.num_tokens)), rollout.num_tokens
    zero, mark = (arithmetic.TOKENIZER.encode(one)[0] for one in "0#")
    digit = rollout.tokens[rows, np.maximum(length - 2, 0)] - zero
    marked = rollout.tokens[rows, np.maximum(length - 3, 0)] == mark
    there = rollout.stopped & (length >= 3) & marked & (digit >= 0) & (digit <= 9)
    return np.where(there, digit, -1)
