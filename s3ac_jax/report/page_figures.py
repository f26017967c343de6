"""Figures of the method, from one run's files: what the critic saw and what it was used for."""

import itertools
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from s3ac_jax.report.page_data import PRETRAINING, Responses, RunData, columns, found, number
from s3ac_jax.report.page_svg import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    SKY,
    above,
    by_tick,
    curve,
    inline_pair,
    log_if_positive,
    pair,
    same_height,
)

_DOTS = 300  # of a scatter: more only blacken it
_BINS = 10
_PERIODS = ("first fifth of the run", "last fifth")


class Card(NamedTuple):
    """A figure of the page. svg: None where nothing was measured, and `note` says what lacks.

    Source: ours.
    """

    title: str
    caption: str
    svg: str | None
    note: str = ""


def method_cards(run: RunData, prefix: str) -> list[Card]:
    """The figures that the method is argued with. prefix: of the ids in them.

    Source: the figures of S3AC (2610.35518), from this run instead of theirs.
    """
    responses = columns(run)
    return [
        _outcomes(run, responses, f"{prefix}-v0"),
        _failures(run, responses, f"{prefix}-fail"),
        _gradients(run, f"{prefix}-grad"),
        _coverage(run, f"{prefix}-cover"),
        _selection(run, responses, f"{prefix}-daps"),
    ]


_NO_RESPONSES = "responses.jsonl isn't there or is empty"


def _outcomes(run: RunData, responses: Responses | None, prefix: str) -> Card:
    title = "Does V(s₀) know who will be right?"
    caption = (
        "Before a response is begun, the critic's value promises a success rate, (V + 1)/2. Small "
        "dots: single responses, right ones on top, wrong ones at the bottom. Large dots: success "
        "rate of a tenth of the scale, with its 95 % interval. On the diagonal the promise is kept."
    )
    if responses is None or not np.isfinite(responses.v0).any():
        note = _NO_RESPONSES if responses is None else "no critic gave a V(s₀)"
        return Card(title, caption, None, note)
    figures, axes = pair(330)
    for axis, name, period, colour in zip(
        axes, _PERIODS, run.periods(), (ORANGE, BLUE), strict=True
    ):
        _calibration(axis, responses, responses.of(period), colour)
        axis.set_title(name)
        axis.set_ylabel("success rate")
    return Card(
        title, caption, inline_pair(figures, f"{title} Success rate against V(s₀).", prefix)
    )


def _calibration(axes: Axes, all_: Responses, chosen: np.ndarray, colour: str) -> None:
    chosen = chosen & np.isfinite(all_.v0)
    promise, success = (all_.v0[chosen] + 1) / 2, all_.success[chosen]
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlim=(-0.06, 1.06), ylim=(-0.1, 1.1), xlabel="promised success, (V(s₀) + 1)/2")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
        axis.set_major_locator(MaxNLocator(5))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    if not len(promise):
        axes.text(0.5, 0.5, "no responses", color=MUTED, ha="center", transform=axes.transAxes)
        return
    rng = np.random.default_rng(0)
    some = rng.permutation(len(promise))[:_DOTS]
    height = np.where(success[some], 1.04, -0.04) + rng.uniform(-0.03, 0.03, len(some))
    axes.plot(np.clip(promise[some], -0.04, 1.04), height, ".", color=colour, alpha=0.35,
              markersize=4, markeredgewidth=0)  # fmt: skip
    place = np.clip((promise * _BINS).astype(int), 0, _BINS - 1)
    for n in range(_BINS):
        here = place == n
        if here.sum() < 3:
            continue
        low, high = _wilson(success[here].sum(), here.sum())
        middle = float(np.clip(promise[here], 0, 1).mean())
        axes.plot([middle] * 2, [low, high], color=colour, linewidth=1.4)
        axes.plot(middle, success[here].mean(), "o", color=colour, markersize=7,
                  markeredgecolor=PAPER)  # fmt: skip


