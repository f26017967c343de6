"""Log-probs and entropies of tokens, in one piece and in chunks, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.models.token_logp import before, token_logp
from tests.helpers import log_softmax_oracle


def random_case(seed, tokens=23, width=6, vocab=11):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(tokens, width)).astype(np.float32)
    head = rng.normal(size=(width, vocab)).astype(np.float32)
    return hidden, head, rng.integers(vocab, size=tokens), rng.normal(size=(2, tokens))


@pytest.mark.parametrize("chunk", [5, 8, 22, 23, 2048])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_values(chunk, temperature):
    hidden, head, targets, _ = random_case(chunk)
    want = log_softmax_oracle(hidden.astype(float) @ head.astype(float) / temperature)
    logp, entropy = token_logp(hidden, head, targets, temperature=temperature, chunk_tokens=chunk)
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(logp, want[np.arange(23), targets], **close)
    np.testing.assert_allclose(entropy, -(np.exp(want) * want).sum(axis=1), **close)
    assert logp.dtype == entropy.dtype == jnp.float32


@pytest.mark.parametrize("chunk", [5, 23])
def test_gradients(chunk):
    hidden, head, targets, weights = random_case(7)
    temperature = 0.6

    def loss(hidden, head):
        got = token_logp(hidden, head, targets, temperature=temperature, chunk_tokens=chunk)
        return jnp.vdot(weights[0], got[0]) + jnp.vdot(weights[1], got[1])

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, head)
    # d logp_y / dz = 1_y - p; d entropy / dz = -p (log p + entropy).
    logp = log_softmax_oracle(hidden.astype(float) @ head.astype(float) / temperature)
    p = np.exp(logp)
    entropy = -(p * logp).sum(axis=1, keepdims=True)
    chosen = np.eye(head.shape[1])[targets]
    upstream = weights[0][:, None] * (chosen - p) - weights[1][:, None] * p * (logp + entropy)
    upstream /= temperature
    np.testing.assert_allclose(got[0], upstream @ head.T.astype(float), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], hidden.T.astype(float) @ upstream, rtol=1e-4, atol=1e-5)


def test_extreme_logits_stay_finite():
    hidden, head, targets, _ = random_case(8)
    logp, entropy = token_logp(1e4 * hidden, head, targets)
    assert np.isfinite(logp).all()
    np.testing.assert_allclose(entropy, 0.0, atol=1e-3)
    _, entropy = token_logp(0 * hidden, head, targets)
    np.testing.assert_allclose(entropy, np.log(head.shape[1]), rtol=1e-6)


def test_bfloat16_hidden_states_are_added_up_in_float32():
    rng = np.random.default_rng(9)
    hidden = jnp.asarray(rng.normal(size=(4, 512)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(512, 5)) / 20, jnp.bfloat16).astype(jnp.float32)
    wide = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    logp, _ = token_logp(hidden, head, jnp.arange(4))
    want = log_softmax_oracle(wide)[np.arange(4), np.arange(4)]
    np.testing.assert_allclose(logp, want, rtol=1e-4, atol=1e-4)


def test_before():
    x = np.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(before(x), [[0, 0, 1, 2, 3, 4], [6, 6, 7, 8, 9, 10]])
