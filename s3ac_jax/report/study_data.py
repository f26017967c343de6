"""results.csv of a study: one row per (arm, seed, tick), read, checked and handed out as arrays."""

import csv
import dataclasses
import io
import math
import os
import pathlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from s3ac_jax.core.errors import RunError

KEYS = ("arm", "family", "recipe", "seed", "tick", "seconds", "offline_seconds")
METRICS = (
    "held_out_accuracy",
    "entropy",
    "response_tokens",
    "explained_variance",
    "value_loss",
    "dropped",
    "equal_outcome",
    "reference_mid",
    "truncated",
    "time_rollout",
    "time_select",
    "time_score",
    "time_critic",
    "time_actor",
    "time_tick",
)
# Written where they are known, not asked for.
MORE_METRICS = (
    "held_out_worked_answers",
    "reward",
    "success",
    "value_mean_error",
    "generated",
    "missing_prompts",
    "candidates",
    "critic_head_share",
    "critic_clipped_steps",
    "actor_ratio_clipped",
    "mismatch_kept",
    "mismatch_abs_log",
    "staleness",
    "overlap",
    "time_gather",
    "time_wait",
    "time_reward",
    "time_prepare",
)
ACCURACY = "held_out_accuracy"
FAMILIES = ("single", "group")
X_AXES = ("tick", "seconds", "seconds_with_offline")
# A share beyond these is a unit mistaken (percent for a fraction).
_FRACTIONS = ("held_out_accuracy", "equal_outcome", "reference_mid", "truncated")


class ResultsError(RunError, ValueError):
    """A results.csv that can't be read, or that lacks what was asked of it; one line for the user.

    Source: ours: a report that stops has to say in one line what to do.
    """


@dataclasses.dataclass(frozen=True)
class _Run:
    family: str
    recipe: str
    offline_seconds: float
    tick: Float[np.ndarray, "T"]
    seconds: Float[np.ndarray, "T"]
    metrics: dict[str, Float[np.ndarray, "T"]]  # NaN where not measured

    def x(self, axis: str) -> Float[np.ndarray, "T"]:
        if axis not in X_AXES:
            raise ValueError(f"x is one of {', '.join(X_AXES)}, not {axis!r}")
        if axis == "tick":
            return self.tick
        return self.seconds + (self.offline_seconds if axis == "seconds_with_offline" else 0.0)


class Results:
    """The measurements of a study, by arm and seed; made by `load`.

    path: of the file. metrics: names of the metric columns, in the order of the file.

    Source: ours: tables and figures ask for curves, not for rows.
    """

    def __init__(
        self, path: pathlib.Path, metrics: tuple[str, ...], runs: dict[tuple[str, int], _Run]
    ):
        self.path = path
        self.metrics = metrics
        self._runs = runs

    @property
    def arms(self) -> list[str]:
        """Names of the arms in the order in which the file names them first.

        Source: ours: tables keep the order of the study's config.
        """
        return list(dict.fromkeys(arm for arm, _ in self._runs))

    def arms_of(self, family: str) -> list[str]:
        """Names of the arms of `family`: "single" or "group".

        Source: ours: methods are compared within one budget of responses per prompt.
        """
        return [arm for arm in self.arms if self.family(arm) == family]

    def seeds(self, arm: str) -> list[int]:
        """Seeds of `arm`, ascending. Raises ResultsError if the file has no such arm.

        Source: ours: intervals are over seeds.
        """
        found = sorted(seed for name, seed in self._runs if name == arm)
        if not found:
            raise ResultsError(f"{self.path} has no arm {arm!r}; it has {', '.join(self.arms)}")
        return found

    def family(self, arm: str) -> str:
        """ "single" (1 response per prompt) or "group" (16).

        Source: ours: see `arms_of`.
        """
        return self._runs[arm, self.seeds(arm)[0]].family

    def offline_seconds(self, arm: str) -> dict[int, float]:
        """Per seed, seconds of work before online training.

        Source: ours: value pretraining is not free, so a budget with it is shown beside one
        without.
        """
        return {seed: self._runs[arm, seed].offline_seconds for seed in self.seeds(arm)}

    def curve(
        self, arm: str, seed: int, metric: str, x: str = "tick"
    ) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]:
        """Where `metric` was measured, and its values there; ascending, both empty if nowhere.

        x: "tick" (optimiser ticks done before), "seconds" (of training, without evaluation,
        checkpoints and compilation) or "seconds_with_offline" (work before training included).
        Raises ResultsError if the file has no such arm, seed or metric.

        Source: ours: metrics are measured at different ticks.
        """
        if seed not in self.seeds(arm):
            raise ResultsError(f"{self.path} has no seed {seed} of arm {arm!r}")
        run = self._runs[arm, seed]
        values = self._values(run, metric)
        measured = np.isfinite(values)
        return run.x(x)[measured], values[measured]

    def mean_over_ticks(self, arm: str, metric: str, first: int, last: int) -> dict[int, float]:
        """Per seed, the mean of what was measured at ticks first..last, both included.

        NaN for a seed that measured nothing there. Raises ResultsError if there is no such arm or
        metric.
        Source: ours: "early online" is a range of ticks, and a seed is one observation.
        """
        means = {}
        for seed in self.seeds(arm):
            ticks, values = self.curve(arm, seed, metric)
            inside = values[(first <= ticks) & (ticks <= last)]
            means[seed] = float(inside.mean()) if len(inside) else math.nan
        return means

    def _values(self, run: _Run, metric: str) -> Float[np.ndarray, "T"]:
        if metric not in run.metrics:
            raise ResultsError(
                f"{self.path} has no metric {metric!r}; it has {', '.join(self.metrics)}"
            )
        return run.metrics[metric]


