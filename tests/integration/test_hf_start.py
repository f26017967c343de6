"""From a Hugging Face folder to a trained policy: a small whole run, resume, what it refuses."""

import json
import os
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from s3ac_jax.config.boundary import ConfigError
from s3ac_jax.core.errors import RunError
from s3ac_jax.train.build import build
from s3ac_jax.train.run import run
from s3ac_jax.train.start import base_policy, check_model
from tests.integration import hf_runs, runs
from tests.unit.data import hf_folder

pytest.importorskip("jinja2", reason="needs the extra hf")
pytest.importorskip("tokenizers", reason="needs the extra hf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder. Not to be written to."""
    return hf_runs.make_folder(tmp_path_factory.mktemp("hf") / "model")


def launch(folder, workdir, changes=None):
    return subprocess.run(
        hf_runs.command(folder, workdir, changes),
        cwd=workdir.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(runs.ROOT), *_path()])},
        capture_output=True,
        text=True,
    )


def _path():
    before = os.environ.get("PYTHONPATH")
    return [before] if before else []


@pytest.fixture(scope="module")
def done(folder, tmp_path_factory):
    """Workdir and output of three ticks through the app. Not to be written to."""
    workdir = tmp_path_factory.mktemp("hf_start") / "run"
    finished = launch(folder, workdir)
    assert (finished.returncode, finished.stderr) == (0, "")
    return workdir, finished.stdout


def test_a_run_leaves_what_every_run_leaves(done):
    workdir, out = done
    assert {path.name for path in workdir.iterdir()} == {
        ".lock", "checkpoints", "config.json", "metrics.jsonl", "pretrained_critic",
        "origin.json", "responses.jsonl", "results.json", "stage_task.json",
        "stage_value_pretraining.json", "summary.png", "tb", "versions.json",
        "tripwires.jsonl",  # its weights are random: no answer is right
    }  # fmt: skip
    facts = json.loads((workdir / "stage_value_pretraining.json").read_text())
    assert list(facts["success_rates"]) == ["late"]
    kept = json.loads((workdir / "config.json").read_text())
    assert kept["task"]["kind"] == "Sums"
    # The table has the task's own levels, and no column of another task.
    for label in ("sums", "1-digit +", "1-digit -", "2-digit +", "2-digit -", "all"):
        assert label in out
    assert "step" not in out.split("Held-out problems")[1]


def test_metrics_are_those_of_the_task(done):
    lines = [json.loads(line) for line in runs.metric_lines(done[0], "online")]
    assert [line["tick"] for line in lines] == [0, 1, 2, 3]
    names = {"add_1", "sub_1", "add_2", "sub_2"}
    assert {n.removeprefix("success/") for n in lines[0] if n.startswith("success/")} <= names
    held_out = {n for n in lines[0] if n.startswith("held_out/accuracy_")}
    assert held_out == {f"held_out/accuracy_{name}" for name in names}
    assert not [name for line in lines for name in line if "step" in name and "clipped" not in name]
    for line in lines[:3]:
        assert line["actor_nonfinite"] == line["critic_nonfinite"] == 0
        assert line["actor_grad_norm"] > 0


def test_the_base_policy_is_the_folders(folder):
    parts = build(hf_runs.small_config(folder))
    policies = base_policy(parts)
    assert list(policies) == ["late"]
    found, tensors = policies["late"], load_file(folder / "model.safetensors")
    for layer in range(2):
        gate = tensors[f"model.layers.{layer}.mlp.gate_proj.weight"]
        np.testing.assert_array_equal(found["layers"]["mlp"]["gate"][layer], gate.T)
    np.testing.assert_array_equal(found["embed"], tensors["model.embed_tokens.weight"])
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found)} == {"float32"}
    # The stops are the folder's: the end of a text by its file, the end of a turn by its tokens.
    stops = hf_folder.END_OF_TEXT, hf_folder.IM_END
    assert parts.rollout.engine.stop_ids == stops


def test_a_stopped_run_goes_on_as_if_it_had_not_been(done, folder, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(done[0], workdir)
    # As if it had been killed after its second tick was saved.
    shutil.rmtree(workdir / "checkpoints" / "3")
    (workdir / "results.json").unlink()
    finished = launch(folder, workdir)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "resumed at tick 2" in finished.stdout
    assert runs.metric_lines(workdir, "online") == runs.metric_lines(done[0], "online")
    before, after = (
        json.loads((path / "results.json").read_text())["trained"] for path in (done[0], workdir)
    )
    assert before == after


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.rope_theta": 10000.0},
         r"model\.rope_theta is 10000\.0, but .*/config\.json says 100000\.0; use that value"),
        ({"model.num_layers": 3}, r"model\.num_layers is 3, but .* says 2"),
        ({"model.tie_embeddings": False}, r"model\.tie_embeddings is False, but .* says True"),
        ({"model.vocab_size": 312}, r"model\.vocab_size is 312, but .* says 320"),
        ({"model.vocab_size": 300}, r"model\.vocab_size is 300, but .* says 320"),
        ({"task.max_prompt_tokens": 20}, r"prompt \d+ \('.*'\) has 2\d tokens, task\.max_prompt_t"),
        ({"task.num_held_out": 100_000}, r"asked for 100000 questions, but"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_claims_nothing(folder, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(hf_runs.small_config(folder, changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_how_to_compute_is_not_the_folders_to_say(folder):
    changes = {"model.dtype": "bfloat16", "model.remat": True, "model.init_std": 0.5}
    check_model(hf_runs.small_config(folder, changes))


def test_no_folder_is_one_line(tmp_path):
    with pytest.raises(RunError, match=rf"no folder {re.escape(str(tmp_path))}/x; give one with"):
        run(hf_runs.small_config(tmp_path / "x"), tmp_path / "run")
    finished = launch(tmp_path / "x", tmp_path / "run")
    assert finished.returncode == 1
    assert re.fullmatch(r"error: no folder .*\n", finished.stderr)
    assert not (tmp_path / "run").exists()
