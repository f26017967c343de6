"""Sums of one- and two-digit numbers, asked in words: the smallest task for a model that can read.

"What is 12 + 34?", or worded in other ways; no difference is negative. One in four sums is held
out, by a hash of the sum itself and not of its wording, so that no split ever asks what another one
does.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from s3ac_jax.data.splits import held_out_by_hash

OPERATORS = "+-*"
HELD_OUT_SHARE = 0.25
_RANGES = {1: (0, 10), 2: (10, 100)}


@dataclasses.dataclass(frozen=True)
class Sums:
    """P sums `first operator second`, all [P]. operator, wording: places in their lists.

    digits: of both operands.
    Source: ours.
    """

    digits: np.ndarray
    operator: np.ndarray
    first: np.ndarray
    second: np.ndarray
    wording: np.ndarray

    def __len__(self) -> int:
        return len(self.digits)

    def take(self, rows: np.ndarray) -> "Sums":
        """The given rows. Source: ours."""
        return Sums(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    def answers(self) -> np.ndarray:
        """The right number of each sum, [P]. Source: ours."""
        a, b = self.first, self.second
        return np.stack([a + b, a - b, a * b])[self.operator, np.arange(len(self))]

    def held_out(self) -> np.ndarray:
        """True for the quarter of all sums that no training set may hold, [P]. Source: ours."""
        code = (self.operator * 100 + self.first) * 100 + self.second
        return held_out_by_hash(code.astype(np.uint64), HELD_OUT_SHARE)

    def levels(self) -> np.ndarray:
        """Digits and operator as one number, [P]: one-digit sums first. Source: ours."""
        return (self.digits - 1) * len(OPERATORS) + self.operator

    def questions(self, wordings: Sequence[str]) -> list[str]:
        """What is asked, in words: `wordings` with {a}, {op} and {b}. Source: ours."""
        return [
            wordings[wording].format(a=a, op=OPERATORS[operator], b=b)
            for wording, a, operator, b in zip(
                self.wording, self.first, self.operator, self.second, strict=True
            )
        ]


def make_sums(
    seed: int,
    num_sums: int,
    *,
    digits: tuple[int, ...],
    operators: str,
    num_wordings: int,
    held_out: bool,
) -> Sums:
    """Distinct questions of one split, the levels as even as their sizes allow.

    There are at most 100 one-digit sums of each operator; what those levels lack goes to the larger
    ones. Raises ValueError when the split has fewer questions than asked for.
    Source: ours.
    """
    rng = np.random.default_rng([seed, int(held_out)])
    pools = []
    for count in sorted(digits):
        for operator in sorted(OPERATORS.index(one) for one in operators):
            pool = _every(count, operator, num_wordings)
            pools.append(pool.take(np.flatnonzero(pool.held_out() == held_out)))
    pools.sort(key=len)  # stable: the smallest first, so that the others can make up for it
    chosen, left = [], num_sums
    for number, pool in enumerate(pools):
        want = left // (len(pools) - number)
        chosen.append(pool.take(rng.permutation(len(pool))[:want]))
        left -= len(chosen[-1])
    if left:
        raise ValueError(
            f"asked for {num_sums} questions, but this split has {num_sums - left} to give; ask "
            "for fewer, or for more task.digits, task.operators or task.wordings"
        )
    return Sums(*(np.concatenate(columns) for columns in zip(*map(_columns, chosen), strict=True)))


def _columns(sums: Sums) -> list[np.ndarray]:
    return [getattr(sums, field.name) for field in dataclasses.fields(sums)]


def _every(digits: int, operator: int, num_wordings: int) -> Sums:
    """All questions of one level."""
    low, high = _RANGES[digits]
    grid = np.indices((high - low, high - low, num_wordings)).reshape(3, -1)
    if OPERATORS[operator] == "-":
        grid = grid[:, grid[0] >= grid[1]]
    same = np.ones(grid.shape[1], np.int64)
    return Sums(digits * same, operator * same, low + grid[0], low + grid[1], grid[2])
