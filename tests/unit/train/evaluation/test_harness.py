"""Suites answered by a made-up policy: what is asked, recorded, kept over kills, and refused."""

import dataclasses
import json

import numpy as np
import pytest

from s3ac_jax.config.evaluation import SuiteConfig
from s3ac_jax.config.sources import FileSource
from s3ac_jax.data.problems import Problem, ProblemsError
from s3ac_jax.data.prompts import Levels, PromptSet
from s3ac_jax.report.records import read
from s3ac_jax.rewards.answers import AnswerVerifier
from s3ac_jax.rewards.pool import GraderPool
from s3ac_jax.rewards.verdict import GraderError
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.train.evaluation import suites as suites_module
from s3ac_jax.train.evaluation.harness import evaluate_suites, results_of
from s3ac_jax.train.evaluation.suites import EvaluationError, sample_seed
from s3ac_jax.train.tasks import Split
from tests.unit.train.evaluation.fakes import (
    TOKENIZER,
    Even,
    FakePolicy,
    of_a_run,
    questions,
    said,
    write,
)

W = "00c0ffee"


def lines(folder, suite="mine"):
    return (folder / f"{suite}.jsonl").read_bytes()


def test_every_response_is_on_record(prepare, tmp_path):
    policy, prepared, told = FakePolicy(), prepare(), []
    found = evaluate_suites(
        prepared, policy, tmp_path / "out", 7, lambda *about: told.append(about[:3]), weights=W
    )
    header, records = read(tmp_path / "out" / "mine.jsonl")
    assert (header["weights"], header["version"], header["problems"]) == ("00c0ffee", 7, 5)
    assert [(one["problem"], one["sample"]) for one in records] == [
        (f"q{n}", s) for n in range(5) for s in range(3)
    ]
    for record in records:
        number = int(record["problem"][1:])
        seed = sample_seed(0, "mine", record["problem"], record["sample"])
        shown = "?" * (number + 1) + "\nPut your final answer within \\boxed{}.\n"
        text, stopped = said(seed, shown)
        value = text.split("{")[-1].rstrip("}") if "boxed" in text and stopped else None
        assert record["seed"] == seed
        assert record["response"] == text
        assert record["finish"] == ("stop" if stopped else "length")
        assert record["tokens"] == len(text) + stopped
        assert record["answer"] == value
        assert record["correct"] == (value is not None and float(value) == number)
    right = np.mean([one["correct"] for one in records])
    assert found["evaluation/mine/avg"] == pytest.approx(right)
    assert 0 < right < 1
    assert told == [
        (
            "mine",
            done,
            15,
        )
        for done in (0, 4, 8, 12, 15)
    ]


def test_neither_chunks_nor_neighbours_change_a_response(prepare, tmp_path):
    other = SuiteConfig(FileSource(questions(tmp_path / "b.jsonl", 2)), max_response_tokens=24)
    evaluate_suites(prepare(), FakePolicy(), tmp_path / "a", 0, weights=W)
    both = {"another": other, **prepare().config.suites}
    evaluate_suites(prepare(both, chunk_rows=11), FakePolicy(), tmp_path / "b", 0, weights=W)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


def test_stopped_anywhere_the_same_call_goes_on(prepare, tmp_path):
    prepared = prepare()
    evaluate_suites(prepared, FakePolicy(), tmp_path / "whole", 0, weights=W)
    whole = lines(tmp_path / "whole")
    for stop_at in range(5):
        folder, asked = tmp_path / f"stop{stop_at}", []
        calls = iter(range(100))

        def stop(*_, calls=calls, at=stop_at):
            if next(calls) == at:
                raise KeyboardInterrupt

        policy = FakePolicy()
        with pytest.raises(KeyboardInterrupt):
            evaluate_suites(prepared, policy, folder, 0, stop, weights=W)
        asked += policy.asked
        policy = FakePolicy()
        evaluate_suites(prepared, policy, folder, 0, weights=W)
        asked += policy.asked
        assert lines(folder) == whole
        # What was answered before the stop is on record, and not asked for again.
        assert sorted(asked) == sorted(
            {record["seed"] for record in read(folder / "mine.jsonl")[1]}
        )


def test_torn_anywhere_the_same_call_gives_the_same(prepare, tmp_path):
    prepared, out = prepare(), tmp_path / "out"
    evaluate_suites(prepared, FakePolicy(), out, 0, weights=W)
    whole, found = lines(out), results_of(prepared, out)
    for size in range(0, len(whole), 97):
        (out / "mine.jsonl").write_bytes(whole[:size])
        evaluate_suites(prepared, FakePolicy(), out, 0, weights=W)
        assert lines(out) == whole
        assert results_of(prepared, out) == found


