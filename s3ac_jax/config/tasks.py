"""Tasks: what is asked and how it is graded. A run's `task` is one of them, told by its "kind"."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from s3ac_jax.config.checks import at_least, positive
from s3ac_jax.config.sources import SourceConfig, check_sums
from s3ac_jax.data.arithmetic import TOKENIZER


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
        check_sums("task", self.operators, self.wordings)


@dataclasses.dataclass(frozen=True)
class Questions:
    """Questions with known answers, through the chat template of the model's folder.

    train, held_out: sources by name; the name is what metrics and the table call them. Without
    `start.hf` the text is bytes and the policies are warm-started (`sft`). instruction: added to
    each question; system: message before it, the template's own default when empty. thinking: what
    the template is told of it. deduplicate: leave out what is asked twice, and training questions
    that held-out sets or evaluation suites ask too. graders: worker processes. deadline_s: seconds
    of work on one answer. seed: of the mixing.
    Source: ours; the instruction is that of the Qwen2.5-Math report (2409.12122).
    """

    max_prompt_tokens: int
    train: Mapping[str, SourceConfig]
    held_out: Mapping[str, SourceConfig]
    instruction: str = "Put your final answer within \\boxed{}."
    system: str = ""
    thinking: bool = False
    deduplicate: bool = True
    graders: int = 2
    deadline_s: float = 2.0
    seed: int = 0

    sized_by: ClassVar[str] = "task.max_prompt_tokens"
    has_warm_start: ClassVar[bool] = True
    # Its tokenizer comes with the model, and is looked at when the task is made.
    min_vocab_size: ClassVar[int] = 1
    # A digit in its box, in a tokenizer that has "boxed" in one token, and the stop token.
    max_answer_tokens: ClassVar[int] = 6
    # Known when the sources have been read.
    num_train: ClassVar[int | None] = None

    def __post_init__(self):
        at_least("task", self, max_prompt_tokens=1, graders=1, seed=0)
        positive("task", self, "deadline_s")
        for name in ("train", "held_out"):
            if not getattr(self, name):
                raise ValueError(f"task.{name} must name at least one source of questions")
        for name, source in self.held_out.items():
            if source.weight != 1:
                raise ValueError(
                    f"task.held_out.{name}.weight is of no use: all of its questions are asked"
                )


# The first one is meant where a config names no kind.
TaskConfig = Ladder | Sums | Questions
