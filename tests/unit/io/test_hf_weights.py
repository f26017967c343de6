"""Golden models go in and come out with every bit as it was, whatever their layout."""

import functools
import shutil

import ml_dtypes
import numpy as np
import pytest

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.hf_config import HfError
from s3ac_jax.io.hf_weights import (
    load,
    load_params,
    read_origin,
    read_spec,
    save,
    save_params,
    stored_dtype,
)
from tests.unit.io.hf_folders import (
    FAMILIES,
    GOLDEN,
    apart,
    fused,
    golden,
    golden_config,
    loaded,
    quiet,
    same_tensors,
    tensors_of,
    write_folder,
)

MOE = ("qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_vl")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_goes_in_comes_out_bit_for_bit(tmp_path, family):
    model = load(GOLDEN / family, **quiet)
    carry = GOLDEN / family if family == "qwen3_5_moe_vl" else None
    save(model, tmp_path / "out", carry_from=carry, **quiet)
    same_tensors(tensors_of(tmp_path / "out"), golden(family))
    for name in ("config.json", "generation_config.json"):
        source, copy = (folder / name for folder in (GOLDEN / family, tmp_path / "out"))
        assert source.exists() == copy.exists()
        assert not source.exists() or source.read_bytes() == copy.read_bytes()


def test_logits_are_those_of_transformers():
    with np.load(GOLDEN / "qwen2_tied" / "golden.npz") as arrays:
        tokens, mask = arrays["right_input_ids"], arrays["right_attention_mask"]
        logits = load(GOLDEN / "qwen2_tied")(tokens, segment_ids=mask)
        real = mask.astype(bool)
        np.testing.assert_allclose(logits[real], arrays["right_logits"][real], rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_comes_back(tmp_path, dtype):
    half = {name: value.astype(dtype) for name, value in golden("qwen2_tied").items()}
    half["model.layers.1.mlp.up_proj.weight"] = golden("qwen2_tied")[
        "model.layers.1.mlp.up_proj.weight"
    ]
    source = write_folder(tmp_path / "m", golden_config("qwen2_tied"), half)
    params = load_params(source, read_spec(source))
    np.testing.assert_array_equal(
        params["embed"], half["model.embed_tokens.weight"].astype(np.float32)
    )
    save_params(params, read_spec(source), read_origin(source), tmp_path / "out")
    same_tensors(tensors_of(tmp_path / "out"), half)


@pytest.mark.parametrize("family", MOE)
def test_experts_in_one_tensor_or_each_in_its_own(tmp_path, family):
    spec = read_spec(GOLDEN / family)
    change = apart if family == "qwen3_5_moe_vl" else functools.partial(
        fused, experts=spec.moe.num_experts
    )  # fmt: skip
    changed = change(golden(family))
    assert changed.keys() != golden(family).keys()
    source = write_folder(tmp_path / "m", golden_config(family), changed)
    params = load_params(source, spec, **quiet)
    for name, leaf in named_leaves(params).items():
        np.testing.assert_array_equal(leaf, loaded(family)[name], err_msg=name)
    origin = read_origin(source)
    carry = source if origin.skipped else None
    save_params(params, spec, origin, tmp_path / "out", carry_from=carry, **quiet)
    same_tensors(tensors_of(tmp_path / "out"), changed)


@pytest.mark.parametrize("shards", [1, 4])
def test_shards_in_and_shards_out(tmp_path, shards):
    source = write_folder(
        tmp_path / "m", golden_config("qwen3_moe"), golden("qwen3_moe"), shards=shards
    )
    params = load_params(source, read_spec(source))
    steps = []
    save_params(
        params, read_spec(source), read_origin(source), tmp_path / "out", shard_bytes=60_000,
        progress=lambda done, total: steps.append(done / total),
    )  # fmt: skip
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 70_000 for file in files)
    assert steps == sorted(steps)
    assert steps[-1] == 1
    same_tensors(tensors_of(tmp_path / "out"), golden("qwen3_moe"))
    again = load_params(tmp_path / "out", read_spec(tmp_path / "out"))
    for name, leaf in named_leaves(again).items():
        np.testing.assert_array_equal(leaf, loaded("qwen3_moe")[name], err_msg=name)


def test_a_tied_head_that_is_stored_too(tmp_path):
    both = golden("qwen3") | {"lm_head.weight": golden("qwen3")["model.embed_tokens.weight"]}
    source = write_folder(tmp_path / "m", golden_config("qwen3"), both)
    model = load(source)
    assert "lm_head" not in named_leaves(load_params(source, read_spec(source)))
    save(model, tmp_path / "out")
    same_tensors(tensors_of(tmp_path / "out"), both)
    other = both | {"lm_head.weight": both["lm_head.weight"] + 1}
    source = write_folder(tmp_path / "other", golden_config("qwen3"), other)
    with pytest.raises(HfError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load(source)


@pytest.mark.parametrize("prefix", ["", "language_model.model."])
def test_other_prefixes(tmp_path, prefix):
    renamed = {n.replace("model.", prefix, 1): v for n, v in golden("qwen3").items()}
    source = write_folder(tmp_path / "m", golden_config("qwen3"), renamed)
    save(load(source), tmp_path / "out")
    same_tensors(tensors_of(tmp_path / "out"), renamed)


def test_llama_goes_back_as_llama(tmp_path):
    config = golden_config("qwen2_tied") | {"model_type": "llama", "architectures": ["Llama"]}
    llama = {n: v for n, v in golden("qwen2_tied").items() if not n.endswith("proj.bias")}
    source = write_folder(tmp_path / "m", config, llama)
    model = load(source)
    save(model, tmp_path / "out")
    same_tensors(tensors_of(tmp_path / "out"), llama)
    # A Qwen2 whose biases are zero is the same function.
    zeros = {n: v * ("bias" not in n) for n, v in golden("qwen2_tied").items()}
    qwen2 = load(write_folder(tmp_path / "q", golden_config("qwen2_tied"), zeros))
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(model(tokens), qwen2(tokens))


def test_experts_that_no_layer_has(tmp_path):
    config = golden_config("qwen3") | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
        "mlp_only_layers": list(range(golden_config("qwen3")["num_hidden_layers"])),
    }  # fmt: skip
    source = write_folder(tmp_path / "m", config, golden("qwen3"))
    model = load(source)
    assert model.spec == read_spec(GOLDEN / "qwen3")
    save(model, tmp_path / "out")
    same_tensors(tensors_of(tmp_path / "out"), golden("qwen3"))
    written = [(folder / "config.json").read_bytes() for folder in (source, tmp_path / "out")]
    assert written[0] == written[1]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe_vl"])
