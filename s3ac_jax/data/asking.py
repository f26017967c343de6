"""From problems to prompts: the instruction and the chat template, each applied once."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from s3ac_jax.data.chat import ChatTemplate
from s3ac_jax.data.problems import Problems, ProblemsError
from s3ac_jax.data.tokenizer import Tokenizer

_BOX = "\\boxed{}"


@dataclasses.dataclass(frozen=True)
class Wording:
    """What surrounds a question. instruction: after it, on a line of its own; empty for none.

    system: message before it; the template's own default when empty. thinking: what the template
    is told of it.
    Source: ours; the instruction is that of the Qwen2.5-Math report (2409.12122).
    """

    instruction: str = "Put your final answer within \\boxed{}."
    system: str = ""
    thinking: bool = False


@dataclasses.dataclass(frozen=True)
class Asked:
    """P prompts [P, T], right-padded, and their lengths [P].

    kept: place of each among the problems [P]. dropped: problems whose prompt was too long.
    longest: tokens of the longest prompt, dropped ones included.
    Source: ours.
    """

    tokens: np.ndarray
    num_tokens: np.ndarray
    kept: np.ndarray
    dropped: int
    longest: int


def ask(
    problems: Problems,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    wording: Wording,
    max_tokens: int,
) -> Asked:
    """The problems as prompts of at most `max_tokens`; longer ones are left out and counted.

    template: None for plain text, which begins as the tokenizer says a bare text does. The
    instruction is left out where the prompt has it already: word for word, or as another request
    for a \\boxed{} in the question, the system message or the template's default one.
    Raises ProblemsError when there are no problems or all are too long, options are not part of
    the question yet, a question can't be encoded, or it ends the user's turn by a token that it
    writes out.
    Source: ours: nothing is cut off, for half a question has another answer.
    """
    rows = [problems[place] for place in range(len(problems))]
    if not rows:
        raise ProblemsError(f"{problems.name}: no questions are left to ask")
    if closed := next((row for row in rows if row.options), None):
        raise ProblemsError(
            f"{problems.name}, {closed.id}: its options must be put into the question first "
            "(data.choices)"
        )
    texts = prompt_texts([row.question for row in rows], template, wording)
    try:
        ids = encoded(texts, tokenizer, template)
    except ValueError as error:
        fault = rows[_first_fault(texts, tokenizer)]
        raise ProblemsError(f"{problems.name}, {fault.id}: {error}") from error
    # The template writes the same number of them around every question.
    stops = _stops(ids, tokenizer)
    if len(odd := np.flatnonzero(stops > stops.min())):
        raise ProblemsError(
            f"{problems.name}, {rows[odd[0]].id}: it writes out a token that ends a turn; "
            "take that out of the question"
        )
    lengths = np.array([len(one) for one in ids], np.int32)
    kept = np.flatnonzero(lengths <= max_tokens)
    if not len(kept):
        raise ProblemsError(
            f"{problems.name}: every prompt is longer than {max_tokens} tokens, the shortest has "
            f"{lengths.min()} and the longest {lengths.max()}; raise the limit"
        )
    tokens = padded([ids[place] for place in kept], max_tokens, tokenizer.pad_id)
    return Asked(tokens, lengths[kept], kept, len(ids) - len(kept), int(lengths.max()))


def prompt_texts(
    questions: Sequence[str], template: ChatTemplate | None, wording: Wording
) -> list[str]:
    """What the model is given, for each question. Source: ours."""
    around = _rendered(["?"], template, wording)[0]
    return _rendered(
        [
            one if _has(wording.instruction, one, around) else f"{one}\n{wording.instruction}"
            for one in questions
        ],
        template,
        wording,
    )


def encoded(
    texts: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[list[int]]:
    """Token ids of prompts; a template writes the beginning of the text itself. Source: ours."""
    ids = tokenizer.encode_all(texts)
    begin = None if template else getattr(tokenizer, "bos_id", None)
    if begin is None:
        return ids
    return [one if one[:1] == [begin] else [begin, *one] for one in ids]


def padded(ids: Sequence[Sequence[int]], width: int, pad_id: int) -> np.ndarray:
    """Rows of token ids as one array [P, width], right-padded. Source: ours."""
    lengths = np.array([len(one) for one in ids], np.int64)
    tokens = np.full((len(ids), width), pad_id, np.int32)
    tokens[np.arange(width) < lengths[:, None]] = np.concatenate(ids)
    return tokens


def _rendered(
    questions: Sequence[str], template: ChatTemplate | None, wording: Wording
) -> list[str]:
    if template is None:
        before = f"{wording.system}\n" if wording.system else ""
        return [f"{before}{one}\n" for one in questions]
    before = [{"role": "system", "content": wording.system}] if wording.system else []
    return template.render_all(
        [[*before, {"role": "user", "content": one}] for one in questions],
        enable_thinking=wording.thinking,
    )


def _has(instruction: str, *texts: str) -> bool:
    """Whether one of the texts asks for what the instruction does."""
    wanted = " ".join(instruction.split())
    return any(
        wanted in " ".join(text.split()) or (_BOX in wanted and _BOX in text) for text in texts
    )


def _stops(ids: Sequence[Sequence[int]], tokenizer: Tokenizer) -> np.ndarray:
    """How many tokens of each prompt end a turn, [P]."""
    is_stop = set(tokenizer.stop_ids).__contains__
    return np.array([sum(map(is_stop, one)) for one in ids])


def _first_fault(texts: Sequence[str], tokenizer: Tokenizer) -> int:
    for place, text in enumerate(texts):
        try:
            tokenizer.encode(text)
        except ValueError:
            return place
    return 0
