"""Tasks: what is asked and how it is graded. A run's `task` is one of them, told by its "kind"."""

import dataclasses
from typing import ClassVar

from s3ac_jax.config.checks import at_least
from s3ac_jax.data.arithmetic import TOKENIZER
from s3ac_jax.data.sums import OPERATORS


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The arithmetic ladder. seed: of the problem sets, apart from the run's seed.

    Source: ours.
    """

    max_steps: int = 8
    num_train: int = 4096
    num_held_out: int = 512
    seed: int = 0

    # What its lengths follow from, and whether a policy can be trained for it from nothing.
    sized_by: ClassVar[str] = "task.max_steps"
    has_warm_start: ClassVar[bool] = True
    # Tokens that a model must have at least.
    min_vocab_size: ClassVar[int] = TOKENIZER.vocab_size

    def __post_init__(self):
        at_least("task", self, max_steps=1, num_train=1, num_held_out=1, seed=0)
        if self.max_steps > 12:
            raise ValueError(f"task.max_steps must be at most 12, got {self.max_steps}")

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt of the ladder. Source: ours."""
        return 2 * self.max_steps + 2

    @property
    def max_answer_tokens(self) -> int:
        """Longest right response of the ladder, stop token included. Source: ours."""
        return 4 * self.max_steps + 3


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums in words, through the chat template of the model's folder.

    digits: of the operands, 1 or 2 or both. wordings: of the questions, with {a}, {op} and {b}.
    system: message before each question; the template's own default when empty. thinking: what the
    template is told of it. seed: of the prompt sets.
    Source: ours.
    """

    max_prompt_tokens: int
    digits: tuple[int, ...] = (1, 2)
    operators: str = "+-"
    wordings: tuple[str, ...] = ("What is {a} {op} {b}?",)
    num_train: int = 2048
    num_held_out: int = 256
    seed: int = 0
    system: str = ""
    thinking: bool = False

    sized_by: ClassVar[str] = "task.max_prompt_tokens"
    has_warm_start: ClassVar[bool] = False
    # Its tokenizer comes with the model, and is looked at when the task is made.
    min_vocab_size: ClassVar[int] = 1
    # A number and the stop token; how many tokens a number takes is the tokenizer's affair.
    max_answer_tokens: ClassVar[int] = 2

    def __post_init__(self):
        at_least("task", self, max_prompt_tokens=1, num_train=1, num_held_out=1, seed=0)
        if not self.digits or set(self.digits) - {1, 2} or len(set(self.digits)) < len(self.digits):
            raise ValueError(f"task.digits must be (1,), (2,) or (1, 2), got {self.digits}")
        known = self.operators and not set(self.operators) - set(OPERATORS)
        if not known or len(set(self.operators)) < len(self.operators):
            raise ValueError(
                f"task.operators must be some of {OPERATORS!r}, each once, got {self.operators!r}"
            )
        if not self.wordings:
            raise ValueError("task.wordings must hold at least one wording")
        for wording in self.wordings:
            if any(wording.count(part) != 1 for part in ("{a}", "{op}", "{b}")) or (
                wording.count("{") + wording.count("}") != 6
            ):
                raise ValueError(
                    f"task.wordings: {wording!r} must have {{a}}, {{op}} and {{b}}, each once, and "
                    "no other braces"
                )


# The first one is meant where a config names no kind.
TaskConfig = Ladder | Sums
