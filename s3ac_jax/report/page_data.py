"""What a finished, running or broken run left in its folder, read for the page."""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from s3ac_jax.core.errors import RunError
from s3ac_jax.report.lines import read_lines
from s3ac_jax.report.log import read

ONLINE, PRETRAINING = "online", "value_pretraining"
PERIOD = 0.2  # of the run: what "early" and "late" mean
_PHASES = ("select", "rollout", "reward", "score", "prepare", "critic", "actor")
_RESPONSE = ("prompt", "level", "tokens", "reward", "success", "v0", "advantage")
_TRAJECTORY = ("tick", "response", "level", "tokens", "pieces", "prompt_pieces", "reward",
               "success", "value", "advantage")  # fmt: skip

Lines = list[dict[str, Any]]


class PageError(RunError):
    """A page that can't be made; the message is one line for the user.

    Source: ours: a run that stops has to say in one line what to do.
    """


@dataclasses.dataclass(frozen=True)
class RunData:
    """One run's files, as they were written. results: None until the run has ended.

    name: what the page calls it, different for each run of a page.
    Source: ours.
    """

    name: str
    config: dict[str, Any]
    versions: dict[str, Any]
    results: dict[str, Any] | None
    pretraining: dict[str, Any]
    reference: dict[str, Any]
    metrics: Lines
    responses: Lines
    trajectories: Lines
    tripwires: Lines

    def series(self, key: str, stage: str = ONLINE) -> tuple[np.ndarray, np.ndarray]:
        """Ticks and values of `key` where it was logged; what is no number is NaN.

        Source: ours.
        """
        pairs = [(m["tick"], m[key]) for m in self.metrics if m["stage"] == stage and key in m]
        ticks = np.array([number(tick) for tick, _ in pairs], float)
        return ticks, np.array([number(value) for _, value in pairs], float)

    def levels(self, prefix: str) -> list[str]:
        """Levels that have an online metric `prefix` + name, by the number in the name.

        Source: ours.
        """
        keys = {key for m in self.metrics if m["stage"] == ONLINE for key in m}
        return sorted((k.removeprefix(prefix) for k in keys if k.startswith(prefix)), key=by_number)

    @property
    def ticks(self) -> int:
        """How many ticks have trained. Source: ours."""
        return len(set(self.series("time/tick")[0]))

    @property
    def wanted_ticks(self) -> int | None:
        """Ticks that the config asks for. Source: ours."""
        return found(self.config, "train.num_ticks")

    def periods(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(first, last) tick of the first fifth of the run, and of its last fifth.

        Source: ours.
        """
        ticks, _ = self.series("time/tick")
        first, last = float(ticks.min(initial=1)), float(ticks.max(initial=1))
        span = PERIOD * (last - first)
        return (first, first + span), (last - span, last)

    def mean_between(self, key: str, period: tuple[float, float]) -> float:
        """Mean of an online metric over ticks, both ends included; NaN where there is none.

        Source: ours.
        """
        ticks, values = self.series(key)
        return mean(values[(ticks >= period[0]) & (ticks <= period[1])])


def number(value: Any) -> float:
    """The number that a file holds, NaN for anything else. Source: ours."""
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known else math.nan


def mean(values: Sequence[float] | np.ndarray) -> float:
    """Mean of what is finite, NaN for nothing. Source: ours."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else math.nan


def by_number(name: str) -> list[tuple[bool, int | str]]:
    """Sorts steps_2 before steps_10. Source: ours."""
    # The odd places of the split are its numbers.
    parts = enumerate(re.split(r"(\d+)", name))
    return [(n % 2 == 1, int(x) if n % 2 else x) for n, x in parts if x]


def found(node: Any, dotted: str) -> Any:
    """What stands at a.b.c, None where there is nothing. Source: ours."""
    for key in dotted.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunData]:
    """Reads the folders; runs of one name are told apart by their folders.

    Raises PageError or LinesError with a message of one line.
    Source: ours.
    """
    paths = [pathlib.Path(folder) for folder in folders]
    runs = [_read_run(path) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    last = [path.resolve().name for path in paths]
    told = last if len(set(last)) == len(last) else [str(path) for path in paths]
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, told, strict=True)]


def _read_run(folder: pathlib.Path) -> RunData:
    if not folder.is_dir():
        raise PageError(f"no folder {str(folder)!r}; give the --workdir of a run")
    if not (folder / "metrics.jsonl").is_file():
        raise PageError(f"{folder} holds no metrics.jsonl; give the --workdir of a run")
    try:
        config = _json(folder / "config.json") or {}
        responses = read_lines(folder / "responses.jsonl", ("tick", *_RESPONSE))
        trajectories = read_lines(folder / "trajectories.jsonl", _TRAJECTORY)
        _check(folder / "responses.jsonl", responses, _RESPONSE)
        _check(folder / "trajectories.jsonl", trajectories, ("tokens", "pieces"))
        return RunData(
            name=str(config.get("name") or folder.resolve().name),
            config=config,
            versions=_json(folder / "versions.json") or {},
            results=_json(folder / "results.json"),
            pretraining=_json(folder / "stage_value_pretraining.json") or {},
            reference=_json(folder / "stage_reference.json") or {},
            metrics=read(folder / "metrics.jsonl"),
            responses=responses,
            trajectories=trajectories,
            tripwires=read_lines(folder / "tripwires.jsonl", ("stage", "tick", "wire", "verdict")),
        )
    except OSError as error:
        raise PageError(f"can't read {error.filename or folder}: {error.strerror}") from error