def _wilson(right: float, count: float) -> tuple[float, float]:
    """The 95 % interval of a success rate. Source: Wilson 1927."""
    z, rate = 1.96, right / count
    middle = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z * np.sqrt(rate * (1 - rate) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    return middle - half, middle + half


def _failures(run: RunData, responses: Responses | None, prefix: str) -> Card:
    title = "What a long failure costs, on hard and on easy prompts"
    caption = (
        "Mean raw advantage of wrong responses that are longer than their tick's median. A critic "
        "that knows the prompt blames little where failure was to be expected (hard) and much "
        "where it was not (easy). Thirds by V(s₀), or by the level's success without a critic; "
        "box: quartiles, whiskers: 5 to 95 %, the number of responses above."
    )
    if responses is None:
        return Card(title, caption, None, _NO_RESPONSES)
    failed = responses.long & ~responses.success & np.isfinite(responses.advantage)
    if not failed.any():
        return Card(title, caption, None, "no long response failed")
    figures, axes = pair(300)
    for axis, name, period in zip(axes, _PERIODS, run.periods(), strict=True):
        axis.set_title(name, pad=18)
        axis.axhline(0, color=MUTED, linewidth=0.8)
        for place, colour in enumerate((ORANGE, SKY, BLUE)):
            chosen = failed & responses.of(period) & (responses.easiness == place)
            _box(axis, place, responses.advantage[chosen], colour)
        axis.set_xticks(range(3), ["hard", "middling", "easy"])
        axis.set_xlim(-0.6, 2.6)
        axis.grid(False, axis="x")
        axis.set_ylabel("advantage, reward units")
    same_height(axes)
    return Card(title, caption, inline_pair(figures, f"{title}: advantages as boxes.", prefix))


def _box(axes: Axes, place: float, values: np.ndarray, colour: str) -> None:
    axes.text(place, 1.01, f"n = {len(values)}", color=MUTED, fontsize=8.5, ha="center",
              va="bottom", transform=axes.get_xaxis_transform())  # fmt: skip
    if not len(values):
        return
    low, first, middle, third, high = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95))
    axes.plot([place] * 2, [low, high], color=colour, linewidth=1.4)
    axes.bar(place, third - first, 0.5, bottom=first, color=colour, alpha=0.45, edgecolor=colour)
    axes.plot([place - 0.25, place + 0.25], [middle] * 2, color=INK, linewidth=1.8)


def _gradients(run: RunData, prefix: str) -> Card:
    title = "Does the value head take all of the gradient?"
    caption = (
        "Value pretraining, gradient norms before clipping. A new head takes nearly all of the "
        "norm; where the clip then bites, the backbone's step is cut down with the head's. Bars: "
        "share of steps that were clipped, and the head's share of the squared norm, in this "
        "pretraining and in the two short diagnoses before it."
    )
    heads, backbones, clips, shares = (
        run.series(f"critic_{key}", PRETRAINING)
        for key in ("head_grad_norm", "backbone_grad_norm", "clipped_steps", "head_share")
    )
    found_ = run.pretraining.get("diagnoses")
    diagnoses = found_ if isinstance(found_, dict) else {}
    if not np.isfinite(heads[1]).any() and not diagnoses:
        return Card(title, caption, None, "the critic was not pretrained in this run")
    figures, axes = pair(300)
    curve(axes[0], *heads, ORANGE, "head")
    curve(axes[0], *backbones, BLUE, "backbone")
    clip = number(found(run.config, "critic.clip"))
    if np.isfinite(clip):
        axes[0].axhline(clip, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="clip")
    log_if_positive(axes[0], heads[1], backbones[1])
    by_tick(axes[0], "L2 norm", "pretraining step")
    above(axes[0])
    rows = [("this run", _share(clips[1]), _share(shares[1]))]
    called = {"ordinary": "std 1/√H, clip 1", "s3ac": "std 1/(H+1), clip 10"}
    for name, one in diagnoses.items():
        rows.append((called.get(name, str(name)), number(found(one, "clipped_steps")),
                     number(found(one, "head_share"))))  # fmt: skip
    _bars(axes[1], rows)
    return Card(title, caption, inline_pair(figures, f"{title} Gradient norms by step.", prefix))


