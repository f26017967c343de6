"""config.json: old and new spellings, the defaults of transformers, and what is refused."""

import dataclasses
import json
import math

import pytest

from s3ac_jax.io.hf_config import HfError, hf_from_spec, spec_from_hf
from s3ac_jax.io.hf_layout import tensors
from s3ac_jax.models.spec import DecoderSpec, LinearAttentionSpec, LoraSpec, MoeSpec
from tests.unit.io.hf_folders import FAMILIES, golden_config

# As on the hub: Qwen2.5-Math-1.5B, transformers 4.
MATH = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
    "intermediate_size": 8960, "max_position_embeddings": 4096, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 12, "num_hidden_layers": 28,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
    "tie_word_embeddings": True, "vocab_size": 49152, "rope_scaling": None, "head_dim": None,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rope_theta": 1000000, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# Qwen3.5-35B-A3B without the keys that say what its class says anyway.
TEXT = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
    "vocab_size": 251392, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
}  # fmt: skip


def test_qwen2_as_on_the_hub():
    assert spec_from_hf(MATH) == DecoderSpec(
        vocab_size=151936, hidden_size=1536, num_layers=28, num_heads=12, num_kv_heads=2,
        head_dim=128, intermediate_size=8960, rope_theta=10000.0, rms_norm_eps=1e-6,
        tie_embeddings=True, qkv_bias=True,
    )  # fmt: skip


def test_llama_is_qwen2_without_biases():
    spec = spec_from_hf(LLAMA)
    assert (spec.qkv_bias, spec.qk_norm, spec.head_dim) == (False, False, 64)
    assert (spec.rms_norm_eps, spec.rope_theta, spec.tie_embeddings) == (1e-5, 1e5, True)
    assert spec_from_hf(LLAMA | {"num_key_value_heads": None}).num_kv_heads == 9


def test_qwen3():
    spec = spec_from_hf(QWEN3)
    assert (spec.head_dim, spec.qk_norm, spec.qkv_bias, spec.rope_theta) == (128, True, False, 1e6)
    without = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert spec_from_hf(without | {"num_attention_heads": 8}).head_dim == 128


def test_qwen3_moe():
    moe = spec_from_hf(QWEN3_MOE).moe
    # The class in transformers doesn't renormalise unless told to.
    assert moe == MoeSpec(128, 8, 768, renormalise=False)
    sparse = {"norm_topk_prob": True, "mlp_only_layers": [0], "decoder_sparse_step": 7}
    moe = spec_from_hf(QWEN3_MOE | sparse).moe
    assert moe.renormalise
    assert set(range(28)) - set(moe.dense_layers) == {6, 13, 20, 27}
    local = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert spec_from_hf(local | {"num_local_experts": 16}).moe.num_experts == 16
    lean = {key: value for key, value in QWEN3_MOE.items() if key != "intermediate_size"}
    assert spec_from_hf(lean).moe == spec_from_hf(QWEN3_MOE).moe


@pytest.mark.parametrize(
    "dense", [{"mlp_only_layers": list(range(28))}, {"decoder_sparse_step": 29}]
)
def test_qwen3_moe_whose_layers_are_all_dense_is_a_qwen3(dense):
    assert spec_from_hf(QWEN3_MOE | dense) == spec_from_hf(QWEN3)


# Class attributes of transformers 5.24; llama has as many as heads.
@pytest.mark.parametrize(
    ("config", "absent", "null"),
    [
        (MATH | {"num_attention_heads": 64}, 32, 64),
        (QWEN3 | {"num_attention_heads": 64}, 32, 64),
        (QWEN3_MOE, 4, 4),
        (TEXT | {"model_type": "qwen3_5_text", "intermediate_size": 8}, 4, 4),
        (TEXT, 2, 2),
        (LLAMA, 9, 9),
    ],
)
def test_key_and_value_heads_of_the_class(config, absent, null):
    without = {key: value for key, value in config.items() if key != "num_key_value_heads"}
    assert spec_from_hf(without).num_kv_heads == absent
    assert spec_from_hf(without | {"num_key_value_heads": None}).num_kv_heads == null


