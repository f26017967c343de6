"""A problem and what holds many of them: the one form that all sources of prompts share."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from s3ac_jax.core.errors import RunError


class ProblemsError(RunError, ValueError):
    """Problems that can't be used; the message is one line: what, where, what to do.

    Source: ours.
    """


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and the answer that counts as right.

    kind: how answers are judged: "math", "choice" (a letter), or "module:function", a user's
    grader. source: what reports call the set it comes from. options: a multiple choice that is not
    yet part of the question; answer is then the text of the right option (see choices.permuted).
    Source: ours.
    """

    id: str
    question: str
    answer: str
    kind: str = "math"
    source: str = ""
    options: tuple[str, ...] = ()


class Problems(Protocol):
    """Problems by their place 0..len-1, in any order; beyond the end IndexError, as in a list.

    Source: ours: where a run stands in its prompts is one number, which the run itself keeps.
    """

    @property
    def name(self) -> str:
        """What reports call the set. Source: ours."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> Problem: ...


class ProblemList:
    """Problems in memory. Raises ProblemsError when there is none, or two have one id.

    Source: ours: what is recorded of a problem is found again by its id.
    """

    def __init__(self, name: str, problems: Sequence[Problem]):
        self.name = name
        self._problems = list(problems)
        if not self._problems:
            raise ProblemsError(f"{name} holds no problems")
        first: dict[str, int] = {}
        for place, problem in enumerate(self._problems):
            if (other := first.setdefault(problem.id, place)) != place:
                raise ProblemsError(
                    f"{name}: problems {other + 1} and {place + 1} have the same id "
                    f"{shown(problem.id)}; give each its own"
                )

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, place: int) -> Problem:
        return self._problems[place]


class Joined:
    """Sets one after the other, as one. name: what reports call them together.

    Source: ours.
    """

    def __init__(self, name: str, sets: Sequence[Problems]):
        self.name = name
        self._sets = tuple(sets)
        self._ends = np.cumsum([len(one) for one in self._sets])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def number(self, places: np.ndarray) -> np.ndarray:
        """Which of the sets (from 0) each of these places is in. Source: ours."""
        return np.searchsorted(self._ends, places, side="right")

    def __getitem__(self, place: int) -> Problem:
        place = at(place, len(self))
        number = int(np.searchsorted(self._ends, place, side="right"))
        one = self._sets[number]
        return one[place - int(self._ends[number]) + len(one)]


class Taken:
    """Some problems of a set, by their places there.

    Source: ours.
    """

    def __init__(self, problems: Problems, index: Sequence[int] | np.ndarray):
        self.name = problems.name
        self._problems = problems
        self._index = np.asarray(index, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> Problem:
        return self._problems[int(self._index[at(place, len(self))])]


def at(place: int, size: int) -> int:
    """`place` counted from the start, as lists count. Raises IndexError. Source: ours."""
    if not -size <= place < size:
        raise IndexError(f"place {place} of {size}")
    return operator.index(place) % size


def shown(text: object, most: int = 60) -> str:
    """A value for a message: on one line and not long. Source: ours."""
    form = repr(text)
    return form if len(form) <= most else form[: most - 3] + "..."
