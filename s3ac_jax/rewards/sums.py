"""The verifier of sums: the last number that a response writes is its answer."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from s3ac_jax.core.types import Rollout, Scored
from s3ac_jax.data.sums import Sums
from s3ac_jax.data.tokenizer import Tokenizer
from s3ac_jax.rewards.verifier import Share

# A sign belongs to the number unless it stands behind one: "7-12" ends with 12.
_NUMBER = re.compile(r"(?<![\d.])[-−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def last_integer(text: str) -> int | None:
    """The last number in `text` if it is an integer, else None. Source: ours."""
    found = _NUMBER.findall(text)
    if not found or "." in found[-1]:
        return None
    # A response of a thousand digits is no answer, and int() refuses even longer ones.
    written = found[-1].replace(",", "").replace("−", "-")
    return int(written) if len(written) <= 18 else None


@dataclasses.dataclass(frozen=True)
class SumsVerifier:
    """Grades responses to `problems`; `rollout.prompt.index` says which sum each answers.

    Source: ours: reward in {-1, +1}; a truncated response is a wrong one, as S3AC (2610.35518)
    has no bootstrap at the limit.
    """

    problems: Sums
    tokenizer: Tokenizer

    def grade(self, rollout: Rollout) -> Scored:
        """+1 iff the response stopped by itself and its last number is the answer, else -1.

        Source: ours.
        """
        right = self.problems.answers()[rollout.prompt.index].tolist()
        success = np.array(
            [given == str(one) for given, one in zip(self.answers(rollout), right, strict=True)],
            bool,
        )
        reward = np.where(success, 1.0, -1.0).astype(np.float32)
        return Scored(rollout, reward, success, np.ones(len(right), bool))

    def answers(self, rollout: Rollout) -> list[str | None]:
        """The last number of each response that stopped by itself, if it is an integer.

        Source: ours.
        """
        stopped = np.flatnonzero(rollout.stopped)
        texts = self.tokenizer.decode_all(
            rollout.tokens[row, : rollout.num_tokens[row] - 1] for row in stopped
        )
        found: list[str | None] = [None] * len(rollout.num_tokens)
        for row, text in zip(stopped, texts, strict=True):
            if (number := last_integer(text)) is not None:
                found[row] = str(number)
        return found

    def shares(self, scored: Scored) -> dict[str, Share]:
        """None: a sum is right or wrong. Source: ours."""
        return {}

    def remark(self, outcome: Mapping[str, float]) -> str:
        """Nothing. Source: ours."""
        return ""
