"""What the grader says of one response, and every reason that it can give."""

import dataclasses

from s3ac_jax.core.errors import RunError

# Every reason code, with what it means; `correct` says which way it went.
REASONS = {
    "string": "the same text after normalisation",
    "number": "two exact numbers compared",
    "percent": "two exact numbers compared, one of them in per cent",
    "choice": "the letter of a multiple-choice answer",
    "text": "words, compared as words",
    "structure": "lists, tuples, sets, intervals or equations, compared part by part",
    "unevaluated": "a calculation where the right answer is a finished value",
    "math_verify": "two expressions, by high-precision values and by math-verify",
    "grader": "a user's own function",
    "no_box": "no final answer in a box",
    "empty_box": "the last box is empty",
    "unterminated_box": "the last box is never closed",
    "unfinished_think": "the response ends before its thinking does",
    "guard_length": "the answer is too long to be one",
    "guard_characters": "control characters, lone surrogates and the like",
    "guard_depth": "nested too deeply",
    "guard_digits": "a number of too many digits",
    "guard_power": "a power, a factorial or a product too large to evaluate",
    "guard_form": "not an expression that the grader can read",
    "deadline": "the grader did not finish in time and was ended",
    "died": "the grading process died twice on this answer",
    "memory": "the grader ran out of memory",
    "error": "the grader failed on this answer",
    "grader_error": "a user's function raised an exception",
}
# Nobody judged these: the response counts as wrong, and its place in a batch says little.
UNJUDGED = frozenset({"deadline", "died", "memory", "error", "grader_error"})


@dataclasses.dataclass(frozen=True)
class Verdict:
    """correct: the response earns +1, otherwise -1. reason: a key of REASONS.

    seconds: what grading took; 0 for a verdict that was known already.
    Source: ours.
    """

    correct: bool
    reason: str
    seconds: float


class GraderError(RunError):
    """Grading cannot go on: a package, a module or a function is missing, or a grader always fails.

    Source: ours.
    """
