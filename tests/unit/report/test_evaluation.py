"""An evaluation's table: every number from records whose answers can be counted by hand."""

import json
import math

import numpy as np
import pytest

from s3ac_jax.report import evaluation_figure
from s3ac_jax.report.evaluation import (
    counted,
    evaluation_table,
    evaluation_text,
    metrics,
    suite_result,
    write_results,
)
from s3ac_jax.report.records import Header, Record

SHARES = {"no_box": ["no_box", "empty_box"], "hung": ["deadline"]}


def header(**changes):
    made = Header(
        suite="mine", weights="w", version=1, made_with={"seed": 3}, config={}, problems=2,
        dropped=["x"],
    )  # fmt: skip
    return made | changes


def record(problem, sample, answer, correct, same_as, **changes):
    made = Record(
        problem=problem, sample=sample, seed=0, tokens=10, finish="stop", answer=answer,
        correct=correct, reason="number", same_as=same_as, letters=None, response="",
    )  # fmt: skip
    return made | changes


# p: 5 right, 7 wrong, 5.0 right, cut off. q: 1, 2, 1 all wrong, no box.
RECORDS = [
    record("p", 0, "5", True, 0),
    record("p", 1, "7", False, 1, tokens=30),
    record("p", 2, "5.0", True, 0),
    record("p", 3, None, False, None, finish="length", tokens=50, reason="truncated"),
    record("q", 0, "1", False, 0),
    record("q", 1, "2", False, 1, reason="deadline"),
    record("q", 2, "1", False, 0),
    record("q", 3, None, False, None, reason="no_box"),
]


def result(records=RECORDS, **changes):
    asked = {"samples": 4, "pass_at": (1, 2, 4), "maj_at": (3, 4), "resamples": 200}
    return suite_result(header(), records, shares=SHARES, **asked | changes)


def test_every_number_by_hand():
    found = result()
    assert (found["problems"], found["dropped"], found["responses"]) == (2, 1, 8)
    assert found["avg"]["value"] == (0.5 + 0) / 2
    # Two right of four: no right one among two in 1 of 6 pairs.
    assert found["pass"]["1"]["value"] == 0.25
    assert found["pass"]["2"]["value"] == pytest.approx((5 / 6 + 0) / 2)
    assert found["pass"]["4"]["value"] == 0.5
    assert found["maj"]["4"]["value"] == 0.5
    # Of the triples of p: {5, 7, 5.0} right, {5, 5.0, -} right, {5, 7, -} and {7, 5.0, -} tie.
    assert found["maj"]["3"]["value"] == pytest.approx((1 + 1 + 0.5 + 0.5) / 4 / 2)
    assert found["truncated"] == 1 / 8
    assert found["no_box"] == 1 / 8
    assert found["hung"] == 1 / 8
    assert found["tokens"] == (6 * 10 + 30 + 50) / 8
    assert found["reasons"] == {"number": 5, "truncated": 1, "deadline": 1, "no_box": 1}
    assert found["avg"]["std_samples"] == pytest.approx(np.std([0.5, 0, 0.5, 0], ddof=1))
    assert found["avg"]["low"] == 0.0
    assert found["avg"]["high"] == 0.5
    assert 0 <= found["avg"]["low_samples"] < 0.25 < found["avg"]["high_samples"] <= 0.5


def test_order_and_repetition_of_lines_change_nothing():
    again = [*RECORDS[::-1], RECORDS[0] | {"correct": False}]
    assert result(sorted(again, key=lambda one: one["problem"])) == result()


def test_votes_that_nobody_can_count_are_no_number():
    """A right response of which nobody says what it answers."""
    records = [*RECORDS[:-1], record("q", 3, None, True, None)]
    found = result(records)
    assert all(math.isnan(one) for one in found["maj"]["4"].values())
    assert found["pass"]["4"]["value"] == 1.0
    assert not [name for name in metrics([found]) if "/maj" in name]
    assert metrics([found])["evaluation/mine/pass_4"] == 1.0
    assert evaluation_text([found]).splitlines()[2].split()[8:10] == ["-", "-"]
    # Wrong ones without an answer have no vote, as ever.
    assert result()["maj"]["4"]["value"] == 0.5


def test_averages_of_levels():
    found = result(levels={"p": "easy", "q": "hard"})["levels"]
    assert {name: (one["problems"], one["value"]) for name, one in found.items()} == {
        "easy": (1, 0.5), "hard": (1, 0.0),
    }  # fmt: skip
    assert result()["levels"] == {}


def test_what_it_was_made_with_stays_with_it():
    assert result()["made_with"] == {"seed": 3}


def test_records_that_count():
    more = [*RECORDS, record("p", 4, "5", True, 0), record("p", -1, "5", True, 0), RECORDS[0]]
    assert counted(more, 4) == RECORDS
    assert counted(RECORDS[::-1], 1) == [RECORDS[4], RECORDS[0]]


def test_fewer_samples_are_the_first_ones():
    found = result(samples=1, pass_at=(1,), maj_at=(1,))
    assert found["responses"] == 2
    assert found["avg"]["value"] == 0.5
    assert math.isnan(found["avg"]["std_samples"])


def test_table_text_and_json(tmp_path):
    other = suite_result(
        header(suite="other", dropped=[]), RECORDS[:1], samples=1, pass_at=(), maj_at=(),
        resamples=10, shares=SHARES,
    )  # fmt: skip
    text = evaluation_text([result(), other])
    assert text.splitlines()[0].split() == [
        "suite", "problems", "n", "avg@n", "95", "%", "pass@1", "pass@2", "pass@4", "maj@3",
        "maj@4", "truncated", "no", "box", "hung", "tokens", "too", "long",
    ]  # fmt: skip
    assert text.splitlines()[2].split() == [
        "mine", "2", "4", "25.0", "0.0..50.0", "25.0", "41.7", "50.0", "37.5", "50.0", "12.5",
        "12.5", "12.5", "18", "1",
    ]  # fmt: skip
    assert text.splitlines()[3].split() == [
        "other", "1", "1", "100.0", *"------", "0.0", "0.0", "0.0", "10", "0"
    ]  # fmt: skip
    assert len(evaluation_table([result(), other]).rows) == 2
    write_results([result(), other], {"weights": "w"}, tmp_path)
    assert (tmp_path / "table.txt").read_text() == text + "\n"
    kept = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert kept["weights"] == "w"
    assert kept["suites"]["other"]["avg"]["low"] is None
    assert kept["suites"]["mine"]["maj"]["4"]["value"] == 0.5


def test_metrics_are_scalars_with_plain_names():
    found = metrics([result()])
    assert found["evaluation/mine/avg"] == 0.25
    assert found["evaluation/mine/pass_4"] == 0.5
    assert found["evaluation/mine/maj_4"] == 0.5
    assert found["evaluation/mine/hung"] == 1 / 8
    assert not any("@" in name for name in found)


def test_nothing_answered_is_no_number():
    found = result([])
    assert math.isnan(found["avg"]["value"])
    assert evaluation_text([found])


def test_a_picture_of_any_results(tmp_path):
    path = tmp_path / "evaluation.png"
    records = {"mine": RECORDS, "empty": [], "one": RECORDS[:1]}
    empty = result([]) | {"suite": "empty"}
    one = result(RECORDS[:1], samples=1, pass_at=(), maj_at=()) | {"suite": "one"}
    unknown = result([record("p", n, None, True, None) for n in range(4)])
    assert math.isnan(unknown["maj"]["4"]["value"])
    evaluation_figure.draw([result(), empty, one, unknown], records, SHARES, "a policy", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not path.with_suffix(".tmp").exists()
