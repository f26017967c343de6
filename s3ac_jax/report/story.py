"""A run told in plain sentences: what was trained, how long it took, what came out."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from s3ac_jax.algos.recipe import RECIPES, Recipe
from s3ac_jax.report.page_data import (
    ONLINE,
    PRETRAINING,
    RunData,
    by_number,
    differences,
    found,
    mean,
    num_parameters,
    number,
    phases,
)

NOT_MEASURED = "not measured"
_ENOUGH_EXPLAINED = 0.3
_MOST_DIFFERENCES = 20


class Badge(NamedTuple):
    """A verdict of a few words. kind: good, bad or plain. Source: ours."""

    text: str
    kind: str = "plain"


class Table(NamedTuple):
    """Headings and rows of text. Source: ours."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def sentences(run: RunData) -> list[str]:
    """The paragraphs of the story, trip wires left to the page. Source: ours."""
    told = (_what(run), _time(run), _outcome(run), _critic(run), _wires(run))
    return [paragraph for paragraph in told if paragraph]


def badges(run: RunData) -> list[Badge]:
    """What one wants to know first. Source: ours."""
    ended, wanted = run.results is not None, run.wanted_ticks
    of = f" of {wanted:,}" if wanted else ""
    first = (
        Badge(f"finished, {run.ticks:,} ticks", "good")
        if ended
        else Badge(f"not finished: {run.ticks:,}{of} ticks", "bad")
    )
    shown = [first]
    base, final = accuracies(run)
    if math.isfinite(final) and math.isfinite(base):
        gained = final > base
        shown.append(
            Badge(f"held out {percent(base)} → {percent(final)}", "good" if gained else "bad")
        )
    count = len(run.tripwires)
    words = "no trip wire" if not count else f"{count} trip wire{'s' * (count > 1)} tripped"
    shown.append(Badge(words, "bad" if count else "good"))
    return shown


def percent(share: float, digits: int = 1) -> str:
    """A share as text. Source: ours."""
    return f"{100 * share:.{digits}f} %" if math.isfinite(share) else NOT_MEASURED


def plain(value: float, digits: int = 2) -> str:
    """A number as text. Source: ours."""
    return f"{value:.{digits}f}".replace("-", "−") if math.isfinite(value) else NOT_MEASURED


def duration(seconds: float) -> str:
    """Seconds as people say them. Source: ours."""
    if not math.isfinite(seconds):
        return NOT_MEASURED
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def accuracies(run: RunData, kind: str = "sampled") -> tuple[float, float]:
    """Held-out accuracy of the base and the trained policy: results.json, else the curve's ends.

    Source: ours.
    """
    named = f"{kind}.held_out/accuracy"
    base, final = (number(found(run.results, f"{who}.{named}")) for who in ("base", "trained"))
    if kind == "sampled" and not (math.isfinite(base) and math.isfinite(final)):
        _, values = run.series("held_out/accuracy")
        values = values[np.isfinite(values)]
        if len(values):
            return float(values[0]), float(values[-1])
    return base, final


def _what(run: RunData) -> str:
    config = run.config
    method = recipe(run)
    weights = num_parameters(config)
    size = f" of {_size(weights)} weights" if weights else ""
    task = found(config, "task.kind")
    on = f" on the task {task}" if task else ""
    start = found(config, "start.hf")
    origin = f", which began as {start}," if start else ""
    text = f"A policy{size}{origin} was trained{on}"
    if method:
        text += f" with {method}"
    prompts, group = found(config, "train.batch_prompts"), found(config, "recipe")
    group = found(group, "responses_per_prompt") or 1
    did = f"{run.ticks:,} of {run.wanted_ticks:,}" if run.wanted_ticks else f"{run.ticks:,}"
    if isinstance(prompts, int) and isinstance(group, int):
        each = f" of {group} responses each" if group > 1 else ", a response to each"
        text += f": {did} ticks with {prompts:,} prompts{each}"
        text += f", {run.ticks * prompts * group:,} responses in all"
    return text + "."


def recipe(run: RunData) -> str:
    """The method: a recipe that differs in two columns at most, or else its columns.

    Source: ours: a kept config knows the columns alone.
    """
    columns = found(run.config, "recipe")
    if isinstance(columns, dict):
        name, changed = nearest_recipe(columns)
        if len(changed) <= 2:
            return f"{name} with another {' and '.join(changed)}" if changed else name
    return _columns(run)


