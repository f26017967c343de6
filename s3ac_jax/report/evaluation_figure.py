"""evaluation.png: how well each suite was answered, what became of the answers, how long."""

import collections
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from s3ac_jax.report.evaluation import Result
from s3ac_jax.report.records import Record
from s3ac_jax.report.style import STYLE

# Okabe-Ito, told apart with any colour vision.
_BLUE, _ORANGE, _GREEN, _GREY, _YELLOW = "#0072B2", "#D55E00", "#009E73", "#999999", "#E69F00"
_STYLE = {**STYLE, "axes.titlepad": 24}
_COLOURS = {"right": _GREEN, "wrong": _ORANGE, "no box": _YELLOW, "truncated": _BLUE, "hung": _GREY}


def draw(
    results: Sequence[Result],
    records: Mapping[str, Sequence[Record]],
    codes: Mapping[str, Sequence[str]],
    told: str,
    path: str | os.PathLike[str],
) -> None:
    """Draws three panels side by side and writes them to `path` (PNG).

    records: by suite, those that `results` were made of. codes: reasons of "no_box" and "hung".
    told: what was evaluated. Raises OSError. Source: ours.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(14, 2.6 + 0.62 * len(results)), dpi=100)
        FigureCanvasAgg(figure)
        height = figure.get_figheight()
        grid = figure.add_gridspec(
            1, 3, left=0.12, right=0.975, top=1 - 1.25 / height, bottom=0.55 / height, wspace=0.16,
            width_ratios=[1.2, 1, 1],
        )  # fmt: skip
        figure.text(0.02, 1 - 0.32 / height, told, fontsize=14, weight="bold", va="center")
        left = figure.add_subplot(grid[0])
        _accuracy(left, results)
        _outcomes(figure.add_subplot(grid[1], sharey=left), results, records, codes)
        _lengths(figure.add_subplot(grid[2], sharey=left), results, records)
        left.set_yticks(range(len(results)), [one["suite"] for one in results])
        left.set_ylim(len(results) - 0.4, -0.6)
        for axes in figure.axes:
            axes.grid(False, axis="y")
            if axes is not left:
                axes.tick_params(axis="y", labelleft=False, length=0)
        temporary = pathlib.Path(path).with_suffix(".tmp")
        figure.savefig(temporary, format="png")
        temporary.replace(path)


def _accuracy(axes: Axes, results: Sequence[Result]) -> None:
    axes.set_title("Problems solved, 95 % over problems")
    for place, result in enumerate(results):
        avg = result["avg"]
        if not math.isnan(avg["low"]):
            axes.plot([avg["low"], avg["high"]], [place, place], color=_BLUE, linewidth=3,
                      alpha=0.45, solid_capstyle="butt")  # fmt: skip
        axes.plot(avg["value"], place, "o", color=_BLUE, markersize=8, label="avg@n")
        for kind, marker, colour in (("maj", "D", _ORANGE), ("pass", ">", _GREEN)):
            if not result[kind]:
                continue
            # The largest k says most; all of them are in the table.
            k = max(result[kind], key=int)
            value = result[kind][k]["value"]
            if math.isnan(value):
                continue
            axes.plot(value, place, marker, color=colour, markersize=7, label=f"{kind}@k")
            axes.annotate(k, (value, place), textcoords="offset points", xytext=(0, 7),
                          ha="center", fontsize=8, color=colour)  # fmt: skip
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    _legend(axes)


def _outcomes(
    axes: Axes, results: Sequence[Result], records: Mapping[str, Sequence[Record]],
    codes: Mapping[str, Sequence[str]],
) -> None:  # fmt: skip
    axes.set_title("What became of the responses")
    ends = np.zeros(len(results))
    counts = [
        collections.Counter(_outcome(record, codes) for record in records[result["suite"]])
        for result in results
    ]
    for name, colour in _COLOURS.items():
        shares = np.array([count[name] / max(1, count.total()) for count in counts])
        if shares.any():
            axes.barh(range(len(results)), shares, left=ends, height=0.5, color=colour, label=name)
        ends += shares
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    _legend(axes)


def _outcome(record: Record, codes: Mapping[str, Sequence[str]]) -> str:
    if record["correct"]:
        return "right"
    for name in ("hung", "no_box"):
        if record["reason"] in codes[name]:
            return name.replace("_", " ")
    return "truncated" if record["finish"] == "length" else "wrong"


def _lengths(
    axes: Axes, results: Sequence[Result], records: Mapping[str, Sequence[Record]]
) -> None:
    axes.set_title("Tokens of a response")
    for place, result in enumerate(results):
        tokens = [record["tokens"] for record in records[result["suite"]]]
        if not tokens:
            continue
        low, first, middle, third, high = np.quantile(tokens, (0.05, 0.25, 0.5, 0.75, 0.95))
        axes.plot([low, high], [place, place], color=_BLUE, linewidth=1, label="5..95 %")
        axes.plot([first, third], [place, place], color=_BLUE, linewidth=7, alpha=0.45,
                  solid_capstyle="butt", label="middle half")  # fmt: skip
        axes.plot(middle, place, "|", color="black", markersize=14, label="median")
    axes.set_xlim(left=0)
    _legend(axes)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    once: dict[str, Any] = {}
    for handle, label in zip(handles, labels, strict=True):
        once.setdefault(label, handle)
    axes.legend(
        once.values(), once.keys(), loc="lower left", bbox_to_anchor=(-0.02, 1.0),
        ncols=len(once), borderaxespad=0.2, handletextpad=0.4, columnspacing=1.0,
    )  # fmt: skip
