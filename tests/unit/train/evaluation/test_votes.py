"""What votes are for: the verifier's word for an answer, a box, or nothing; averages by level."""

import json

import numpy as np
import pytest

from s3ac_jax.config.evaluation import SuiteConfig
from s3ac_jax.config.sources import FileSource
from s3ac_jax.report import evaluation as report
from s3ac_jax.report.records import read
from s3ac_jax.train.evaluation.harness import evaluate_suites, results_of
from tests.unit.train.evaluation.fakes import Even, FakePolicy, of_a_run, write

W = "00c0ffee"


class Said(Even):
    """The same; it knows the answer: the number of tokens, in tens."""

    def answers(self, rollout):
        return [str(n // 10) for n in rollout.num_tokens]


def test_votes_are_for_what_the_verifier_says_was_answered(prepare, tmp_path):
    suites = {"held_out": SuiteConfig(samples=6, maj_at=(2,), max_response_tokens=24)}
    prepared = prepare(suites, of_a_run(Said()))
    evaluate_suites(prepared, FakePolicy(), tmp_path / "said", 0, weights=W)
    _, records = read(tmp_path / "said" / "held_out.jsonl")
    assert [one["answer"] for one in records] == [str(one["tokens"] // 10) for one in records]
    wrong = [one for one in records if not one["correct"]]
    same = {(one["problem"], one["answer"]): one["same_as"] for one in wrong}
    assert all(same[one["problem"], one["answer"]] == one["same_as"] for one in wrong)
    (found,) = results_of(prepared, tmp_path / "said")
    assert 0 <= found["maj"]["6"]["value"] <= 1


def test_without_answers_there_is_no_majority(prepare, tmp_path):
    """Whole texts as answers would split the wrong votes, and the right ones would always win."""
    suites = {"held_out": SuiteConfig(samples=30, maj_at=(2,), max_response_tokens=24)}
    prepared = prepare(suites, of_a_run(Even()))
    numbers = evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 0, weights=W)
    results = results_of(prepared, tmp_path / "out")
    assert 0 < results[0]["avg"]["value"] < 1
    report.write_results(results, {}, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "results.json").read_text())["suites"]["held_out"]
    assert kept["maj"]["30"] == {"value": None, "low": None, "high": None}
    header, _, row = (tmp_path / "out" / "table.txt").read_text().splitlines()
    assert dict(zip(header.split(), row.split(), strict=False))["suite"] == "held_out"
    assert row.split()[5:8].count("-") == 2  # pass@30, maj@2, maj@30
    assert "evaluation/held_out/pass_30" in numbers
    assert not [name for name in numbers if "/maj_" in name]


def test_votes_on_a_users_grader_are_for_boxes(prepare, tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    (tmp_path / "theirs.py").write_text("def even(response, gold):\n    return '4' in response\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"id": f"q{n}", "prompt": "?" * (n + 1), "answer": str(n)} for n in range(3)]
    source = FileSource(write(tmp_path / "u.jsonl", rows), grade="theirs:even")
    suite = SuiteConfig(source, samples=5, max_response_tokens=24)
    prepared = prepare({"u": suite})
    evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 0, weights=W)
    _, records = read(tmp_path / "out" / "u.jsonl")
    for one in records:
        boxed = one["finish"] == "stop" and "boxed" in one["response"]
        assert one["answer"] == (one["response"].split("{")[1].rstrip("}") if boxed else None)
    # 3 and 3.0 are one answer, as the grader of mathematics compares.
    values = {}
    for one in records:
        if one["answer"]:
            key = one["problem"], float(one["answer"])
            assert one["same_as"] == values.setdefault(key, one["sample"])
    assert any(".0" in one["answer"] for one in records if one["answer"])


def test_averages_by_level_of_a_run(prepare, tmp_path):
    prompts = ("1+1=", "2+2=", "3+3=", "4+4=")
    split = of_a_run(Even(), prompts, (0, 1, 1, 0))
    prepared = prepare({"h": SuiteConfig(samples=3, max_response_tokens=24)}, split)
    evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 0, weights=W)
    _, records = read(tmp_path / "out" / "h.jsonl")
    (found,) = results_of(prepared, tmp_path / "out")
    for name, ids in (("low", "03"), ("high", "12")):
        right = [one["correct"] for one in records if one["problem"] in ids]
        assert found["levels"][name]["problems"] == 2
        assert found["levels"][name]["value"] == pytest.approx(np.mean(right))