def _share(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan


def _bars(axes: Axes, rows: list[tuple[str, float, float]]) -> None:
    places = np.arange(len(rows))[::-1]
    clipped, shares = [row[1] for row in rows], [row[2] for row in rows]
    for shift, colour, label, widths in (
        (0.18, PAPER, "steps clipped", clipped),
        (-0.18, ORANGE, "head's share", shares),
    ):
        axes.barh(places + shift, widths, 0.34, color=colour, label=label, linewidth=1,
                  edgecolor=MUTED if colour == PAPER else colour)  # fmt: skip
        for place, width in zip(places, widths, strict=True):
            if np.isfinite(width):
                axes.text(width + 0.02, place + shift, f"{100 * width:.0f} %", fontsize=8.5,
                          va="center", color=MUTED)  # fmt: skip
    axes.set_yticks(places, [row[0] for row in rows])
    axes.set_xlim(0, 1.18)
    axes.set_xticks([0, 0.5, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(False, axis="y")
    above(axes, 2)


def _coverage(run: RunData, prefix: str) -> Card:
    title = "Has the critic seen “long and right”?"
    caption = (
        "Responses by length. If the first policy never shows long responses that are right, a "
        "critic pretrained on it alone takes length for failure. Bars: where the responses are; "
        "lines: how many of them are right."
    )
    buckets = run.levels("coverage/share_")
    edges, mixed = _mixture(run)
    if not buckets and not mixed.size:
        return Card(title, caption, None, "this run did not count responses by length")
    labels = [name.replace("_", "–") for name in buckets] or [
        f"{low:g}–{high:g}" for low, high in itertools.pairwise(edges)
    ]
    rows: list[tuple[str, str, np.ndarray, np.ndarray]] = []
    if len(mixed) == len(labels):
        count, right = mixed.T
        share = count / max(1.0, count.sum())
        rows.append(("pretraining", GREEN, share, _ratio(right, count)))
    for name, colour, period in zip(_PERIODS, (ORANGE, BLUE), run.periods(), strict=True):
        if buckets:
            share, accuracy = _by_bucket(run, buckets, period)
            rows.append((name, colour, share, accuracy))
    figures, axes = pair(300)
    places, width = np.arange(len(labels)), 0.8 / len(rows)
    for n, (name, colour, share, accuracy) in enumerate(rows):
        shift = (n - (len(rows) - 1) / 2) * width
        axes[0].bar(places + shift, share, width * 0.92, color=colour, label=name)
        axes[1].plot(places, accuracy, "o-", color=colour, linewidth=1.6, markersize=4)
    for axis, unit in zip(axes, ("share of responses", "right among them"), strict=True):
        axis.set_xticks(places, labels, rotation=45 if max(map(len, labels)) > 6 else 0)
        axis.set_xlim(-0.6, len(labels) - 0.4)
        axis.set(xlabel="response tokens", ylabel=unit)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.grid(False, axis="x")
    axes[1].set_ylim(-0.03, 1.03)
    above(axes[0])
    return Card(title, caption, inline_pair(figures, f"{title} Responses by length.", prefix))


def _mixture(run: RunData) -> tuple[list[float], np.ndarray]:
    """Edges, and [buckets, 2] responses and right ones of all pretraining policies together."""
    coverage: Any = run.pretraining.get("coverage")
    try:
        edges = [float(edge) for edge in coverage["edges"]]
        tables = [
            np.array([one["responses"], one["correct"]], float).T
            for one in coverage["policies"].values()
        ]
        return edges, np.sum(tables, axis=0) if tables else np.zeros((0, 2))
    except (AttributeError, KeyError, TypeError, ValueError):  # an older run
        return [], np.zeros((0, 2))


def _by_bucket(
    run: RunData, buckets: list[str], period: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Share and accuracy of each bucket over a period, every response counted alike."""
    shares, accuracies = [], []
    for name in buckets:
        ticks, share = run.series(f"coverage/share_{name}")
        known = dict(zip(*run.series(f"coverage/accuracy_{name}"), strict=True))
        accuracy = np.array([known.get(tick, np.nan) for tick in ticks])
        inside = (ticks >= period[0]) & (ticks <= period[1])
        both = inside & np.isfinite(share) & np.isfinite(accuracy)
        shares.append(_share(share[inside]))
        weight = share[both].sum()
        accuracies.append((share[both] * accuracy[both]).sum() / weight if weight else np.nan)
    return np.array(shares), np.array(accuracies)


def _ratio(above_: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.where(below > 0, above_ / np.maximum(below, 1), np.nan)


def _selection(run: RunData, responses: Responses | None, prefix: str) -> Card:
    title = "Are the prompts that train of middling difficulty?"
    caption = (
        "Bars: how often selection accepts a prompt, by difficulty (without selection: training "
        "success). Lines: share of trained prompts that V(s₀) gives a success of 20 to 80 %, the "
        "same by the reference policy where there is one, and groups dropped because all their "
        "responses were equally right."
    )
    kind, unit = "accept/", "mean acceptance"
    if not run.levels(kind):
        kind, unit = "success/", "training success"
    levels = run.levels(kind)
    shares = [
        (colour, label, *series)
        for colour, label, series in (
            (BLUE, "V(s₀) 20–80 %", _promised_middling(responses)),
            (GREEN, "reference 20–80 %", run.series("reference_mid")),
        )
        if np.isfinite(series[1]).any()
    ]
    if not levels and not shares:
        return Card(title, caption, None, "neither acceptance nor success by difficulty is there")
    figures, axes = pair(300)
    places = np.arange(len(levels))
    for shift, name, colour, period in zip(
        (-0.2, 0.2), _PERIODS, (ORANGE, BLUE), run.periods(), strict=True
    ):
        heights = [run.mean_between(f"{kind}{level}", period) for level in levels]
        axes[0].bar(places + shift, heights, 0.36, color=colour, label=name)
    axes[0].set_xticks(places, _short(levels), rotation=0 if len(levels) < 10 else 45)
    axes[0].set(ylim=(0, 1.03), ylabel=unit, xlabel=_shared(levels))
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0].grid(False, axis="x")
    above(axes[0], 2)
    _lines_of_selection(axes[1], shares, *run.series("dropped_groups"))
    return Card(title, caption, inline_pair(figures, f"{title} Acceptance by difficulty.", prefix))


def _lines_of_selection(
    axes: Axes,
    shares: list[tuple[str, str, np.ndarray, np.ndarray]],
    ticks: np.ndarray,
    dropped: np.ndarray,
) -> None:
    for colour, label, when, share in shares:
        curve(axes, when, share, colour, label)
    by_tick(axes, "share of trained prompts")
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if not shares:
        axes.text(0.5, 0.5, "not measured", color=MUTED, ha="center", transform=axes.transAxes)
    if np.nanmax(dropped, initial=0) > 0:
        other = axes.twinx()
        other.grid(False)
        curve(other, ticks, dropped, ORANGE)
        axes.plot([], [], color=ORANGE, label="dropped groups")
        other.set_ylabel("dropped groups")
        other.set_ylim(bottom=0)
    above(axes, 2)


def _promised_middling(responses: Responses | None) -> tuple[np.ndarray, np.ndarray]:
    """Of each tick, the share of responses to which V(s₀) gives a success of 20 to 80 %."""
    if responses is None:
        return np.zeros(0), np.zeros(0)
    known = np.isfinite(responses.v0)
    promise = (responses.v0 + 1) / 2
    middling = (promise >= 0.2) & (promise <= 0.8)
    ticks = np.unique(responses.tick)
    here = [known & (responses.tick == tick) for tick in ticks]
    return ticks, np.array([middling[one].mean() if one.any() else np.nan for one in here])


def _shared(levels: list[str]) -> str:
    """What all level names begin with: steps_1, steps_2 have the axis "steps"."""
    stems = {level.rpartition("_")[0] for level in levels}
    return stems.pop().replace("_", " ") if len(stems) == 1 else ""


def _short(levels: list[str]) -> list[str]:
    if _shared(levels):
        return [level.rpartition("_")[2] for level in levels]
    return [level.replace("_", " ") for level in levels]
