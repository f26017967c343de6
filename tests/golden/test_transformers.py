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

from s3ac_jax.io import hf_weights
from s3ac_jax.models.causal_lm import CausalLM

FOLDER = Path(__file__).parent
PYTHON = os.environ.get("S3AC_TRANSFORMERS_PYTHON")
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="set S3AC_TRANSFORMERS_PYTHON"),
]


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
    np.save(tmp_path / "ids.npy", ids)
    command = [PYTHON, "-c", THEIRS, tmp_path / "out", tmp_path / "ids.npy", tmp_path / "y.npy"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (
        said["class"] == json.loads((FOLDER / name / "config.json").read_text())["architectures"][0]
    )
    assert said["wrong"] == {}
    ours = jax.jit(lambda ids: model(ids))(ids)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), ours, rtol=0, atol=2e-4)
