"""What is evaluated: combinations of flags, and the run that a checkpoint belongs to."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest

from s3ac_jax.config.boundary import to_dict
from s3ac_jax.config.evaluate import EvaluateConfig, SamplerConfig
from s3ac_jax.config.evaluation import SuiteConfig
from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.core.errors import RunError
from s3ac_jax.data.chat import NoTemplate
from s3ac_jax.data.hf_tokenizer import TokenizerError
from s3ac_jax.train.evaluation import target
from s3ac_jax.train.evaluation.suites import EvaluationError
from s3ac_jax.train.evaluation.target import (
    Target,
    Wanted,
    checkpoint_of,
    read_target,
    run_config,
    run_of,
)
from tests.helpers import run_config as config_of_a_run
from tests.unit.data import hf_folder

GOLDEN = Path(__file__).parents[3] / "golden"


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


def test_held_out_questions_are_those_of_the_training(tmp_path):
    config = config_of_a_run()
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    reading = read_target(Wanted(checkpoint=str(tmp_path)))
    facts = {"train": {}, "held_out": reading.held_out.facts()}
    reading.close()
    (tmp_path / "stage_task.json").write_text(json.dumps(facts))
    read_target(Wanted(checkpoint=str(tmp_path))).close()
    level = next(iter(facts["held_out"]))
    facts["held_out"][level][1] = "another"
    (tmp_path / "stage_task.json").write_text(json.dumps(facts))
    with pytest.raises(EvaluationError, match=rf"others now than when it was trained \({level}\)"):
        read_target(Wanted(checkpoint=str(tmp_path)))
    (tmp_path / "stage_task.json").write_text("[]")
    with pytest.raises(EvaluationError, match=r"stage_task\.json can't be read"):
        read_target(Wanted(checkpoint=str(tmp_path)))


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(EvaluationError, match=r"config\.json can't be read .* workdir of a run"):
        run_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(EvaluationError, match=r"config\.json: recipe must be a section"):
        run_config(str(tmp_path))


def test_only_a_folder_without_a_template_is_asked_in_plain_text(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    path = hf_folder.folder(tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "qwen3" / name, path)
    assert read_target(Wanted(hf=str(path))).plain is None
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja can't be read"):
        read_target(Wanted(hf=str(path)))

    def none(folder, tokenizer):
        raise NoTemplate(f"{folder} has none")

    monkeypatch.setattr(target, "load_template", none)
    reading = read_target(Wanted(hf=str(path)))
    assert (reading.template, reading.plain) == (None, f"{path} has none")


def test_the_checkpoint_that_is_meant(tmp_path):
    with pytest.raises(EvaluationError, match="has no checkpoint that was written to the end"):
        checkpoint_of(str(tmp_path))
    for step in (3, 20):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / "commit_success.txt").touch()
    (tmp_path / "checkpoints" / "30").mkdir()  # never written to the end
    newest = tmp_path / "checkpoints" / "20"
    for name in ("", "checkpoints", "checkpoints/20"):
        assert checkpoint_of(str(tmp_path / name)) == (newest, 20)
    assert checkpoint_of(str(tmp_path / "checkpoints" / "3"))[1] == 3
    for step in (4, 30):
        with pytest.raises(EvaluationError, match=rf"no checkpoint {step} .* it has 3, 20"):
            checkpoint_of(str(tmp_path / "checkpoints" / str(step)))


@pytest.fixture
def reading(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(to_dict(config_of_a_run())))
    reading = read_target(Wanted(checkpoint=str(tmp_path / "run")))
    yield reading
    reading.close()


@pytest.fixture
def who_answers(reading, tmp_path):
    """An address -> (weights, version, told) of a target there."""

    def ask(address, **sampler):
        config = EvaluateConfig(
            {"a": SuiteConfig()}, sampler=SamplerConfig(server_patience_s=1.0, **sampler)
        )
        wanted = Wanted(checkpoint=str(tmp_path / "run"), address=address)
        limits = {"max_prompt_tokens": 9, "max_response_tokens": 9}
        with Target(wanted, reading, config, **limits) as found:
            return found.weights, found.version, found.told

    return ask


@pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_who_answers_over_http(who_answers):
    pytest.importorskip("aiohttp")
    from tests.unit.rollout.client.fake_http import FakeEndpoint

    one, other = (FakeEndpoint("s3ac", {}) for _ in range(2))
    try:
        listed = {"id": "tiny", "version": 4, "fingerprint": "00c0ffee"}
        one.control["/v1/models"] = 200, {"data": [listed]}
        # The weights' own fingerprint: others at the same address are told apart.
        assert who_answers(one.address)[:2] == ("00c0ffee", 4)
        for endpoint in (one, other):
            endpoint.control["/v1/models"] = 200, {"data": [{"id": "qwen"}]}
        # One spelling: neither a slash, nor /v1, nor case, nor order is another policy.
        ports = sorted((one.port, other.port))
        pair = [f"http://127.0.0.1:{port}" for port in ports]
        told = f"qwen of {', '.join(pair)}"
        for spelled in (
            pair, pair[::-1], [pair[0] + "/", pair[1] + "/v1"], [pair[1] + "/v1/", *pair],
            [pair[0].replace("http", "HTTP"), pair[1]],
        ):  # fmt: skip
            assert who_answers(",".join(spelled)) == (told, 0, told)
    finally:
        one.stop()
        other.stop()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (",", "must be like host:9000"),
        ("a:1,http://b:1", "must be like host:9000"),
        ("http://127.0.0.1:9", "no rollout server to be had for 1 s"),
    ],
)
def test_addresses_where_nobody_answers(who_answers, address, message):
    with pytest.raises(RunError, match=message):
        who_answers(address)


def test_what_servers_decide_is_not_ours_to_say(who_answers):
    for name in ("kv_dtype", "weights"):
        with pytest.raises(CommandLineError, match=rf"sampler\.{name} is for a sampler in this"):
            who_answers("http://127.0.0.1:9", **{name: "int8"})


def test_no_memory_is_one_line(who_answers, monkeypatch, reading, tmp_path):
    monkeypatch.setattr(Target, "_servers", lambda *_: None)
    wanted = Wanted(checkpoint=str(tmp_path / "run"), address="a:1")
    config = EvaluateConfig({"a": SuiteConfig()})
    with Target(wanted, reading, config, max_prompt_tokens=10, max_response_tokens=90) as found:
        full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        said = r"no memory for sampler\.slots \(64\) x 100 tokens"
        with pytest.raises(EvaluationError, match=said), found.memory():
            raise full
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), found.memory():
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")
