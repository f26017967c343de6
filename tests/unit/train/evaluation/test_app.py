"""An evaluation in its folder: what is refused before weights are read, and what begins anew."""

import dataclasses
import errno
import json

import pytest

from s3ac_jax.config.boundary import to_dict
from s3ac_jax.config.evaluate import EvaluateConfig, SamplerConfig
from s3ac_jax.config.evaluation import SuiteConfig
from s3ac_jax.config.sources import FileSource
from s3ac_jax.io.workdir import Workdir, WorkdirError
from s3ac_jax.report.records import RecordFile, read
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.train.evaluation import app
from s3ac_jax.train.evaluation.suites import EvaluationError
from s3ac_jax.train.evaluation.target import Wanted
from tests.helpers import run_config
from tests.unit.train.evaluation.fakes import TOKENIZER, FakePolicy, questions

CONFIG = EvaluateConfig({"own": SuiteConfig(samples=2, max_response_tokens=0)}, bootstrap=10)


class FakeTarget:
    """Counts how often weights were read."""

    made: list
    policy: FakePolicy

    def __init__(self, wanted, reading, config, **limits):
        FakeTarget.made.append(wanted.checkpoint)
        self.backend, self.version, self.told, self.weights = self.policy, 3, "it", "00c0ffee"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def memory(self):
        return app.contextlib.nullcontext()


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(app, "Target", FakeTarget)
    FakeTarget.made, FakeTarget.policy = [], FakePolicy(width=40)
    return FakeTarget.made


@pytest.fixture
def wanted(tmp_path):
    run = tmp_path / "run"
    for step in (3, 20):
        (run / "checkpoints" / str(step)).mkdir(parents=True)
        (run / "checkpoints" / str(step) / "commit_success.txt").touch()
    (run / "config.json").write_text(json.dumps(to_dict(run_config())))
    return Wanted(checkpoint=str(run))


def seeded(seed):
    return dataclasses.replace(CONFIG, seed=seed)


def test_without_a_workdir_it_has_a_folder_of_its_own(made, wanted, tmp_path):
    """Not that of evaluations inside training, which a run makes anew when it goes on."""
    app.evaluate(CONFIG, wanted, None)
    assert (tmp_path / "run" / "evaluated" / "tick_000020" / "results.json").is_file()
    assert not (tmp_path / "run" / "evaluations").exists()
    # The weights are those that the folder is named by, whatever the run saves meanwhile.
    assert made == [str(tmp_path / "run" / "checkpoints" / "20")]
    third = Wanted(checkpoint=str(tmp_path / "run" / "checkpoints" / "3"))
    app.evaluate(CONFIG, third, None)
    assert (tmp_path / "run" / "evaluated" / "tick_000003" / "results.json").is_file()
    gone = Wanted(checkpoint=str(tmp_path / "run" / "checkpoints" / "4"))
    with pytest.raises(EvaluationError, match="no checkpoint 4"):
        app.evaluate(CONFIG, gone, None)
    assert not (tmp_path / "run" / "evaluated" / "tick_000004").exists()


def test_what_can_be_refused_without_weights_is(made, wanted, tmp_path):
    out = tmp_path / "out"
    app.evaluate(CONFIG, wanted, str(out))
    assert made == [wanted.checkpoint]
    with pytest.raises(WorkdirError, match="another config: seed was 0, now 1"):
        app.evaluate(seeded(1), wanted, str(out))
    rounded = dataclasses.replace(CONFIG, sampler=SamplerConfig(kv_dtype="int8"))
    with pytest.raises(WorkdirError, match=r"sampler\.kv_dtype was \"auto\", now \"int8\""):
        app.evaluate(rounded, wanted, str(out))
    cooler = {"own": dataclasses.replace(CONFIG.suites["own"], temperature=0.5)}
    with pytest.raises(EvaluationError, match=r"made with temperature 1\.0, now it is 0\.5"):
        app.evaluate(dataclasses.replace(CONFIG, suites=cooler), wanted, str(out))
    there = Workdir(out)
    with pytest.raises(WorkdirError, match="is in use by another run"):
        app.evaluate(CONFIG, wanted, str(out))
    there.close()
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match="is or lies below a file"):
        app.evaluate(CONFIG, wanted, str(tmp_path / "file"))
    (out / "own.jsonl").unlink()
    (out / "own.jsonl").mkdir()
    with pytest.raises(WorkdirError, match=r"can't use .*own\.jsonl: Is a directory; mend that, "):
        app.evaluate(CONFIG, wanted, str(out))
    assert made == [wanted.checkpoint]


def test_where_nothing_is_on_record_another_config_may_begin(made, wanted, tmp_path):
    out = tmp_path / "out"
    FakeTarget.policy.aborts = True
    with pytest.raises(RolloutError):
        app.evaluate(CONFIG, wanted, str(out))
    assert read(out / "own.jsonl")[0] is not None
    FakeTarget.policy.aborts = False
    app.evaluate(seeded(1), wanted, str(out))
    assert json.loads((out / "config.json").read_text())["seed"] == 1
    assert read(out / "own.jsonl")[0]["made_with"]["seed"] == 1


def test_a_runs_own_folder_is_left_alone(made, wanted, tmp_path):
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(WorkdirError, match="another config"):
        app.evaluate(CONFIG, wanted, wanted.checkpoint)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_full_disk_is_told_as_one(made, wanted, tmp_path, monkeypatch):
    def full(self, records):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordFile, "append", full)
    with pytest.raises(WorkdirError, match=r"out: No space left on device; make room, then go on"):
        app.evaluate(CONFIG, wanted, str(tmp_path / "out"))


def test_more_records_than_samples_are_in_no_picture(made, wanted, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        app.evaluation_figure, "draw", lambda results, records, *_: shown.append(records)
    )
    out = str(tmp_path / "out")
    app.evaluate(CONFIG, wanted, out)
    fewer = {"own": dataclasses.replace(CONFIG.suites["own"], samples=1)}
    results = app.evaluate(dataclasses.replace(CONFIG, suites=fewer), wanted, out)
    assert len(shown[0]["own"]) == 16
    assert [one["sample"] for one in shown[1]["own"]] == [0] * 8
    assert results["suites"]["own"]["config"]["samples"] == 1


def test_algebra_that_is_not_there_is_told_first(made, wanted, tmp_path, monkeypatch):
    def absent(self):
        raise AssertionError("asked for")

    monkeypatch.setattr(app.GraderPool, "check_algebra", absent)
    source = FileSource(questions(tmp_path / "q.jsonl"))
    hf = {"q": SuiteConfig(source, instruction="", max_response_tokens=20)}
    reading = app.read_target(wanted)
    plain = dataclasses.replace(reading, tokenizer=TOKENIZER)
    monkeypatch.setattr(app, "read_target", lambda _: plain)
    with pytest.raises(AssertionError, match="asked for"):
        app.evaluate(dataclasses.replace(CONFIG, suites=hf), wanted, str(tmp_path / "out"))
    assert made == []
    # A task with a verifier of its own needs none.
    app.evaluate(CONFIG, wanted, str(tmp_path / "own"))
