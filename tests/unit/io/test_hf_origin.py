"""What is remembered of a folder, and what is wrong with one."""

import json

import numpy as np
import pytest

from s3ac_jax.io.hf_config import HfError
from s3ac_jax.io.hf_weights import (
    Origin,
    load,
    read_origin,
)
from tests.unit.io.hf_folders import (
    FAMILIES,
    GOLDEN,
    golden,
    golden_config,
    write_folder,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_origin_can_be_kept_beside_a_config(family):
    origin = read_origin(GOLDEN / family)
    text = json.dumps({"origin": origin.to_json()})
    again = Origin.from_json(json.loads(text)["origin"])
    assert again == origin
    assert hash(again) == hash(origin)
    assert len(origin.to_json()) < 4000
    for name, value in golden(family).items():
        if not name.startswith(("model.visual.", "mtp.")):
            spelled = {"float32": "F32", "bfloat16": "BF16"}[str(value.dtype)]
            assert origin.dtype_of(name) == spelled, name


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"dtypes": 3, "skipped": []}'])
def test_what_is_no_origin(text):
    with pytest.raises(HfError, match="this is no record of a Hugging Face folder"):
        Origin.from_json(text)


UP = "model.layers.1.mlp.up_proj.weight"


def changed(**tensors):
    found = dict(golden("qwen3")) | {k.replace("__", "."): v for k, v in tensors.items()}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "line"),
    [
        ({UP: None}, rf"{UP} \(64, 32\) is missing"),
        ({UP: np.zeros((32, 64), np.float32)},
         rf"{UP} in model.safetensors is \(32, 64\), by config.json it must be \(64, 32\)"),
        ({"model.layers.3.input_layernorm.weight": np.zeros(32, np.float32)},
         r"model.layers.3.input_layernorm.weight \(32,\) in model.safetensors has no place"),
        ({f"model.layers.0.mlp.{name}_proj.weight": None for name in ("up", "gate", "down")} |
         {UP: None, "model.norm.weight": None},
         r"layers.0.mlp.gate_proj.weight \(64, 32\) is missing; .*; .*; and 2 more$"),
        ({"model.embed_tokens.weight": None}, "must hold one tensor called ...embed_tokens.weigh"),
        ({UP: np.zeros((64, 32), np.float64)}, f"{UP} has dtype F64, only F32, F16, BF16 can be"),
        ({"model.norm.weight": np.zeros(32, np.int32)},
         "m: in model.safetensors model.norm.weight has dtype I32, only F32, F16, BF16 can be"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_in_one_line(tmp_path, monkeypatch, tensors, line):
    source = write_folder(tmp_path / "m", golden_config("qwen3"), changed(**tensors))
    monkeypatch.setattr("s3ac_jax.io.hf_weights.load_tree", None)  # nothing is loaded
    with pytest.raises(HfError, match=line) as caught:
        load(source)
    assert "\n" not in str(caught.value)
