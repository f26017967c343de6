"""What is evaluated: combinations of flags, and the run that a checkpoint belongs to."""

import dataclasses
import json
from pathlib import Path

import pytest

from s3ac_jax.config.boundary import to_dict
from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.train.evaluation.suites import EvaluationError
from s3ac_jax.train.evaluation.target import Wanted, read_target, run_config, run_of
from tests.helpers import run_config as config_of_a_run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"give one of --checkpoint=RUN and --hf=FOLDER$"),
        ({"checkpoint": "a", "hf": "b"}, r"give one of"),
        ({"address": "host:1"}, r"--hf=FOLDER beside --address, for the tokenizer"),
        ({"checkpoint": ""}, r"--checkpoint is empty"),
        ({"hf": "a", "address": ""}, r"--address is empty"),
    ],
)
def test_what_belongs_together(flags, message):
    with pytest.raises(CommandLineError, match=message):
        Wanted(**flags)


def test_the_run_of_a_checkpoint():
    for path in ("runs/a", "runs/a/checkpoints", "runs/a/checkpoints/40"):
        assert run_of(path) == Path("runs/a")


def test_a_runs_own_config_says_how_questions_are_read(tmp_path):
    config = dataclasses.replace(config_of_a_run(), seed=5)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    assert run_config(str(tmp_path / "checkpoints" / "3")) == config
    reading = read_target(Wanted(checkpoint=str(tmp_path)))
    assert reading.spec == config.model
    assert len(reading.held_out.prompts) == config.task.num_held_out
    assert reading.plain == "the run's tokenizer has no chat template"
    reading.close()


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(EvaluationError, match=r"config\.json can't be read .* workdir of a run"):
        run_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(EvaluationError, match=r"config\.json: recipe must be a section"):
        run_config(str(tmp_path))
