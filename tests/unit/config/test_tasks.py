"""The task of a run: kinds, what each checks, and where a base policy has to come from."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest

from s3ac_jax.config.boundary import ConfigError, completed, from_config_dict, to_dict
from s3ac_jax.config.run import SftConfig, StartConfig
from s3ac_jax.config.sources import FileSource, SumsSource, TfdsSource
from s3ac_jax.config.tasks import Ladder, Questions, Sums
from s3ac_jax.io.workdir import Workdir
from tests.helpers import run_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SUMS = {
    "task": {"kind": "Sums", "max_prompt_tokens": 24},
    "start": {"hf": "somewhere"},
    "value_pretraining": {"early_prompts": 0, "middle_prompts": 0, "late_prompts": 512},
}


def tiny(**sections):
    config = runpy.run_path(str(CONFIGS / "tiny.py"))["get_config"]()
    with config.unlocked(), config.ignore_type():
        for name, section in sections.items():
            config[name] = section
    return config


def test_no_kind_means_the_ladder():
    config = from_config_dict(tiny(task={"max_steps": 5, "num_train": 1000}))
    assert config.task == Ladder(max_steps=5, num_train=1000)
    assert to_dict(config)["task"]["kind"] == "Ladder"


def test_kinds_have_their_own_fields():
    task = from_config_dict(tiny(**SUMS)).task
    assert task == Sums(max_prompt_tokens=24)
    with pytest.raises(ConfigError, match=r"unknown key task\.max_steps; known: max_prompt_tokens"):
        from_config_dict(tiny(task={"kind": "Sums", "max_steps": 3}))
    with pytest.raises(ConfigError, match=r"missing from the config file: task\.max_prompt_tokens"):
        from_config_dict(tiny(task={"kind": "Sums"}))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            {"kind": "Sum"},
            r"task\.kind must be 'Ladder' or 'Sums' or 'Questions', got 'Sum' \(str\)",
        ),
        ({"kind": 3}, r"task\.kind must be 'Ladder' or 'Sums' or 'Questions', got 3 \(int\)"),
        (7, r"task must be a section with keys, got 7 \(int\)"),
    ],
)
def test_what_is_no_kind(task, message):
    with pytest.raises(ConfigError, match=message):
        from_config_dict(tiny(task=task))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_prompt_tokens": 0}, r"task\.max_prompt_tokens must be at least 1"),
        ({"digits": ()}, r"task\.digits must be \(1,\), \(2,\) or \(1, 2\), got \(\)"),
        ({"digits": (1, 3)}, r"task\.digits must be"),
        ({"digits": (1, 1)}, r"task\.digits must be"),
        ({"operators": ""}, r"task\.operators must be some of '\+-\*', each once, got ''"),
        ({"operators": "+/"}, r"task\.operators must be some of"),
        ({"operators": "++"}, r"task\.operators must be some of"),
        ({"wordings": ()}, r"task\.wordings must hold at least one wording"),
        ({"wordings": ("{a}{op}{b}", "{a}+{b}")}, r"'\{a\}\+\{b\}' must have \{a\}, \{op\} and"),
        ({"wordings": ("{a}{op}{b}{c}",)}, r"and no other braces"),
        ({"wordings": ("{a}{op}{b}{a}",)}, r"each once"),
        ({"num_held_out": 0}, r"task\.num_held_out must be at least 1"),
    ],
)
def test_sums_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        Sums(**{"max_prompt_tokens": 32} | change)


def test_a_pretrained_model_has_no_earlier_policies():
    config = from_config_dict(tiny(**SUMS))
    for name in ("early_prompts", "middle_prompts"):
        share = dataclasses.replace(config.value_pretraining, **{name: 8})
        with pytest.raises(ValueError, match=rf"value_pretraining\.{name} \(8\) must be 0 with st"):
            dataclasses.replace(config, value_pretraining=share)


def test_sums_need_a_pretrained_model():
    config = from_config_dict(tiny(**SUMS))
    with pytest.raises(ValueError, match=r"task\.kind Sums has no warm start; set start\.hf"):
        dataclasses.replace(config, start=StartConfig())


def test_the_prompts_limit_is_named():
    with pytest.raises(ConfigError, match=r"\(60 tokens, from task\.max_prompt_tokens\) plus"):
        from_config_dict(tiny(**SUMS | {"task": {"kind": "Sums", "max_prompt_tokens": 60}}))


def test_who_trains_the_base_policy():
    config = run_config()
    assert not config.trains_policies
    own = dataclasses.replace(config, sft=SftConfig(embedded=False))
    assert own.trains_policies
    shares = dataclasses.replace(config.value_pretraining, early_prompts=0, middle_prompts=0)
    started = dataclasses.replace(own, start=StartConfig("x"), value_pretraining=shares)
    assert not started.trains_policies


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    """Its config.json lacks what came since: the kind of the task, the start."""
    config = to_dict(from_config_dict(tiny()))
    old = {name: section for name, section in config.items() if name != "start"}
    old["task"] = {name: x for name, x in config["task"].items() if name != "kind"}
    old["recipe"] = {name: x for name, x in config["recipe"].items() if name != "updates"}
    assert old != config
    for number, kept in enumerate((old, config)):
        folder = Workdir(tmp_path / str(number))
        folder.claim(kept, set())
        folder.claim(config, set(), completed)
        folder.close()
    assert completed({"name": "what no version wrote"}) == {"name": "what no version wrote"}


QUESTIONS = {
    "kind": "Questions",
    "max_prompt_tokens": 24,
    "train": {
        "mine": {"path": "mine.jsonl", "question": "problem", "weight": 2},
        "theirs": {"kind": "TfdsSource", "name": "theirs", "split": "train[:10%]"},
        "sums": {"kind": "SumsSource", "count": 100, "digits": [1]},
    },
    "held_out": {"mine": {"path": "test.jsonl", "limit": 50}},
}


def test_sources_are_sections_by_name():
    config = from_config_dict(tiny(task=QUESTIONS))
    assert config.task.train == {
        "mine": FileSource("mine.jsonl", question="problem", weight=2.0),
        "theirs": TfdsSource("theirs", split="train[:10%]"),
        "sums": SumsSource(100, digits=(1,)),
    }
    assert config.task.held_out["mine"].limit == 50


def test_questions_are_written_as_they_are_read():
    config = from_config_dict(tiny(task=QUESTIONS))
    kept = json.loads(json.dumps(to_dict(config)))
    assert kept["task"]["kind"] == "Questions"
    kinds = {name: one["kind"] for name, one in kept["task"]["train"].items()}
    assert kinds == {"mine": "FileSource", "theirs": "TfdsSource", "sums": "SumsSource"}
    assert completed(kept) == kept
    del kept["task"]["train"]["mine"]["answer_after"]
    assert completed(kept) == to_dict(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {}}, r"task\.train must name at least one source"),
        ({"held_out": {}}, r"task\.held_out must name at least one source"),
        ({"train": 3}, r"task\.train must be a section with keys, got 3"),
        ({"train": {"a": {}}}, r"missing from the config file: task\.train\.a\.path"),
        ({"train": {"a": {"path": "x", "anser": "y"}}}, r"unknown key task\.train\.a\.anser; did"),
        ({"train": {"a": {"path": "x", "weight": 0}}}, r"task\.train\.a.*weight must be positive"),
        ({"train": {"a": {"path": "x", "limit": 0}}}, r"task\.train\.a.*limit must be at least 1"),
        ({"train": {"a": {"kind": "Csv"}}}, r"task\.train\.a\.kind must be 'FileSource' or 'Tfds"),
        (
            {"train": {"a": {"kind": "SumsSource", "count": 3, "operators": "/"}}},
            r"task\.train\.a.*operators must be some of",
        ),
        (
            {"held_out": {"a": {"path": "x", "weight": 2}}},
            r"task\.held_out\.a\.weight is of no use",
        ),
        (
            {"train": {"a": {"kind": "SumsSource", "count": 3, "digits": (0, 1)}}},
            r"task\.train\.a.*digits must be some of 1\.\.9",
        ),
        ({"graders": 0}, r"task\.graders must be at least 1"),
        ({"deadline_s": 0}, r"task\.deadline_s must be positive"),
    ],
)
def test_questions_are_checked(change, message):
    with pytest.raises(ConfigError, match=message):
        from_config_dict(tiny(task=QUESTIONS | change))


def test_how_many_questions_there_are_is_not_known_before_they_are_read():
    assert Questions(8, {"a": FileSource("a")}, {"a": FileSource("a")}).num_train is None
