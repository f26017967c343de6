"""results.csv: what is in it comes out, and a damaged one says where."""

import math

import pytest

from s3ac_jax.core.errors import RunError
from s3ac_jax.report.study_data import KEYS, METRICS, ResultsError, load

HEADER = (*KEYS, *METRICS, "kl")  # one metric that nobody planned

HEAD = ",".join(HEADER)


def _line(**cells):
    base = {"arm": "a", "family": "group", "recipe": "grpo", "seed": 0, "tick": 0, "seconds": 0,
            "offline_seconds": 10}  # fmt: skip
    return ",".join(str({**base, **cells}.get(name, "")) for name in HEADER)


LINES = (
    _line(tick=2, seconds=6, held_out_accuracy=0.75),
    _line(held_out_accuracy=0.25, entropy=1.5, kl=7),
    _line(tick=1, seconds=4, entropy="nan", kl=8),
    _line(seed=3, held_out_accuracy=0.5),
    _line(arm="b, second", family="single", held_out_accuracy=1).replace(
        "b, second", '"b, second"'
    ),
)


def _write(folder, *lines, header=HEAD):
    path = folder / "results.csv"
    path.write_text("".join(f"{line}\n" for line in (header, *lines)))
    return path


def test_what_was_written_is_read(tmp_path):
    results = load(_write(tmp_path, *LINES))
    assert results.arms == ["a", "b, second"]
    assert results.arms_of("single") == ["b, second"]
    assert results.seeds("a") == [0, 3]
    assert results.family("a") == "group"
    assert results.offline_seconds("a") == {0: 10.0, 3: 10.0}
    assert results.metrics == (*METRICS, "kl")


@pytest.mark.parametrize(
    ("x", "expected"),
    [("tick", [0, 2]), ("seconds", [0, 6]), ("seconds_with_offline", [10, 16])],
)
def test_curves_are_in_order_and_without_empty_cells(tmp_path, x, expected):
    xs, ys = load(_write(tmp_path, *LINES)).curve("a", 0, "held_out_accuracy", x)
    assert (xs.tolist(), ys.tolist()) == (expected, [0.25, 0.75])


def test_nan_is_not_measured_and_unknown_metrics_are_kept(tmp_path):
    results = load(_write(tmp_path, *LINES))
    assert results.curve("a", 0, "entropy")[0].tolist() == [0]
    assert results.curve("a", 0, "kl")[1].tolist() == [7, 8]
    assert results.curve("a", 3, "kl")[1].tolist() == []


def test_means_over_ticks_include_both_ends(tmp_path):
    results = load(_write(tmp_path, *LINES))
    assert results.mean_over_ticks("a", "kl", 0, 1)[0] == 7.5
    assert results.mean_over_ticks("a", "kl", 1, 9)[0] == 8
    assert math.isnan(results.mean_over_ticks("a", "kl", 0, 1)[3])


def test_questions_that_have_no_answer(tmp_path):
    results = load(_write(tmp_path, *LINES))
    with pytest.raises(ResultsError, match="no arm 'c'; it has a, b, second"):
        results.seeds("c")
    with pytest.raises(ResultsError, match="no seed 1 of arm 'a'"):
        results.curve("a", 1, "entropy")
    with pytest.raises(ResultsError, match="no metric 'entropi'"):
        results.mean_over_ticks("a", "entropi", 0, 1)
    with pytest.raises(ValueError, match="x is one of"):
        results.curve("a", 0, "entropy", "hours")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (_line(tick=1, entropy="much"), "line 3, column entropy: 'much' is no number"),
        (
            _line(tick=1, held_out_accuracy=35),
            "line 3, column held_out_accuracy: '35' is no fraction",
        ),
        (_line(tick="1.5"), "line 3, column tick: '1.5' is no whole number"),
        (_line(tick=""), "line 3, column tick: '' is no whole number"),
        (_line(seed=-1), "line 3, column seed: '-1' is negative"),
        (_line(tick=1, seconds=""), "line 3, column seconds: '' is no number"),
        (_line(tick=1, seconds="nan"), "line 3, column seconds: 'nan' is no time"),
        (_line(tick=1, offline_seconds=-3), "line 3, column offline_seconds: '-3' is no time"),
        (_line(arm=" "), "line 3, column arm: ' ' is empty"),
        (_line(family="pair"), "line 3, column family: 'pair' is none of single, group"),
        (_line(), "line 3, column tick: '0' stands in line 2 already"),
        (_line(seed=1, recipe="dapo"), "line 3, column recipe: 'dapo' differs"),
        (_line(seed=1, family="single"), "line 3, column family: 'single' differs"),
        (_line(tick=1, offline_seconds=11), "line 3, column offline_seconds: '11' differs"),
        ("a,group,grpo,0,1", f"line 3: 5 cells for {len(HEADER)} columns"),
        ('"a,group', "line 3 is no CSV"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = _write(tmp_path, _line(), line)
    with pytest.raises(ResultsError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, {message}")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, RunError)


def test_time_does_not_run_backwards(tmp_path):
    path = _write(tmp_path, _line(seconds=5), _line(tick=1, seconds=4))
    with pytest.raises(ResultsError, match="line 3, column seconds: '4' is less"):
        load(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (HEAD.replace("entropy,", "").replace(",tick", ""),
         "lacks the column tick, entropy"),
        (",".join((*HEADER, "kl")), "has the column kl twice"),
        (HEAD, "has no rows yet"),
        ("", "is empty"),
    ],
)  # fmt: skip
def test_a_bad_head(tmp_path, header, message):
    with pytest.raises(ResultsError, match=message):
        load(_write(tmp_path, header=header))


def test_files_that_are_none(tmp_path):
    with pytest.raises(ResultsError, match=r"results\.csv does not exist"):
        load(tmp_path / "results.csv")
    with pytest.raises(ResultsError, match="can't be read: Is a directory"):
        load(tmp_path)
    (tmp_path / "results.csv").write_bytes(b"arm\xff")
    with pytest.raises(ResultsError, match="not UTF-8"):
        load(tmp_path / "results.csv")
