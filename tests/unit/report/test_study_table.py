"""The tables of a study: cells worked out by hand and by scipy, and no "nan" anywhere."""

import pytest
from scipy import stats

from s3ac_jax.report.study_data import KEYS, METRICS, ResultsError, load
from s3ac_jax.report.study_table import (
    Comparison,
    comparison_table,
    cost_table,
    main_table,
    time_table,
)

FINALS = {"ac": (0.80, 0.84, 0.88), "pg": (0.70, 0.72, 0.77)}


def _load(folder, rows):
    names = (*KEYS, *METRICS)
    base = {"family": "group", "recipe": "r", "offline_seconds": 0}
    lines = [",".join(names)]
    lines += [",".join(str({**base, **row}.get(name, "")) for name in names) for row in rows]
    path = folder / "results.csv"
    path.write_text("\n".join(lines))
    return load(path)


def _rows():
    """Two arms of three seeds and four ticks; ac: 2 s per tick and 4 s offline, pg: 1 s."""
    rows = []
    for arm, finals in FINALS.items():
        pace, offline = (2, 4) if arm == "ac" else (1, 0)
        for seed, final in enumerate(finals):
            base = {"arm": arm, "seed": seed, "offline_seconds": offline}
            for tick in range(4):
                row = {**base, "tick": tick, "seconds": pace * tick, "dropped": 1000 * tick + seed,
                       "time_tick": 9 if tick == 0 else pace, "time_rollout": pace / 4}  # fmt: skip
                if arm == "ac":
                    row["time_critic"] = 0.5 + seed / 10
                if tick % 2 == 0:
                    row["held_out_accuracy"] = 0.4 if tick == 0 else 0.6
                rows.append(row)
            rows.append({**base, "tick": 4, "seconds": pace * 4, "held_out_accuracy": final})
    rows.append({"arm": "one", "family": "single", "seed": 0, "tick": 0, "seconds": 0})
    return rows


def _cells(text, line):
    """Cells of body line `line`, by header."""
    lines = text.splitlines()
    split = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in lines]
    return dict(zip(split[0], split[2 + line], strict=True))


def _percent_interval(values):
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return f"{100 * sum(values) / len(values):.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def test_main_table(tmp_path):
    text = main_table(_load(tmp_path, _rows()), "group")
    ac, pg = _cells(text, 0), _cells(text, 1)
    assert ac["held-out accuracy after 4 ticks"] == _percent_interval(FINALS["ac"])
    # Trapezoids: (0.4 + 0.6 + 0.6 + final) * 2 / 2 / 4.
    areas = [(1.6 + final) / 4 for final in FINALS["pg"]]
    assert pg["mean over ticks 0-4 (trapezoids)"] == _percent_interval(areas)
    # 0.6 at tick 2, so 2 + 2 * 0.2 / (final - 0.6): 4, 3.667 and 3.429.
    low, high = stats.ttest_1samp([4, 2 + 5 / 3, 2 + 10 / 7], 0).confidence_interval(0.95)
    assert ac["ticks to 80 %"] == f"4 [{low:.0f}, {high:.0f}]"
    assert pg["ticks to 80 %"] == "never"
    # pg ends after 4 s, when ac stands after 2 ticks, or has not begun.
    assert ac["at 4.00 s of training"] == "60.0 % [60.0, 60.0]"
    assert ac["at 4.00 s with offline work"] == "40.0 % [40.0, 40.0]"
    assert pg["at 4.00 s with offline work"] == _percent_interval(FINALS["pg"])
    assert (ac["s per tick (median)"], ac["seeds"]) == ("2.00", "3")
    assert len(text.splitlines()) == 6
    assert "Student-t" in text


def test_some_seeds_reach_a_level(tmp_path):
    text = main_table(_load(tmp_path, _rows()), "group", ["pg", "one"], level=0.75)
    assert _cells(text, 0)["ticks to 75 %"] == "1 of 3 seeds"
    assert len(text.splitlines()) == 5


def test_main_table_of_nothing_measured(tmp_path):
    results = _load(tmp_path, _rows())
    text = main_table(results, "single")
    assert list(_cells(text, 0).values())[:4] == ["one", "1", "n/a", "n/a"]
    assert "nan" not in text.lower().split()
    assert main_table(results, "group", []) == "No arms of the family group.\n"


