"""A run on questions from several sources: mixed, graded, evaluated by suites, and gone on with."""

import runpy

import numpy as np
import pytest

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.report.log import read
from s3ac_jax.report.records import read as read_records
from s3ac_jax.train.build import build
from s3ac_jax.train.interrupt import Interrupted
from s3ac_jax.train.online import abstract_state
from s3ac_jax.train.run import run
from tests.integration import runs

TICKS = 4
SMALL = {
    "task.train.gsm8k.limit": 60,
    "task.train.gsm8k.weight": 3.0,
    "task.held_out.gsm8k.limit": 8,
    "task.held_out.sums.count": 8,
    "task.max_prompt_tokens": 200,
    "train.pack_tokens": 224,
    "rollout.slots": 16,
    "rollout.insert_batch": 8,
    "sft.careful_steps": 200,
    "sft.early_step": 20,
    "sft.hasty_steps": 1,
    "sft.batch_responses": 2,
    "value_pretraining.early_prompts": 8,
    "value_pretraining.middle_prompts": 8,
    "value_pretraining.late_prompts": 16,
    "value_pretraining.batch_responses": 16,
    "value_pretraining.epochs": 1,
    "value_pretraining.diagnose_steps": 0,
    "train.batch_prompts": 8,
    "train.micro_rows": 2,
    "train.minibatches": 2,
    "scheduler.candidates": 16,
    "cadence.save_every": 2,
    "cadence.evaluate_every": 4,
    "evaluation.every": 2,
    "evaluation.suites.gsm8k.source.limit": 4,
    "evaluation.suites.gsm8k.max_prompt_tokens": 200,
    "evaluation.suites.sums.source.count": 4,
    "evaluation.suites.sums.max_prompt_tokens": 200,
}


def config(**changes):
    whole = runpy.run_path(str(runs.ROOT / "configs" / "gsm8k_tiny.py"))["get_config"]()
    whole.update_from_flattened_dict(SMALL | {name.replace("__", "."): value
                                              for name, value in changes.items()})  # fmt: skip
    return from_config_dict(whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions") / "run"
    return folder, run(config(train__num_ticks=TICKS), folder)


def state_of(folder):
    parts = build(config(train__num_ticks=TICKS))
    try:
        state, _ = Checkpoints(folder / "checkpoints").restore(TICKS, abstract_state(parts))
    finally:
        parts.close()
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}


def test_what_a_tick_tells(whole):
    folder, results = whole
    ticks = [line for line in read(folder / "metrics.jsonl") if line["stage"] == "online"]
    assert len(ticks) == TICKS + 1
    for line in ticks[:TICKS]:
        assert line["hung"] == 0
        assert 0 <= line["no_box"] <= 1
        assert {"accept/gsm8k", "accept/sums"} & line.keys()
    assert {"held_out/accuracy_gsm8k", "held_out/accuracy_sums"} <= ticks[-1].keys()
    evaluated = [line["tick"] for line in ticks if "evaluation/sums/pass_8" in line]
    assert evaluated == [0, 2, 4]
    assert set(results) >= {"base", "trained"}


def test_suites_are_recorded_by_sample(whole):
    folder, _ = whole
    lines = {line["tick"]: line for line in read(folder / "metrics.jsonl")
             if line["stage"] == "online"}  # fmt: skip
    for tick in (0, 2, 4):
        header, records = read_records(folder / "evaluations" / f"tick_{tick:06d}" / "sums.jsonl")
        assert header["version"] == tick
        assert len(records) == 8 * header["problems"]
        right = np.mean([record["correct"] for record in records])
        assert lines[tick]["evaluation/sums/avg"] == pytest.approx(right)


class Stop:
    """Asked for as soon as this file is there."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def asked(self):
        return self.path.exists()


def test_a_stop_is_heard_while_suites_are_answered(whole, tmp_path, monkeypatch):
    folder, late = whole[0], tmp_path / "run" / "evaluations" / "tick_000002" / "gsm8k.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr("s3ac_jax.train.run.StopRequest", lambda: Stop(late))
        with pytest.raises(Interrupted, match=r"tick 2 and 0 of \d+ responses to gsm8k are saved"):
            run(config(train__num_ticks=TICKS), tmp_path / "run")
    assert not (late.parent / "sums.jsonl").exists()
    run(config(train__num_ticks=TICKS), tmp_path / "run")
    assert runs.metric_lines(tmp_path / "run", "online") == runs.metric_lines(folder, "online")


def test_a_run_that_stopped_half_way_ends_as_one_that_did_not(whole, tmp_path):
    run(config(train__num_ticks=2), tmp_path / "run")
    run(config(train__num_ticks=TICKS), tmp_path / "run")
    folder, _ = whole
    want, got = state_of(folder), state_of(tmp_path / "run")
    # How often each prompt was asked is among it, and the place in the stream.
    assert any("attempts" in name for name in want)
    assert sum(want["stats/attempts"]) > 0
    assert [
        name for name in want if not np.array_equal(want[name], got[name], equal_nan=True)
    ] == []
    assert runs.metric_lines(tmp_path / "run", "online") == runs.metric_lines(folder, "online")
    for tick in (0, 2, 4):
        for suite in ("sums", "gsm8k"):
            name = f"evaluations/tick_{tick:06d}/{suite}.jsonl"
            assert (folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
