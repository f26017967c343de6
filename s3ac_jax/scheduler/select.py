"""Drawing prompts from the stream, by V(s_0) and history, and keeping that history."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from s3ac_jax.algos.selection import Accepting, Ranking, Select
from s3ac_jax.core.types import DataCursor, LastResponse, PromptStats, Scored
from s3ac_jax.data.stream import PromptStream


@dataclasses.dataclass(frozen=True)
class Draw:
    """Prompts [P] and how they came about.

    cursor: after the last prompt looked at. seen, acceptance: index and acceptance probability
    of every candidate looked at; 0 or 1 where the best are taken. forced: prompts taken although
    their draw said no. nan_values: candidates whose V(s_0) was NaN.
    Source: ours.
    """

    index: np.ndarray
    cursor: DataCursor
    seen: np.ndarray
    acceptance: np.ndarray
    forced: int
    nan_values: int


def empty_stats(num_prompts: int, *, last_tokens: int = 0) -> PromptStats:
    """No history. last_tokens: longest response to remember of each prompt, 0 for none of it.

    Source: ours.
    """
    zeros = np.zeros(num_prompts, np.float32)
    last = None
    if last_tokens:
        shape = (num_prompts, last_tokens)
        last = LastResponse(
            np.zeros(shape, np.int32), np.zeros(num_prompts, np.int32), np.zeros(shape, np.float32)
        )
    return PromptStats(zeros, zeros.copy(), np.zeros(num_prompts, np.int32), last)


def start_cursor() -> DataCursor:
    """The beginning of the first epoch. Source: ours."""
    return DataCursor(np.int32(0), np.int32(0))


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Walks the stream of prompts, epoch by epoch in a shuffled order, and accepts or passes over.

    A prompt that is passed over stays in the set and comes again in the next epoch. candidates:
    prompts per critic pass (a static shape). max_rounds: critic passes per draw, after which
    the candidates most likely to be accepted fill what is missing. A column that ranks takes the
    best of its pool instead.
    Source: S3AC (2610.35518), DAPS; ours: the walk and the bound.
    """

    select: Select
    num_prompts: int
    stream: PromptStream
    batch_prompts: int
    candidates: int
    max_rounds: int

    def __post_init__(self):
        for name in ("candidates", "batch_prompts"):
            if not 1 <= getattr(self, name) <= self.num_prompts:
                section = {"candidates": "scheduler", "batch_prompts": "train"}[name]
                raise ValueError(
                    f"{section}.{name} must be in 1..{self.num_prompts} (the prompt set), got "
                    f"{getattr(self, name)}"
                )
        walks = self.select.reads_values and isinstance(self.select, Accepting)
        if walks and self.candidates * self.max_rounds < self.batch_prompts:
            raise ValueError(
                f"{self.max_rounds} rounds of {self.candidates} candidates can't fill a batch of "
                f"{self.batch_prompts} prompts; raise scheduler.candidates or .max_rounds"
            )

    def _walk(self, cursor: DataCursor, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next `count` prompts and their places counted from the first epoch's start."""
        start = int(cursor.epoch) * self.stream.epoch_length + int(cursor.offset)
        places = start + np.arange(count)
        return self.stream.at(places), places

    def draw(
        self,
        key: PRNGKeyArray,
        stats: PromptStats,
        cursor: DataCursor,
        tick: int,
        values: Callable[[np.ndarray], Array],
        count: int,
    ) -> Draw:
        """`count` prompts, at most batch_prompts. values(index) -> V(s_0), if the column reads it.

        Shapes on the device do not depend on `count`.
        Source: S3AC (2610.35518), DAPS; PCL (2510.01135) and SPO (2509.13232) for ranks.
        """
        if isinstance(self.select, Ranking):
            return self._best(self.select, key, stats, cursor, tick, values, count)
        return self._accepted(self.select, key, stats, cursor, tick, values, count)

    def _best(
        self, select: Ranking, key: PRNGKeyArray, stats: PromptStats, cursor: DataCursor, tick: int,
        values: Callable[[np.ndarray], Array], count: int,
    ) -> Draw:  # fmt: skip
        pool = select.pool(self.batch_prompts, self.num_prompts)
        rows, at = self._walk(cursor, pool)
        value = self._read(values, rows)
        history = self._aged(stats, rows, tick)
        priority = np.array(select.priority(key, value, *history))
        # A pool across two epochs may hold a prompt twice: only its first place counts.
        again = np.ones(pool, bool)
        again[np.unique(rows, return_index=True)[1]] = False
        priority[again] = -np.inf
        taken = np.argsort(-priority, kind="stable")[:count]
        acceptance = np.zeros(pool, np.float32)
        acceptance[taken] = 1.0
        nan_values = int(np.isnan(np.asarray(value)).sum())
        return Draw(rows[taken], self._after(at[-1]), rows, acceptance, 0, nan_values)

    def _accepted(
        self, select: Accepting, key: PRNGKeyArray, stats: PromptStats, cursor: DataCursor,
        tick: int, values: Callable[[np.ndarray], Array], missing: int,
    ) -> Draw:  # fmt: skip
        index, chance, accepted, nan_values = [], [], [], 0
        pool = self.candidates if self.select.reads_values else self.batch_prompts
        rounds = 0
        while missing > 0 and rounds < self.max_rounds:
            rows, at = self._walk(cursor, pool)
            value = self._read(values, rows)
            history = self._aged(stats, rows, tick)
            probability = np.asarray(select.acceptance(value, *history))
            uniform = jax.random.uniform(jax.random.fold_in(key, rounds), (pool,))
            took = np.asarray(uniform) < probability
            # Candidates beyond the one that filled the batch were not looked at.
            looked = pool
            if took.sum() >= missing:
                looked = int(np.flatnonzero(took)[missing - 1]) + 1
            index.append(rows[:looked])
            chance.append(probability[:looked])
            accepted.append(took[:looked])
            nan_values += int(np.isnan(np.asarray(value)[:looked]).sum())
            cursor = self._after(at[looked - 1])
            missing -= int(took[:looked].sum())
            rounds += 1
        seen, probability, took = (np.concatenate(x) for x in (index, chance, accepted))
        if missing > 0:
            passed = np.flatnonzero(~took)
            took[passed[np.argsort(-probability[passed], kind="stable")[:missing]]] = True
        return Draw(seen[took], cursor, seen, probability, missing, nan_values)

    def _read(self, values: Callable[[np.ndarray], Array], rows: np.ndarray) -> Array:
        return values(rows) if self.select.reads_values else jnp.zeros(len(rows))

    def _after(self, place: int) -> DataCursor:
        after = int(place) + 1
        epoch, offset = divmod(after, self.stream.epoch_length)
        return DataCursor(np.int32(epoch), np.int32(offset))

    def _aged(self, stats: PromptStats, rows: np.ndarray, tick: int) -> tuple[Array, Array]:
        return self.select.aged(
            jnp.asarray(stats.successes[rows]),
            jnp.asarray(stats.attempts[rows]),
            jnp.asarray(tick - stats.updated[rows]),
            jnp.full(len(rows), jnp.nan),
        )

    def success_rate(self, stats: PromptStats, index: np.ndarray) -> np.ndarray:
        """What the history of these prompts says of their success; 1/2 without any [P].

        Source: ours; SPO (2509.13232) takes it as its baseline.
        """
        attempts = stats.attempts[index]
        known = attempts > 0
        rate = stats.successes[index] / np.where(known, attempts, 1.0)
        return np.where(known, rate, 0.5).astype(np.float32)

    def record(
        self, stats: PromptStats, scored: Scored, tick: int, drift: np.ndarray
    ) -> PromptStats:
        """History with these outcomes added; invalid gradings (infrastructure) don't count.

        scored: responses, those to one prompt side by side. drift: of each prompt, nats per token,
        NaN where it is not known. What counts is success, the verifier's word, not the shaped
        reward.
        Source: S3AC (2610.35518), DAPS; SPO (2509.13232); ours: lazy aging.
        """
        index, valid, success = scored.rollout.prompt.index, scored.valid, scored.success
        touched = np.zeros(self.num_prompts, bool)
        touched[index[valid]] = True
        moved = np.full(self.num_prompts, np.nan, np.float32)
        moved[index[:: len(index) // len(drift)]] = drift
        # Over all prompts, though few change: a shape of its own each tick would compile anew.
        aged = self.select.aged(
            jnp.asarray(stats.successes),
            jnp.asarray(stats.attempts),
            jnp.asarray(tick - stats.updated),
            jnp.asarray(moved),
        )
        successes = np.where(touched, np.asarray(aged[0]), stats.successes)
        attempts = np.where(touched, np.asarray(aged[1]), stats.attempts)
        np.add.at(successes, index[valid], success[valid].astype(np.float32))
        np.add.at(attempts, index[valid], np.float32(1))
        updated = np.where(touched, tick, stats.updated).astype(np.int32)
        return PromptStats(successes, attempts, updated, self._remembered(stats.last, scored))

    def _remembered(self, last: LastResponse | None, scored: Scored) -> LastResponse | None:
        if last is None:
            return None
        rollout, valid = scored.rollout, scored.valid
        index = rollout.prompt.index[valid]
        width = last.tokens.shape[1]

        def put(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            out = old.copy()
            out[index] = new[valid]
            return out

        return LastResponse(
            put(last.tokens, rollout.tokens[:, :width]),
            put(last.num_tokens, rollout.num_tokens),
            put(last.logp, rollout.logp[:, :width]),
        )
