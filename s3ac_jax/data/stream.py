"""In which order prompts come: a place in an endless stream, and what is asked there."""

import dataclasses
from typing import Protocol

import numpy as np


class PromptStream(Protocol):
    """An endless order of the prompts of a set, without state: the same place, the same prompt.

    Source: ours: a run remembers one number, wherever it stops and on however many hosts it goes
    on.
    """

    @property
    def epoch_length(self) -> int:
        """Places that count as one epoch. Source: ours."""
        ...

    def at(self, places: np.ndarray) -> np.ndarray:
        """Which prompts stand at these places (from 0), of the same shape, int64. Source: ours."""
        ...


@dataclasses.dataclass(frozen=True)
class Epochs:
    """All prompts once, in an order of its own each epoch.

    Source: ours: shuffled without replacement.
    """

    num_prompts: int
    seed: int

    def __post_init__(self):
        if self.num_prompts < 1:
            raise ValueError(f"a stream needs at least one prompt, got {self.num_prompts}")

    @property
    def epoch_length(self) -> int:
        """The number of prompts. Source: ours."""
        return self.num_prompts

    def at(self, places: np.ndarray) -> np.ndarray:
        """Which prompts stand at these places. Source: ours."""
        epochs = places // self.num_prompts
        index = np.empty(places.shape, np.int64)
        for epoch in np.unique(epochs):
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)
            now = epochs == epoch
            index[now] = order[places[now] % self.num_prompts]
        return index


def share(start: int, count: int, host: int, hosts: int) -> np.ndarray:
    """The places of [start, start + count) that fall to this host, int64.

    The shares of all hosts are disjoint and make up the whole, whatever `hosts` is; so a run that
    remembers `start` alone may go on with more hosts or fewer.
    Source: ours: place n is host n % hosts's, counted from the stream's beginning.
    """
    if not 0 <= host < hosts:
        raise ValueError(f"host must be in 0..{hosts - 1}, got {host}")
    return np.arange(start + (host - start) % hosts, start + count, hosts, dtype=np.int64)
