"""A prompt set: what the scheduler draws from and the report groups by."""

import dataclasses

import numpy as np

from s3ac_jax.core.types import Prompt
from s3ac_jax.data import arithmetic


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """P prompts, right-padded [P, T], their lengths [P] and difficulty levels [P] (for reports).

    Source: ours.
    """

    tokens: np.ndarray
    num_tokens: np.ndarray
    levels: np.ndarray

    def __len__(self) -> int:
        return len(self.num_tokens)

    def take(self, index: np.ndarray) -> Prompt:
        """The prompts at these places. Source: ours."""
        return Prompt(index.astype(np.int32), self.tokens[index], self.num_tokens[index])


def arithmetic_prompts(problems: arithmetic.Problems) -> PromptSet:
    """Prompts of the arithmetic ladder; the level is the number of steps. Source: ours."""
    tokens, num_tokens = arithmetic.prompt_tokens(problems)
    return PromptSet(tokens, num_tokens, problems.num_steps)
