"""Log-probs and entropies of tokens, in one piece and in chunks, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.models.token_logp import before, token_logp
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh
from s3ac_jax.parallel.vocab import look_up
from tests.helpers import log_softmax_oracle


def random_case(seed, tokens=23, width=6, vocab=11):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(tokens, width)).astype(np.float32)
    head = rng.normal(size=(width, vocab)).astype(np.float32)
    return hidden, head, rng.integers(vocab, size=tokens), rng.normal(size=(2, tokens))


# 23 tokens: a vocabulary of 300 in blocks of 128 (the last begins in the one before) or 256, whole.
@pytest.mark.parametrize("numbers", [1, 23 * 256, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_values(numbers, temperature):
    hidden, head, targets, _ = random_case(numbers % 11, vocab=300)
    want = log_softmax_oracle(hidden.astype(float) @ head.astype(float) / temperature)
    logp, entropy = token_logp(
        hidden, head, targets, temperature=temperature, block_numbers=numbers
    )
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(logp, want[np.arange(23), targets], **close)
    np.testing.assert_allclose(entropy, -(np.exp(want) * want).sum(axis=1), **close)
    assert logp.dtype == entropy.dtype == jnp.float32


@pytest.mark.parametrize("numbers", [1, 23 * 256, 1 << 20])
def test_gradients(numbers):
    hidden, head, targets, weights = random_case(7, vocab=300)
    temperature = 0.6

    def loss(hidden, head):
        got = token_logp(hidden, head, targets, temperature=temperature, block_numbers=numbers)
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


MESHES = (
    MeshSpec(tensor=2), MeshSpec(data=2, fsdp=2), MeshSpec(fsdp=2, tensor=2),
    MeshSpec(expert=2, context=2),
)  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("vocab", [600, 299])
def test_a_vocabulary_on_several_devices(mesh, vocab):
    # Blocks of 128 don't divide a device's part; 299 entries don't divide over tensor.
    hidden, head, targets, weights = random_case(9, tokens=24, width=8, vocab=vocab)
    hidden *= 0.3  # logits of an untrained model, so that float32 has five digits of each gradient

    def both(numbers):
        def loss(hidden, head):
            got = token_logp(hidden, head, targets, temperature=0.7, block_numbers=numbers)
            return jnp.vdot(weights[0], got[0]) + jnp.vdot(weights[1], got[1]), got

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)

    want = both(1 << 20)
    with jax.set_mesh(make_mesh(mesh)):
        got = both(1)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_head_is_summed_in_float32():
    # 4,096 equal contributions of 2^-9 beside 1: in bfloat16 the sum would stay where it was.
    tokens, vocab = 4096, 4
    hidden = jnp.full((tokens, 1), 2**-9, jnp.bfloat16).at[0].set(1.0)
    head = jnp.zeros((1, vocab), jnp.float32)

    def loss(head):
        return jnp.sum(token_logp(hidden, head, jnp.zeros(tokens, int), block_numbers=1)[0])

    # d logp_0 / dz = (3/4, -1/4, -1/4, -1/4), times the sum of the hidden states.
    total = 1 + 4095 * 2**-9
    want = total * np.array([[0.75, -0.25, -0.25, -0.25]])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(head), want, rtol=1e-5)


@pytest.mark.parametrize("mesh", [MeshSpec(fsdp=2, tensor=2), MeshSpec(tensor=4)], ids=str)
def test_an_embedding_on_several_devices(mesh):
    rng = np.random.default_rng(1)
    table = rng.normal(size=(8, 6)).astype(np.float32)
    tokens, weights = rng.integers(8, size=16), rng.normal(size=(16, 6)).astype(np.float32)

    def loss(table):
        rows = look_up(table, tokens, jnp.float32)
        return jnp.vdot(rows, weights), rows

    with jax.set_mesh(make_mesh(mesh)):
        grad, rows = jax.jit(jax.grad(loss, has_aux=True))(table)
    want = np.zeros((8, 6))
    np.add.at(want, tokens, weights.astype(float))
    np.testing.assert_array_equal(rows, table[tokens])
    np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-6)
