"""Figures of a study: six curves of each arm over ticks, and accuracy over wall time."""

import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from s3ac_jax.report.study_data import ACCURACY, Results
from s3ac_jax.report.study_stats import equal_budget, interval
from s3ac_jax.report.style import STYLE

# Okabe-Ito without its yellow, which can't be seen on white; dashes tell more than eight apart.
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D46",
)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_GREY = "#666666"
_STYLE = {**STYLE, "axes.titlepad": 20, "legend.fontsize": 10}  # room for the caption
_WIDTH, _DPI = 12.0, 100  # inches; 1200 pixels
_TIME_POINTS = 240  # where curves over seconds are read: about one per two pixels
_LOWEST_EV = -1.0  # one tick with a constant return sends it to minus thousands


class _Band(NamedTuple):
    """Mean over seeds and its 95 % interval; low and high are NaN for one seed."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class _Pen(NamedTuple):
    colour: str
    dash: Any


def draw(results: Results, arms: Sequence[str], path: str | os.PathLike[str], title: str) -> None:
    """Six panels over ticks, mean over seeds and 95 % interval, as a PNG 1200 pixels wide.

    arms: drawn in this order, at most 32 told apart. Nothing is smoothed. A curve ends where the
    first seed of its arm ends.

    Raises OSError if `path` can't be written, ResultsError if there is no such arm.
    Source: ours: the curves that the S3AC paper (2610.35518) argues with, here with seeds.
    """
    pens = _pens(arms)
    with matplotlib.rc_context(_STYLE):
        figure, top = _figure(7.4, title, _entries(results, arms, pens))
        height = figure.get_figheight()
        grid = figure.add_gridspec(
            2, 3, left=0.07, right=0.985, top=top - 0.5 / height, bottom=0.55 / height,
            wspace=0.28, hspace=0.46,
        )  # fmt: skip
        panels = [figure.add_subplot(grid[i // 3, i % 3]) for i in range(6)]
        _accuracy(panels[0], _bands(results, arms, ACCURACY), pens)
        _entropy(panels[1], _bands(results, arms, "entropy"), pens)
        _length(panels[2], _bands(results, arms, "response_tokens"), pens)
        _explained(panels[3], _bands(results, arms, "explained_variance"), pens)
        groups = [arm for arm in arms if results.family(arm) == "group"]
        _dropped(panels[4], _bands(results, groups, "dropped"), pens, any_group=bool(groups))
        _reference(panels[5], _bands(results, arms, "reference_mid"), pens)
        _save(figure, path)


def draw_time(
    results: Results, arms: Sequence[str], path: str | os.PathLike[str], title: str
) -> None:
    """Held-out accuracy over seconds, without and with offline work, as a PNG 1200 pixels wide.

    arms: as for `draw`. Each seed is interpolated between its evaluations; with offline work a
    curve is flat while that goes on. The dotted line is the longest time that every run reached,
    the one of the tables.

    Raises OSError if `path` can't be written, ResultsError if there is no such arm.
    Source: ours: the paper compares at equal steps alone.
    """
    pens = _pens(arms)
    with matplotlib.rc_context(_STYLE):
        figure, top = _figure(4.3, title, _entries(results, arms, pens))
        height = figure.get_figheight()
        grid = figure.add_gridspec(
            1, 2, left=0.07, right=0.985, top=top - 0.5 / height, bottom=0.55 / height, wspace=0.16
        )
        left = figure.add_subplot(grid[0])
        right = figure.add_subplot(grid[1], sharey=left)
        _time_panel(left, results, arms, pens, with_offline=False)
        _time_panel(right, results, arms, pens, with_offline=True)
        _save(figure, path)


def _pens(arms: Sequence[str]) -> dict[str, _Pen]:
    many = len(_COLOURS)
    return {
        arm: _Pen(_COLOURS[i % many], _DASHES[i // many % len(_DASHES)])
        for i, arm in enumerate(dict.fromkeys(arms))
    }


def _entries(results: Results, arms: Sequence[str], pens: dict[str, _Pen]) -> list[Artist]:
    """What the legend shows; it says the number of seeds where arms differ in it."""
    counts = {arm: len(results.seeds(arm)) for arm in arms}
    alike = len(set(counts.values())) == 1
    entries: list[Artist] = [
        Line2D([], [], color=pens[arm].colour, linestyle=pens[arm].dash, linewidth=2.2,
               label=arm if alike else f"{arm} ({n} seed{'s' if n > 1 else ''})")
        for arm, n in counts.items()
    ]  # fmt: skip
    if max(counts.values(), default=0) > 1:
        entries.append(Patch(color=_GREY, alpha=0.25, linewidth=0, label="95 % over seeds"))
    return entries


def _figure(panels: float, title: str, entries: list[Artist]) -> tuple[Figure, float]:
    """A figure with title and legend; also where the panels' share of the height ends.

    panels: inches of height below the legend.
    """
    lines = textwrap.wrap(title, 85) or [""]
    rows, columns = _legend_shape([len(str(entry.get_label())) for entry in entries])
    head = 0.3 + 0.27 * len(lines) + 0.24 * rows
    height = panels + head
    figure = Figure(figsize=(_WIDTH, round(height * _DPI) / _DPI), dpi=_DPI)
    FigureCanvasAgg(figure)
    figure.text(
        0.07, 1 - 0.15 / height, "\n".join(lines), fontsize=14, weight="bold", va="top",
        linespacing=1.3,
    )  # fmt: skip
    figure.legend(
        handles=entries, loc="upper left", ncols=columns, borderaxespad=0, borderpad=0,
        bbox_to_anchor=(0.07, 1 - (0.25 + 0.27 * len(lines)) / height), handlelength=2.2,
        columnspacing=1.6,
    )  # fmt: skip
    return figure, panels / height


def _legend_shape(letters: list[int]) -> tuple[int, int]:
    """Fewest rows, then columns, in which entries of so many letters fit; filled by columns."""
    for rows in range(1, len(letters)):
        starts = range(0, len(letters), rows)
        # A letter is about 0.085 inches wide, the line and the gap before it 0.65.
        width = sum(0.65 + 0.085 * max(letters[i : i + rows]) for i in starts)
        if width <= 0.92 * _WIDTH:
            return rows, len(starts)
    return max(1, len(letters)), 1


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    temporary = pathlib.Path(path).with_suffix(".tmp")
    figure.savefig(temporary, format="png", metadata={"Software": None})
    temporary.replace(path)


def _bands(results: Results, arms: Sequence[str], metric: str) -> dict[str, _Band]:
    """Bands over the ticks at which every seed of the arm measured `metric`."""
    bands = {}
    for arm in arms:
        curves = [results.curve(arm, seed, metric) for seed in results.seeds(arm)]
        ticks = set(curves[0][0].tolist()).intersection(*(x.tolist() for x, _ in curves))
        x = np.array(sorted(ticks), float)
        bands[arm] = _over_seeds(x, np.array([y[np.isin(own, x)] for own, y in curves]))
    return bands


def _time_band(results: Results, arm: str, axis: str) -> _Band:
    curves = [results.curve(arm, seed, ACCURACY, axis) for seed in results.seeds(arm)]
    end = min(x[-1] if len(x) else 0.0 for x, _ in curves)
    if end <= 0:
        return _over_seeds(np.empty(0), np.empty((len(curves), 0)))
    x = np.linspace(0, end, _TIME_POINTS)
    return _over_seeds(x, np.array([np.interp(x, *curve) for curve in curves]))


def _over_seeds(x: np.ndarray, values: np.ndarray) -> _Band:
    """values: [seeds, points]."""
    found = [interval(column) for column in values.T]
    return _Band(
        x,
        np.array([i.mean for i in found]),
        np.array([i.low for i in found]),
        np.array([i.high for i in found]),
    )


def _measured(bands: dict[str, _Band]) -> bool:
    return any(len(band.x) for band in bands.values())


def _frame(
    axes: Axes, title: str, unit: str, caption: str, bands: dict[str, _Band], x: str = "tick",
    absent: str = "n/a: not measured",
) -> None:  # fmt: skip
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_xlabel(x)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.text(0, 1.03, caption, color=_GREY, fontsize=9, transform=axes.transAxes)
    if not _measured(bands):
        axes.text(0.5, 0.5, absent, color=_GREY, ha="center", va="center",
                  transform=axes.transAxes)  # fmt: skip
        axes.set_xticks([])
        axes.set_yticks([])


def _plot(
    axes: Axes, bands: dict[str, _Band], pens: dict[str, _Pen], *, floor: float = -np.inf,
    many: int = 100,
) -> None:  # fmt: skip
    """floor: bands end there, for axes that can't show all. many: points that make lines thin."""
    for arm, band in bands.items():
        low, high = np.maximum(band.low, floor), np.maximum(band.high, floor)
        axes.fill_between(band.x, low, high, color=pens[arm].colour, alpha=0.13, linewidth=0)
    for arm, band in bands.items():  # after all bands, so that none veils a line
        # Thick noisy lines hide each other.
        axes.plot(band.x, band.mean, color=pens[arm].colour, linestyle=pens[arm].dash,
                  linewidth=2.0 if len(band.x) < many else 1.2,
                  marker="o" if len(band.x) == 1 else None)  # fmt: skip