@pytest.mark.parametrize(
    ("config", "moe"),
    [
        (QWEN3_MOE, MoeSpec(128, 8, 768, renormalise=False)),
        (TEXT, MoeSpec(256, 8, 512, shared_width=512)),
    ],
)
def test_experts_of_the_class(config, moe):
    said = ("num_experts", "num_experts_per_tok", "moe_intermediate_size",
            "shared_expert_intermediate_size", "rms_norm_eps")  # fmt: skip
    spec = spec_from_hf({key: value for key, value in config.items() if key not in said})
    assert (spec.moe, spec.rms_norm_eps) == (moe, 1e-6)


@pytest.mark.parametrize("config", [MATH, QWEN3])
@pytest.mark.parametrize(
    "inert",
    [
        {"max_window_layers": 28},
        {"max_window_layers": None},  # the class's, 28
        {"max_window_layers": 0, "sliding_window": None},
        {"max_window_layers": 0, "layer_types": ["full_attention"] * 28},
    ],
)
def test_a_sliding_window_that_no_layer_has(config, inert):
    said = {"sliding_window": 4096, "use_sliding_window": True} | inert
    assert spec_from_hf(config | said) == spec_from_hf(config)


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "intern_s2_preview", None])
def test_qwen3_5_moe_by_its_defaults(kind):
    config = TEXT if kind is None else {"model_type": kind, "text_config": TEXT}
    assert spec_from_hf(config) == DecoderSpec(
        vocab_size=251392, hidden_size=2048, num_layers=40, num_heads=16, num_kv_heads=2,
        head_dim=256, intermediate_size=512, rope_theta=1e7, rope_fraction=0.25,
        tie_embeddings=False, qkv_bias=False, qk_norm=True, gated_attention=True,
        zero_centred_norms=True,
        moe=MoeSpec(256, 8, 512, renormalise=True, shared_width=512),
        linear_attention=LinearAttentionSpec(16, 32, 128, 128, 4),
        full_attention=(3, 7, 11, 15, 19, 23, 27, 31, 35, 39),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (MATH, 1_543_714_304),
        (MATH | {"tie_word_embeddings": False}, 1_777_088_000),  # R1-Distill-Qwen-1.5B
        (QWEN3, 596_049_920),
        (QWEN3_MOE | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                      "num_key_value_heads": 4, "tie_word_embeddings": False}, 30_532_122_624),
        (TEXT | {"vocab_size": 248320}, 34_660_610_688),
        (TEXT, 34_673_193_600),  # Intern-S2-Preview
    ],
)  # fmt: skip
@pytest.mark.parametrize("experts", ["fused", "each"])
def test_the_number_of_weights_is_that_of_transformers(config, weights, experts):
    """Counted by transformers 5.24 on torch's meta device."""
    found = tensors(spec_from_hf(config), experts=experts)
    assert sum(math.prod(tensor.shape) for tensor in found) == weights


def test_the_outer_config_says_whether_the_head_is_tied():
    nested = {"model_type": "qwen3_5_moe", "text_config": TEXT | {"tie_word_embeddings": True}}
    assert spec_from_hf(nested).tie_embeddings
    assert not spec_from_hf(nested | {"tie_word_embeddings": False}).tie_embeddings
    assert spec_from_hf(nested | {"tie_word_embeddings": None}).tie_embeddings


