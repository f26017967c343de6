"""Suites in config files: what they may say, and what each mistake is answered with."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from s3ac_jax.config.boundary import ConfigError, kept_run, plain, to_dict
from s3ac_jax.config.evaluate import FREE_KEYS, evaluate_from_config_dict
from s3ac_jax.config.evaluation import EvaluationConfig, SuiteConfig, TrainingEvaluationConfig
from s3ac_jax.config.sources import FileSource
from s3ac_jax.io.workdir import Workdir, WorkdirError
from tests.helpers import run_config

ROOT = Path(__file__).resolve().parents[3]


def config(preset="gsm8k"):
    return runpy.run_path(str(ROOT / "configs" / "evaluate.py"))["get_config"](preset)


def made(**suite):
    tree = {"suites": {"mine": {"source": {"path": "mine.jsonl"}, **suite}}}
    return evaluate_from_config_dict(ConfigDict(tree))


def test_suites_are_sections_by_name():
    found = made(samples=4, pass_at=(1, 2), temperature=1)
    assert found.suites == {
        "mine": SuiteConfig(FileSource("mine.jsonl"), samples=4, pass_at=(1, 2), temperature=1.0)
    }
    assert found.suites["mine"].reported == {"pass": (1, 2, 4), "maj": (4,)}
    assert made().suites["mine"].reported == {"pass": (), "maj": ()}
    assert made(max_response_tokens=7).max_response_tokens == 7
    assert EvaluationConfig().max_response_tokens == 0


def test_a_runs_own_problems_may_take_its_limit():
    own, other = SuiteConfig(max_response_tokens=0), SuiteConfig(max_response_tokens=9)
    found = EvaluationConfig({"own": own, "other": other}).of_run(40)
    assert {name: suite.max_response_tokens for name, suite in found.suites.items()} == {
        "own": 40, "other": 9,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"suite\.max_response_tokens must be at least 1"):
        SuiteConfig(FileSource("mine.jsonl"), max_response_tokens=0)


def test_every_preset_of_the_config_file_is_whole():
    presets = runpy.run_path(str(ROOT / "configs" / "evaluate.py"))["PRESETS"]
    for preset in presets:
        file = config(preset)
        if preset == "mine":
            with pytest.raises(ConfigError, match=r"path has no value; set it: --config\.suites"):
                evaluate_from_config_dict(file)
            file.suites.mine.source.path = "mine.jsonl"
        found = evaluate_from_config_dict(file)
        assert set(found.suites) == set(presets[preset])
        # As config.json of a folder keeps it, and as the next start compares it.
        kept = json.loads(json.dumps(plain(found)))
        assert evaluate_from_config_dict(ConfigDict(kept)) == found
    with pytest.raises(ConfigError, match=r"no preset 'gsm8'; known: held_out, gsm8k"):
        config("gsm8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, r"suites\.mine.*samples must be at least 1"),
        ({"temperature": 0, "samples": 2}, r"temperature 0 gives the same answer 2 times"),
        ({"top_p": 0}, r"top_p must be above 0 and at most 1, got 0"),
        ({"samples": 2, "pass_at": (3,)}, r"pass_at must be in 1\.\.samples \(2\), got 3"),
        ({"maj_at": (0,)}, r"maj_at must be in 1\.\.samples \(1\), got 0"),
        ({"source": {"path": "x", "weight": 2}}, r"source\.weight \(2\.0\) is of no use"),
        ({"sample": 2}, r"unknown key suites\.mine\.sample; did you mean samples"),
        ({"source": {"kind": "Csv", "path": "x"}}, r"source\.kind must be 'FileSource' or"),
    ],
)
def test_mistakes_in_a_suite(changes, message):
    with pytest.raises(ConfigError, match=message):
        made(**changes)


def test_mistakes_beside_the_suites():
    for tree, message in (
        ({"suites": {}}, "suites is empty"),
        ({"suites": {"a/b": {}}}, "names of suites have letters"),
        ({"suites": {"a": {}}, "deadline_s": 0}, "deadline_s must be positive"),
        ({"suites": {"a": {}}, "graders": 0}, "graders must be at least 1"),
        ({"suites": {"a": {}}, "sampler": {"slots": 0}}, r"slots must be at least 1"),
        ({"suites": {"a": {}}, "sampler": {"flavour": "vllm"}}, r"'openai' or 'sglang'"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate_from_config_dict(ConfigDict(tree))
    # A ConfigDict can't hold it, and says so in its own words.
    with pytest.raises(ValueError, match=r"suites\.a\.b: names of suites have letters"):
        EvaluationConfig({"a.b": SuiteConfig()})
    with pytest.raises(ValueError, match=r"evaluation\.every \(5\) needs evaluation\.suites"):
        TrainingEvaluationConfig(every=5)


def test_a_runs_config_is_read_from_its_workdir():
    run = dataclasses.replace(run_config(), seed=3)
    assert kept_run(json.loads(json.dumps(to_dict(run)))) == run
    with pytest.raises(ConfigError, match="recipe must be a section"):
        kept_run({})


def test_inside_training_the_tasks_grader_grades():
    """Fields that nobody reads would be a promise."""
    there = {field.name for field in dataclasses.fields(TrainingEvaluationConfig)}
    assert not there & {"graders", "deadline_s"}
    with pytest.raises(ConfigError, match=r"unknown key evaluation\.deadline_s"):
        kept_run(to_dict(run_config()) | {"evaluation": {"deadline_s": 3.0}})


def test_a_folder_goes_on_with_what_changes_no_response(tmp_path):
    free = {
        "bootstrap": 7, "chunk_rows": 7, "graders": 7, "sampler.flavour": "sglang",
        "sampler.insert_batch": 7, "sampler.max_in_flight": 7, "sampler.model": "m",
        "sampler.prefill_chunk": 7, "sampler.scan_layers": True, "sampler.server_patience_s": 7.0,
        "sampler.slots": 7, "sampler.steps_per_dispatch": 7, "sampler.tls_ca": "x",
        "sampler.token_file": "x", "suites.mine.samples": 7,
    }  # fmt: skip
    refused = {
        "deadline_s": 7.0, "mesh.data": 2, "sampler.kv_dtype": "int8", "sampler.weights": "int8",
        "seed": 7,
    }  # fmt: skip

    def claim(**changes):
        file = config("mine")
        file.suites.mine.source.path = "mine.jsonl"
        file.update_from_flattened_dict(changes)
        folder = Workdir(tmp_path)
        try:
            folder.claim(plain(evaluate_from_config_dict(file)), FREE_KEYS)
        finally:
            folder.close()

    claim()
    for name, value in free.items():
        claim(**{name: value})
    for name, value in refused.items():
        with pytest.raises(WorkdirError, match=f"made with another config: {name} was"):
            claim(**{name: value})
    file, tree = config("mine"), {*free, *refused}
    known = {f"sampler.{name}" for name in file.sampler} | {"bootstrap", "chunk_rows", "graders"}
    assert known | {"deadline_s", "seed"} <= tree
