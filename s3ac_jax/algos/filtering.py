"""The `keep` and `shaping` columns: which responses are trained on, and what their reward becomes.

Both decide on the host, between rollout and packing: numpy in, numpy out.
"""

import dataclasses
import math
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from s3ac_jax.algos.shaping import soft_overlong_penalty


@dataclasses.dataclass(frozen=True)
class KeepAll:
    """Every graded response is trained on, truncated ones included.

    Source: S3AC (2610.35518); ours: truncation is a wrong answer, not a missing one.
    """

    max_rounds: ClassVar[int] = 1
    needs_group: ClassVar[bool] = False

    def groups(
        self,
        success: Bool[np.ndarray, "B"],
        valid: Bool[np.ndarray, "B"],
        group_ids: Int[np.ndarray, "B"],
        *,
        num_groups: int,
    ) -> Bool[np.ndarray, "P"]:
        """True for each group.

        Source: ours: no filter.
        """
        return np.ones(num_groups, bool)


@dataclasses.dataclass(frozen=True)
class VariedGroups:
    """Groups whose responses are all right or all wrong go, and new prompts are drawn for them.

    max_rounds: rollouts per tick, after which what there is is trained on.
    Source: DAPO (2503.14476), dynamic sampling, on accuracy and not on the shaped reward; ours:
    each round draws only what is missing, and the bound.
    """

    max_rounds: int = 8
    needs_group: ClassVar[bool] = True

    def __post_init__(self):
        if self.max_rounds < 1:
            raise ValueError(f"max_rounds must be at least 1, got {self.max_rounds}")

    def groups(
        self,
        success: Bool[np.ndarray, "B"],
        valid: Bool[np.ndarray, "B"],
        group_ids: Int[np.ndarray, "B"],
        *,
        num_groups: int,
    ) -> Bool[np.ndarray, "P"]:
        """True where the valid responses of a group differ in success.

        Source: DAPO (2503.14476), eq. 11: 0 < number right < G.
        """
        valid = np.asarray(valid, bool)
        right = np.bincount(group_ids[valid & success], minlength=num_groups)
        graded = np.bincount(group_ids[valid], minlength=num_groups)
        return (right > 0) & (right < graded)


@dataclasses.dataclass(frozen=True)
class SoftOverlong:
    """A penalty that grows over the last part of the response limit.

    buffer_share: that part, of the limit; DAPO has 4,096 of 20,480 tokens.
    Source: DAPO (2503.14476), eq. 13.
    """

    buffer_share: float = 0.2

    def __post_init__(self):
        if not 0 < self.buffer_share <= 1:
            raise ValueError(f"buffer_share must be above 0 and at most 1, got {self.buffer_share}")

    def buffer_tokens(self, max_tokens: int) -> int:
        """Tokens of the buffer under a limit of max_tokens, at least 1. Source: ours."""
        return math.ceil(self.buffer_share * max_tokens)

    def shaped(
        self,
        reward: Float[np.ndarray, "B"],
        num_tokens: Int[np.ndarray, "B"],
        *,
        max_tokens: int,
    ) -> Float[np.ndarray, "B"]:
        """Reward plus the penalty, in reward units; success is judged without it.

        Source: DAPO (2503.14476), eq. 13.
        """
        # Of every length there is: the number of responses changes, and would compile anew.
        by_length = soft_overlong_penalty(
            np.arange(max_tokens + 1),
            max_tokens=max_tokens,
            buffer_tokens=self.buffer_tokens(max_tokens),
        )
        return np.asarray(reward, np.float32) + np.asarray(by_length, np.float32)[num_tokens]


Keep = KeepAll | VariedGroups