def _fit(axes: Axes, bands: dict[str, _Band], least: float, most: float, span: float) -> None:
    """Shows all means, and of the bands at most half of the means' span more, in least..most.

    span: of the axis at least, so that noise does not fill it.
    """
    shown = list(bands.values())
    means = np.clip(np.concatenate([band.mean for band in shown]), least, most)
    lows = np.clip(np.concatenate([np.fmin(b.mean, b.low) for b in shown]), least, most)
    highs = np.clip(np.concatenate([np.fmax(b.mean, b.high) for b in shown]), least, most)
    half = max(float(np.ptp(means)), span) / 2
    bottom = max(float(lows.min()), float(means.min()) - half)
    top = min(float(highs.max()), float(means.max()) + half)
    margin = max(0.04 * (top - bottom), (span - (top - bottom)) / 2)
    # The margin above stays, so that a line at the top is whole.
    axes.set_ylim(max(least, bottom - margin), top + margin)


def _time_panel(
    axes: Axes, results: Results, arms: Sequence[str], pens: dict[str, _Pen], *, with_offline: bool
) -> None:
    axis = "seconds_with_offline" if with_offline else "seconds"
    bands = {arm: _time_band(results, arm, axis) for arm in arms}
    title = "With the work before training" if with_offline else "Training alone"
    budget = equal_budget(results, arms, with_offline)
    counts = "value pretraining counts" if with_offline else "value pretraining does not count"
    caption = f"{counts}; dotted: {budget:.0f} s, reached by every run"
    _frame(axes, title, "held-out problems solved", caption, bands, "seconds")
    if not _measured(bands):
        return
    axes.axvline(budget, color=_GREY, linestyle=":", linewidth=1.4, zorder=1)
    _plot(axes, bands, pens, many=_TIME_POINTS + 1)
    _fit(axes, bands, 0.0, 1.0, span=0.1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(0, 1.02 * max(band.x[-1] for band in bands.values() if len(band.x)))


def _accuracy(axes: Axes, bands: dict[str, _Band], pens: dict[str, _Pen]) -> None:
    _frame(axes, "Held-out accuracy", "problems solved", "before the tick's update", bands)
    if _measured(bands):
        _plot(axes, bands, pens)
        _fit(axes, bands, 0.0, 1.0, span=0.1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _entropy(axes: Axes, bands: dict[str, _Band], pens: dict[str, _Pen]) -> None:
    _frame(axes, "Entropy of the policy", "nats per token", "log scale", bands)
    if not _measured(bands):
        return
    means = np.concatenate([band.mean for band in bands.values()])
    positive = means[means > 0]
    if not len(positive):
        _plot(axes, bands, pens)
        return
    highest = np.concatenate([np.fmax(band.mean, band.high) for band in bands.values()]).max()
    # A Student-t band may reach below 0, so the means set the range.
    bottom, top = positive.min() / 1.5, min(highest, 2 * positive.max()) * 1.1
    axes.set_yscale("log")
    _plot(axes, bands, pens, floor=bottom / 10)
    axes.set_ylim(bottom, top)
    fine = (1, 1.5, *range(2, 10)) if top < 5 * bottom else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=fine if top < 1000 * bottom else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _length(axes: Axes, bands: dict[str, _Band], pens: dict[str, _Pen]) -> None:
    _frame(axes, "Response length", "tokens", "mean over the tick's responses", bands)
    if _measured(bands):
        _plot(axes, bands, pens)
        _fit(axes, bands, 0.0, np.inf, span=2.0)


def _explained(axes: Axes, bands: dict[str, _Band], pens: dict[str, _Pen]) -> None:
    shown = [band for band in bands.values() if len(band.x)]
    cut = any((band.mean < _LOWEST_EV).any() for band in shown)
    caption = "1: V tells all returns apart; 0: none"
    _frame(axes, "Explained variance of the critic", "share",
           caption + (f"; cut at {_LOWEST_EV:g}" if cut else ""), bands,
           absent="n/a: no critic")  # fmt: skip
    if _measured(bands):
        _plot(axes, bands, pens)
        _fit(axes, bands, _LOWEST_EV, 1.0, span=0.1)


def _dropped(
    axes: Axes, bands: dict[str, _Band], pens: dict[str, _Pen], *, any_group: bool
) -> None:
    reason = "not measured" if any_group else "no arm rolls out groups"
    _frame(axes, "Dropped trajectories", "per batch", "rolled out and not trained on; group arms",
           bands, absent=f"n/a: {reason}")  # fmt: skip
    if _measured(bands):
        _plot(axes, bands, pens)
        _fit(axes, bands, 0.0, np.inf, span=2.0)
        axes.set_ylim(bottom=0)  # none dropped is the mark to beat


def _reference(axes: Axes, bands: dict[str, _Band], pens: dict[str, _Pen]) -> None:
    _frame(axes, "Prompts of middle difficulty", "share of trained prompts",
           "success 0.2-0.8 under the reference policy", bands)  # fmt: skip
    if _measured(bands):
        _plot(axes, bands, pens)
        _fit(axes, bands, 0.0, 1.0, span=0.1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