def nearest_recipe(columns: dict[str, Any]) -> tuple[str, list[str]]:
    """The recipe that differs from these columns of a config.json in the fewest, and in which.

    Source: ours.
    """

    def differing(one: Recipe) -> list[str]:
        return [
            field.name
            for field in dataclasses.fields(one)
            if _as_kept(getattr(one, field.name)) != columns.get(field.name)
        ]

    each = {name: differing(one) for name, one in RECIPES.items()}
    return min(each.items(), key=lambda item: len(item[1]))


def _as_kept(column: Any) -> Any:
    """A column of a recipe as config.json has it."""
    if not dataclasses.is_dataclass(column) or isinstance(column, type):
        return column
    return {"kind": type(column).__name__, **json.loads(json.dumps(dataclasses.asdict(column)))}


def _columns(run: RunData) -> str:
    named = {}
    for column in ("select", "keep", "advantage", "surrogate", "guard"):
        kind = found(run.config, f"recipe.{column}.kind")
        if kind:
            named[column] = str(kind)
    words = [kind for column, kind in named.items() if (column, kind) != ("keep", "KeepAll")]
    if not words:
        return ""
    critic = found(run.config, "recipe.critic")
    how = found(critic, "pretraining")
    tail = "no critic" if not critic else f"a critic ({how or 'no'} pretraining)".replace("_", " ")
    return f"{', '.join(words)} and {tail}"


def _size(weights: int) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if weights >= unit:
            return f"{weights / unit:.3g} {name}"
    return f"{weights:,}"


def _time(run: RunData) -> str:
    _, ticks = run.series("time/tick")
    if not np.isfinite(ticks).any():
        return ""
    whole = float(np.nansum(ticks))
    told = [
        f"The ticks took {duration(whole)}, half of them {plain(np.nanmedian(ticks))} s or less"
    ]
    named = sorted(phases(run).items(), key=lambda one: -one[1])
    if named and whole:
        shares = ", ".join(
            f"{name} {percent(s / whole, 0)}" for name, s in named if s / whole > 0.005
        )
        told[0] += f" ({shares})"
    before = []
    for name, facts in (("value pretraining", run.pretraining), ("reference", run.reference)):
        seconds = number(facts.get("seconds"))
        if math.isfinite(seconds):
            before.append(f"{name} {duration(seconds)}")
    if before:
        told.append(f"before them came {' and '.join(before)}")
    machine = " ".join(
        str(run.versions[k]) for k in ("num_devices", "device_kind") if k in run.versions
    )
    return "; ".join(told) + (f", on {machine}." if machine else ".")


def _outcome(run: RunData) -> str:
    base, final = accuracies(run)
    greedy = accuracies(run, "greedy")
    if not (math.isfinite(base) and math.isfinite(final)):
        return "Held-out accuracy was not measured."
    change = f"{100 * (final - base):+.1f}".replace("-", "−")
    text = f"Held-out accuracy went from {percent(base)} to {percent(final)} ({change} points)"
    if run.results is None:
        return (
            f"{text} by the last evaluation. results.json isn't there: the run still goes on, or "
            f"stopped after {run.ticks:,} ticks."
        )
    if all(map(math.isfinite, greedy)):
        text += f" sampled, and from {percent(greedy[0])} to {percent(greedy[1])} greedily"
    return text + "."


def _critic(run: RunData) -> str:
    if "critic" in (found(run.config, "recipe") or {}) and not found(run.config, "recipe.critic"):
        return "The method has no critic."
    early, late = run.periods()
    name, key = "explained variance", "explained_variance"
    first, last = (run.mean_between(key, period) for period in (early, late))
    told = []
    begun = number(run.pretraining.get("explained_variance"))
    if math.isfinite(begun):
        verdict = "more than" if begun > _ENOUGH_EXPLAINED else "not more than"
        told.append(
            f"When online training began, the critic explained {plain(begun)} of the variance of "
            f"the outcomes, {verdict} the {_ENOUGH_EXPLAINED} of a sound one"
        )
    if math.isfinite(first) or math.isfinite(last):
        text = f"its {name} was {plain(first)} in the first fifth of the run and {plain(last)} in "
        success = run.mean_between("success", late)
        text += "the last"
        if math.isfinite(last) and last < 0.1 and success > 0.9:
            text += (
                f", where {percent(success, 0)} of the responses are right and little is left to "
                "explain"
            )
        told.append(text)
    off = [run.mean_between("v0_calibration_error", period) for period in (early, late)]
    if all(map(math.isfinite, off)):
        told.append(
            f"the success that V(s₀) promises was off by {plain(100 * off[0], 0)} points on "
            f"average at first and by {plain(100 * off[1], 0)} at last"
        )
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}." if text else "The critic was not measured."


