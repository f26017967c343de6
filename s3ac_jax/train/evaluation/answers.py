"""What a suite's responses say, and which of them say the same."""

import string
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from s3ac_jax.core.types import Rollout
from s3ac_jax.data.tokenizer import Tokenizer
from s3ac_jax.report.records import Record
from s3ac_jax.rewards.choices import letter
from s3ac_jax.rewards.extract import final_answer
from s3ac_jax.rewards.verifier import Answering, Verifier


class Same(Protocol):
    """Are two answers one answer? As `rewards.pool.GraderPool.same`, for which what a user's
    grader judged is mathematics. Source: ours."""

    def __call__(self, pairs: Sequence[tuple[str, str]], kind: str = "math") -> list[bool]:
        """For each pair. Source: ours."""
        ...


def texts_of(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """The text of each response, without what ended it. Source: ours."""
    ends = np.asarray(rollout.num_tokens) - np.asarray(rollout.stopped)
    rows = [
        [int(one) for one in row[:end] if one < tokenizer.vocab_size]
        for row, end in zip(np.asarray(rollout.tokens), ends, strict=True)
    ]
    return tokenizer.decode_all(rows)


def answers_of(
    rollout: Rollout, texts: Sequence[str], kinds: Sequence[str], verifier: Verifier
) -> list[str | None]:
    """The final answer in each response; None for none, and in one that was cut off.

    kinds: as in `Problem`, the answer is in the box; "" where the task's own verifier says what was
    answered, if it can. A whole text is no answer: any two differ, and none would be outvoted.
    Source: ours: what was cut off earns nothing in training either (S3AC, 2610.35518).
    """
    own: list[str | None] = [None] * len(texts)
    if "" in kinds and isinstance(verifier, Answering):
        own = verifier.answers(rollout)
    return [
        said if not kind else final_answer(text, kind)[0] if stopped else None
        for text, kind, stopped, said in zip(texts, kinds, rollout.stopped, own, strict=True)
    ]


def mark_same(
    records: Sequence[Record], earlier: Sequence[Record], kinds: Sequence[str], same: Same
) -> None:
    """Sets `same_as` of records, which may hold several problems.

    earlier: records of the same problems that have theirs. kinds: of each of `records`. All right
    answers to a problem are one answer; a wrong one is the first of those before it that the
    verifier calls the same.
    Source: self-consistency (2203.11171): votes are for answers, not for spellings.
    """
    # Of each problem: (answer, its first sample) of wrong ones, and the first right one's sample.
    known: dict[str, list[tuple[str, int]]] = {}
    right: dict[str, int] = {}
    for record in earlier:
        _place(record, known, right)
    waiting: dict[str, dict[str, list[Record]]] = {}
    kind_of: dict[str, str] = {}
    for record, kind in zip(records, kinds, strict=True):
        kind_of[record["problem"]] = kind
        if (answer := _vote(record)) is None:
            continue
        if record["correct"]:
            record["same_as"] = right.setdefault(record["problem"], record["sample"])
        else:
            waiting.setdefault(record["problem"], {}).setdefault(answer, []).append(record)
    # In each turn every problem compares what is left with one more answer, all in one call.
    turn = 0
    while waiting:
        pairs, places = [], []
        for problem, answers in waiting.items():
            found = known.setdefault(problem, [])
            if turn >= len(found):
                first = next(iter(answers))
                found.append((first, min(one["sample"] for one in answers[first])))
            mine = found[turn][0]
            for answer in answers:
                pairs.append((mine, answer))
                places.append((problem, answer))
        verdicts = _compare(pairs, [kind_of[problem] for problem, _ in places], same)
        for (problem, answer), equal in zip(places, verdicts, strict=True):
            if equal:
                for record in waiting[problem].pop(answer):
                    record["same_as"] = known[problem][turn][1]
        waiting = {problem: answers for problem, answers in waiting.items() if answers}
        turn += 1


def _place(record: Record, known: dict[str, list[tuple[str, int]]], right: dict[str, int]) -> None:
    answer, first = _vote(record), record["same_as"]
    if answer is None or first is None:
        return
    if record["correct"]:
        right.setdefault(record["problem"], first)
    elif first == record["sample"]:
        known.setdefault(record["problem"], []).append((answer, first))


def _vote(record: Record) -> str | None:
    """What a response votes for: its answer, or the option that its letter stood for."""
    answer, letters = record["answer"], record["letters"]
    if answer is None or letters is None:
        return answer
    place = string.ascii_uppercase.find(letter(answer) or " ")
    return letters[place] if 0 <= place < len(letters) else answer


def _compare(pairs: Sequence[tuple[str, str]], kinds: Sequence[str], same: Same) -> list[bool]:
    """Equal texts need nobody's word."""
    equal = [a == b for a, b in pairs]
    for kind in dict.fromkeys(filter(None, kinds)):
        asked = [n for n, one in enumerate(kinds) if one == kind and not equal[n]]
        if asked:
            for n, verdict in zip(asked, same([pairs[n] for n in asked], kind), strict=True):
                equal[n] = verdict
    return equal
