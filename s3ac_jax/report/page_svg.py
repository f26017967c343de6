"""Figures for a page: matplotlib's SVG made inline, its colours left to the page's theme."""

import html
import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from s3ac_jax.report.style import STYLE

# Colours that stand for CSS variables: the page has a light and a dark theme, a figure has one.
INK, MUTED, GRID, PAPER = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
BLUE, ORANGE, GREEN, SKY, PINK, YELLOW = (f"#0a0c0{n}" for n in range(1, 7))
SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW)
_VARIABLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper",
    BLUE: "--blue", ORANGE: "--orange", GREEN: "--green", SKY: "--sky", PINK: "--pink",
    YELLOW: "--yellow",
}  # fmt: skip
_SCALE = "#0b0d"  # and two digits: per cent of the way from --scale-low to --scale-high
_MOST_POINTS = 400  # of a curve: more can't be told apart at its width

_STYLE = {
    **STYLE,
    "font.family": "sans-serif",
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "s3ac",
    "text.parse_math": False,  # a level called $x must not be read as mathematics
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.facecolor": "none",
    "axes.labelsize": 10.5,
    "axes.titlesize": 11,
    "axes.titleweight": "normal",
    "axes.titlecolor": INK,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.fontsize": 10,
    "legend.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


def themed() -> AbstractContextManager[None]:
    """The settings that every figure of a page is made and written with. Source: ours."""
    return matplotlib.rc_context(_STYLE)


def panels(count: int, width: float, height: float, **more) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side; width and height in CSS pixels at full size.

    Source: ours.
    """
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, list(figure.subplots(1, count, squeeze=False, **more)[0])


def scale_colour(share: float) -> str:
    """A colour of the sequential scale, 0 to 1. Source: ours."""
    return f"{_SCALE}{round(99 * share):02d}"


def pair(height: float) -> tuple[list[Figure], list[Axes]]:
    """Two figures of one panel each, so that a narrow page puts one below the other.

    Source: ours.
    """
    made = [panels(1, 372, height) for _ in range(2)]
    return [figure for figure, _ in made], [axes for _, [axes] in made]


def same_height(axes: Sequence[Axes]) -> None:
    """Gives panels of two figures one y axis. Source: ours."""
    ends = [one.get_ylim() for one in axes]
    for one in axes:
        one.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))


def inline_pair(figures: Sequence[Figure], label: str, prefix: str) -> str:
    """As `inline`, of both figures of a pair. Source: ours."""
    sides = zip(figures, ("left", "right"), strict=True)
    return "".join(inline(one, f"{label} ({side})", f"{prefix}-{side}") for one, side in sides)


def css_colour(text: str) -> str:
    """`text` with the theme's own colours in place of those that stand for them. Source: ours."""
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return re.sub(
        _SCALE + r"(\d\d)",
        lambda m: f"color-mix(in oklab, var(--scale-high) {m[1]}%, var(--scale-low))",
        text,
    )


def inline(figure: Figure, label: str, prefix: str) -> str:
    """The figure as an `<svg>` element to stand in a page: themed, named, ids with the prefix.

    Equal figures give equal text. Source: ours.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = _ids(text, prefix)
    text = css_colour(text)
    # Presentation attributes know no var(): those that hold one become properties.
    text = re.sub(r' (fill|stroke)="(var\([^"]*)"', r' style="\1: \2"', text)
    text = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 var(--sans)", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", text)
    view = re.search(r'viewBox="[^"]*"', text)
    width = figure.get_size_inches()[0] * 72
    opening = (
        f'<svg role="img" aria-label="{html.escape(label)}" {view[0] if view else ""} '
        f'style="max-width: {width:.0f}px" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    return re.sub(r">\s+<", "><", text)


def _ids(text: str, prefix: str) -> str:
    """Only ids that something refers to stay: several figures share one document."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]*)"', renamed, text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)


def curve(axes: Axes, ticks: np.ndarray, values: np.ndarray, colour: str, label: str = "") -> None:
    """A curve and, where it has many points, its running mean. Source: ours."""
    ticks, values = _thinned(ticks, values)
    rough = np.isfinite(values).sum() > 40
    marker = "o" if np.isfinite(values).sum() < 3 else ""
    if rough:
        axes.plot(ticks, values, color=colour, alpha=0.3, linewidth=0.8)
    shown = running_mean(values) if rough else values
    axes.plot(ticks, shown, color=colour, linewidth=1.8, label=label or None, marker=marker,
              markersize=4)  # fmt: skip


def _thinned(ticks: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(ticks) <= _MOST_POINTS:
        return ticks, values
    blocks = np.array_split(np.arange(len(ticks)), _MOST_POINTS)
    known = [values[b][np.isfinite(values[b])] for b in blocks]
    means = [k.mean() if len(k) else np.nan for k in known]
    return np.array([ticks[b].mean() for b in blocks]), np.array(means)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over about a twenty-fifth of the curve, centred; gaps don't count. Source: ours."""
    half = max(1, len(values) // 50)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return np.array([w[np.isfinite(w)].mean() if np.isfinite(w).any() else np.nan for w in windows])


def log_if_positive(axes: Axes, *series: np.ndarray) -> None:
    """A log scale where the numbers allow one and span a factor of 4. Source: ours."""
    every = np.concatenate([values[np.isfinite(values)] for values in series])
    if len(every) and every.min() > 0 and every.max() > 4 * every.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def by_tick(axes: Axes, unit: str, what: str = "tick") -> None:
    """The frame of a curve over ticks. Source: ours."""
    axes.set_xlabel(what)
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if axes.get_yscale() != "log":
        axes.yaxis.set_major_locator(MaxNLocator(5))


def fell_over(axes: Axes, ticks: Sequence[float]) -> None:
    """Vertical lines where a trip wire tripped. Source: ours."""
    for tick in ticks:
        axes.axvline(tick, color=PINK, linewidth=1, linestyle=(0, (3, 2)), zorder=0.5)


def above(axes: Axes, columns: int = 3) -> None:
    """The legend, over the panel. Source: ours."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.1, borderpad=0,
            handlelength=1.2, handletextpad=0.5, columnspacing=1.2, frameon=False,
        )  # fmt: skip
