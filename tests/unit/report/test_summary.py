"""summary.png: right size, not blank, and no metric is indispensable."""

import math

import matplotlib.image
import numpy as np
import pytest

from s3ac_jax.data.prompts import Levels
from s3ac_jax.report import summary
from s3ac_jax.report.summary import draw


def _metrics(ticks=60):
    rng = np.random.default_rng(0)
    lines = [
        {"stage": "value_pretraining", "tick": t, "value_loss": 0.5, "explained_variance": 0.1,
         "critic_head_grad_norm": 20 / (t + 1), "critic_backbone_grad_norm": 1.0}
        for t in range(20)
    ]  # fmt: skip
    for tick in range(ticks):
        line = {
            "stage": "online", "tick": tick, "entropy": math.exp(-tick / 30),
            "response_tokens": 30 + tick / 3, "value_loss": 0.2 * rng.lognormal(),
            "explained_variance": tick / 60, "critic_head_grad_norm": rng.lognormal(),
            "critic_backbone_grad_norm": rng.lognormal(),
        }  # fmt: skip
        for n in range(2, 6):
            line[f"accept/steps_{n}"] = 1 / n
            line[f"success/steps_{n}"] = 1 - n / 8
            if tick % 10 == 0:
                line[f"held_out/accuracy_steps_{n}"] = tick / 60 / n
        if tick % 10 == 0:
            line["held_out/accuracy"] = 0.2 + tick / 100
        lines.append(line)
    return lines


def _pixels(path):
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (900, 1400)
    return image[..., :3]


def _ink(image, row, column):
    """Share of pixels that aren't white or grey in one of the 2 x 3 panels."""
    panel = image[90 + 405 * row : 495 + 405 * row, 466 * column : 466 * (column + 1)]
    return (np.ptp(panel, axis=-1) > 0.2).mean()


def test_every_panel_holds_coloured_curves(tmp_path):
    draw(_metrics(), {"name": "x", "base_accuracy": 0.1}, tmp_path / "summary.png")
    image = _pixels(tmp_path / "summary.png")
    assert all(_ink(image, row, column) > 0.002 for row in range(2) for column in range(3))
    assert [p.name for p in tmp_path.iterdir()] == ["summary.png"]


def test_without_selection_the_last_panel_shows_training_success(tmp_path):
    metrics = [{k: v for k, v in m.items() if "accept" not in k} for m in _metrics()]
    draw(metrics, {}, tmp_path / "success.png")
    draw(_metrics(), {}, tmp_path / "accept.png")
    success, accept = _pixels(tmp_path / "success.png"), _pixels(tmp_path / "accept.png")
    assert _ink(success, 1, 2) > 0.01
    assert (success[495:, 933:] != accept[495:, 933:]).any()


KEYS = sorted({key for m in _metrics() for key in m} - {"stage", "tick"})


def test_no_key_is_indispensable_and_nulls_are_gaps(tmp_path):
    for key in [k for k in KEYS if "steps_" not in k]:
        draw(
            [{k: v for k, v in m.items() if k != key} for m in _metrics(3)], {}, tmp_path / "a.png"
        )
    nulls = [{k: None if k in KEYS and m["tick"] % 2 else v for k, v in m.items()}
             for m in _metrics(20)]  # fmt: skip
    draw(nulls, {}, tmp_path / "a.png")
    draw([{k: None if k in KEYS else v for k, v in m.items()} for m in _metrics(3)], {},
         tmp_path / "a.png")  # fmt: skip
    _pixels(tmp_path / "a.png")


@pytest.mark.parametrize(
    "metrics",
    [[], [{"stage": "online", "tick": 0}], _metrics(1), _metrics(0),
     [{"stage": "online", "tick": t, "entropy": 0.0, "value_loss": 0.0} for t in range(3)]],
)  # fmt: skip
def test_short_runs(tmp_path, metrics):
    draw(metrics, {"name": "short"}, tmp_path / "a.png")
    _pixels(tmp_path / "a.png")


SUMS = Levels("sums", {0: "add_1", 3: "add_2"}, {0: "1-digit +", 3: "2-digit +"})
STEPS = Levels(
    "steps", {n: f"steps_{n}" for n in range(1, 13)}, {n: str(n) for n in range(1, 13)}, True
)


@pytest.mark.parametrize(
    ("called", "legend", "bars", "label"),
    [
        (SUMS, ["all", "base", "1-digit +", "2-digit +"], ["1-digit +", "2-digit +"], ""),
        (STEPS, ["all", "base", "2 steps", "11 steps"], ["2", "11"], "steps of the problem"),
        (None, ["all", "base", "x 2", "x 11"], ["x 2", "x 11"], ""),
    ],
)
def test_levels_are_called_as_the_task_calls_them(
    tmp_path, monkeypatch, called, legend, bars, label
):
    """Their order is the task's, or that of the numbers in their names."""
    names = list(called.names.values()) if called else ["x_11", "x_2"]
    names = [name for name in names if not name.startswith("steps") or name[6:] in ("2", "11")]
    metrics = [
        {"stage": "online", "tick": tick, "held_out/accuracy": 0.5}
        | {f"held_out/accuracy_{name}": 0.5 for name in names}
        | {f"success/{name}": 0.5 for name in names}
        for tick in range(3)
    ]
    figures, make = [], summary.Figure

    def kept(*args, **kwargs):
        figures.append(make(*args, **kwargs))
        return figures[-1]

    monkeypatch.setattr(summary, "Figure", kept)
    draw(metrics, {} if called is None else {"levels": called}, tmp_path / "a.png")
    panels = {axes.get_title(loc="left"): axes for axes in figures[0].axes}
    accuracy = panels["Held-out accuracy"].get_legend().get_texts()
    assert [text.get_text() for text in accuracy] == legend
    success = panels["Training success by difficulty"]
    assert [text.get_text() for text in success.get_xticklabels()] == bars
    assert success.get_xlabel() == label
