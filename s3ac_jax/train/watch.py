"""Looks at every tick of a run: the critic's health, kept responses, trip wires."""

import collections
import contextlib
import dataclasses
import resource
import sys
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from s3ac_jax.core.errors import RunError
from s3ac_jax.core.types import Packed, Scored
from s3ac_jax.parallel import hosts
from s3ac_jax.report import critic_health
from s3ac_jax.report.lines import LineFile, read_lines
from s3ac_jax.report.live import Progress
from s3ac_jax.report.tripwires import Coverage, Trip, tripped, tripped_in_pretraining
from s3ac_jax.train.build import Parts
from s3ac_jax.train.gather import Gathered
from s3ac_jax.train.prepare import Prepared, Scores
from s3ac_jax.train.trajectories import chosen, read_tokens, rounded, trajectory_lines

PRETRAINING = "value_pretraining"
RESPONSES, TRAJECTORIES, TRIPWIRES = "responses.jsonl", "trajectories.jsonl", "tripwires.jsonl"
_GIB = 2.0**30


class Tripped(RunError):
    """A trip wire ended the run; the message says which, and how to go on.

    Source: ours: what was wanted is no fault, but a script has to notice.
    """

    exit_code = 3
    prefix = ""


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A tick whose arrays are still on the devices."""

    tick: int
    batch: Gathered
    v0: Any
    advantage: Any
    kept: np.ndarray
    tokens: Any


class Watcher:
    """Watches the online stage of one run, and keeps what it sees in the run's folder.

    A context manager. start: the tick that comes first; what the files hold of it and later ticks
    is dropped, for it is made again. history: metrics of the ticks before.
    Source: ours: arrays are read one tick late, when they have long been there.
    """

    def __init__(
        self, parts: Parts, folder: Path, stage: str, start: int, history: list[dict[str, Any]],
        coverage: Coverage | None,
    ):  # fmt: skip
        self._parts, self._config, self._coverage = parts, parts.config.watch, coverage
        self._stage, self._seen = stage, collections.deque[_Seen]()
        writes = hosts.is_first()
        self._responses, self._trajectories, self.trips = (
            LineFile(folder / name, writes=writes) for name in (RESPONSES, TRAJECTORIES, TRIPWIRES)
        )
        for file in (self._responses, self._trajectories):
            file.keep(lambda line: line["tick"] < start)
        self.trips.keep(
            lambda line: line["stage"] != stage or line["tick"] < start, ("stage", "tick")
        )
        back = hosts.from_first("tripwires", lambda: _rollbacks(folder / TRIPWIRES, stage))
        self.rollbacks = len(back)
        since = max(back, default=-1)
        self._history = [line for line in history if since <= line["tick"] < start]
        self._sick = {trip.wire for trip in self._look()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as closing:
            for file in (self._responses, self._trajectories, self.trips):
                closing.callback(file.close)

    def see(
        self, tick: int, batch: Gathered, packed: list[Packed], scores: list[Scores],
        prepared: Prepared,
    ) -> None:  # fmt: skip
        """Remembers a rollout batch before it is learnt from; nothing waits for the devices.

        Source: ours.
        """
        if not self._config.health:
            return
        kept, tokens = np.zeros(0, int), None
        if self._config.trajectories:
            kept = chosen(batch.trained, self._config.trajectories)
            if len(kept):
                # Of one shape, whatever there is: a number twice costs nothing.
                numbers = np.resize(kept, self._config.trajectories)
                tokens = read_tokens(packed, scores, prepared.actor, numbers)
        seen = _Seen(tick, batch, prepared.v0, prepared.advantage, kept, tokens)
        self._seen.append(seen)

    def told(self) -> dict[str, float]:
        """Metrics of the oldest tick seen and not yet told; writes what is kept of it.

        Of several hosts all have to call it at the same time. Source: ours.
        """
        if not self._seen:
            return {}
        seen = self._seen.popleft()
        v0, advantage, tokens = hosts.to_host((seen.v0, seen.advantage, seen.tokens))
        found = {**_memory(), **self._health(seen.batch, v0, advantage)}
        if self._config.responses:
            self._responses.append(self._columns(seen, v0, advantage))
        if tokens is not None:
            prompts, tokenizer = self._parts.train.prompts, self._parts.task.tokenizer
            trained = seen.batch.trained
            for line in trajectory_lines(seen.tick, trained, seen.kept, tokens, prompts, tokenizer):
                self._trajectories.append(line)
        return found

    def _health(
        self, batch: Gathered, v0: np.ndarray | None, advantage: np.ndarray
    ) -> dict[str, float]:
        made, trained = batch.made, batch.trained
        limit = self._parts.config.rollout.max_response_tokens
        graded = made.valid
        found = critic_health.coverage_metrics(
            critic_health.coverage_of(made.rollout.num_tokens[graded], made.success[graded], limit)
        )
        count = len(trained.success)
        if v0 is not None:
            found |= critic_health.v0_metrics(v0[:count], trained.reward, trained.success)
        return found | critic_health.advantage_metrics(
            advantage[:count], trained.rollout.num_tokens, self._levels(trained)
        )

    def _levels(self, scored: Scored) -> list[str]:
        prompts = self._parts.train.prompts
        levels = prompts.levels[scored.rollout.prompt.index]
        return [prompts.called.names[int(level)] for level in levels]

    def _columns(self, seen: _Seen, v0: np.ndarray | None, advantage: np.ndarray) -> dict[str, Any]:
        trained = seen.batch.trained
        valid = np.flatnonzero(trained.valid)
        most = min(self._config.responses, len(valid))
        # Evenly out of all, so that no group or source is favoured.
        rows = valid[np.arange(most) * len(valid) // max(most, 1)]
        part = jax.tree.map(lambda x: x[rows], dataclasses.replace(trained, reasons=None))
        return {
            "tick": seen.tick,
            "prompt": part.rollout.prompt.index.tolist(),
            "level": self._levels(part),
            "tokens": part.rollout.num_tokens.tolist(),
            "stopped": part.rollout.stopped.tolist(),
            "reward": rounded(part.reward),
            "success": part.success.tolist(),
            "v0": None if v0 is None else rounded(v0[rows]),
            "advantage": rounded(advantage[rows]),
        }

    def judge(self, metrics: dict[str, Any]) -> list[Trip]:
        """The wires that these metrics trip and those of the tick before did not.

        metrics: of the newest tick, with its number as "tick". The same on all hosts.
        Source: ours: a wire speaks once, until things are well again.
        """
        if not self._config.health:
            return []
        self._history.append(metrics)
        found = self._look()
        new = [trip for trip in found if trip.wire not in self._sick]
        self._sick = {trip.wire for trip in found}
        return [Trip(*told) for told in hosts.from_first("tripwires", lambda: new)]

    def _look(self) -> list[Trip]:
        return tripped(self._history, self._config.tripwires, self._coverage)

    def record(self, tick: int, trip: Trip, action: str, before: int) -> None:
        """Writes a line of tripwires.jsonl: what tick `tick` tripped, and what was done about it
        before tick `before`. Source: ours.
        """
        self.trips.append(trip_line(self._stage, tick, trip, action, before))

    def begin_anew(self) -> None:
        """Forgets all ticks so far, whose weights the run no longer has. Source: ours."""
        self._history, self._sick = [], set()
        self.rollbacks += 1


class PretrainingWatcher:
    """Asks the trip wires during value pretraining; a context manager.

    success_rates: of the policies whose responses the critic learns from.
    Source: S3AC (2610.35518), head domination.
    """

    def __init__(
        self, parts: Parts, folder: Path, success_rates: dict[str, float], progress: Progress
    ):
        self._config, self._rates, self._progress = parts.config.watch, success_rates, progress
        self._trips = LineFile(folder / TRIPWIRES, writes=hosts.is_first())
        self._trips.keep(lambda line: line["stage"] != PRETRAINING, ("stage", "tick"))
        self._steps: list[dict[str, Any]] = []
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._trips.close()

    def judge(self, step: int, metrics: dict[str, float], command: str) -> None:
        """Says what the newest step trips. Raises Tripped where the config wants no more than that.

        Source: ours: there is no weight to go back to yet.
        """
        if not self._config.health:
            return
        self._steps.append(metrics)
        wires = self._config.tripwires
        for trip in tripped_in_pretraining(self._steps, wires, self._rates):
            if trip.wire in self._told:
                continue
            self._told.add(trip.wire)
            action = "tell" if wires.action == "tell" else "stop"
            self._trips.append(trip_line(PRETRAINING, step, trip, action, step))
            self._progress.note(told(step, trip, "value-pretraining step"))
            if action == "stop":
                raise Tripped(
                    f"stopped by a trip wire, {trip.wire}: {trip.verdict}; value pretraining "
                    f"begins anew with: {command} (--config.watch.tripwires.action=tell goes on "
                    "whatever trips)"
                )


def _rollbacks(path: Path, stage: str) -> list[int]:
    """The ticks before which the run went back."""
    lines = read_lines(path, ("stage", "before", "action"))
    found = [line for line in lines if line["stage"] == stage and line["action"] == "rollback"]
    return sorted({line["before"] for line in found})


def trip_line(stage: str, tick: int, trip: Trip, action: str, before: int) -> dict[str, Any]:
    """A line of tripwires.jsonl. Source: ours; docs/report.md describes the file."""
    return {"stage": stage, "tick": tick, **trip._asdict(), "action": action, "before": before}


def told(tick: int, trip: Trip, where: str = "tick") -> str:
    """A trip in one line for people. Source: ours."""
    return (
        f"TRIP WIRE {trip.wire} at {where} {tick}: {trip.verdict}. Likely cause: {trip.cause}. "
        f"Look at: {trip.knob}"
    )


def _memory() -> dict[str, float]:
    """The most that was in use so far, on the host and on the fullest device that says so."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, but on macOS bytes.
    found = {"memory/host_peak_gib": peak * (1 if sys.platform == "darwin" else 1024) / _GIB}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    if peaks:
        found["memory/device_peak_gib"] = max(peaks) / _GIB
    return found
