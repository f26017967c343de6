"""Weights from one format to the other and back; the app's one line on each mistake."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from s3ac_jax.config.boundary import to_dict
from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.core.errors import RunError
from s3ac_jax.core.types import Learner
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.io.hf_weights import critic_start, load_params, read_origin, read_spec
from s3ac_jax.io.orbax_weights import spec_from_dict
from s3ac_jax.models.spec import LinearAttentionSpec, LoraSpec, MoeSpec
from s3ac_jax.train.convert import ORIGIN, ConvertError, Wanted, run
from tests.helpers import run_config, tiny_spec
from tests.unit.io.hf_folders import FAMILIES, GOLDEN, same_tensors, tensors_of, write_folder

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("family", FAMILIES)
def test_through_orbax_and_back_bit_for_bit(tmp_path, family, capsys):
    source, weights, target = str(GOLDEN / family), str(tmp_path / "w"), tmp_path / "out"
    run(Wanted(hf=source, to_orbax=weights))
    run(Wanted(orbax=weights, to_hf=str(target), base=source))
    same_tensors(tensors_of(target), tensors_of(GOLDEN / family))
    assert (target / "config.json").read_bytes() == (GOLDEN / family / "config.json").read_bytes()
    said = capsys.readouterr().out.splitlines()
    skipped = ["skipped 37 tensors of model.visual, mtp: text only"] if "_vl" in family else []
    assert said == [
        "[read] starts", *skipped, "[write] starts", f"{source} is in {weights}",
        "[read] starts", "[write] starts", f"{weights} is in {target}",
    ]  # fmt: skip


def test_from_folder_to_folder(tmp_path):
    run(Wanted(hf=str(GOLDEN / "qwen3_5_moe_vl"), to_hf=str(tmp_path / "text")))
    text = {
        name: value
        for name, value in tensors_of(GOLDEN / "qwen3_5_moe_vl").items()
        if not name.startswith(("model.visual.", "mtp."))
    }
    same_tensors(tensors_of(tmp_path / "text"), text)


@pytest.fixture
def workdir(tmp_path):
    """A run's folder after steps 1 and 2 of training the golden qwen3_moe, times 1 and 2."""
    hf = GOLDEN / "qwen3_moe"
    spec = read_spec(hf)
    policy = load_params(hf, spec)
    critic = critic_start(policy) | {"value_head": jnp.ones(32)}
    tx = optax.adamw(1e-3)

    def learner(params, frozen=()):
        held = {name: params[name] for name in frozen}
        rest = {name: leaf for name, leaf in params.items() if name not in frozen}
        return Learner(rest, held, tx.init(rest), jnp.int32(0))

    state = {"actor": learner(policy), "critic": learner(critic, ["backbone"])}
    folder = tmp_path / "run"
    checkpoints = Checkpoints(folder / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, jax.tree.map(lambda x, s=step: s * x, state), {})
    checkpoints.close()
    config = {"model": dataclasses.asdict(spec), "start": {"hf": str(hf)}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def times(factor):
    return {n: (factor * v).astype(v.dtype) for n, v in tensors_of(GOLDEN / "qwen3_moe").items()}


@pytest.mark.parametrize(("step", "factor"), [(None, 2), (1, 1)])
def test_a_runs_policy_as_the_model_it_started_from(workdir, tmp_path, step, factor):
    run(Wanted(workdir=str(workdir), to_hf=str(tmp_path / "out"), step=step))
    same_tensors(tensors_of(tmp_path / "out"), times(factor))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_runs_critic(workdir, tmp_path, capsys):
    run(Wanted(workdir=str(workdir), role="critic", to_hf=str(tmp_path / "out")))
    assert f"the critic of {workdir} at step 2 is in" in capsys.readouterr().out
    want = times(2) | {"value_head.weight": np.full((1, 32), 2, np.float32)}
    del want["lm_head.weight"]
    same_tensors(tensors_of(tmp_path / "out"), want)
    run(Wanted(hf=str(tmp_path / "out"), to_orbax=str(tmp_path / "w")))
    run(Wanted(orbax=str(tmp_path / "w"), to_hf=str(tmp_path / "again")))
    same_tensors(tensors_of(tmp_path / "again"), want)


def test_the_origin_is_the_runs_then_the_starts_then_the_bases(workdir, tmp_path):
    config = json.loads((workdir / "config.json").read_text())
    base = tmp_path / "base"
    half = {name: value.astype(np.float16) for name, value in times(1).items()}
    write_folder(base, json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()), half)

    def dtype(**more):
        target = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        run(Wanted(workdir=str(workdir), to_hf=str(target), **more))
        return str(tensors_of(target)["model.norm.weight"].dtype)

    assert dtype(base=str(base)) == "float32"
    (workdir / "config.json").write_text(json.dumps({"model": config["model"]}))
    assert dtype(base=str(base)) == "float16"
    assert dtype() == "float32"
    (workdir / ORIGIN).write_text(read_origin(base).to_json())
    assert dtype() == "float16"


