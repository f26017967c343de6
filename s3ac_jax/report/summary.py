"""summary.png: six panels that say whether a run learned, and whether its critic was sound."""

import os
import pathlib
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from s3ac_jax.data.prompts import Levels
from s3ac_jax.report.style import STYLE

# Okabe-Ito, told apart with any colour vision.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
_STYLE = {**STYLE, "axes.titlepad": 22}  # room for one line: a legend, or what the curve is
_ONLINE, _PRETRAINING = "online", "value_pretraining"
_FIRST_TICKS = 5
_PERIOD = 0.2  # of the run: what "early" and "late" mean

Metrics = list[dict[str, Any]]


def draw(metrics: Metrics, facts: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws the run's metrics as a figure of 1400 x 900 pixels and writes it to `path` (PNG).

    metrics: lines of metrics.jsonl. facts, each optional: `name` of the run, `base_accuracy` and
    `final_accuracy` on held-out problems (fractions); without them the first and last held-out
    accuracy in the metrics stand in; `levels` (Levels): what the difficulty levels are called,
    without it the metrics' own names. A panel whose metrics are missing says so.

    Raises OSError if `path` can't be written.
    Source: ours: the six curves that S3AC (2610.35518) and SAO (2607.07508) argue with.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(14, 9), dpi=100)
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(
            2, 3, left=0.06, right=0.97, top=0.84, bottom=0.07, wspace=0.36, hspace=0.46
        )
        figure.text(0.06, 0.95, _title(metrics, facts), fontsize=16, weight="bold", va="center")
        _accuracy(figure.add_subplot(grid[0, 0]), metrics, facts)
        _entropy(figure.add_subplot(grid[0, 1]), metrics)
        _length(figure.add_subplot(grid[0, 2]), metrics)
        _value(figure.add_subplot(grid[1, 0]), metrics)
        _gradients(figure, grid[1, 1], metrics)
        _acceptance(figure.add_subplot(grid[1, 2]), metrics, facts)
        temporary = pathlib.Path(path).with_suffix(".tmp")
        figure.savefig(temporary, format="png")
        temporary.replace(path)