def test_comparisons(tmp_path):
    text = comparison_table(
        _load(tmp_path, _rows()),
        [
            Comparison("ac", "pg", "held_out_accuracy", 4, 4, "is it | worth it?"),
            ("pg", "ac", "dropped", 1, 2, "drops"),
            ("ac", "nobody", "entropy", 0, 3, "missing"),
        ],
    ).replace("\\|", "or")
    expected = stats.ttest_rel(FINALS["ac"], FINALS["pg"])
    low, high = (100 * bound for bound in expected.confidence_interval(0.95))
    assert list(_cells(text, 0).values()) == [
        "is it or worth it?", "held-out accuracy, tick 4", "ac: 84.0 %", "pg: 73.0 %", "3",
        f"+11.0 [{low:+.1f}, {high:+.1f}]", f"{2 * expected.pvalue:.3f}", "higher",
    ]  # fmt: skip
    assert list(_cells(text, 1).values()) == [
        "drops", "dropped, ticks 1-2", "pg: 1501", "ac: 1501", "3",
        "0.0 [0.0, 0.0]", "1.000", "not separated",
    ]  # fmt: skip
    assert list(_cells(text, 2).values())[2:] == [
        "ac: n/a", "nobody: n/a", "0", "n/a", "n/a", "too few seeds",
    ]  # fmt: skip
    assert "Holm's method over the 2 tested lines" in text


def test_signs_and_digits_of_small_differences(tmp_path):
    rows = [
        {"arm": arm, "seed": seed, "tick": 0, "seconds": 0, "entropy": entropy,
         "held_out_accuracy": accuracy}
        for arm, values in {"x": [(0.0123, 0.5), (0.0125, 0.5001)],
                            "y": [(0.0223, 0.5001), (0.0229, 0.5)]}.items()
        for seed, (entropy, accuracy) in enumerate(values)
    ]  # fmt: skip
    results = _load(tmp_path, rows)
    listed = [("x", "y", "entropy", 0, 0, ""), ("x", "y", "held_out_accuracy", 0, 0, "")]
    text = comparison_table(results, listed)
    # Differences -0.0100 and -0.0104; half-width 12.706 * 0.0002.
    assert _cells(text, 0)["A - B"] == "-0.0102 [-0.0127, -0.0077]"
    assert _cells(text, 0)["A"] == "x: 0.0124"
    # A mean of 0 has no sign; half-width 12.706 * 0.01 points.
    assert _cells(text, 1)["A - B"] == "0.0 [-0.1, +0.1]"


def test_equal_wall_time(tmp_path):
    """pg ends at 4 s; there ac has done two ticks, or with its 4 s of offline work none."""
    text = time_table(_load(tmp_path, _rows()), ["ac", "pg", "absent"])
    bare, whole = _cells(text, 0), _cells(text, 1)
    for cells, ac in ((bare, 0.6), (whole, 0.4)):
        differences = [ac - pg for pg in FINALS["pg"]]
        low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        mean = 100 * sum(differences) / 3
        assert cells["A - B"] == f"{mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        assert (cells["A"], cells["B"], cells["seconds"]) == ("ac", "pg", "4.00")
    # Holm over two lines: the smaller p twice, the larger one at least as much.
    p = [stats.ttest_1samp([ac - pg for pg in FINALS["pg"]], 0).pvalue for ac in (0.6, 0.4)]
    assert whole["p (Holm)"] == f"{2 * min(p):.3f}"
    assert bare["p (Holm)"] == f"{max(2 * min(p), max(p)):.3f}"
    assert (bare["offline work"], whole["offline work"]) == ("-", "counts")
    assert {bare["verdict: A is"], whole["verdict: A is"]} == {"lower"}
    assert len(text.split("\n\n")[0].splitlines()) == 4


def test_costs(tmp_path):
    text = cost_table(_load(tmp_path, _rows()), ["ac", "pg", "nobody"], "pg")
    ac, pg, nobody = (_cells(text, line) for line in range(3))
    assert list(ac) == [
        "arm", "rollout", "critic", "whole tick", "tick / pg", "offline work per tick",
        "tick with offline work / pg",
    ]  # fmt: skip
    # Medians of (9, 2, 2, 2): the first tick does not count; 4 s offline over 4 ticks.
    assert list(ac.values()) == [
        "ac", "0.500", "0.600", "2.00 [2.00, 2.00]", "2.00 [2.00, 2.00]", "1.00",
        "3.00 [3.00, 3.00]",
    ]  # fmt: skip
    assert (pg["critic"], pg["tick / pg"]) == ("n/a", "1.00 [1.00, 1.00]")
    assert set(nobody.values()) == {"nobody", "n/a"}


def test_costs_without_the_baseline(tmp_path):
    text = cost_table(_load(tmp_path, _rows()), ["ac", "one"], "grpo_x")
    assert _cells(text, 0)["tick / grpo_x"] == "n/a"
    assert _cells(text, 0)["whole tick"] == "2.00 [2.00, 2.00]"


def test_a_metric_misspelt_is_an_error(tmp_path):
    with pytest.raises(ResultsError, match="no metric 'entropi'"):
        comparison_table(_load(tmp_path, _rows()), [("ac", "pg", "entropi", 0, 1, "")])
