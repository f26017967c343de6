"""config.json of Hugging Face models: read into a DecoderSpec, and written from one.

A key that is absent means what the model's class in transformers means by it. What our decoder
doesn't compute is refused by name: a wrong model that runs is worse than none.
"""

import math
from collections.abc import Mapping
from typing import Any

from s3ac_jax.core.errors import RunError
from s3ac_jax.models.spec import DecoderSpec, LinearAttentionSpec, MoeSpec

# Models whose text decoder is described by `text_config`, and what that decoder is.
_NESTED = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "intern_s2_preview": "qwen3_5_moe_text",
}
_TEXT = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text")
_HYBRID = ("qwen3_5_text", "qwen3_5_moe_text")
_MOE = ("qwen3_moe", "qwen3_5_moe_text")
# head_dim where the config has none; the others have hidden_size / num_attention_heads.
_HEAD_DIM = {"qwen3": 128, "qwen3_5_text": 256, "qwen3_5_moe_text": 256}
# num_key_value_heads likewise; the first two and llama have num_attention_heads where it is null.
_KV_HEADS = {
    "qwen2": 32, "qwen3": 32, "qwen3_moe": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 2
}  # fmt: skip
# num_experts and moe_intermediate_size likewise.
_EXPERTS = {"qwen3_moe": (128, 768), "qwen3_5_moe_text": (256, 512)}
_QUANTISED = ("quantization_config", "compression_config")
_ANY_CONTEXT = 32768


class HfError(RunError):
    """A Hugging Face folder that can't be read or written; the message is one line for the user.

    Source: ours: a wrong folder costs a second and is told by name.
    """


def spec_from_hf(config: Mapping[str, Any], where: str = "config.json") -> DecoderSpec:
    """The decoder that a config.json describes; of a multimodal model, its text decoder.

    where: the file's name, for messages.

    Raises HfError on an unknown model_type, a missing or misspelt number, or anything that our
    decoder doesn't compute (scaled RoPE, sliding windows, biases of o_proj, quantised weights).
    Source: transformers 5.24, the configuration_*.py of each family; older spellings of RoPE too.
    """
    try:
        kind, text = _text_config(config)
        said = {key: value for key, value in text.items() if value is not None}
        _refuse_unsupported(kind, {**config, **said})
        return _decoder(kind, text, config)
    except (HfError, ValueError) as error:
        raise HfError(f"{where}: {error}") from error


def _text_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    kind = config.get("model_type")
    if kind in _TEXT:
        return kind, config
    if not isinstance(kind, str) or kind not in _NESTED:
        known = ", ".join((*_TEXT, *_NESTED))
        raise HfError(f"model_type {kind!r} is none of those that can be read: {known}")
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise HfError(f"model_type {kind} needs a text_config section")
    return _NESTED[kind], text


def _refuse_unsupported(kind: str, config: Mapping[str, Any]) -> None:
    def refuse(what: str, why: str) -> None:
        raise HfError(f"{what} is not supported: {why}")

    for key in _QUANTISED:
        if config.get(key):
            refuse(key, "give the folder of the unquantised weights")
    if config.get("use_sliding_window") and _has_window(kind, config):
        refuse("use_sliding_window true", "every layer here attends to the whole sequence")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        refuse(f"hidden_act {act!r}", "the MLP is SwiGLU, so it must be silu")
    # Qwen2 has its three biases whatever this key says.
    if config.get("attention_bias") and kind != "qwen2":
        refuse("attention_bias true", "there is no place for a bias of o_proj")
    if config.get("mlp_bias"):
        refuse("mlp_bias true", "there is no place for biases in the MLP")


