"""Adapters from a folder to a merged export: what moves, what stays, and what comes out."""

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict
from safetensors.numpy import load_file

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.hf_weights import read_spec
from s3ac_jax.io.orbax_weights import load_role
from s3ac_jax.train import convert
from s3ac_jax.train.run import run
from tests.integration import hf_runs

pytest.importorskip("jinja2", reason="needs the extra hf")
pytest.importorskip("tokenizers", reason="needs the extra hf")

RANK, ALPHA = 2, 6.0


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Folder and workdir of a run with adapters. Not to be written to."""
    base = tmp_path_factory.mktemp("adapters")
    folder = hf_runs.make_folder(base / "model")
    changes = {"actor.lr": 0.05, "critic.lr": 0.05, "train.num_ticks": 2}
    config = hf_runs.config_dict(folder, changes)
    with config.unlocked():
        config.model.lora = config_dict.ConfigDict(
            {"rank": RANK, "alpha": ALPHA, "targets": ("attn", "mlp"), "base_dtype": "float32"}
        )
    run(from_config_dict(config), base / "run")
    return folder, base / "run"


def test_only_adapters_and_the_value_head_moved(done):
    folder, workdir = done
    tensors = load_file(folder / "model.safetensors")
    for role in ("actor", "critic"):
        params, step = load_role(workdir / "checkpoints", role)
        assert step == 2
        names = named_leaves(params)
        layers = params["layers"] if role == "actor" else params["backbone"]["layers"]
        for layer in range(2):
            up = tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
            np.testing.assert_array_equal(layers["mlp"]["up"][layer], up.T)
            norm = tensors[f"model.layers.{layer}.input_layernorm.weight"]
            np.testing.assert_array_equal(layers["attn_norm"][layer], norm)
        moved = {name for name, leaf in names.items() if name.endswith("_lora_b") and leaf.any()}
        adapted = {name for name in names if name.endswith("_lora_b")}
        assert len(adapted) == 7
        # S3AC's critic keeps its attention as it is, adapters of it included.
        frozen = {name for name in adapted if role == "critic" and "/attn/" in name}
        assert moved == adapted - frozen


def test_the_export_is_merged(done, tmp_path):
    folder, workdir = done
    convert.run(convert.Wanted(workdir=str(workdir), to_hf=str(tmp_path / "out")))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert set(after) == set(before)
    assert read_spec(tmp_path / "out").lora is None
    params, _ = load_role(workdir / "checkpoints", "actor")
    attn = params["layers"]["attn"]
    for layer in range(2):
        a, b = (np.asarray(attn[f"o_lora_{side}"][layer], np.float64) for side in "ab")
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        want = before[name].astype(np.float64) + ALPHA / RANK * (a @ b).T
        assert np.abs(want - before[name]).max() > 1e-3
        # The folder is in bfloat16 or float32, as its maker had it.
        rounding = float(jnp.finfo(before[name].dtype).eps)
        np.testing.assert_allclose(after[name].astype(np.float64), want, rtol=rounding, atol=1e-6)
        name = f"model.layers.{layer}.input_layernorm.weight"
        np.testing.assert_array_equal(after[name], before[name])