def test_nothing_is_made_twice_and_more_samples_go_on(prepare, tmp_path):
    prepared, policy = prepare(), FakePolicy()
    first = evaluate_suites(prepared, policy, tmp_path / "out", 0, weights=W)
    assert evaluate_suites(prepared, policy, tmp_path / "out", 0, weights=W) == first
    assert len(policy.asked) == 15
    suite = dataclasses.replace(prepared.config.suites["mine"], samples=4)
    evaluate_suites(prepare({"mine": suite}), policy, tmp_path / "out", 0, weights=W)
    assert len(policy.asked) == 20
    assert len(set(policy.asked)) == 20


def test_other_weights_are_refused_or_made_anew(prepare, tmp_path):
    prepared = prepare()
    evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 1, weights=W)
    with pytest.raises(EvaluationError, match=r"mine\.jsonl holds answers of weights 00c0ffee, th"):
        evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 1, weights="other", keep=True)
    policy = FakePolicy()
    evaluate_suites(prepared, policy, tmp_path / "out", 1, weights="other")
    assert len(policy.asked) == 15
    assert read(tmp_path / "out" / "mine.jsonl")[0]["weights"] == "other"


def test_other_settings_and_questions_are_named(prepare, tmp_path):
    prepared = prepare()
    suite, out = prepared.config.suites["mine"], tmp_path / "out"
    evaluate_suites(prepared, FakePolicy(), out, 0, weights=W)
    hotter = dataclasses.replace(suite, temperature=0.5)
    with pytest.raises(EvaluationError, match=r"made with temperature 1\.0, now it is 0\.5"):
        evaluate_suites(prepare({"mine": hotter}), FakePolicy(), out, 0, weights=W, keep=True)
    with pytest.raises(EvaluationError, match=r"made with seed 0, now it is 1"):
        evaluate_suites(
            prepare({"mine": suite}, seed=1), FakePolicy(), out, 0, weights=W, keep=True
        )
    rows = [{"id": f"q{n}", "prompt": "?" * (n + 1), "answer": "9"} for n in range(5)]
    write(tmp_path / "mine.jsonl", rows)
    with pytest.raises(EvaluationError, match=r"made with questions '[0-9a-f]+', now it is"):
        evaluate_suites(prepare({"mine": suite}), FakePolicy(), out, 0, weights=W, keep=True)


def test_too_long_prompts_are_left_out_and_counted(prepare, tmp_path):
    source = FileSource(questions(tmp_path / "mine.jsonl"))
    suite = SuiteConfig(source, instruction="", max_prompt_tokens=4, max_response_tokens=24)
    prepared = prepare({"mine": suite})
    evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 0, weights=W)
    (found,) = results_of(prepared, tmp_path / "out")
    assert (found["problems"], found["dropped"]) == (3, 2)
    assert read(tmp_path / "out" / "mine.jsonl")[0]["dropped"] == ["q3", "q4"]
    with pytest.raises(ProblemsError, match="every prompt is longer than 1 tokens"):
        prepare({"mine": dataclasses.replace(suite, max_prompt_tokens=1)})


def test_options_are_drawn_anew_for_each_sample(prepare, tmp_path):
    rows = [
        {"id": f"c{n}", "prompt": f"Which {n}?", "answer": "oak", "no": ["elm", "ash", "fir"]}
        for n in range(6)
    ]
    source = FileSource(write(tmp_path / "c.jsonl", rows), options="no", grade="choice")
    suite = SuiteConfig(source, samples=4, instruction="", max_response_tokens=24)
    policy = FakePolicy()
    evaluate_suites(prepare({"c": suite}), policy, tmp_path / "out", 0, weights=W)
    _, records = read(tmp_path / "out" / "c.jsonl")
    for record, shown in zip(records, policy.prompts, strict=True):
        question, _, *options = shown.splitlines()
        assert question == f"Which {record['problem'][1:]}?"
        assert sorted(one[3:] for one in options) == ["ash", "elm", "fir", "oak"]
        # As many orders as records say: the same letter is the same option wherever it stood.
        by_letter = dict(zip(record["letters"], (one[3:] for one in options), strict=True))
        same = [one for one in records if one["problem"] == record["problem"]]
        for other in same:
            place = records.index(other)
            theirs = policy.prompts[place].splitlines()[2:]
            assert dict(zip(other["letters"], (one[3:] for one in theirs), strict=True)) == (
                by_letter
            )
    assert len({record["letters"] for record in records}) > 4


