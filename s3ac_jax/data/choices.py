"""Multiple choice: options put into the question under letters, in an order that can be redrawn."""

import dataclasses
import hashlib
import string

import numpy as np

from s3ac_jax.data.problems import Problem, Problems


@dataclasses.dataclass(frozen=True)
class Permuted:
    """A problem whose options are part of its question, and the order in which they stand there.

    order: order[n] is the place that the option under letter n had before.
    Source: ours.
    """

    problem: Problem
    order: tuple[int, ...]


def permuted(problem: Problem, *, seed: int, sample: int = 0) -> Permuted:
    """The options under the letters A, B, ... after the question; the answer is then a letter.

    The order depends on seed, the problem's id and `sample` alone, so that no other problem and no
    chunking can change it. A problem without options comes back as it is.
    Source: the habit of GPQA's evaluation (2311.12022), where a fixed order would favour a letter.
    """
    if not problem.options:
        return Permuted(problem, ())
    # Not hash(): that one differs from process to process.
    digest = hashlib.blake2b(problem.id.encode(), digest_size=8).digest()
    rng = np.random.default_rng([seed, int.from_bytes(digest, "big"), sample])
    order = tuple(int(place) for place in rng.permutation(len(problem.options)))
    lines = [
        f"{letter}. {problem.options[place]}"
        for letter, place in zip(string.ascii_uppercase, order, strict=False)
    ]
    right = order.index(problem.options.index(problem.answer))
    return Permuted(
        dataclasses.replace(
            problem,
            question="\n".join([problem.question, "", *lines]),
            answer=string.ascii_uppercase[right],
            options=(),
        ),
        order,
    )


class Lettered:
    """A set whose options, where it has any, are part of the questions; see `permuted`.

    Source: ours.
    """

    def __init__(self, problems: Problems, *, seed: int, sample: int = 0):
        self.name = problems.name
        self._problems = problems
        self._seed, self._sample = seed, sample

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, place: int) -> Problem:
        return permuted(self._problems[place], seed=self._seed, sample=self._sample).problem
