"""Problems made on demand: problem i follows from the seed and i alone."""

from collections.abc import Sequence

import numpy as np

from s3ac_jax.data.problems import Problem, ProblemsError, at
from s3ac_jax.data.splits import held_out_by_hash
from s3ac_jax.data.sums import HELD_OUT_SHARE, OPERATORS


class SumsProblems:
    """Sums in words, as many as wanted; no difference is negative.

    digits: how many the operands have, one of these for both. wordings: of the question, with {a},
    {op} and {b}. held_out: the quarter of all sums, by their hash, that no training set may hold;
    data/sums.py splits its one- and two-digit sums alike. With few digits sums come again.
    Raises ProblemsError naming the setting.
    Source: ours: a source whose difficulty is known, of any length and with nothing to store.
    """

    def __init__(
        self,
        count: int,
        *,
        seed: int = 0,
        digits: Sequence[int] = (1, 2),
        operators: str = "+-",
        wordings: Sequence[str] = ("What is {a} {op} {b}?",),
        held_out: bool = False,
        name: str = "sums",
    ):
        if count < 1:
            raise ProblemsError(f"{name} needs at least one problem, got {count}")
        if not digits or not all(1 <= number <= 9 for number in digits):
            raise ProblemsError(f"{name}: digits must be some of 1..9, got {tuple(digits)}")
        if not operators or set(operators) - set(OPERATORS):
            raise ProblemsError(
                f"{name}: operators must be some of {OPERATORS!r}, got {operators!r}"
            )
        if not wordings:
            raise ProblemsError(f"{name} needs at least one wording")
        for wording in wordings:
            once = all(wording.count(part) == 1 for part in ("{a}", "{op}", "{b}"))
            if not once or wording.count("{") + wording.count("}") != 6:
                raise ProblemsError(
                    f"{name}: the wording {wording!r} must have {{a}}, {{op}} and {{b}}, "
                    "each once, and no other braces"
                )
        self.name = name
        self._count, self._seed, self._held_out = count, seed, held_out
        self._digits, self._operators, self._wordings = tuple(digits), operators, tuple(wordings)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Problem:
        place = at(place, self._count)
        rng = np.random.default_rng([self._seed, place])
        while True:
            digits = int(rng.choice(self._digits))
            operator = self._operators[rng.integers(len(self._operators))]
            low = 0 if digits == 1 else 10 ** (digits - 1)
            a, b = (int(number) for number in rng.integers(low, 10**digits, size=2))
            if operator == "-":
                a, b = max(a, b), min(a, b)
            if _held_out(operator, a, b) == self._held_out:
                break
        wording = self._wordings[rng.integers(len(self._wordings))]
        answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
        question = wording.format(a=a, op=operator, b=b)
        return Problem(f"{self.name}-{self._seed}-{place}", question, str(answer), source=self.name)


def _held_out(operator: str, a: int, b: int) -> bool:
    base = 10 ** max(2, len(str(a)))
    code = (OPERATORS.index(operator) * base + a) * base + b
    return bool(held_out_by_hash(np.array([code], np.uint64), HELD_OUT_SHARE)[0])