def test_the_held_out_problems_of_a_run_with_their_own_verifier(prepare, tmp_path):
    ids = [TOKENIZER.encode(text) for text in ("1+1=", "2+2=", "3+3=")]
    called = Levels("level", {0: "all"}, {0: "all"})
    prompts = PromptSet(np.array(ids, np.int32), np.full(3, 4, np.int32), np.zeros(3), called)
    suites = {"held_out": SuiteConfig(samples=2, max_response_tokens=24)}
    policy = FakePolicy()
    prepared = prepare(suites, Split(prompts, Even()))
    evaluate_suites(prepared, policy, tmp_path, 0, weights=W)
    assert policy.prompts == ["1+1=", "1+1=", "2+2=", "2+2=", "3+3=", "3+3="]
    _, records = read(tmp_path / "held_out.jsonl")
    assert [one["correct"] for one in records] == [one["tokens"] % 2 == 0 for one in records]
    assert {one["reason"] for one in records} == {"verifier"}
    for one in records:
        # It says of no response what it answers.
        assert one["answer"] is None
    with pytest.raises(EvaluationError, match=r"suites\.held_out has no source.*--checkpoint"):
        prepare(suites)


def test_aborted_responses_are_no_answers(prepare, tmp_path):
    policy = FakePolicy()
    policy.aborts = True
    with pytest.raises(RolloutError, match="4 of 4 responses were aborted"):
        evaluate_suites(prepare(), policy, tmp_path / "out", 0, weights=W)
    assert read(tmp_path / "out" / "mine.jsonl")[1] == []


def test_seeds_follow_from_names_and_differ():
    assert sample_seed(0, "a", "b", 1) == sample_seed(0, "a", "b", 1) < 2**32
    asked = [
        (seed, suite, problem, sample)
        for seed in range(3)
        for suite in ("a", "ab")
        for problem in ("c", "bc")
        for sample in range(20)
    ]
    assert len({sample_seed(*one) for one in asked}) == len(asked)


def test_weights_have_to_be_named(prepare, tmp_path):
    """Servers of others know no fingerprint; two empty ones would be the same weights."""
    with pytest.raises(TypeError, match="weights"):
        evaluate_suites(prepare(), FakePolicy(), tmp_path / "out", 0)
    with pytest.raises(ValueError, match="weights must say what answers"):
        evaluate_suites(prepare(), FakePolicy(), tmp_path / "out", 0, weights="")


def test_a_file_without_records_commits_nobody(prepare, tmp_path):
    suite, policy, out = prepare().config.suites["mine"], FakePolicy(), tmp_path / "out"
    policy.aborts = True
    with pytest.raises(RolloutError):
        evaluate_suites(prepare(), policy, out, 0, weights="a typo", keep=True)
    assert read(out / "mine.jsonl")[0]["weights"] == "a typo"
    hotter = dataclasses.replace(suite, temperature=0.5)
    evaluate_suites(prepare({"mine": hotter}), FakePolicy(), out, 0, weights=W, keep=True)
    header, records = read(out / "mine.jsonl")
    assert (header["weights"], header["made_with"]["temperature"], len(records)) == (W, 0.5, 15)


def test_records_of_another_suite_are_refused(prepare, tmp_path):
    prepared = prepare()
    evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 0, weights=W)
    (tmp_path / "out" / "mine.jsonl").rename(tmp_path / "out" / "other.jsonl")
    other = {"other": prepared.config.suites["mine"]}
    with pytest.raises(EvaluationError, match=r"other\.jsonl holds answers of suite mine, this is"):
        evaluate_suites(prepare(other), FakePolicy(), tmp_path / "out", 0, weights=W, keep=True)


def test_all_suites_are_compared_before_the_first_is_answered(prepare, tmp_path):
    prepared = prepare()
    evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 0, weights="older")
    suite, policy = prepared.config.suites["mine"], FakePolicy()
    both = prepare({"first": suite, "mine": suite})
    with pytest.raises(EvaluationError, match="holds answers of weights older"):
        evaluate_suites(both, policy, tmp_path / "out", 0, weights=W, keep=True)
    assert policy.asked == []