def _wires(run: RunData) -> str:
    if not run.tripwires:
        known = "watch" in run.config
        return "No trip wire tripped." if known else "This run had no trip wires."
    when = ", ".join(_place(trip) for trip in run.tripwires[:5])
    more = f" and {len(run.tripwires) - 5} later ones" if len(run.tripwires) > 5 else ""
    count = len(run.tripwires)
    return f"{count} trip wire{'s' * (count > 1)} tripped: {when}{more}."


def _place(trip: dict[str, Any]) -> str:
    step = "tick" if trip["stage"] == ONLINE else "pretraining step"
    return f"{str(trip['wire']).replace('_', ' ')} at {step} {trip['tick']}"


class Trip(NamedTuple):
    """A trip wire as text. Source: ours."""

    where: str
    wire: str
    verdict: str
    cause: str
    knob: str
    done: str


def trips(run: RunData) -> list[Trip]:
    """What tripped, oldest first. Source: ours."""
    done = {"tell": "only told", "stop": "stopped the run", "rollback": "rolled back"}
    return [
        Trip(
            f"{'pretraining step' if one['stage'] == PRETRAINING else 'tick'} {one['tick']}",
            str(one["wire"]).replace("_", " "),
            str(one["verdict"]),
            str(one.get("cause") or ""),
            str(one.get("knob") or ""),
            done.get(str(one.get("action")), str(one.get("action") or "")),
        )
        for one in run.tripwires
    ]


def level_table(run: RunData) -> Table | None:
    """Held-out accuracy by level, base against trained; None before results.json.

    Source: ours.
    """
    base, after = (found(run.results, f"{who}.sampled") or {} for who in ("base", "trained"))
    stem = "held_out/accuracy_"
    names = sorted((key.removeprefix(stem) for key in after if key.startswith(stem)), key=by_number)
    rows = []
    for name in names:
        was, now = number(base.get(stem + name)), number(after.get(stem + name))
        gain = f"{100 * (now - was):+.1f}".replace("-", "−") if math.isfinite(now - was) else "–"
        rows.append((name.replace("_", " "), percent(was), percent(now), gain))
    return Table(("level", "base", "trained", "gain, points"), rows) if rows else None


def comparison(runs: Sequence[RunData]) -> Table:
    """A row per measure, a column per run. Source: ours."""
    rows: list[tuple[str, list[str]]] = [("finished", []), ("ticks", [])]
    for run in runs:
        rows[0][1].append("yes" if run.results is not None else "no")
        rows[1][1].append(f"{run.ticks:,}")

    def add(name: str, told: list[str]) -> None:
        rows.append((name, told))

    add("held out, base", [percent(accuracies(run)[0]) for run in runs])
    add("held out, last", [percent(accuracies(run)[1]) for run in runs])
    add("held out, last, greedy", [percent(accuracies(run, "greedy")[1]) for run in runs])
    times = [run.series("time/tick")[1] for run in runs]
    add("time of all ticks", [duration(float(np.nansum(t))) if len(t) else "–" for t in times])
    add("seconds per tick, median", [plain(float(np.nanmedian(t))) if np.isfinite(t).any()
                                     else NOT_MEASURED for t in times])  # fmt: skip
    for name, key in (("explained variance", "explained_variance"), ("R² of V", "value_r2")):
        for which, period in (("first fifth", 0), ("last fifth", 1)):
            add(f"{name}, {which}", [plain(r.mean_between(key, r.periods()[period])) for r in runs])
    entropy = [mean(run.series("entropy")[1][-5:]) for run in runs]
    add("entropy at the end, nats", [plain(x, 3) for x in entropy])
    add("trip wires", [", ".join(dict.fromkeys(t.wire for t in trips(r))) or "none" for r in runs])
    kept = [(name, told) for name, told in rows if set(told) != {NOT_MEASURED}]
    return Table(("", *(run.name for run in runs)), [(name, *told) for name, told in kept])


def difference_table(runs: Sequence[RunData]) -> Table:
    """The first differences between the runs' configs, and how many more. Source: ours."""
    every = differences(runs)
    rows = [(key, *told) for key, told in every[:_MOST_DIFFERENCES]]
    if len(every) > len(rows):
        rows.append((f"and {len(every) - len(rows)} more", *[""] * len(runs)))
    return Table(("config field", *(run.name for run in runs)), rows)
