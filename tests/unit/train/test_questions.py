"""The task of questions: what is left of its sources, how it is asked, and what it teaches."""

import dataclasses
import json
import types
from pathlib import Path

import numpy as np
import pytest

from s3ac_jax.config.evaluation import SuiteConfig, TrainingEvaluationConfig
from s3ac_jax.config.run import SftConfig
from s3ac_jax.config.sources import FileSource, SumsSource
from s3ac_jax.config.tasks import Questions
from s3ac_jax.data.mixing import Mixture
from s3ac_jax.data.problems import ProblemsError
from s3ac_jax.data.stream import Epochs
from s3ac_jax.io.workdir import Workdir, WorkdirError
from s3ac_jax.rewards.verdict import GraderError
from s3ac_jax.train.build import build
from s3ac_jax.train.run import claim
from s3ac_jax.train.tasks import held_out_half, make_task
from tests.helpers import run_config


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileSource(str(path))


def questions(prefix, count, answer=str):
    return [
        {"id": f"{prefix}{n}", "prompt": f"{prefix} {n}?", "answer": answer(n)}
        for n in range(count)
    ]


def config(train, held_out, **changes):
    base = run_config()
    task = Questions(max_prompt_tokens=32, train=train, held_out=held_out, instruction="Box it.")
    task = dataclasses.replace(
        task, **{name: changes.pop(name) for name in list(changes) if hasattr(task, name)}
    )
    return dataclasses.replace(
        base,
        task=task,
        model=dataclasses.replace(base.model, vocab_size=258),
        rollout=dataclasses.replace(base.rollout, max_response_tokens=16),
        train=dataclasses.replace(base.train, pack_tokens=64, batch_prompts=2),
        scheduler=dataclasses.replace(base.scheduler, candidates=2),
        sft=SftConfig(embedded=False),
        **changes,
    )


@pytest.fixture
def files(tmp_path):
    return {
        "mine": write(tmp_path / "mine.jsonl", questions("first", 6)),
        "theirs": write(tmp_path / "theirs.jsonl", questions("second", 4)),
        "test": write(tmp_path / "test.jsonl", questions("held", 3)),
    }


def asked(task, split):
    prompts = split.prompts
    return [
        task.tokenizer.decode(row[:length])
        for row, length in zip(prompts.tokens, prompts.num_tokens, strict=True)
    ]


def test_sources_follow_each_other_and_are_levels(files):
    sources = {"a": files["mine"], "b": files["theirs"]}
    task = make_task(config(sources, {"t": files["test"]}))
    assert asked(task, task.train)[0] == "first 0?\nBox it.\n"
    assert asked(task, task.train)[6] == "second 0?\nBox it.\n"
    assert task.train.prompts.levels.tolist() == [0] * 6 + [1] * 4
    assert task.train.prompts.called.names == {0: "a", 1: "b"}
    assert task.held_out.prompts.called.names == {0: "t"}
    assert [problem.answer for problem in task.train.verifier.problems] == list("0123450123")
    assert task.notes == ()


def test_weights_decide_how_often_a_source_comes(files):
    sources = {
        "a": dataclasses.replace(files["mine"], weight=1.0),
        "b": dataclasses.replace(files["theirs"], weight=3.0),
    }
    task = make_task(config(sources, {"t": files["test"]}))
    stream = task.stream(0)
    assert isinstance(stream, Mixture)
    drawn = task.train.prompts.levels[stream.at(np.arange(400))]
    assert np.bincount(drawn).tolist() == [100, 300]


def test_what_is_asked_elsewhere_or_twice_or_at_length_is_left_out_and_told(files, tmp_path):
    rows = [
        *questions("first", 4),
        {"id": "again", "prompt": "FIRST  1 ?", "answer": "1"},
        {"id": "leak", "prompt": "held 2?", "answer": "2"},
        {"id": "suite", "prompt": "second 3?", "answer": "3"},
        {"id": "long", "prompt": "x" * 40, "answer": "4"},
    ]
    train = {"a": write(tmp_path / "train.jsonl", rows)}
    evaluation = TrainingEvaluationConfig(
        every=1,
        suites={"s": SuiteConfig(files["theirs"], max_prompt_tokens=32, max_response_tokens=16)},
    )
    task = make_task(config(train, {"t": files["test"]}, evaluation=evaluation))
    ids = [problem.id for problem in task.train.verifier.problems]
    assert ids == ["first0", "first1", "first2", "first3"]
    told = "\n".join(task.notes)
    assert "train: left out 1 question asked before, such as again" in told
    assert "also asked by held_out, such as leak" in told
    assert "also asked by s, such as suite" in told
    assert "train: left out 1 of 5 questions whose prompt has more than 32 tokens" in told
    whole = make_task(config(train, {"t": files["test"]}, deduplicate=False, evaluation=evaluation))
    assert len(whole.train.prompts) == 7


def test_a_source_of_which_nothing_is_left_is_named(files, tmp_path):
    same = {"a": files["mine"], "copy": write(tmp_path / "copy.jsonl", questions("first", 6))}
    with pytest.raises(ProblemsError, match=r"task\.train\.copy: no question is left"):
        make_task(config(same, {"t": files["test"]}))


