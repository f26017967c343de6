"""Models born here, critics, and what can't be saved."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core.trees import named_leaves, nest
from s3ac_jax.io.hf_config import HfError, spec_from_hf
from s3ac_jax.io.hf_weights import (
    critic_start,
    load,
    load_params,
    read_origin,
    read_spec,
    save,
    save_params,
)
from s3ac_jax.models.network import critic_network
from tests.unit.io.hf_folders import (
    FAMILIES,
    GOLDEN,
    loaded,
    quiet,
    same_tensors,
    tensors_of,
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_born_here_is_saved_and_loaded(tmp_path, family, dtype):
    spec = read_spec(GOLDEN / family)
    params = load_params(GOLDEN / family, spec, dtype=dtype, **quiet)
    save_params(params, spec, None, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == np.dtype(dtype).name
    assert spec_from_hf(config) == spec
    again = named_leaves(load_params(tmp_path / "out", spec, dtype=dtype))
    for name, leaf in named_leaves(params).items():
        assert leaf.dtype == again[name].dtype
        np.testing.assert_array_equal(leaf, again[name], err_msg=name)


def test_a_model_that_is_not_its_origins(tmp_path):
    spec, params = read_spec(GOLDEN / "qwen3"), nest(loaded("qwen3"))
    with pytest.raises(
        HfError, match=r"q_proj.weight is \(64, 32\) in this model, but \(32, 32\) by"
    ):
        save_params(params, spec, read_origin(GOLDEN / "qwen2_tied"), tmp_path / "out")
    changed = {**params, "embed": params["embed"][:-1]}
    with pytest.raises(HfError, match=r"embed is \(127, 32\), to be saved it must be \(128, 32\)"):
        save_params(changed, spec, None, tmp_path / "out")
    changed = {**params, "layers": {**params["layers"], "attn": {}}}
    with pytest.raises(HfError, match="layers/attn/q is absent, to be saved it must be"):
        save_params(changed, spec, None, tmp_path / "out")
    attn = {**params["layers"]["attn"], "q_lora_a": params["layers"]["attn"]["q"]}
    changed = {**params, "layers": {**params["layers"], "attn": attn}}
    with pytest.raises(HfError, match=r"q_lora_a is .*; merge LoRA's weights first"):
        save_params(changed, spec, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- critics


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3_5_moe_vl"])
@pytest.mark.parametrize("known", [True, False])
def test_a_critic_goes_out_and_in(tmp_path, family, known):
    spec = read_spec(GOLDEN / family)
    network = critic_network(spec)
    params = nest(loaded(family))
    head = np.arange(32, dtype=np.float32) + np.float32(0.1)
    critic = critic_start(params) | {"value_head": jnp.asarray(head)}
    assert named_leaves(critic).keys() == named_leaves(network.abstract).keys()
    origin = read_origin(GOLDEN / family) if known else None
    save_params(critic, spec, origin, tmp_path / "out", **quiet)
    stored = tensors_of(tmp_path / "out")
    assert "lm_head.weight" not in stored
    assert stored["value_head.weight"].dtype == np.float32
    np.testing.assert_array_equal(stored["value_head.weight"], [head])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert all(name.endswith("Model") for name in config["architectures"])
    assert config["value_head"]["tensor"] == "value_head.weight"
    for what in (network, spec):
        again = named_leaves(load_params(tmp_path / "out", what, **quiet))
        for name, leaf in named_leaves(critic).items():
            np.testing.assert_array_equal(again[name], leaf, err_msg=name)
    again = load_params(tmp_path / "out", network, **quiet)
    save_params(again, spec, read_origin(tmp_path / "out"), tmp_path / "twice", **quiet)
    same_tensors(tensors_of(tmp_path / "twice"), stored)
    assert json.loads((tmp_path / "twice" / "config.json").read_text()) == config


def test_a_policy_is_no_critic_and_a_critic_no_policy(tmp_path):
    spec = read_spec(GOLDEN / "qwen3")
    with pytest.raises(HfError, match=r"value_head.weight \(1, 32\) is missing, so this is no cri"):
        load_params(GOLDEN / "qwen3", critic_network(spec))
    critic = critic_start(nest(loaded("qwen3"))) | {"value_head": jnp.ones(32)}
    save_params(critic, spec, None, tmp_path / "out")
    with pytest.raises(HfError, match=r"value_head.weight .* has no place .*\(a critic's; load"):
        load(tmp_path / "out")


def test_a_critic_starts_from_a_copy():
    params = nest(loaded("qwen3_moe"))
    start = critic_start(params)
    assert set(start) == {"backbone"}
    assert set(start["backbone"]) == set(params) - {"lm_head"}
    pairs = zip(
        jax.tree.leaves(start["backbone"]),
        jax.tree.leaves({k: v for k, v in params.items() if k != "lm_head"}),
        strict=True,
    )
    for copy, leaf in pairs:
        np.testing.assert_array_equal(copy, leaf)
        assert copy.unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()


def test_nothing_is_left_of_a_model_that_could_not_be_saved(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    model = load(GOLDEN / "qwen3")
    with pytest.raises(HfError, match=r"can't write .*config.json: No space left on device"):
        save(model, tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(HfError, match="No space left"):
        save(model, tmp_path / "there")
    assert [(p.name, list(p.iterdir())) for p in tmp_path.iterdir()] == [("there", [])]
    monkeypatch.undo()
    save(model, tmp_path / "there")
    with pytest.raises(HfError, match="there isn't empty"):
        save(model, tmp_path / "there")