def test_what_a_suite_was_is_in_its_records_and_results(prepare, tmp_path):
    suite = dataclasses.replace(prepare().config.suites["mine"], instruction="In a box, please.")
    prepared = prepare({"mine": suite})
    evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 0, weights=W)
    (found,) = results_of(prepared, tmp_path / "out")
    for config in (read(tmp_path / "out" / "mine.jsonl")[0]["config"], found["config"]):
        assert config["instruction"] == "In a box, please."
        assert config["source"]["path"] == str(tmp_path / "mine.jsonl")
        assert config["source"]["kind"] == "FileSource"
    assert found["made_with"]["deadline_s"] == 2.0
    assert json.loads(json.dumps(found["config"])) == found["config"]


def test_numbers_of_half_a_suite_are_refused(prepare, tmp_path):
    prepared = prepare()
    with pytest.raises(EvaluationError, match=r"mine\.jsonl has 0 of 15 responses"):
        results_of(prepared, tmp_path / "out")
    evaluate_suites(prepared, FakePolicy(), tmp_path / "out", 0, weights=W)
    whole = lines(tmp_path / "out")
    (tmp_path / "out" / "mine.jsonl").write_bytes(b"\n".join(whole.split(b"\n")[:10]) + b"\n")
    with pytest.raises(EvaluationError, match=r"mine\.jsonl has 9 of 15 responses"):
        results_of(prepared, tmp_path / "out")
    more = dataclasses.replace(prepared.config.suites["mine"], samples=5, pass_at=(5,))
    (tmp_path / "out" / "mine.jsonl").write_bytes(whole)
    with pytest.raises(EvaluationError, match=r"has 15 of 25 responses"):
        results_of(prepare({"mine": more}), tmp_path / "out")


def test_all_suites_have_prompts_of_one_width(prepare, tmp_path):
    short = SuiteConfig(
        FileSource(questions(tmp_path / "b.jsonl", 2)), instruction="", max_response_tokens=24
    )
    long = dataclasses.replace(short, instruction="In a box, please.")
    ids = [TOKENIZER.encode("1+1=")]
    prompts = PromptSet(
        np.pad(np.array(ids, np.int32), ((0, 0), (0, 90))), np.array([4]), np.zeros(1),
        Levels("level", {0: "all"}, {0: "all"}),
    )  # fmt: skip
    own = SuiteConfig(max_response_tokens=24)
    prepared = prepare({"short": short, "long": long, "own": own}, Split(prompts, Even()))
    assert {suite.tokens.shape[1] for suite in prepared.suites} == {len("??\nIn a box, please.\n")}
    for suite in prepared.suites:
        for row, length in zip(suite.tokens, suite.num_tokens, strict=True):
            assert (row[length:] == TOKENIZER.pad_id).all()
            assert (row[:length] != TOKENIZER.pad_id).all()


def test_the_deadline_on_record_is_that_of_who_grades(prepare):
    with GraderPool(1, deadline_seconds=0.5) as pool:
        prepared = prepare(grader=pool)
        assert prepared.suites[0].made_with["deadline_s"] == 0.5
        # Also of a run's own questions, whose task has a pool of its own.
        theirs = AnswerVerifier([Problem("a", "1+1=", "2")], TOKENIZER, GraderPool(1))
        own = {"h": SuiteConfig(max_response_tokens=24)}
        (suite,) = prepare(own, of_a_run(theirs, ["1+1="], [0]), pool).suites
        assert suite.made_with["deadline_s"] == 0.5
        assert suite.verifier.grader is pool
        (suite,) = prepare(own, of_a_run(Even(), ["1+1="], [0]), pool).suites
        assert suite.made_with["deadline_s"] is None


def test_a_grader_that_is_not_there_is_told_first(prepare, tmp_path):
    path = questions(tmp_path / "q.jsonl")
    for grade, message in (("no_module:f", "no_module"), ("json:nothing", "nothing")):
        suite = SuiteConfig(FileSource(path, grade=grade), max_response_tokens=24)
        with pytest.raises(GraderError, match=message):
            prepare({"mine": suite})


class Twice:
    """A set whose ids nobody has looked at."""

    name = "mine"

    def __len__(self):
        return 3

    def __getitem__(self, place):
        return Problem(f"q{place % 2}", "?" * (place + 1), "1")


def test_ids_that_come_twice_are_refused(prepare, monkeypatch):
    """Their records would be those of one problem, and responses would be lost."""
    monkeypatch.setattr(suites_module, "problems_of", lambda name, source, where: Twice())
    with pytest.raises(ProblemsError, match="mine: problems 1 and 3 have the same id 'q0'"):
        prepare({"mine": SuiteConfig(FileSource("any"), max_response_tokens=24)})
