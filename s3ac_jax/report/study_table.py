"""Tables of a study as markdown: who is better, what it took, and whether the seeds can tell."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from s3ac_jax.report.study_data import ACCURACY, Results
from s3ac_jax.report.study_stats import (
    Interval,
    area,
    at_seconds,
    at_tick,
    common_seeds,
    equal_budget,
    equal_ticks,
    holm_verdicts,
    interval,
    paired_difference,
    ticks_to,
)

ABSENT = "n/a"
_PERCENT = (ACCURACY, "equal_outcome", "reference_mid", "truncated")
_WHOLE = "time_tick"


class Comparison(NamedTuple):
    """A against B: the mean of `metric` over ticks first..last (both included) of each seed.

    question: what it asks, a few words.

    Source: ours: comparisons are named before the study runs, not found in it.
    """

    a: str
    b: str
    metric: str
    first: int
    last: int
    question: str


def main_table(
    results: Results,
    family: str,
    arms: Sequence[str] | None = None,
    *,
    level: float = 0.8,
    ticks: float | None = None,
) -> str:
    """Held-out accuracy of the arms of `family` at equal ticks and at equal wall time; markdown.

    arms: in this order, others than the family's left out; default, all of it. level: a fraction,
    for "ticks to 80 %". ticks: where ticks are equal; default, the last evaluation that every seed
    of every arm has.

    Source: ours: the paper compares by steps alone and without seeds.
    """
    known = results.arms_of(family)
    shown = known if arms is None else [arm for arm in arms if arm in known]
    if not shown:
        return f"No arms of the family {family}.\n"
    ticks = equal_ticks(results, shown) if ticks is None else ticks
    seconds = equal_budget(results, shown)
    with_offline = equal_budget(results, shown, with_offline=True)
    header = [
        "arm",
        "seeds",
        f"held-out accuracy after {ticks:g} ticks",
        f"mean over ticks 0-{ticks:g} (trapezoids)",
        f"ticks to {100 * level:g} %",
        f"at {_number(seconds)} s of training",
        f"at {_number(with_offline)} s with offline work",
        "s per tick (median)",
    ]
    rows = [
        [
            arm,
            str(len(results.seeds(arm))),
            _percent(interval(at_tick(results, arm, ACCURACY, ticks).values())),
            _percent(interval(area(results, arm, ticks).values())),
            _ticks(ticks_to(results, arm, level)),
            _percent(interval(at_seconds(results, arm, ACCURACY, seconds, False).values())),
            _percent(interval(at_seconds(results, arm, ACCURACY, with_offline, True).values())),
            _bare(interval(_median_seconds(results, arm, _WHOLE).values()), ranged=False),
        ]
        for arm in shown
    ]
    caption = (
        f"Responses per prompt: {'one' if family == 'single' else 'a group'}. Mean over seeds "
        "[95 % Student-t interval over seeds, of each number by itself]; seconds per tick: median "
        "over ticks, mean over seeds. Equal wall time is the longest that every run reached. "
        "Offline work is what a method does before its first tick (value pretraining, reference "
        "rollouts); evaluation, checkpoints and compilation are not counted."
    )
    return _markdown(header, rows, caption, "lrrrrrrr")


def comparison_table(
    results: Results, comparisons: Sequence[Comparison | tuple[str, str, str, int, int, str]]
) -> str:
    """One line per comparison: A, B, A - B with its 95 % interval, and what may be said; markdown.

    Verdicts are corrected with Holm over the lines of this table. An arm that the file lacks has
    no data; a metric that it lacks raises ResultsError.

    Source: ours: several comparisons at 5 % each find one difference too many.
    """
    listed = [Comparison(*comparison) for comparison in comparisons]
    values = [(_measured(results, c, c.a), _measured(results, c, c.b)) for c in listed]
    differences = [paired_difference(a, b) for a, b in values]
    header = ["question", "measured", "A", "B", "seeds", "A - B", "p (Holm)", "verdict: A is"]
    rows = []
    for c, (a, b), difference, (p, verdict) in zip(
        listed, values, differences, holm_verdicts(differences), strict=True
    ):
        seeds = common_seeds(a, b)
        span = f"tick {c.first}" if c.first == c.last else f"ticks {c.first}-{c.last}"
        rows.append([
            c.question,
            f"{_label(c.metric)}, {span}",
            f"{c.a}: {_mean(c.metric, [a[seed] for seed in seeds])}",
            f"{c.b}: {_mean(c.metric, [b[seed] for seed in seeds])}",
            str(len(seeds)),
            _difference(c.metric, difference.interval),
            _p(p),
            verdict,
        ])  # fmt: skip
    tested = sum(not math.isnan(difference.p) for difference in differences)
    caption = (
        "Means over the ticks of the span that were measured, then over the seeds that both arms "
        "have and that reached its end, and the difference of equal seeds [95 % "
        "Student-t interval], percentages in points. The intervals are not corrected for "
        f"multiplicity; p and verdict are, with Holm's method over the {tested} tested lines of "
        "this table at 5 %, so a line whose interval excludes 0 may still be not separated."
    )
    return _markdown(header, rows, caption, "llllrrrl")


def time_table(results: Results, arms: Sequence[str]) -> str:
    """The first of `arms` against each other one at equal wall time, without and with offline work.

    Held-out accuracy at the longest time that every run of `arms` reached, differences of equal
    seeds; verdicts are corrected with Holm over the lines of this table. Markdown.

    Source: ours: the paper compares by steps alone.
    """
    known = [arm for arm in arms if arm in results.arms]
    header = ["A", "B", "offline work", "seconds", "A - B", "p (Holm)", "verdict: A is"]
    about, differences = [], []
    for counted in (False, True):
        seconds = equal_budget(results, known, with_offline=counted) if known else math.nan
        found = {arm: at_seconds(results, arm, ACCURACY, seconds, counted) for arm in known}
        for other in known[1:]:
            about.append([known[0], other, "counts" if counted else "-", _number(seconds)])
            differences.append(paired_difference(found[known[0]], found[other]))
    rows = [
        [*line, _difference(ACCURACY, difference.interval), _p(p), verdict]
        for line, difference, (p, verdict) in zip(
            about, differences, holm_verdicts(differences), strict=True
        )
    ]
    caption = (
        "Held-out accuracy at equal wall time, differences of equal seeds in points [95 % Student-t"
        " interval, uncorrected]; p and verdict corrected with Holm's method over this table."
    )
    return _markdown(header, rows, caption, "lllrrrl")


def cost_table(results: Results, arms: Sequence[str], baseline: str) -> str:
    """Seconds per tick of `arms` by phase, and their ratio to `baseline`; markdown.

    Medians over ticks, then means over seeds. Phases are the metrics `time_*`; those that none of
    the arms measured are left out. The ratios are of equal seeds.

    Source: ours: amortised wall time per actor step, what the paper's "+27-40 %" measures.
    """
    phases = [name for name in results.metrics if name.startswith("time_") and name != _WHOLE]
    seconds = {
        arm: {name: _median_seconds(results, arm, name) for name in (*phases, _WHOLE)}
        for arm in dict.fromkeys((*arms, baseline))
        if arm in results.arms
    }
    phases = [name for name in phases
              if any(not math.isnan(v) for a in arms if a in seconds
                     for v in seconds[a][name].values())]  # fmt: skip
    base = seconds.get(baseline, {}).get(_WHOLE, {})
    base_whole = _with_offline(results, baseline, base)
    header = [
        "arm",
        *(name.removeprefix("time_").replace("_", " ") for name in phases),
        "whole tick",
        f"tick / {baseline}",
        "offline work per tick",
        f"tick with offline work / {baseline}",
    ]
    rows = []
    for arm in arms:
        own = seconds.get(arm, {})
        tick = own.get(_WHOLE, {})
        whole = _with_offline(results, arm, tick)
        offline = [whole[seed] - tick[seed] for seed in tick]
        rows.append([
            arm,
            *(_bare(interval(own.get(name, {}).values()), ranged=False) for name in phases),
            _bare(interval(tick.values())),
            _bare(_ratio(tick, base)),
            _bare(interval(offline), ranged=False),
            _bare(_ratio(whole, base_whole)),
        ])  # fmt: skip
    caption = (
        "Seconds per tick: median over the ticks of a seed, then mean over seeds [95 % Student-t "
        "interval], so phases need not add up to the whole. Ratios are taken seed by seed. Offline "
        "work is spread over the ticks that the run made."
    )
    return _markdown(header, rows, caption, "l" + "r" * (len(header) - 1))


def _median_seconds(results: Results, arm: str, metric: str) -> dict[int, float]:
    medians = {}
    for seed in results.seeds(arm):
        _, values = results.curve(arm, seed, metric)
        medians[seed] = float(np.median(values)) if len(values) else math.nan
    return medians


def _with_offline(results: Results, arm: str, tick: dict[int, float]) -> dict[int, float]:
    """Per seed, seconds per tick and its share of the work before training."""
    if not tick:
        return {}
    offline = results.offline_seconds(arm)
    return {
        seed: seconds + offline[seed] / max(1, len(results.curve(arm, seed, _WHOLE)[0]))
        for seed, seconds in tick.items()
    }


def _ratio(a: dict[int, float], b: dict[int, float]) -> Interval:
    return interval(a[seed] / b[seed] for seed in common_seeds(a, b) if b[seed] > 0)


def _measured(results: Results, comparison: Comparison, arm: str) -> dict[int, float]:
    if arm not in results.arms:
        return {}
    found = results.mean_over_ticks(arm, comparison.metric, comparison.first, comparison.last)
    # A run that ended before the span did has no answer.
    return {
        seed: value
        for seed, value in found.items()
        if results.curve(arm, seed, ACCURACY)[0].max(initial=-1) >= comparison.last
    }


def _label(metric: str) -> str:
    return metric.replace("held_out", "held-out").replace("_", " ")


def _ticks(by_seed: dict[int, float]) -> str:
    reached = sum(math.isfinite(tick) for tick in by_seed.values())
    if reached == len(by_seed):
        return _spread(interval(by_seed.values()), lambda value: f"{value:.0f}")
    return f"{reached} of {len(by_seed)} seeds" if reached else "never"


def _percent(found: Interval) -> str:
    if math.isnan(found.mean):
        return ABSENT
    bounds = "" if math.isnan(found.low) else f" [{100 * found.low:.1f}, {100 * found.high:.1f}]"
    return f"{100 * found.mean:.1f} %{bounds}"


def _bare(found: Interval, *, ranged: bool = True) -> str:
    places = _places(found.mean)
    if not ranged:
        return ABSENT if math.isnan(found.mean) else f"{found.mean:.{places}f}"
    return _spread(found, lambda value: f"{value:.{places}f}")


def _spread(found: Interval, form: Callable[[float], str]) -> str:
    if math.isnan(found.mean):
        return ABSENT
    bounds = "" if math.isnan(found.low) else f" [{form(found.low)}, {form(found.high)}]"
    return form(found.mean) + bounds


def _mean(metric: str, values: list[float]) -> str:
    if not values:
        return ABSENT
    mean = float(np.mean(values))
    return f"{100 * mean:.1f} %" if metric in _PERCENT else _number(mean)


def _difference(metric: str, found: Interval) -> str:
    if metric in _PERCENT:
        return _spread(found, lambda value: _signed(100 * value, 1))
    known = [abs(v) for v in (found.mean, found.low, found.high) if not math.isnan(v)]
    places = _places(max(known, default=0.0))
    return _spread(found, lambda value: _signed(value, places))


def _signed(value: float, places: int) -> str:
    """With a sign, and without one if it is 0 as printed."""
    text = f"{value:+.{places}f}"
    return text[1:] if float(text) == 0 else text


def _p(p: float) -> str:
    if math.isnan(p):
        return ABSENT
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _places(value: float) -> int:
    """Decimals that show three digits of `value`, at most 6."""
    if not math.isfinite(value) or value == 0:
        return 1
    return min(6, max(0, 2 - math.floor(math.log10(abs(value)))))


def _number(value: float) -> str:
    return ABSENT if not math.isfinite(value) else f"{value:.{_places(value)}f}"


def _markdown(header: list[str], rows: list[list[str]], caption: str, align: str) -> str:
    rules = ["---:" if side == "r" else "---" for side in align]
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line]
             for line in (header, rules, *rows)]  # fmt: skip
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), "", caption, ""])
