"""Figures of a study: right size, curves where they belong, the same bytes twice."""

import matplotlib.image
import numpy as np
import pytest

from s3ac_jax.report.study_data import KEYS, METRICS, ResultsError, load
from s3ac_jax.report.study_figure import draw, draw_time

TICKS = 30
# Colours of the first two arms, as matplotlib reads them from a PNG.
BLUE, VERMILION = (0, 114, 178), (213, 94, 0)


def _load(folder, arms, seeds=3, ticks=TICKS, left_out=(), **constants):
    rng = np.random.default_rng(0)
    names = (*KEYS, *METRICS)
    lines = [",".join(names)]
    for i, (arm, family) in enumerate(arms):
        for seed in range(seeds):
            for tick in range(ticks + 1):
                cells = {"arm": arm, "family": family, "recipe": arm, "seed": seed, "tick": tick,
                         "seconds": tick, "offline_seconds": 10 * i}  # fmt: skip
                if tick % 10 == 0:
                    cells["held_out_accuracy"] = 0.2 + i / 4 + tick / 100 + rng.uniform(0, 0.02)
                if tick < ticks:
                    cells |= {
                        "entropy": np.exp(-tick / 10 - i) * rng.lognormal(0, 0.1),
                        "response_tokens": 20 + 10 * i + tick + rng.normal(),
                        "explained_variance": 0.3
                        + 0.4 * i
                        + rng.normal(0, 0.02)
                        - (tick < 2) * 900,
                        "dropped": 10 + 30 * i + rng.normal(),
                        "reference_mid": 0.3 + 0.3 * i + rng.normal(0, 0.02),
                        **constants,
                    }
                lines.append(",".join(
                    "" if name in left_out else str(cells.get(name, "")) for name in names
                ))  # fmt: skip
    path = folder / "results.csv"
    path.write_text("\n".join(lines))
    return load(path)


def _pixels(path):
    image = matplotlib.image.imread(path)
    assert image.shape[1] == 1200
    return (255 * image[..., :3]).round().astype(int)


def _share(image, colour, rows, columns):
    """Share of pixels of `colour` in a part of the image; parts are fractions of its size."""
    h, w = image.shape[:2]
    part = image[int(rows[0] * h) : int(rows[1] * h), int(columns[0] * w) : int(columns[1] * w)]
    return (abs(part - np.array(colour)).max(axis=-1) < 40).mean()


def _panels(image):
    """For each of the 2 x 3 panels, whether it shows blue and whether vermilion."""
    return [
        tuple(
            bool(_share(image, colour, (0.12 + 0.44 * row, 0.56 + 0.44 * row),
                        (column / 3, (column + 1) / 3)) > 0.0005)
            for colour in (BLUE, VERMILION)
        )
        for row in range(2)
        for column in range(3)
    ]  # fmt: skip


GROUPS = (("first", "group"), ("second", "group"))


def test_every_panel_shows_every_arm(tmp_path):
    draw(_load(tmp_path, GROUPS), ["first", "second"], tmp_path / "a.png", "title")
    assert _panels(_pixels(tmp_path / "a.png")) == [(True, True)] * 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "results.csv"]


def test_arms_without_a_metric_are_absent_from_its_panel(tmp_path):
    results = _load(tmp_path, (("first", "single"), ("second", "group")))
    draw(results, ["first", "second"], tmp_path / "a.png", "title")
    assert _panels(_pixels(tmp_path / "a.png"))[4] == (False, True)
    draw(results, ["first"], tmp_path / "a.png", "title")
    assert _panels(_pixels(tmp_path / "a.png")) == [(True, False)] * 4 + [
        (False, False), (True, False),
    ]  # fmt: skip


def test_the_same_results_give_the_same_bytes(tmp_path):
    results = _load(tmp_path, GROUPS)
    for picture in (draw, draw_time):
        for name in ("a.png", "b.png"):
            picture(results, ["first", "second"], tmp_path / name, "title")
        whole = (tmp_path / "a.png").read_bytes()
        assert whole == (tmp_path / "b.png").read_bytes()
        assert b"tEXt" not in whole  # neither dates nor versions
        assert b"tIME" not in whole


def test_time_is_drawn_without_and_with_offline_work(tmp_path):
    draw_time(_load(tmp_path, GROUPS), ["first", "second"], tmp_path / "a.png", "title")
    image = _pixels(tmp_path / "a.png")
    below = (0.3, 1.0)
    assert _share(image, VERMILION, below, (0.0, 0.5)) > 0.001
    # 10 s offline of 40 s: the second arm is flat in the first quarter of the right panel.
    early = image[int(0.3 * len(image)) :, 680:780]
    found = np.argwhere(abs(early - np.array(VERMILION)).max(axis=-1) < 40)
    assert len(found) > 100
    assert np.ptp(found[:, 0]) <= 3


@pytest.mark.parametrize("picture", [draw, draw_time])
def test_no_metric_is_indispensable(tmp_path, picture):
    for left_out in [(name,) for name in METRICS] + [METRICS]:
        results = _load(tmp_path, GROUPS, ticks=4, left_out=left_out)
        picture(results, results.arms, tmp_path / "a.png", "title")
    _pixels(tmp_path / "a.png")


@pytest.mark.parametrize("picture", [draw, draw_time])
@pytest.mark.parametrize(
    "options",
    [{"seeds": 1}, {"seeds": 2}, {"ticks": 0}, {"ticks": 1},
     {"entropy": 0, "dropped": 0, "reference_mid": 1, "explained_variance": 1}],
)  # fmt: skip
def test_short_and_constant_runs(tmp_path, picture, options):
    results = _load(tmp_path, GROUPS, **options)
    picture(results, results.arms, tmp_path / "a.png", "title")
    picture(results, [], tmp_path / "a.png", "")
    _pixels(tmp_path / "a.png")


def test_many_arms_and_a_long_title_fit(tmp_path):
    arms = [(f"an_arm_with_a_long_name_{i}", "group") for i in range(12)]
    results = _load(tmp_path, arms, seeds=2, ticks=2, held_out_accuracy=0.5,
                    explained_variance=0.1, reference_mid=0.5)  # fmt: skip
    for picture in (draw, draw_time):
        picture(results, results.arms, tmp_path / "a.png", "many words " * 15)
        image = _pixels(tmp_path / "a.png")
        assert (image[:, -6:] == 255).all()
        assert (image[:, :6] == 255).all()


def test_an_unknown_arm(tmp_path):
    with pytest.raises(ResultsError, match="no arm 'third'"):
        draw(_load(tmp_path, GROUPS), ["third"], tmp_path / "a.png", "title")
