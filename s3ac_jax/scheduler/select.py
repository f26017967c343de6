"""Drawing a full batch of prompts from the stream, by acceptance on V(s_0) and history."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from s3ac_jax.algos.recipe import Daps, Uniform
from s3ac_jax.core.types import DataCursor, PromptStats


@dataclasses.dataclass(frozen=True)
class Draw:
    """A batch of prompts [P] and how it came about.

    cursor: after the last prompt looked at. seen, acceptance: index and acceptance probability
    of every candidate looked at. forced: prompts taken although their draw said no.
    nan_values: candidates whose V(s_0) was NaN.
    Source: ours.
    """

    index: np.ndarray
    cursor: DataCursor
    seen: np.ndarray
    acceptance: np.ndarray
    forced: int
    nan_values: int


def empty_stats(num_prompts: int) -> PromptStats:
    """No history. Source: ours."""
    zeros = np.zeros(num_prompts, np.float32)
    return PromptStats(zeros, zeros.copy(), np.zeros(num_prompts, np.int32))


def start_cursor() -> DataCursor:
    """The beginning of the first epoch. Source: ours."""
    return DataCursor(np.int32(0), np.int32(0))


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Walks the prompt set, epoch by epoch in a shuffled order, and accepts or passes over.

    A prompt that is passed over stays in the set and comes again in the next epoch. candidates:
    prompts per critic pass (a static shape). max_rounds: critic passes per batch, after which
    the candidates most likely to be accepted fill what is missing.
    Source: S3AC (2610.35518), DAPS; ours: the walk and the bound.
    """

    select: Uniform | Daps
    num_prompts: int
    seed: int
    batch_prompts: int
    candidates: int
    max_rounds: int

    def __post_init__(self):
        for name in ("candidates", "batch_prompts"):
            if not 1 <= getattr(self, name) <= self.num_prompts:
                raise ValueError(
                    f"{name} must be in 1..{self.num_prompts} (the prompt set), got "
                    f"{getattr(self, name)}"
                )
        if self.candidates * self.max_rounds < self.batch_prompts:
            raise ValueError(
                f"{self.max_rounds} rounds of {self.candidates} candidates can't fill a batch of "
                f"{self.batch_prompts} prompts; raise scheduler.candidates or .max_rounds"
            )

    def _walk(self, cursor: DataCursor, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next `count` prompts and their places counted from the first epoch's start."""
        places = int(cursor.epoch) * self.num_prompts + int(cursor.offset) + np.arange(count)
        epochs = places // self.num_prompts
        index = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)
            now = epochs == epoch
            index[now] = order[places[now] % self.num_prompts]
        return index, places

    def draw(
        self,
        key: PRNGKeyArray,
        stats: PromptStats,
        cursor: DataCursor,
        tick: int,
        values: Callable[[np.ndarray], Array],
    ) -> Draw:
        """Fills a batch. values(index [candidates]) -> V(s_0); not called by a uniform recipe.

        Source: S3AC (2610.35518), DAPS: Bernoulli acceptance until the batch is full.
        """
        index, chance, accepted, nan_values = [], [], [], 0
        missing, rounds = self.batch_prompts, 0
        while missing > 0 and rounds < self.max_rounds:
            count = self.candidates if self.select.reads_values else missing
            rows, at = self._walk(cursor, count)
            value = values(rows) if self.select.reads_values else jnp.zeros(count)
            probability = np.asarray(self._acceptance(value, rows, stats, tick))
            uniform = jax.random.uniform(jax.random.fold_in(key, rounds), (count,))
            took = np.asarray(uniform) < probability
            # Candidates beyond the one that filled the batch were not looked at.
            looked = count
            if took.sum() >= missing:
                looked = int(np.flatnonzero(took)[missing - 1]) + 1
            index.append(rows[:looked])
            chance.append(probability[:looked])
            accepted.append(took[:looked])
            nan_values += int(np.isnan(np.asarray(value)[:looked]).sum())
            after = int(at[looked - 1]) + 1
            cursor = DataCursor(
                np.int32(after // self.num_prompts), np.int32(after % self.num_prompts)
            )
            missing -= int(took[:looked].sum())
            rounds += 1
        seen, probability, took = (np.concatenate(x) for x in (index, chance, accepted))
        if missing > 0:
            passed = np.flatnonzero(~took)
            took[passed[np.argsort(-probability[passed], kind="stable")[:missing]]] = True
        return Draw(seen[took], cursor, seen, probability, missing, nan_values)

    def _acceptance(self, value: Array, rows: np.ndarray, stats: PromptStats, tick: int) -> Array:
        successes, attempts = self.select.decayed(
            jnp.asarray(stats.successes[rows]),
            jnp.asarray(stats.attempts[rows]),
            jnp.asarray(tick - stats.updated[rows]),
        )
        return self.select.acceptance(value, successes, attempts)

    def record(
        self,
        stats: PromptStats,
        index: np.ndarray,
        success: np.ndarray,
        valid: np.ndarray,
        tick: int,
    ) -> PromptStats:
        """History with these outcomes added; invalid gradings (infrastructure) don't count.

        index, success, valid: one entry per response, prompts may repeat. success is the
        verifier's word, not the shaped reward.
        Source: S3AC (2610.35518), DAPS; ours: lazy decay.
        """
        touched = np.zeros(self.num_prompts, bool)
        touched[index[valid]] = True
        # Over all prompts, though few change: a shape of its own each tick would compile anew.
        decayed = self.select.decayed(
            jnp.asarray(stats.successes),
            jnp.asarray(stats.attempts),
            jnp.asarray(tick - stats.updated),
        )
        successes = np.where(touched, np.asarray(decayed[0]), stats.successes)
        attempts = np.where(touched, np.asarray(decayed[1]), stats.attempts)
        np.add.at(successes, index[valid], success[valid].astype(np.float32))
        np.add.at(attempts, index[valid], np.float32(1))
        updated = np.where(touched, tick, stats.updated).astype(np.int32)
        return PromptStats(successes, attempts, updated)