def test_a_runs_config_says_what_its_model_is():
    rich = tiny_spec(
        qkv_bias=False, qk_norm=True, zero_centred_norms=True, full_attention=(1,),
        moe=MoeSpec(4, 2, 8, shared_width=8, dense_layers=(0,)), lora=LoraSpec(2, 4.0),
        linear_attention=LinearAttentionSpec(2, 4, 4, 4),
    )  # fmt: skip
    for spec in (tiny_spec(), rich):
        config = json.loads(json.dumps(to_dict(run_config(model=spec))))
        assert spec_from_dict(config["model"], "config.json") == spec


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ({}, "give one source .* and one target"),
        ({"hf": "a", "orbax": "b", "to_hf": "c"}, "give one source"),
        ({"hf": "a", "to_hf": "c", "to_orbax": "d"}, "give one source .* and one target"),
        ({"hf": "a", "to_hf": "c", "step": 0}, "--step chooses from a run's checkpoints"),
        ({"hf": "a", "to_hf": "c", "role": "actor"}, "--role chooses from a run's checkpoints"),
        ({"hf": "a", "to_orbax": "c", "base": "d"}, "--base is for --to_hf"),
    ],
)
def test_what_cannot_be_wanted(wanted, line):
    with pytest.raises(CommandLineError, match=line):
        Wanted(**wanted)


def rewrite(name, content):
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("change", "more", "line"),
    [
        (lambda folder: (folder / "config.json").unlink(), {}, "config.json isn't there, so .* is"),
        (rewrite("config.json", "{"), {}, "config.json can't be read .*; restore that file"),
        (rewrite("config.json", "[]"), {}, "config.json can't be read"),
        (rewrite("config.json", '{"model": 3}'), {}, "config.json describes no model"),
        (rewrite("config.json", '{"model": {"heads": 3}}'), {}, "config.json doesn't describe a m"),
        (rewrite(ORIGIN, "?"), {}, "no record of a Hugging Face folder"),
        (lambda folder: None, {"step": 7}, r"has no checkpoint of step 7 \(it has 1, 2\)"),
        (lambda folder: None, {"base": "nowhere"}, "no folder nowhere"),
        (lambda folder: None, {"base": str(GOLDEN / "qwen3")}, "is another model than these weig"),
    ],
)
def test_what_is_wrong_with_a_run_is_one_line(workdir, tmp_path, change, more, line):
    change(workdir)
    wanted = Wanted(workdir=str(workdir), to_hf=str(tmp_path / "out"), **more)
    with pytest.raises(RunError, match=line) as caught:
        run(wanted)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_target_that_is_taken_is_told_before_anything_is_read(tmp_path):
    (tmp_path / "file").touch()
    for target in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConvertError, match="isn't an empty folder; name a new one, or delete"):
            run(Wanted(hf="nowhere", to_hf=str(target)))


def launch(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "launch" / "convert.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_the_app(tmp_path):
    done = launch(f"--hf={GOLDEN / 'qwen3'}", f"--to_orbax={tmp_path / 'w'}")
    assert (done.returncode, done.stderr) == (0, "")
    done = launch(f"--orbax={tmp_path / 'w'}", f"--to_hf={tmp_path / 'out'}")
    assert (done.returncode, done.stderr) == (0, "")
    same_tensors(tensors_of(tmp_path / "out"), tensors_of(GOLDEN / "qwen3"))
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    for arguments, code, line in (
        ([f"--hf={tmp_path / 'out'}"], 1, "model.safetensors is no whole safetensors file"),
        ([f"--workdir={tmp_path / 'w'}"], 1, "config.json isn't there, so"),
        ([], 2, "give one source (--hf, --workdir or --orbax) and one target"),
        (["--rolle=critic"], 2, "no flag --rolle; did you mean --role?"),
        (["--step=two"], 2, "--step=two: "),
    ):
        done = launch(*arguments, f"--to_hf={tmp_path / 'new'}")
        assert done.returncode == code
        assert done.stderr.startswith("error: ")
        assert line in done.stderr
        assert done.stderr.count("\n") == 1
