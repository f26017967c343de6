"""A Qwen2 of transformers, weight by weight and number by number (see qwen2_tied/README.md)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from s3ac_jax.core.trees import global_norm, named_leaves
from s3ac_jax.core.types import Prompt
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.models.token_logp import token_logp
from s3ac_jax.rollout.backend import seeded_sampling
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout

FOLDER = Path(__file__).parent / "qwen2_tied"
HF = json.loads((FOLDER / "config.json").read_text())
SPEC = DecoderSpec(
    vocab_size=HF["vocab_size"],
    hidden_size=HF["hidden_size"],
    num_layers=HF["num_hidden_layers"],
    num_heads=HF["num_attention_heads"],
    num_kv_heads=HF["num_key_value_heads"],
    head_dim=HF["hidden_size"] // HF["num_attention_heads"],
    intermediate_size=HF["intermediate_size"],
    rope_theta=HF["rope_parameters"]["rope_theta"],
    rms_norm_eps=HF["rms_norm_eps"],
    tie_embeddings=HF["tie_word_embeddings"],
)
NETWORK = actor_network(SPEC)
ROWS = ["right", "left", "long"]


def from_hf(weights):
    """HF names and [out, in] matrices -> our names; every layer stacked on the first axis."""

    def stacked(name, shape=None):
        layers = [weights[f"model.layers.{n}.{name}"] for n in range(SPEC.num_layers)]
        return np.stack([layer.T.reshape(shape or layer.T.shape) for layer in layers])

    width, dim, heads, kv = SPEC.hidden_size, SPEC.head_dim, SPEC.num_heads, SPEC.num_kv_heads
    attn = {"o": stacked("self_attn.o_proj.weight", (heads, dim, width))}
    for name, count in (("q", heads), ("k", kv), ("v", kv)):
        attn[name] = stacked(f"self_attn.{name}_proj.weight", (width, count, dim))
        attn[f"{name}_bias"] = stacked(f"self_attn.{name}_proj.bias", (count, dim))
    return {
        "embed": weights["model.embed_tokens.weight"],
        "final_norm": weights["model.norm.weight"],
        "layers": {
            "attn": attn,
            "attn_norm": stacked("input_layernorm.weight"),
            "mlp_norm": stacked("post_attention_layernorm.weight"),
            "mlp": {name: stacked(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")},
        },
    }


@pytest.fixture(scope="module")
def golden():
    with np.load(FOLDER / "golden.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def params():
    return from_hf(load_file(FOLDER / "model.safetensors"))


@jax.jit
def forward(params, tokens, positions, segment_ids):
    model = NETWORK.bind(params)
    hidden, kept = model(tokens, positions, segment_ids, keep=("layers",))
    return hidden, kept.layers, hidden @ model.head()


def inputs(golden, side):
    # Right-padded rows of ours count on through the padding, HF's stand still; nobody reads it.
    names = ("input_ids", "position_ids", "attention_mask")
    return tuple(golden[f"{side}_{name}"] for name in names)


def next_logp(params, tokens, positions, segment_ids):
    """log pi of tokens 1.. [B, T - 1], as `right_next_logprobs` has it."""
    model = NETWORK.bind(params)
    hidden, _ = model(tokens, positions, segment_ids)
    flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    # By blocks of the vocabulary: the path that large batches take.
    logp, _ = token_logp(flat, model.head(), tokens[:, 1:].reshape(-1), block_numbers=1)
    return logp.reshape(tokens.shape[0], -1)


def test_names_and_shapes(params):
    ours, theirs = named_leaves(NETWORK.abstract), named_leaves(params)
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    meta = json.loads((FOLDER / "meta.json").read_text())
    assert sum(v.size for v in theirs.values()) == meta["n_params"]


@pytest.mark.parametrize("side", ROWS)
def test_forward(golden, params, side):
    tokens, positions, real = inputs(golden, side)
    hidden, layers, logits = forward(params, tokens, positions, real)
    real = real.astype(bool)
    np.testing.assert_allclose(logits[real], golden[f"{side}_logits"][real], rtol=0, atol=2e-4)
    want = golden[f"{side}_last_hidden"][real]
    np.testing.assert_allclose(hidden[real], want, rtol=0, atol=1e-4)
    want = golden[f"{side}_last_hidden_prenorm"][real]
    np.testing.assert_allclose(layers[-1][real], want, rtol=0, atol=1e-4)
    if side != "long":
        want = golden[f"{side}_layer_outputs"][:, real]
        np.testing.assert_allclose(layers[:, real], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("side", ROWS)
def test_next_token_logp(golden, params, side):
    tokens, positions, real = inputs(golden, side)
    got = jax.jit(next_logp)(params, tokens, positions, real)
    read = (real[:, 1:] & real[:, :-1]).astype(bool)
    want = golden[f"{side}_next_logprobs"]
    np.testing.assert_allclose(got[read], want[read], rtol=0, atol=2e-4)


def test_gradients(golden, params):
    tokens, positions, real = inputs(golden, "right")
    read = (real[:, 1:] & real[:, :-1]).astype(bool)

    def nll(params):
        logp = next_logp(params, tokens, positions, real)
        return -jnp.sum(jnp.where(read, logp, 0.0)) / read.sum()

    value, grads = jax.jit(jax.value_and_grad(nll))(params)
    np.testing.assert_allclose(value, golden["right_nll"], rtol=1e-5)
    want = named_leaves(from_hf(load_file(FOLDER / "grads.safetensors")))
    for name, got in named_leaves(grads).items():
        size = np.abs(want[name]).max()
        np.testing.assert_allclose(got, want[name], rtol=1e-3, atol=1e-5 * size, err_msg=name)
    np.testing.assert_allclose(global_norm(grads), golden["right_grad_global_norm"], rtol=1e-5)


def test_greedy_continuation(golden, params):
    tokens, _, real = inputs(golden, "right")
    want = golden["greedy_ids"]
    rows, made = want.shape
    engine = Engine(NETWORK, slots=2, cache_tokens=28, steps_per_dispatch=5, stop_ids=(1,))
    sampler = LocalRollout(engine, insert_batch=2, max_prompt_tokens=12, max_response_tokens=made)
    sampler.update_weights(params, 3)
    sampling = seeded_sampling(np.arange(rows), temperature=0.0, max_tokens=made, stop_ids=(1,))
    prompt = Prompt(np.arange(rows, dtype=np.int32), tokens, real.sum(axis=1).astype(np.int32))
    rollout = sampler.generate(prompt, sampling)
    np.testing.assert_array_equal(rollout.tokens, want)
    np.testing.assert_array_equal(rollout.num_tokens, [made] * rows)
    assert not rollout.stopped.any()
    logp = jax.nn.log_softmax(golden["greedy_logits"], axis=-1)
    want = np.take_along_axis(np.asarray(logp), want[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(rollout.logp, want, rtol=0, atol=2e-4)
