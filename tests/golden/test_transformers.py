"""What we export, opened by transformers itself. Opt-in: torch is no requirement of ours.

  S3AC_TRANSFORMERS_PYTHON=/path/to/venv/bin/python pytest -m slow tests/golden/test_transformers.py

The interpreter needs torch and transformers 5.
"""

import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from s3ac_jax.io import hf_weights
from s3ac_jax.models.causal_lm import CausalLM

FOLDER = Path(__file__).parent
PYTHON = os.environ.get("S3AC_TRANSFORMERS_PYTHON")
MAKE = """
import json, sys
import torch, transformers
name, sizes, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
torch.manual_seed(int(sys.argv[4]))
config = getattr(transformers, name + ("TextConfig" if "3_5" in name else "Config"))(**sizes)
model = getattr(transformers, name + "ForCausalLM")(config)
with torch.no_grad():
    for key, weight in model.named_parameters():
        size = 0.3 if weight.ndim > 1 else 0.2
        weight.add_(size * torch.randn_like(weight))
model.save_pretrained(folder)
"""
THEIRS = """
import json, sys
import numpy as np, torch, transformers
model, info = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, output_loading_info=True
)
ids = torch.from_numpy(np.load(sys.argv[2]))
with torch.no_grad():
    np.save(sys.argv[3], model(input_ids=ids).logits.numpy())
wrong = {key: sorted(map(str, value)) for key, value in info.items() if value}
print(json.dumps({"class": type(model).__name__, "wrong": wrong}))
"""

BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 12}
LINEAR = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
}  # fmt: skip
KINDS = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
SETTINGS = {
    "untied, one key head": (
        "Qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}
    ),
    "another theta": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}),
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "gates not renormalised, a dense layer": (
        "Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]}
    ),
    "every second layer": (
        "Qwen3Moe",
        {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "full attention first": ("Qwen3_5", {**LINEAR, "layer_types": KINDS, "num_hidden_layers": 4}),
    "as many key as value heads": (
        "Qwen3_5", {**LINEAR, "linear_num_key_heads": 4, "num_hidden_layers": 5}
    ),
    "experts in a period of two": (
        "Qwen3_5Moe",
        {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 20, "num_hidden_layers": 4,
         "layer_types": KINDS[:2] * 2, "tie_word_embeddings": True, "head_dim": 16},
    ),
}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="set S3AC_TRANSFORMERS_PYTHON"),
]


def theirs(folder, ids, tmp_path):
    """Logits of transformers for the folder, and what it says of opening it."""
    np.save(tmp_path / "ids.npy", ids)
    command = [PYTHON, "-c", THEIRS, folder, tmp_path / "ids.npy", tmp_path / "y.npy"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return np.load(tmp_path / "y.npy"), json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_other_settings_of_the_families(settings, seed, tmp_path):
    name, changes = SETTINGS[settings]
    folder = tmp_path / "theirs"
    command = [PYTHON, "-c", MAKE, name, json.dumps(BASE | changes), folder, str(seed)]
    subprocess.run(command, check=True, capture_output=True)
    ids = np.random.default_rng(seed).integers(96, size=(2, 40))
    want, _ = theirs(folder, ids, tmp_path)
    assert want.std() > 0.5
    model = hf_weights.load(folder)
    gap = np.abs(jax.jit(lambda ids: model(ids))(ids) - want).max(axis=-1)
    # Layers of a delta rule lift single tokens out of the rounding (see test_families.py).
    loose = 0 if model.spec.linear_attention is None else 4
    assert (gap > 2e-4).sum() <= loose
    assert gap.max() <= (2e-3 if loose else 2e-4)
    assert np.median(gap) < 2e-5
    hf_weights.save(model, tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert set(before) == set(after)
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key], tensor, err_msg=key)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("born_here", [False, True])
def test_transformers_opens_what_was_trained(name, born_here, tmp_path):
    before = hf_weights.load(FOLDER / name)
    # As after training: no weight is what it was.
    leaves, tree = jax.tree.flatten(nnx.to_pure_dict(nnx.state(before.decoder)))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    moved = [
        w * (1 + 0.1 * jax.random.normal(k, w.shape)) for w, k in zip(leaves, keys, strict=True)
    ]
    origin = None if born_here else before.origin
    model = CausalLM.from_params(before.spec, jax.tree.unflatten(tree, moved), origin)
    hf_weights.save(model, tmp_path / "out")

    ids = np.random.default_rng(1).integers(128, size=(2, 20))
    want, said = theirs(tmp_path / "out", ids, tmp_path)
    assert (
        said["class"] == json.loads((FOLDER / name / "config.json").read_text())["architectures"][0]
    )
    assert said["wrong"] == {}
    ours = jax.jit(lambda ids: model(ids))(ids)
    np.testing.assert_allclose(ours, want, rtol=0, atol=2e-4)