def test_layer_types_and_interval():
    types = ["full_attention", "linear_attention"] * 20
    assert spec_from_hf(TEXT | {"layer_types": types}).full_attention == tuple(range(0, 40, 2))
    assert spec_from_hf(TEXT | {"full_attention_interval": 20}).full_attention == (19, 39)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 5.0, "partial_rotary_factor": 0.5}, (5.0, 0.5)),
        ({"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.125}}, (7.0, 0.125)),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 1]}, "rope_theta": 3},
         (3.0, 0.25)),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 3}, (3.0, 0.25)),
        ({"rope_parameters": None, "rope_scaling": None}, (10000.0, 0.25)),
    ],
)  # fmt: skip
def test_both_spellings_of_rope(rope, expected):
    spec = spec_from_hf({k: v for k, v in TEXT.items() if k != "rope_parameters"} | rope)
    assert (spec.rope_theta, spec.rope_fraction) == expected


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "config.json: model_type None is none of those .* llama, qwen2, .* intern_s2_preview"),
        ({"model_type": ["qwen2"]}, "model_type"),
        ({"model_type": "qwen3_5_moe"}, "qwen3_5_moe needs a text_config"),
        (MATH | {"use_sliding_window": True}, "use_sliding_window true is not supported"),
        (QWEN3 | {"use_sliding_window": True, "max_window_layers": 27}, "use_sliding_window true"),
        (QWEN3 | {"use_sliding_window": True, "num_hidden_layers": 29}, "use_sliding_window true"),
        (QWEN3_MOE | {"use_sliding_window": True, "max_window_layers": 28}, "use_sliding_window t"),
        (MATH | {"use_sliding_window": True,
                 "layer_types": ["full_attention", "sliding_attention"] * 14}, "layer_types names"),
        (MATH | {"layer_types": ["sliding_attention"] * 28}, "layer_types names 'sliding_attent"),
        (MATH | {"layer_types": ["full_attention"]}, "layer_types must be a list of 28"),
        (MATH | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (MATH | {"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        (MATH | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supp"),
        (MATH | {"rope_parameters": {"rope_type": "llama3"}}, "rope_type 'llama3' is not support"),
        (MATH | {"rope_parameters": {"full_attention": {}}}, "must be one section for all layers"),
        (MATH | {"rope_parameters": 3}, "must be one section for all layers"),
        (MATH | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported in a"),
        (MATH | {"hidden_size": None}, "hidden_size is missing"),
        (MATH | {"hidden_size": "1536"}, "hidden_size must be a whole number from 1 on, got '15"),
        (MATH | {"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        (MATH | {"num_attention_heads": 7}, "hidden_size 1536 is no multiple of num_attention_h"),
        (MATH | {"num_key_value_heads": 5}, "num_heads .12. must be a multiple of"),
        (MATH | {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
        (MATH | {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        (LLAMA | {"attention_bias": True}, "attention_bias true is not supported"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias true is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, "rope_type 'llama3'"),
        (QWEN3 | {"attention_bias": True}, "attention_bias true is not supported"),
        (QWEN3_MOE | {"mlp_only_layers": ["0"]}, "mlp_only_layers must be a list of layer num"),
        (QWEN3_MOE | {"num_experts_per_tok": 129}, "per_token .129. must not exceed"),
        (TEXT | {"mlp_only_layers": [3]}, "mlp_only_layers and decoder_sparse_step are not known"),
        (TEXT | {"shared_expert_intermediate_size": 0},
         "shared_expert_intermediate_size 0 is not supported: this model's layers have a shared"),
        (TEXT | {"linear_num_value_heads": 24}, "value_heads .24. must be a multiple of"),
        ({"model_type": "qwen3_5_moe", "text_config": TEXT, "quantization_config": {"a": 1}},
         "quantization_config is not supported"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_in_one_line(config, line):
    with pytest.raises(HfError, match=line) as caught:
        spec_from_hf(config)
    assert "\n" not in str(caught.value)


# ---- models that were born here

BORN = {
    "qwen2": DecoderSpec(50, 32, 3, 4, 2, 16, 64),
    "llama": DecoderSpec(50, 32, 3, 4, 2, 8, 64, qkv_bias=False, rms_norm_eps=1e-5),
    "qwen3": DecoderSpec(50, 32, 3, 4, 2, 16, 64, qkv_bias=False, qk_norm=True, rope_theta=5e6),
    "qwen3_moe": DecoderSpec(
        50, 32, 3, 4, 2, 16, 64, qkv_bias=False, qk_norm=True, tie_embeddings=False,
        moe=MoeSpec(8, 3, 16, renormalise=False, dense_layers=(1,)),
    ),
    "qwen3_5_text": DecoderSpec(
        50, 32, 3, 4, 2, 16, 64, qkv_bias=False, qk_norm=True, gated_attention=True,
        zero_centred_norms=True, rope_fraction=0.5, full_attention=(1,),
        linear_attention=LinearAttentionSpec(2, 4, 8, 6, 3),
    ),
}  # fmt: skip
BORN["qwen3_5_moe_text"] = dataclasses.replace(
    BORN["qwen3_5_text"], moe=MoeSpec(8, 3, 16, shared_width=24), intermediate_size=16
)


@pytest.mark.parametrize("kind", BORN)
def test_a_config_written_here_is_read_back(kind):
    config = json.loads(json.dumps(hf_from_spec(BORN[kind], "bfloat16")))
    assert (config["model_type"], config["dtype"]) == (kind, "bfloat16")
    assert spec_from_hf(config) == BORN[kind]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_5_moe_vl"])
def test_a_config_written_here_is_that_of_transformers(family):
    theirs = golden_config(family)
    ours = hf_from_spec(spec_from_hf(theirs), "float32")
    ours["rope_parameters"] = theirs["rope_parameters"] | ours["rope_parameters"]
    alike = theirs.keys() & ours.keys() - {"max_position_embeddings"}
    assert {key: ours[key] for key in alike} == {key: theirs[key] for key in alike}
    # What the spec doesn't know, and what the class would say if it were absent.
    assert theirs.keys() - ours.keys() <= {
        "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "layer_types",
        "max_window_layers", "sliding_window", "use_sliding_window", "output_router_logits",
        "router_aux_loss_coef",
    }  # fmt: skip


MOE = BORN["qwen3_5_moe_text"].moe


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [
        ("qwen2", {"qk_norm": True}, "like Qwen2 with qk_norm True"),
        ("qwen2", {"gated_attention": True}, "like Qwen2 with gated_attention True"),
        ("qwen3", {"zero_centred_norms": True}, "like Qwen3 with zero_centred_norms True"),
        ("llama", {"rope_fraction": 0.5}, "like Llama with rope_fraction 0.5"),
        ("qwen3_moe", {"qk_norm": False}, "like Qwen3Moe with qk_norm False"),
        ("qwen3_moe", {"moe": MoeSpec(8, 3, 16, shared_width=8)}, "shared_width without linear"),
        ("qwen3_5_text", {"gated_attention": False}, "like Qwen3_5 with gated_attention False"),
        ("qwen3_5_moe_text", {"moe": MoeSpec(8, 3, 16)}, "a MoE without shared_width"),
        ("qwen3_5_moe_text", {"moe": dataclasses.replace(MOE, renormalise=False)}, "renormalise"),
        ("qwen3_5_moe_text", {"moe": dataclasses.replace(MOE, dense_layers=(0,))}, "dense_layers"),
    ],
)
def test_what_no_class_can_express_is_named(kind, changes, line):
    with pytest.raises(HfError, match=line) as caught:
        hf_from_spec(dataclasses.replace(BORN[kind], **changes))
    assert "\n" not in str(caught.value)


def test_how_we_compute_does_not_reach_the_config():
    here = {"dtype": "bfloat16", "remat": True, "onehot_embedding": True, "lora": LoraSpec(2, 4.0)}
    assert hf_from_spec(dataclasses.replace(BORN["qwen2"], **here)) == hf_from_spec(BORN["qwen2"])
