"""Several sets in one stream, each with its share: which set comes next is grain's to say."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from s3ac_jax.data.problems import ProblemsError
from s3ac_jax.data.stream import Epochs

# Far more places than a run comes to; grain counts the mixture's length in 64 bits.
_ENDLESS = 2**40


class Mixture:
    """A stream over sets that follow each other (see problems.Joined), mixed by weight.

    Of each set all prompts come once before any comes again, in another order each time, however
    often that is: a small set with a large weight is repeated while a large one is still read.
    sizes, weights: of the sets; only the ratio of weights counts. epoch_length: the sets together.
    Raises ProblemsError when grain is missing, ValueError when the numbers make no sense.
    Source: ours, on grain.MapDataset.mix, whose shares are exact to one place.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        if not sizes or len(sizes) != len(weights):
            raise ValueError(
                f"a weight is needed for each set, got {len(weights)} for {len(sizes)}"
            )
        if not all(np.isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError(f"weights must be positive numbers, got {list(weights)}")
        # Each set has a seed of its own, or equally large ones would be in step.
        seeds = np.random.SeedSequence(seed).generate_state(len(sizes), np.uint64)
        self._orders = [Epochs(size, int(one)) for size, one in zip(sizes, seeds, strict=True)]
        self._starts = np.cumsum([0, *sizes])[:-1]
        self._turns = _turns(tuple(float(weight) / sum(weights) for weight in weights))
        self.epoch_length = int(sum(sizes))

    def at(self, places: np.ndarray) -> np.ndarray:
        """Which prompts stand at these places, counted over all sets. Source: ours."""
        turns = [self._turns[int(place)] for place in places.ravel()]
        sets, nth = np.array(turns, np.int64).reshape(-1, 2).T
        index = np.empty(places.size, np.int64)
        for number in np.unique(sets):
            now = sets == number
            index[now] = self._starts[number] + self._orders[number].at(nth[now])
        return index.reshape(places.shape)


def _turns(weights: tuple[float, ...]) -> Any:
    """For each place: which set's turn it is, and how many turns it had before."""
    try:
        import grain
    except ImportError as error:
        raise ProblemsError(
            "mixing sets by weight needs the package grain: pip install 's3ac-jax[data]'"
        ) from error
    counts = [
        grain.MapDataset.range(_ENDLESS).map(functools.partial(_turn, number))
        for number in range(len(weights))
    ]
    return grain.MapDataset.mix(counts, weights=weights)


def _turn(number: int, nth: int) -> tuple[int, int]:
    return number, nth