def load(path: str | os.PathLike[str]) -> Results:
    """Reads a results.csv with the columns KEYS and METRICS; further columns are metrics too.

    Empty metric cells are not measured; so are NaN and infinity, as in metrics.jsonl.

    Raises ResultsError, naming file, line and column, if the file is missing, empty, damaged or
    contradicts itself.
    Source: ours: one tidy file that any tool reads.
    """
    path = pathlib.Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ResultsError(f"{path} does not exist; launch/study.py writes it") from error
    except OSError as error:
        raise ResultsError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ResultsError(f"{path} is not UTF-8 text (byte {error.start})") from error
    lines = _lines(path, text)
    _, header = next(lines, (0, []))
    _check_header(path, header)
    metrics = tuple(name for name in header if name not in KEYS)
    rows: dict[tuple[str, int], dict[int, _Row]] = {}
    arms: dict[str, tuple[str, str]] = {}
    for number, cells in lines:
        if len(cells) != len(header):
            raise ResultsError(
                f"{path}, line {number}: {len(cells)} cells for {len(header)} columns; delete it"
            )
        row = _Row(path, number, dict(zip(header, cells, strict=True)))
        described = (row.choice("family", FAMILIES), row.text("recipe"))
        if arms.setdefault(row.text("arm"), described) != described:
            row.fail("family" if described[0] != arms[row.text("arm")][0] else "recipe",
                     "differs from that of the arm's other rows")  # fmt: skip
        run = rows.setdefault((row.text("arm"), row.integer("seed")), {})
        if run.setdefault(row.integer("tick"), row) is not row:
            row.fail("tick", f"stands in line {run[row.integer('tick')].number} already")
    if not rows:
        raise ResultsError(f"{path} has no rows yet; run launch/study.py on")
    return Results(path, metrics, {key: _run(run, metrics) for key, run in rows.items()})


@dataclasses.dataclass(frozen=True)
class _Row:
    path: pathlib.Path
    number: int
    cells: dict[str, str]

    def fail(self, column: str, reason: str) -> None:
        cell = self.cells[column]
        raise ResultsError(f"{self.path}, line {self.number}, column {column}: {cell!r} {reason}")

    def text(self, column: str) -> str:
        if not self.cells[column].strip():
            self.fail(column, "is empty")
        return self.cells[column]

    def choice(self, column: str, allowed: tuple[str, ...]) -> str:
        if self.cells[column] not in allowed:
            self.fail(column, f"is none of {', '.join(allowed)}")
        return self.cells[column]

    def integer(self, column: str) -> int:
        value = -1
        try:
            value = int(self.cells[column])
        except ValueError:
            self.fail(column, "is no whole number")
        if value < 0:
            self.fail(column, "is negative")
        return value

    def seconds(self, column: str) -> float:
        value = self.number_in(column)
        if not 0 <= value < math.inf:
            self.fail(column, "is no time in seconds")
        return value

    def metric(self, column: str) -> float:
        if not self.cells[column].strip():
            return math.nan
        value = self.number_in(column)
        if column in _FRACTIONS and math.isfinite(value) and not 0 <= value <= 1:
            self.fail(column, "is no fraction between 0 and 1")
        return value if math.isfinite(value) else math.nan

    def number_in(self, column: str) -> float:
        value = math.nan
        try:
            value = float(self.cells[column])
        except ValueError:
            self.fail(column, "is no number")
        return value


def _lines(path: pathlib.Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and cells of the lines that hold anything."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise ResultsError(f"{path}, line {reader.line_num} is no CSV: {error}") from error


def _check_header(path: pathlib.Path, header: list[str]) -> None:
    if not header:
        raise ResultsError(f"{path} is empty; delete it and run launch/study.py again")
    if missing := [name for name in (*KEYS, *METRICS) if name not in header]:
        raise ResultsError(f"{path}, line 1 lacks the column {', '.join(missing)}")
    if twice := [name for name in dict.fromkeys(header) if header.count(name) > 1]:
        raise ResultsError(f"{path}, line 1 has the column {', '.join(twice)} twice")


def _run(rows: dict[int, _Row], metrics: tuple[str, ...]) -> _Run:
    """The rows of one (arm, seed) in the order of ticks, as arrays."""
    ordered = [rows[tick] for tick in sorted(rows)]
    seconds = [row.seconds("seconds") for row in ordered]
    offline = ordered[0].seconds("offline_seconds")
    for i, row in enumerate(ordered):
        if i and seconds[i] < seconds[i - 1]:
            row.fail("seconds", "is less than at the tick before")
        if row.seconds("offline_seconds") != offline:
            row.fail("offline_seconds", "differs from that of the seed's other rows")
    return _Run(
        family=ordered[0].text("family"),
        recipe=ordered[0].text("recipe"),
        offline_seconds=offline,
        tick=np.array(sorted(rows), float),
        seconds=np.array(seconds, float),
        metrics={name: np.array([row.metric(name) for row in ordered]) for name in metrics},
    )