def test_the_dtype_that_holds_the_stored_weights(tmp_path, family):
    # The one is stored in float32; the other in bfloat16 but for A_log and the like.
    assert stored_dtype(GOLDEN / family) == {"qwen3": "float32"}.get(family, "bfloat16")
    half = {name: value.astype(ml_dtypes.bfloat16) for name, value in golden(family).items()}
    assert stored_dtype(write_folder(tmp_path / "half", golden_config(family), half)) == "bfloat16"
    exact = ("A_log", "dt_bias", "linear_attn.norm.weight", "mlp.gate.weight", "mtp.", "visual.")
    most = {
        name: value.astype(np.float32) if any(map(name.__contains__, exact)) else value
        for name, value in half.items()
    }
    assert stored_dtype(write_folder(tmp_path / "most", golden_config(family), most)) == "bfloat16"
    norm = next(name for name in half if name.endswith("1.input_layernorm.weight"))
    for dtype in (np.float32, np.float16):
        mixed = most | {norm: golden(family)[norm].astype(dtype)}
        source = write_folder(tmp_path / "mixed", golden_config(family), mixed)
        assert stored_dtype(source) == np.float32


# ---- what is skipped, and what else comes along


def test_vision_and_mtp_are_skipped_with_one_line(tmp_path):
    lines = []
    model = load(GOLDEN / "qwen3_5_moe_vl", note=lines.append)
    assert lines == ["skipped 37 tensors of model.visual, mtp: text only"]
    save(model, tmp_path / "out", note=lines.append)
    assert lines[1:] == [
        "left out 37 tensors of model.visual, mtp; carry_from=FOLDER copies them from there"
    ]
    kept = {n: v for n, v in golden("qwen3_5_moe_vl").items() if "language_model" in n}
    kept["lm_head.weight"] = golden("qwen3_5_moe_vl")["lm_head.weight"]
    same_tensors(tensors_of(tmp_path / "out"), kept)
    with pytest.raises(HfError, match="qwen3 has no tensors to carry along"):
        save(model, tmp_path / "again", carry_from=GOLDEN / "qwen3", **quiet)
    assert not (tmp_path / "again").exists()


def test_frequencies_are_no_other_modality(tmp_path):
    extra = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(8, "f4") for n in (0, 1)}
    lines = []
    source = write_folder(tmp_path / "m", golden_config("qwen3"), golden("qwen3") | extra)
    save(load(source, note=lines.append), tmp_path / "out", note=lines.append)
    assert lines == []
    same_tensors(tensors_of(tmp_path / "out"), golden("qwen3"))
    extra |= {"mtp.fc.weight": np.ones((2, 2), "f4")}
    source = write_folder(tmp_path / "one", golden_config("qwen3"), golden("qwen3") | extra)
    model = load(source, note=lines.append)
    save(model, tmp_path / "left", note=lines.append)
    assert lines == [
        "skipped 1 tensor of mtp: text only",
        "left out 1 tensor of mtp; carry_from=FOLDER copies them from there",
    ]


def test_nothing_is_noted_of_a_model_that_is_not_saved(tmp_path):
    model = load(GOLDEN / "qwen3_5_moe_vl", **quiet)
    (tmp_path / "file").write_text("")
    lines = []
    with pytest.raises(HfError, match="is or lies below a file"):
        save(model, tmp_path / "file" / "out", note=lines.append)
    assert lines == []


def test_the_tokenizer_comes_along_and_other_files_do_not(tmp_path):
    source = shutil.copytree(GOLDEN / "qwen3", tmp_path / "m")
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja"):
        (source / name).write_bytes(name.encode() + b"\r\n")
    model = load(source)
    save(model, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "merges.txt", "chat_template.jinja",
    }  # fmt: skip
    assert (tmp_path / "out" / "merges.txt").read_bytes() == b"merges.txt\r\n"
    base = source.rename(tmp_path / "moved")
    lines = []
    save(model, tmp_path / "later", note=lines.append)
    assert lines == [
        f"{source} is gone, so the tokenizer's files are not copied; base=FOLDER names another"
    ]
    params = load_params(base, model.spec)
    save_params(params, model.spec, model.origin, tmp_path / "based", base=base)
    assert (tmp_path / "based" / "merges.txt").exists()
    with pytest.raises(HfError, match=r"no folder .* to take the tokenizer's files from"):
        save_params(params, model.spec, model.origin, tmp_path / "x", base=tmp_path / "absent")