def test_bytes_need_their_vocabulary(files):
    run = config({"a": files["mine"]}, {"t": files["test"]})
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=257))
    with pytest.raises(ValueError, match=r"model\.vocab_size must be at least 258, .*UTF-8"):
        make_task(run)


def test_the_careful_writer_is_right_and_the_hasty_one_guesses(files):
    task = make_task(config({"a": files["mine"]}, {"t": files["test"]}))
    rng = np.random.default_rng(0)
    careful = task.demonstrate(rng, 200, slope=0.0, most=0.0).rollout
    graded = task.train.verifier.grade(careful)
    assert graded.success.all()
    assert set(graded.reasons) == {"string"}
    # A guess is right by chance: 1 in 6 of the half that is guessed.
    hasty = task.train.verifier.grade(task.demonstrate(rng, 600, slope=0.0, most=0.5).rollout)
    assert 0.5 < hasty.success.mean() < 0.67


def test_answers_that_do_not_fit_are_not_taught(tmp_path, files):
    rows = questions("first", 4, answer=lambda n: "12345678901" if n else "5")
    task = make_task(config({"a": write(tmp_path / "a.jsonl", rows)}, {"t": files["test"]}))
    taught = task.demonstrate(np.random.default_rng(0), 50, slope=0.0, most=0.0).rollout
    assert set(taught.prompt.index) == {0}
    with pytest.raises(ProblemsError, match=r"no answer fits into rollout\.max_response_tokens"):
        make_task(config({"a": write(tmp_path / "b.jsonl", rows[1:])}, {"t": files["test"]}))


def test_generated_sums_hold_out_what_others_train_on():
    train = {"sums": SumsSource(300, digits=(1,), operators="+")}
    held_out = {"sums": SumsSource(300, digits=(1,), operators="+", held_out=True)}
    task = make_task(config(train, held_out))
    ours = {problem.question for problem in task.train.verifier.problems}
    theirs = {problem.question for problem in task.held_out.verifier.problems}
    assert not ours & theirs
    # All hundred one-digit sums, each once, almost: draws are with replacement.
    assert 90 < len(ours) + len(theirs) <= 100


def test_a_run_goes_on_with_its_own_questions_alone(files, tmp_path):
    def claimed():
        run = config({"a": files["mine"], "b": files["theirs"]}, {"t": files["test"]})
        task, folder = make_task(run), Workdir(tmp_path / "run")
        try:
            claim(types.SimpleNamespace(config=run, task=task), folder)
        finally:
            folder.close()
            task.close()

    claimed()
    claimed()
    path = Path(files["mine"].path)
    lines = path.read_text().splitlines(keepends=True)
    others = {
        "".join(reversed(lines)): r"train, a: 6 as then, but others or in another order",
        "".join(lines[:4]): r"train, a: 6 then, 4 now",
        "".join(lines).replace(
            '"answer": "3"', '"answer": "9"'
        ): r"train, a: 6 as then, but others",
    }
    for text, message in others.items():
        path.write_text(text)
        with pytest.raises(WorkdirError, match=rf"made with other questions: {message}"):
            claimed()
    path.write_text("".join(lines))
    claimed()


def test_evaluations_need_no_training_set(files):
    run = config({"a": FileSource("is/not/there.jsonl")}, {"t": files["test"]})
    half = held_out_half(run)
    assert [problem.id for problem in half.split.verifier.problems] == ["held0", "held1", "held2"]
    whole = make_task(config({"a": files["mine"]}, {"t": files["test"]}))
    np.testing.assert_array_equal(half.split.prompts.tokens, whole.held_out.prompts.tokens)
    half.close()
    with pytest.raises(ProblemsError, match=r"is/not/there\.jsonl"):
        make_task(run)


def test_a_selection_by_rank_does_not_see_weights(files):
    sources = {"a": files["mine"], "b": files["theirs"]}
    task = make_task(config(sources, {"t": files["test"]}))
    assert task.stream(3, ranked=True) == Epochs(10, 3)
    sources["b"] = dataclasses.replace(files["theirs"], weight=2.0)
    task = make_task(config(sources, {"t": files["test"]}))
    with pytest.raises(ValueError, match=r"give all sources of task\.train the same weight"):
        task.stream(3, ranked=True)


def test_a_grader_that_is_not_there_is_missed_at_once(files):
    source = dataclasses.replace(files["mine"], grade="no_such_module:grade")
    with pytest.raises(GraderError, match=r"no_such_module"):
        make_task(config({"a": source}, {"t": files["test"]}))


def test_suites_go_with_their_tasks_grader(files):
    evaluation = TrainingEvaluationConfig(
        every=1,
        suites={
            "s": SuiteConfig(
                files["theirs"], max_prompt_tokens=32, max_response_tokens=16, instruction=""
            )
        },
    )
    run = config({"a": files["mine"]}, {"t": files["test"]}, evaluation=evaluation)
    first = build(run)
    again = build(dataclasses.replace(run, seed=5), like=first)
    assert again.suites is first.suites
    other = build(
        dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=300)), like=first
    )
    assert other.task is not first.task
    first.close(kept=other)
    # Neither the task's nor the suites' grader was closed with the other's.
    assert other.task.grader.grade([("x", "1", "math")])[0].reason == "no_box"
    assert other.suites.grader is other.task.grader
    other.close()