def _has_window(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether a config that asks for a sliding window has a layer with one."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return False
    if kind not in ("qwen2", "qwen3"):
        return True
    if config.get("layer_types") is not None:
        return False  # then only they count, and _full_attention looks at them
    first = _value(config, "max_window_layers", 28)
    return type(first) is not int or first < _count(config, "num_hidden_layers")


def _decoder(kind: str, text: Mapping[str, Any], top: Mapping[str, Any]) -> DecoderSpec:
    layers, hidden = _count(text, "num_hidden_layers"), _count(text, "hidden_size")
    heads = _count(text, "num_attention_heads")
    theta, fraction = _rope(kind, text)
    full = _full_attention(kind, text, layers)
    hybrid = kind in _HYBRID
    moe = _moe(kind, text, layers)
    # Nothing reads it in a model without a dense MLP, and some classes don't have it.
    unread = moe.width if moe and not moe.dense_layers else None
    return DecoderSpec(
        vocab_size=_count(text, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_count(text, "num_key_value_heads", _kv_heads(kind, text, heads)),
        head_dim=_head_dim(kind, text, hidden, heads),
        intermediate_size=_count(text, "intermediate_size", unread),
        rope_theta=theta,
        rope_fraction=fraction,
        rms_norm_eps=_number(text, "rms_norm_eps", 1e-6),
        tie_embeddings=_flag(
            {**text, **{key: value for key, value in top.items() if value is not None}},
            "tie_word_embeddings",
            False,
        ),
        qkv_bias=kind == "qwen2",
        qk_norm=kind not in ("llama", "qwen2"),
        gated_attention=hybrid and _flag(text, "attn_output_gate", True),
        zero_centred_norms=hybrid,
        moe=moe,
        linear_attention=_linear_attention(text) if hybrid else None,
        full_attention=full if hybrid else (),
    )


def _kv_heads(kind: str, text: Mapping[str, Any], heads: int) -> int:
    """Where the config names none."""
    null = "num_key_value_heads" in text and kind in ("qwen2", "qwen3")
    return heads if null else _KV_HEADS.get(kind, heads)


def _head_dim(kind: str, text: Mapping[str, Any], hidden: int, heads: int) -> int:
    if "head_dim" not in text and kind in _HEAD_DIM:
        return _HEAD_DIM[kind]
    if text.get("head_dim") is None and hidden % heads:
        raise HfError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no "
            "head_dim"
        )
    return _count(text, "head_dim", hidden // heads)


def _rope(kind: str, text: Mapping[str, Any]) -> tuple[float, float]:
    """theta, and the share of each head that is rotated."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise HfError("rope_parameters must be one section for all layers")
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling not in (None, "default"):
        raise HfError(f"rope_type {scaling!r} is not supported: only plain RoPE, 'default'")
    both = {**text, **{key: value for key, value in rope.items() if value is not None}}
    fraction = _number(both, "partial_rotary_factor", 0.25 if kind in _HYBRID else 1.0)
    if kind not in _HYBRID and fraction != 1:
        raise HfError(f"partial_rotary_factor {fraction} is not supported in a {kind} model")
    return _number(both, "rope_theta", 10000.0), fraction


def _full_attention(kind: str, text: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of the layers that attend in full."""
    types = text.get("layer_types")
    if types is None:
        every = _count(text, "full_attention_interval", 4) if kind in _HYBRID else 1
        return tuple(n for n in range(layers) if (n + 1) % every == 0)
    if not isinstance(types, list) or len(types) != layers:
        raise HfError(f"layer_types must be a list of {layers} names, one for each layer")
    known = ("full_attention", "linear_attention") if kind in _HYBRID else ("full_attention",)
    if bad := [name for name in types if name not in known]:
        raise HfError(f"layer_types names {bad[0]!r}; a {kind} model can have {' or '.join(known)}")
    return tuple(n for n, name in enumerate(types) if name == "full_attention")


def _moe(kind: str, text: Mapping[str, Any], layers: int) -> MoeSpec | None:
    if kind not in _MOE:
        return None
    dense = text.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(n) is not int for n in dense):
        raise HfError("mlp_only_layers must be a list of layer numbers")
    step = _count(text, "decoder_sparse_step", 1)
    plain = tuple(n for n in range(layers) if n in dense or (n + 1) % step)
    hybrid = kind in _HYBRID
    if hybrid and plain:
        raise HfError(f"mlp_only_layers and decoder_sparse_step are not known to a {kind} model")
    if len(plain) == layers:
        return None
    count = "num_experts" if text.get("num_experts") is not None else "num_local_experts"
    experts, width = _EXPERTS[kind]
    return MoeSpec(
        num_experts=_count(text, count, experts),
        per_token=_count(text, "num_experts_per_tok", 8),
        width=_count(text, "moe_intermediate_size", width),
        renormalise=hybrid or _flag(text, "norm_topk_prob", False),
        shared_width=_shared_width(text) if hybrid else 0,
        dense_layers=plain,
    )


def _shared_width(text: Mapping[str, Any]) -> int:
    if text.get("shared_expert_intermediate_size") == 0:
        raise HfError(
            "shared_expert_intermediate_size 0 is not supported: this model's layers have a "
            "shared expert, and its gate, beside the others"
        )
    return _count(text, "shared_expert_intermediate_size", 512)


def _linear_attention(text: Mapping[str, Any]) -> LinearAttentionSpec:
    return LinearAttentionSpec(
        key_heads=_count(text, "linear_num_key_heads", 16),
        value_heads=_count(text, "linear_num_value_heads", 32),
        key_dim=_count(text, "linear_key_head_dim", 128),
        value_dim=_count(text, "linear_value_head_dim", 128),
        conv_width=_count(text, "linear_conv_kernel_dim", 4),
    )


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise HfError(f"{key} is missing")
    return value


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _value(config, key, default)
    if type(value) is not int or value < 1:
        raise HfError(f"{key} must be a whole number from 1 on, got {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = _value(config, key, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise HfError(f"{key} must be a positive number, got {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = _value(config, key, default)
    if type(value) is not bool:
        raise HfError(f"{key} must be true or false, got {value!r}")
    return value


def hf_from_spec(spec: DecoderSpec, dtype: str = "float32") -> dict[str, Any]:
    """A config.json for a model that was born here.

    RoPE is spelt the old and the new way, so that older readers find it. dtype: of the weights.

    Raises HfError naming what no class of transformers can express.
    Source: transformers 5.24, the configuration_*.py of each family.
    """
    kind, architecture = _class_of(spec)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": spec.init_std,
        # Our RoPE has no table and no limit; readers want a number.
        "max_position_embeddings": _ANY_CONTEXT,
        "model_type": kind,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "use_cache": True,
        "vocab_size": spec.vocab_size,
    }
    if kind != "qwen3_5_moe_text":
        config["intermediate_size"] = spec.intermediate_size
    if kind != "qwen2":
        config["attention_bias"] = False
    if moe := spec.moe:
        # Both spellings, as with RoPE.
        config |= {"num_experts": moe.num_experts, "num_local_experts": moe.num_experts}
        config |= {
            "num_experts_per_tok": moe.per_token,
            "moe_intermediate_size": moe.width,
            "norm_topk_prob": moe.renormalise,
        }
        if kind == "qwen3_moe":
            config |= {"mlp_only_layers": list(moe.dense_layers), "decoder_sparse_step": 1}
        else:
            config["shared_expert_intermediate_size"] = moe.shared_width
    if linear := spec.linear_attention:
        full = spec.full_attention
        config["rope_parameters"]["partial_rotary_factor"] = spec.rope_fraction
        config |= {
            "layer_types": [
                "full_attention" if n in full else "linear_attention"
                for n in range(spec.num_layers)
            ],
            "linear_num_key_heads": linear.key_heads,
            "linear_num_value_heads": linear.value_heads,
            "linear_key_head_dim": linear.key_dim,
            "linear_value_head_dim": linear.value_dim,
            "linear_conv_kernel_dim": linear.conv_width,
        }
    return dict(sorted(config.items()))


def _class_of(spec: DecoderSpec) -> tuple[str, str]:
    """model_type and class that express the spec; raises HfError where none does."""
    moe = spec.moe
    if spec.linear_attention is not None:
        kind, name = ("qwen3_5_moe_text", "Qwen3_5Moe") if moe else ("qwen3_5_text", "Qwen3_5")
        needs = {"qkv_bias": False, "qk_norm": True, "gated_attention": True,
                 "zero_centred_norms": True}  # fmt: skip
        if moe and (not moe.shared_width or moe.dense_layers or not moe.renormalise):
            raise HfError(
                "no class of transformers has linear attention and a MoE without shared_width, "
                "with dense_layers, or without renormalise"
            )
    else:
        needs = {"gated_attention": False, "zero_centred_norms": False, "rope_fraction": 1.0}
        if moe:
            kind, name = "qwen3_moe", "Qwen3Moe"
            needs |= {"qkv_bias": False, "qk_norm": True}
            if moe.shared_width:
                raise HfError(
                    "no class of transformers has moe.shared_width without linear attention"
                )
        elif spec.qkv_bias:
            kind, name = "qwen2", "Qwen2"
            needs |= {"qk_norm": False}
        else:
            kind, name = ("qwen3", "Qwen3") if spec.qk_norm else ("llama", "Llama")
    for field, value in needs.items():
        if getattr(spec, field) != value:
            raise HfError(
                f"no class of transformers is like {name} with {field} {getattr(spec, field)}; "
                f"a model saved in this format needs {field} {value}"
            )
    return kind, f"{name}ForCausalLM"