def _json(path: pathlib.Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        whole = json.loads(path.read_bytes())
        if not isinstance(whole, dict):
            raise ValueError("another kind of file")
        return whole
    except (ValueError, RecursionError) as error:
        raise PageError(f"{path} is damaged; delete it to make the page without it") from error


def _check(path: pathlib.Path, lines: Lines, equally_long: Sequence[str]) -> None:
    for place, line in enumerate(lines, start=1):
        # A method without a critic has no V(s_0).
        parts = [line[name] for name in equally_long if name != "v0" or line[name] is not None]
        parts.append(line.get("prompt_pieces", []))
        whole = all(isinstance(part, list) for part in parts) and isinstance(line["tick"], int)
        if not whole or len({len(part) for part in parts[:-1]}) > 1:
            raise PageError(f"{path}, line {place} is damaged; delete that line")


@dataclasses.dataclass(frozen=True)
class Responses:
    """Responses of a run as columns [n]. v0: NaN without a critic.

    long: longer than the median of the tick's responses. easiness: 0, 1 or 2 for the third of the
    tick's responses whose V(s_0) is lowest (hard) to highest, or without V the level's success over
    the run; -1 where neither is known.
    Source: ours.
    """

    tick: np.ndarray
    tokens: np.ndarray
    success: np.ndarray
    v0: np.ndarray
    advantage: np.ndarray
    long: np.ndarray
    easiness: np.ndarray

    def of(self, period: tuple[float, float]) -> np.ndarray:
        """Which of them were made in a period, both ends included [n]. Source: ours."""
        return (self.tick >= period[0]) & (self.tick <= period[1])


def columns(run: RunData) -> Responses | None:
    """responses.jsonl as columns; None where there is nothing in it. Source: ours."""
    parts: dict[str, list[np.ndarray]] = {}
    levels: list[str] = []
    for line in run.responses:
        count = len(line["tokens"])
        tokens = np.array([number(x) for x in line["tokens"]], float)
        values = line["v0"] or [None] * count
        for name, column in (
            ("tick", np.full(count, number(line["tick"]))),
            ("tokens", tokens),
            ("success", np.array([bool(x) for x in line["success"]], bool)),
            ("v0", np.array([number(x) for x in values], float)),
            ("advantage", np.array([number(x) for x in line["advantage"]], float)),
            ("long", tokens > np.median(tokens) if count else np.zeros(0, bool)),
        ):
            parts.setdefault(name, []).append(column)
        levels += [str(level) for level in line["level"]]
    if not levels:
        return None
    whole = {name: np.concatenate(some) for name, some in parts.items()}
    promise = whole["v0"]
    if not np.isfinite(promise).any():
        names = np.array(levels)
        rates = {name: whole["success"][names == name].mean() for name in set(levels)}
        promise = np.array([rates[name] for name in levels])
    easiness = np.full(len(levels), -1)
    for tick in np.unique(whole["tick"]):
        here = (whole["tick"] == tick) & np.isfinite(promise)
        if here.any():
            low, high = np.quantile(promise[here], (1 / 3, 2 / 3))
            easiness[here] = (promise[here] > low).astype(int) + (promise[here] > high)
    return Responses(**whole, easiness=easiness)


def phases(run: RunData) -> dict[str, float]:
    """Seconds of each phase over all ticks, in the order of a tick. Source: ours."""
    keys = {key for m in run.metrics if m["stage"] == ONLINE for key in m}
    named = {key.removeprefix("time/") for key in keys if key.startswith("time/")} - {"tick"}
    # What another thread does ahead is no part of the tick, waiting for it is.
    named -= {"gather"}
    order = [name for name in _PHASES if name in named] + sorted(named - set(_PHASES))
    if "wait" in named:
        order = [name for name in order if name not in ("select", "rollout", "reward")]
    return {name: float(np.nansum(run.series(f"time/{name}")[1])) for name in order}


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Fields of the configs that are not equal in all runs, with each run's value as text.

    A section that some run's config lacks, as an older one's may, is one row.
    Source: ours: what differs between two curves is the first thing that one asks.
    """
    flat = [dict(_flat(run.config)) for run in runs]
    shared = {key for run in runs for key in run.config}
    shared = {key for key in shared if all(key in run.config for run in runs)}
    for one in flat:
        for key in [key for key in one if key.partition(".")[0] not in shared]:
            one.pop(key)
            one[key.partition(".")[0]] = "there"
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [(key, [one.get(key, "-") for one in flat]) for key in keys]
    return [(key, told) for key, told in rows if len(set(told)) > 1 and key != "name"]


def _flat(node: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flat(value, f"{place}.{key}" if place else key)
    else:
        yield place, json.dumps(node)


def num_parameters(config: dict[str, Any]) -> int | None:
    """Weights of a dense decoder as the config describes it; None for other kinds.

    Source: ours: the page has no model at hand; a test counts those of a real one.
    """
    model = config.get("model")
    if not isinstance(model, dict) or model.get("moe") or model.get("linear_attention"):
        return None
    if model.get("gated_attention"):
        return None
    try:
        width, inner, layers = (
            int(model[k]) for k in ("hidden_size", "intermediate_size", "num_layers")
        )
        head = int(model["head_dim"])
        queries, keys = (int(model[k]) * head for k in ("num_heads", "num_kv_heads"))
        rows = int(model["vocab_size"]) * (1 if model["tie_embeddings"] else 2)
        attention = 2 * width * queries + 2 * width * keys
        attention += (queries + 2 * keys) * bool(model["qkv_bias"])
        attention += 2 * head * bool(model["qk_norm"])
    except (KeyError, TypeError, ValueError):
        return None
    return rows * width + width + layers * (attention + 3 * width * inner + 2 * width)
