"""Curves of one run or of several over each other, as small multiples."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from s3ac_jax.report.page_data import ONLINE, RunData, number, phases
from s3ac_jax.report.page_figures import Card
from s3ac_jax.report.page_svg import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SERIES,
    SKY,
    YELLOW,
    above,
    by_tick,
    curve,
    fell_over,
    inline,
    log_if_positive,
    panels,
    scale_colour,
)

_WIDTH, _HEIGHT = 370, 230


class Curves(NamedTuple):
    """One panel. keys: metrics and what each is called, at most three; log: if it can be."""

    title: str
    unit: str
    caption: str
    keys: tuple[tuple[str, str], ...]
    log: bool = False
    percent: bool = False


_PANELS = (
    Curves("Reward", "mean reward", "of the tick's responses", (("reward", ""),)),
    Curves("Entropy", "nats per token", "how undecided the policy is", (("entropy", ""),),
           log=True),
    Curves("Response length", "tokens", "mean of the tick", (("response_tokens", ""),)),
    Curves("Truncated", "share of responses", "cut off at the longest length allowed",
           (("truncated", ""),), percent=True),
    Curves("Value loss", "plain squared error", "of V against the return, before the step",
           (("value_loss", ""),), log=True),
    Curves("How much the critic explains", "1 is all of it",
           "R² counts a constant error, explained variance (EV) forgives it",
           (("explained_variance", "EV"), ("value_r2", "R²"), ("actor_target_ev", "EV, actor"))),
    Curves("V(s₀) before the response", "reward units, and shares",
           "error = V − R; calibration error of the promised success rate",
           (("v0_mean_error", "mean error"), ("v0_calibration_error", "calibration error"),
            ("v0_explained_variance", "EV"))),
    Curves("Gradient norm, critic", "L2 norm", "before clipping",
           (("critic_backbone_grad_norm", "backbone"), ("critic_head_grad_norm", "head")),
           log=True),
    Curves("Gradient norm, actor", "L2 norm", "before clipping", (("actor_grad_norm", ""),),
           log=True),
    Curves("What clips cut", "share", "steps whose gradient, tokens whose value or ratio was cut",
           (("critic_clipped_steps", "critic steps"), ("critic_value_clipped", "values"),
            ("actor_ratio_clipped", "ratios")), percent=True),
    Curves("Sampler against trainer", "mean |log ratio|, nats",
           "0: both give each token the same probability", (("mismatch_abs_log", ""),)),
    Curves("Throughput", "tokens per second", "generated, over the whole tick",
           (("tokens_per_second", ""),)),
    Curves("Memory", "GiB", "of this process, and the device's peak where it tells",
           (("memory/host_peak_gib", "host, peak"), ("memory/device_peak_gib", "device, peak"))),
)  # fmt: skip


def curve_cards(run: RunData, prefix: str) -> list[Card]:
    """Every curve of one run. Source: ours."""
    trips = [number(trip["tick"]) for trip in run.tripwires if trip["stage"] == ONLINE]
    cards = [_accuracy(run, f"{prefix}-accuracy", trips)]
    for place, panel in enumerate(_PANELS):
        series = [(label, *run.series(key)) for key, label in panel.keys]
        shown = [one for one in series if np.isfinite(one[2]).any()]
        if not shown:
            cards.append(Card(panel.title, panel.caption, None, "not measured"))
            continue
        figure, [axes] = panels(1, _WIDTH, _HEIGHT)
        for (label, ticks, values), colour in zip(shown, (BLUE, ORANGE, GREEN), strict=False):
            curve(axes, ticks, values, colour, label if len(panel.keys) > 1 else "")
        _frame(axes, panel, [one[2] for one in shown])
        fell_over(axes, trips)
        svg = inline(figure, f"{panel.title} by tick", f"{prefix}-c{place}")
        cards.append(Card(panel.title, panel.caption, svg))
    cards.append(_phases(run, f"{prefix}-phases", trips))
    return cards


def overlaid_cards(runs: Sequence[RunData], prefix: str) -> list[Card]:
    """Each curve with all runs in it; the page has one legend for all. Source: ours."""
    accuracy = Curves("Held-out accuracy", "problems solved", "during training",
                      (("held_out/accuracy", ""),), percent=True)  # fmt: skip
    tick = Curves("Time of a tick", "seconds", "all phases together", (("time/tick", ""),))
    singles = [
        panel._replace(keys=(key,), title=f"{panel.title}: {key[1]}" if key[1] else panel.title)
        for panel in (accuracy, *_PANELS, tick)
        for key in panel.keys
    ]
    cards = []
    for place, panel in enumerate(singles):
        series = [run.series(panel.keys[0][0]) for run in runs]
        if not any(np.isfinite(values).any() for _, values in series):
            continue
        figure, [axes] = panels(1, _WIDTH, _HEIGHT)
        for (ticks, values), colour in zip(series, run_colours(len(runs)), strict=True):
            curve(axes, ticks, values, colour)
        _frame(axes, panel, [values for _, values in series])
        svg = inline(figure, f"{panel.title} by tick, all runs", f"{prefix}-o{place}")
        cards.append(Card(panel.title, panel.caption, svg))
    return cards


def run_colours(count: int) -> list[str]:
    """A colour per run: named ones while they last, else a scale. Source: ours."""
    if count <= len(SERIES):
        return list(SERIES[:count])
    return [scale_colour(n / (count - 1)) for n in range(count)]


def _frame(axes: Axes, panel: Curves, values: Sequence[np.ndarray]) -> None:
    if panel.log:
        log_if_positive(axes, *values)
    by_tick(axes, panel.unit)
    every = np.concatenate([v[np.isfinite(v)] for v in values])
    if len(every) and panel.unit == "1 is all of it":
        # One tick with a constant return sends the explained variance to minus thousands.
        axes.set_ylim(max(-1.0, min(-0.05, float(every.min()) - 0.05)), 1.03)
    elif len(every) and every.min() >= 0 and axes.get_yscale() != "log":
        axes.set_ylim(0, max(float(every.max()) * 1.08, 1e-6))
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    above(axes)


def _accuracy(run: RunData, prefix: str, trips: Sequence[float]) -> Card:
    title, caption = "Held-out accuracy", "all problems, and the easiest and hardest by name"
    ticks, values = run.series("held_out/accuracy")
    if not np.isfinite(values).any():
        return Card(title, caption, None, "not measured")
    figure, [axes] = panels(1, _WIDTH, _HEIGHT)
    levels = run.levels("held_out/accuracy_")
    for n, level in enumerate(levels):
        label = level.replace("_", " ") if n in (0, len(levels) - 1) else None
        colour = scale_colour(n / max(1, len(levels) - 1))
        axes.plot(*run.series(f"held_out/accuracy_{level}"), color=colour, linewidth=1, label=label)
    axes.plot(ticks, values, color=BLUE, linewidth=2.4, label="all")
    axes.set_ylim(0, 1.03)
    by_tick(axes, "problems solved")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    fell_over(axes, trips)
    above(axes)
    return Card(title, caption, inline(figure, f"{title} by tick", prefix))


def _phases(run: RunData, prefix: str, trips: Sequence[float]) -> Card:
    title, caption = "Time by phase", "of a tick, stacked"
    named = phases(run)
    if not named or len(run.series(f"time/{next(iter(named))}")[0]) < 2:
        return Card(title, caption, None, "not measured")
    ticks, _ = run.series("time/tick")
    heights = []
    for name in named:
        known = dict(zip(*run.series(f"time/{name}"), strict=True))
        heights.append([np.nan_to_num(known.get(tick, 0.0)) for tick in ticks])
    figure, [axes] = panels(1, _WIDTH, _HEIGHT)
    colours = [SKY, BLUE, GREEN, YELLOW, PINK, ORANGE, scale_colour(0.5)]
    axes.stackplot(ticks, *heights, labels=list(named), alpha=0.85,
                   colors=(colours * 3)[: len(named)], linewidth=0)  # fmt: skip
    # The first tick compiles and would hide all others.
    total = np.sum(heights, axis=0)
    axes.set_ylim(0, float(np.quantile(total, 0.97)) * 1.25)
    by_tick(axes, "seconds")
    fell_over(axes, trips)
    above(axes, 4)
    return Card(title, caption, inline(figure, f"{title} by tick", prefix))
