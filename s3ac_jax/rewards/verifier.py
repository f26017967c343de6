"""What a task's verifier says of responses: their reward, and what else is worth a look."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from s3ac_jax.core.types import Rollout, Scored


@dataclasses.dataclass(frozen=True)
class Share:
    """A metric of a task as a share, sum of `part` over sum of `whole`; both of B responses.

    by_level: it is also reported for each difficulty level, with a column in the final table.
    Source: ours: sums, so that a share of a batch follows from its responses in any grouping.
    """

    part: np.ndarray
    whole: np.ndarray
    by_level: bool = False

    def of(self, rows: np.ndarray | slice = slice(None)) -> float:
        """The share among these responses, 0 where there is nothing to share. Source: ours."""
        return float(self.part[rows].sum() / max(self.whole[rows].sum(), 1))


class Verifier(Protocol):
    """Grades the responses to one prompt set. Source: ours."""

    def grade(self, rollout: Rollout) -> Scored:
        """Reward, success and validity of each response. Source: ours."""
        ...

    def shares(self, scored: Scored) -> dict[str, Share]:
        """Metrics that only this task has, by name. Source: ours."""
        ...

    def remark(self, outcome: Mapping[str, float]) -> str:
        """Words on an outcome, from the metrics of `shares`; empty for none. Source: ours."""
        ...


@runtime_checkable
class Answering(Protocol):
    """A verifier that knows which answer a response gives, right or not.

    Source: self-consistency (2203.11171): a vote is for an answer, not for a text.
    """

    def answers(self, rollout: Rollout) -> list[str | None]:
        """The answer of each response, spelled as one where it is one; None for none, and for a
        response that was cut off. Every right response has one. Source: ours."""
        ...
