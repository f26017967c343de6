"""A prompt set: what the scheduler draws from and the report groups by."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from s3ac_jax.core.types import Prompt
from s3ac_jax.data import arithmetic, sums
from s3ac_jax.data.asking import Asked, Wording, encoded, padded, prompt_texts
from s3ac_jax.data.chat import ChatTemplate
from s3ac_jax.data.hf_tokenizer import HFTokenizer


@dataclasses.dataclass(frozen=True)
class Levels:
    """How difficulty levels are called: numbers to names of metrics, and to labels for people.

    heading: what a level is. scale: whether the labels are numbers, so that the ends say it all.
    Source: ours.
    """

    heading: str
    names: Mapping[int, str]
    labels: Mapping[int, str]
    scale: bool = False


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """P prompts, right-padded [P, T], their lengths [P] and difficulty levels [P] (for reports).

    Source: ours.
    """

    tokens: np.ndarray
    num_tokens: np.ndarray
    levels: np.ndarray
    called: Levels

    def __len__(self) -> int:
        return len(self.num_tokens)

    def take(self, index: np.ndarray) -> Prompt:
        """The prompts at these places. Source: ours."""
        return Prompt(index.astype(np.int32), self.tokens[index], self.num_tokens[index])


def arithmetic_prompts(problems: arithmetic.Problems) -> PromptSet:
    """Prompts of the arithmetic ladder; the level is the number of steps. Source: ours."""
    tokens, num_tokens = arithmetic.prompt_tokens(problems)
    steps = range(1, problems.moves.shape[1] + 1)
    called = Levels(
        "steps", {n: f"steps_{n}" for n in steps}, {n: str(n) for n in steps}, scale=True
    )
    return PromptSet(tokens, num_tokens, problems.num_steps, called)


def sums_prompts(
    problems: sums.Sums,
    tokenizer: HFTokenizer,
    template: ChatTemplate,
    *,
    wordings: Sequence[str],
    system: str,
    thinking: bool,
    max_tokens: int,
) -> PromptSet:
    """Sums as the chat template puts them; the level is the operator and the digits.

    Source: ours.
    """
    tokens, num_tokens = chat_tokens(
        problems.questions(wordings), tokenizer, template,
        system=system, thinking=thinking, max_tokens=max_tokens,
    )  # fmt: skip
    words = dict(zip(sums.OPERATORS, ("add", "sub", "mul"), strict=True))
    pairs = [(digits, operator) for digits in (1, 2) for operator in sums.OPERATORS]
    called = Levels(
        "sums",
        {n: f"{words[operator]}_{digits}" for n, (digits, operator) in enumerate(pairs)},
        {n: f"{digits}-digit {operator}" for n, (digits, operator) in enumerate(pairs)},
    )
    return PromptSet(tokens, num_tokens, problems.levels(), called)


def question_prompts(asked: Asked, numbers: np.ndarray, names: Sequence[str]) -> PromptSet:
    """Questions of several sources; the level is the source. numbers: of each prompt's [P].

    Source: ours.
    """
    called = dict(enumerate(names))
    levels = Levels("source", called, called)
    return PromptSet(asked.tokens, asked.num_tokens, numbers, levels)


def chat_tokens(
    questions: Sequence[str],
    tokenizer: HFTokenizer,
    template: ChatTemplate,
    *,
    system: str,
    thinking: bool,
    max_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Questions as token ids [P, max_tokens], right-padded, and their lengths [P].

    system: message before each question, none when empty.
    Raises ValueError naming the longest prompt when it has more than `max_tokens`.
    Source: ours: nothing is cut off, for half a question has another answer.
    """
    texts = prompt_texts(questions, template, Wording("", system, thinking))
    ids = encoded(texts, tokenizer, template)
    lengths = np.array([len(one) for one in ids], np.int32)
    longest = int(lengths.argmax())
    if lengths[longest] > max_tokens:
        raise ValueError(
            f"prompt {longest} ({questions[longest][:60]!r}) has {lengths[longest]} tokens, "
            f"task.max_prompt_tokens is {max_tokens}; raise it, or leave out such prompts"
        )
    return padded(ids, max_tokens, tokenizer.pad_id), lengths