def _series(metrics: Metrics, stage: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Ticks and values of `key`; a null (NaN or infinity when it was logged) is a gap."""
    pairs = [(m["tick"], m[key]) for m in metrics if m.get("stage") == stage and key in m]
    values = [np.nan if value is None else value for _, value in pairs]
    return np.array([tick for tick, _ in pairs], float), np.array(values, float)


def _measured(*series: np.ndarray) -> bool:
    return any(np.isfinite(values).any() for values in series)


def _levels(metrics: Metrics, prefix: str, called: Levels | None) -> dict[str, str]:
    """Levels that have a metric `prefix` + name, easy ones first: names to labels."""
    names = {key for m in metrics if m.get("stage") == _ONLINE for key in m}
    found = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    if called is not None:
        known = [(called.names[n], called.labels[n]) for n in sorted(called.names)]
        return {name: label for name, label in known if name in found}

    def by_number(name: str) -> list[int | str]:
        # The odd places of the split are its numbers.
        return [int(x) if n % 2 else x for n, x in enumerate(re.split(r"(\d+)", name))]

    return {name: name.replace("_", " ") for name in sorted(found, key=by_number)}


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over about a twenty-fifth of the run, centred; gaps don't count."""
    half = max(1, len(values) // 50)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return np.array([w[np.isfinite(w)].mean() if np.isfinite(w).any() else np.nan for w in windows])


def _line(axes: Axes, ticks: np.ndarray, values: np.ndarray, colour: str, label: str = "") -> None:
    axes.plot(ticks, values, color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(ticks, _running_mean(values), color=colour, linewidth=2, label=label or None)


def _log_if_positive(axes: Axes, *series: np.ndarray) -> None:
    if any((values > 0).any() for values in series):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _frame(axes: Axes, title: str, unit: str, *, empty: bool) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_xlabel("tick")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if empty:
        axes.text(0.5, 0.5, "not measured", color=_GREY, ha="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])


def _caption(axes: Axes, text: str) -> None:
    axes.text(0, 1.025, text, color=_GREY, fontsize=9, transform=axes.transAxes)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2,
        borderpad=0, handlelength=1.2, handletextpad=0.5, columnspacing=1.2,
    )  # fmt: skip


def _base_and_final(metrics: Metrics, facts: dict[str, Any]) -> tuple[float | None, float | None]:
    _, values = _series(metrics, _ONLINE, "held_out/accuracy")
    values = values[np.isfinite(values)]
    base, final = facts.get("base_accuracy"), facts.get("final_accuracy")
    if len(values):
        base = values[0] if base is None else base
        final = values[-1] if final is None else final
    return base, final


def _title(metrics: Metrics, facts: dict[str, Any]) -> str:
    name = facts.get("name", "run")
    base, final = _base_and_final(metrics, facts)
    if base is None or final is None:
        return f"{name}: held-out accuracy not measured"
    return f"{name}: held-out accuracy {100 * base:.1f} % → {100 * final:.1f} %"


def _accuracy(axes: Axes, metrics: Metrics, facts: dict[str, Any]) -> None:
    ticks, values = _series(metrics, _ONLINE, "held_out/accuracy")
    _frame(axes, "Held-out accuracy", "problems solved", empty=not _measured(values))
    if not _measured(values):
        return
    axes.plot(ticks, values, color="black", linewidth=2.5, label="all", zorder=3)
    base, _ = _base_and_final(metrics, facts)
    if base is not None:
        axes.axhline(base, color="black", linestyle="--", linewidth=1.2, label="base")
    called = facts.get("levels")
    levels = _levels(metrics, "held_out/accuracy_", called)
    ends = [next(iter(levels)), list(levels)[-1]] if called and called.scale and levels else levels
    for colour, (name, label) in zip(_sequential(len(levels)), levels.items(), strict=True):
        xs, ys = _series(metrics, _ONLINE, f"held_out/accuracy_{name}")
        if called and called.scale:
            label = f"{label} {called.heading}"
        # The ends of a scale are enough to read it.
        axes.plot(xs, ys, color=colour, linewidth=1.2, label=label if name in ends else None)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if len(axes.get_legend_handles_labels()[0]) > 4:
        # Room for a second line of it.
        axes.set_title(axes.get_title(loc="left"), loc="left", pad=38)
    _legend(axes, 4)


def _sequential(count: int) -> list[Any]:
    # The yellow end of viridis can't be seen on white.
    return [matplotlib.colormaps["viridis"](x) for x in np.linspace(0.85, 0.1, count)]


def _entropy(axes: Axes, metrics: Metrics) -> None:
    ticks, values = _series(metrics, _ONLINE, "entropy")
    _frame(axes, "Entropy of the policy", "nats per token", empty=not _measured(values))
    _caption(axes, "how undecided the policy is; 0 is one certain answer")
    _line(axes, ticks, values, _BLUE)
    _log_if_positive(axes, values)


def _length(axes: Axes, metrics: Metrics) -> None:
    ticks, values = _series(metrics, _ONLINE, "response_tokens")
    _frame(axes, "Response length", "tokens per response", empty=not _measured(values))
    _caption(axes, "mean over the tick's responses")
    _line(axes, ticks, values, _GREEN)
    if _measured(values):
        axes.set_ylim(bottom=0)


def _value(axes: Axes, metrics: Metrics) -> None:
    ticks, loss = _series(metrics, _ONLINE, "value_loss")
    ev_ticks, ev = _series(metrics, _ONLINE, "explained_variance")
    _frame(axes, "Critic: loss and fit", "value loss", empty=not _measured(loss, ev))
    _caption(axes, f"dots: the first {_FIRST_TICKS} ticks")
    _line(axes, ticks, loss, _ORANGE)
    axes.plot(ticks[:_FIRST_TICKS], loss[:_FIRST_TICKS], "o", color=_ORANGE, markersize=4)
    _log_if_positive(axes, loss)
    axes.yaxis.label.set_color(_ORANGE)
    if not _measured(ev):
        return
    right = axes.twinx()
    right.grid(False)
    _line(right, ev_ticks, ev, _BLUE)
    right.plot(ev_ticks[:_FIRST_TICKS], ev[:_FIRST_TICKS], "o", color=_BLUE, markersize=4)
    # One tick with a constant return sends the explained variance to minus thousands.
    right.set_ylim(max(-1.0, min(-0.05, float(np.nanmin(ev, initial=0.0)) - 0.05)), 1.02)
    right.set_ylabel("explained variance", color=_BLUE)
    right.spines["right"].set_visible(True)


def _gradients(figure: Figure, place: SubplotSpec, metrics: Metrics) -> None:
    keys = (
        ("critic_head_grad_norm", "head", _ORANGE),
        ("critic_backbone_grad_norm", "backbone", _BLUE),
    )
    before = [_series(metrics, _PRETRAINING, key) for key, _, _ in keys]
    online = [_series(metrics, _ONLINE, key) for key, _, _ in keys]
    has_before = _measured(*(values for _, values in before))
    title = "Critic: gradient norm before clipping"
    if has_before:
        # Panels side by side, because there may be far more pretraining steps than ticks.
        halves = place.subgridspec(1, 2, width_ratios=[1, 2], wspace=0.04)
        left = figure.add_subplot(halves[0])
        right = figure.add_subplot(halves[1], sharey=left)
        left.set_facecolor("#f2efe6")
        for (ticks, values), (_, _, colour) in zip(before, keys, strict=True):
            _line(left, ticks, values, colour)
        _frame(left, title, "L2 norm", empty=False)
        left.set_xlabel("pretraining step")
        left.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        right.tick_params(axis="y", which="both", left=False, labelleft=False)
    else:
        right = figure.add_subplot(place)
    for (ticks, values), (_, label, colour) in zip(online, keys, strict=True):
        _line(right, ticks, values, colour, label)
    nothing = not has_before and not _measured(*(values for _, values in online))
    _frame(right, "" if has_before else title, "" if has_before else "L2 norm", empty=nothing)
    _log_if_positive(right, *(values for _, values in before + online))
    if not nothing:
        _legend(right, 2)


def _acceptance(axes: Axes, metrics: Metrics, facts: dict[str, Any]) -> None:
    called = facts.get("levels")
    prefix, title, unit = "accept/", "Prompt selection by difficulty", "mean acceptance"
    if not _levels(metrics, prefix, called):
        prefix, title, unit = "success/", "Training success by difficulty", "mean success"
    levels = _levels(metrics, prefix, called)
    _frame(axes, title, unit, empty=not levels)
    axes.set_xlabel(f"{called.heading} of the problem" if called and called.scale else "")
    if not levels:
        return
    ticks = [m["tick"] for m in metrics if m.get("stage") == _ONLINE]
    first, last = min(ticks), max(ticks)
    span = _PERIOD * (last - first)
    places = np.arange(len(levels))
    for shift, colour, label, low, high in (
        (-0.2, "#9ecae1", f"first {_PERIOD:.0%} of the run", first, first + span),
        (0.2, _BLUE, f"last {_PERIOD:.0%}", last - span, last),
    ):
        heights = [_mean_between(metrics, f"{prefix}{name}", low, high) for name in levels]
        axes.bar(places + shift, heights, 0.38, color=colour, label=label)
    axes.set_xticks(places, list(levels.values()))
    axes.grid(False, axis="x")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend(axes, 2)


def _mean_between(metrics: Metrics, key: str, low: float, high: float) -> float:
    ticks, values = _series(metrics, _ONLINE, key)
    chosen = values[(ticks >= low) & (ticks <= high) & np.isfinite(values)]
    return float(chosen.mean()) if len(chosen) else 0.0
