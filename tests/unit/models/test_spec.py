"""Shapes that can't work are told by the name of the field; which layer has which blocks."""

import dataclasses

import pytest

from s3ac_jax.models.spec import LinearAttentionSpec, LoraSpec, MoeSpec
from tests.helpers import tiny_spec

MOE = MoeSpec(num_experts=5, per_token=2, width=7)
LINEAR = LinearAttentionSpec(key_heads=2, value_heads=4, key_dim=3, value_dim=5)
LORA = LoraSpec(rank=2, alpha=4.0)
RICH = tiny_spec(
    num_layers=4, moe=dataclasses.replace(MOE, dense_layers=(1,)), linear_attention=LINEAR,
    full_attention=(0, 3), lora=LORA,
)  # fmt: skip


def test_which_layer_has_what():
    assert RICH.kinds == (
        ("attn", "moe"), ("linear_attn", "mlp"), ("linear_attn", "moe"), ("attn", "moe")
    )  # fmt: skip
    assert RICH.layers_with("attn") == (0, 3)
    assert RICH.layers_with("linear_attn") == (1, 2)
    assert RICH.layers_with("mlp") == (1,)
    assert RICH.layers_with("moe") == (0, 2, 3)
    assert RICH.routing_shape == (3, 2)
    assert tiny_spec().routing_shape is None
    assert tiny_spec().kinds == (("attn", "mlp"),) * 3
    linear = tiny_spec(linear_attention=LINEAR)
    assert linear.layers_with("attn") == ()
    assert hash(RICH) == hash(dataclasses.replace(RICH))


@pytest.mark.parametrize(
    ("one", "changes", "line"),
    [
        (RICH, {"vocab_size": 0}, "model.vocab_size must be at least 1, got 0"),
        (RICH, {"rope_theta": 0.0}, "model.rope_theta must be positive and finite"),
        (RICH, {"init_std": float("inf")}, "model.init_std must be positive and finite, got inf"),
        (RICH, {"rms_norm_eps": float("nan")}, "model.rms_norm_eps must be positive"),
        (RICH, {"num_kv_heads": 3}, r"model.num_heads \(4\) must be a multiple of model.num_kv_h"),
        (RICH, {"rope_fraction": 1.5}, "model.rope_fraction must be in 0..1, got 1.5"),
        (RICH, {"rope_fraction": 0.0}, "model.rope_fraction must be in 0..1, got 0.0"),
        (RICH, {"rope_fraction": 0.5}, "model.head_dim x model.rope_fraction must be even .* 3"),
        (RICH, {"rope_fraction": 0.1}, "must be even for RoPE, got 0"),
        (RICH, {"full_attention": (0, 4)}, r"model.full_attention names layer 4, there are 0..3"),
        (RICH, {"num_layers": 1}, r"model.full_attention names layer 3, there are 0..0"),
        (RICH, {"moe": dataclasses.replace(MOE, dense_layers=(-1,))},
         "model.moe.dense_layers names layer -1"),
        (RICH, {"moe": dataclasses.replace(MOE, dense_layers=(0, 1, 2, 3))},
         "model.moe.dense_layers names every layer"),
        (RICH, {"linear_attention": None}, "model.full_attention is for models with linear_att"),
        (RICH, {"moe": MOE, "lora": LoraSpec(2, 4.0, targets=("mlp",))},
         r"model.lora.targets \(mlp\) names no block of this model"),
        (MOE, {"num_experts": 0}, "model.moe.num_experts must be at least 1, got 0"),
        (MOE, {"per_token": 0}, "model.moe.per_token must be at least 1"),
        (MOE, {"width": 0}, "model.moe.width must be at least 1"),
        (MOE, {"per_token": 6}, r"model.moe.per_token \(6\) must not exceed model.moe.num_experts"),
        (MOE, {"shared_width": -1}, "model.moe.shared_width must be 0 or more, got -1"),
        (LINEAR, {"value_heads": 3}, r"model.linear_attention.value_heads \(3\) must be a mult"),
        (LINEAR, {"key_dim": 0}, "model.linear_attention.key_dim must be at least 1"),
        (LINEAR, {"conv_width": 0}, "model.linear_attention.conv_width must be at least 1"),
        (LINEAR, {"chunk": 0}, "model.linear_attention.chunk must be at least 1"),
        (LORA, {"rank": 0}, "model.lora.rank must be at least 1, got 0"),
        (LORA, {"alpha": 0.0}, "model.lora.alpha must be positive and finite, got 0.0"),
        (LORA, {"alpha": float("nan")}, "model.lora.alpha must be positive"),
        (LORA, {"targets": ()}, r"model.lora.targets must be of attn, linear_attn, mlp, got \[\]"),
        (LORA, {"targets": ("attn", "moe")}, r"model.lora.targets must be of .*'moe'"),
    ],
)  # fmt: skip
def test_impossible(one, changes, line):
    with pytest.raises(ValueError, match=line):
        dataclasses.replace(one, **changes)
