"""The verdict on a response where it costs microseconds: text, letters and exact numbers."""

import time

from s3ac_jax.rewards import choices, compare, guard
from s3ac_jax.rewards.extract import final_answer
from s3ac_jax.rewards.normalise import Refused, normalise
from s3ac_jax.rewards.verdict import Verdict


def decide(response: str, gold: str, *, kind: str = "math") -> Verdict | None:
    """The verdict on the boxed answer of `response`, or None where it takes a worker.

    kind: "math", "choice", or a user's "module:function", which always takes one. Never raises
    and never evaluates anything.
    Source: ours: where the right answer is a finished number, the answer has to be one too, so
    that no response ever earns a reward with the calculation that it was asked for.
    """
    if ":" in kind:
        return None
    started = time.perf_counter()
    answer, missing = final_answer(response, kind)
    if answer is None:
        return Verdict(False, missing, time.perf_counter() - started)
    correct, reason = judge(answer, gold, kind)
    if correct is None:
        return None
    return Verdict(correct, reason, time.perf_counter() - started)


def judge(
    answer: str, gold: str, kind: str = "math", leaf: compare.Leaf = compare.ask_later
) -> compare.Found:
    """The same for an answer that is extracted already: (correct or None, reason). Source: ours."""
    try:
        if len(answer) > guard.longest(gold):
            return False, "guard_length"
        if kind == "choice":
            return _choice(answer, gold)
        if not (text := normalise(answer)):
            return False, "empty_box"
        if not (right := normalise(gold)):
            return False, "text"  # nothing is the answer to an empty gold
        return compare.compare(right, text, leaf)
    except Refused as refused:
        return False, str(refused)
    except (RecursionError, ValueError, ArithmeticError, IndexError):
        return False, "error"


def _choice(answer: str, gold: str) -> compare.Found:
    wanted = choices.letter(gold)
    if wanted is None:
        return normalise(gold) == normalise(answer) != "", "choice"
    return choices.letter(answer) == wanted, "choice"
