"""The whole language model as a module: positions, weights in and out, gradients by NNX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.models.causal_lm import CausalLM, positions_of
from s3ac_jax.models.network import actor_network
from tests.helpers import decoder_oracle, random_params, tiny_spec

SPEC = tiny_spec(num_layers=2)
ORIGIN = ("any", "hashable", "thing")
TOKENS = np.random.default_rng(0).integers(SPEC.vocab_size, size=(2, 7)).astype(np.int32)
IDS = np.array([[1, 1, 1, 2, 2, 2, 2], [0, 3, 3, 3, 3, 0, 0]], np.int32)


@pytest.fixture(scope="module")
def params():
    return random_params(actor_network(SPEC), 1)


def test_positions_by_hand():
    ids = [
        [1, 1, 1, 2, 2, 3, 0, 0],
        [0, 0, 5, 5, 5, 0, 5, 5],
        [7, 7, 7, 7, 7, 7, 7, 7],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [1, 2, 3, 1, 2, 3, 1, 1],
    ]
    want = [
        [0, 1, 2, 0, 1, 0, 0, 1],
        [0, 1, 0, 1, 2, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
    np.testing.assert_array_equal(positions_of(jnp.array(ids)), want)
    assert positions_of(jnp.ones((2, 1), int)).tolist() == [[0], [0]]


def test_logits_are_the_loops_with_and_without_segments(params):
    head = np.asarray(params["embed"], np.float64).T
    run = jax.jit(lambda model, ids: model(TOKENS, segment_ids=ids))
    model = CausalLM.from_params(SPEC, params)
    logits = run(model, IDS)
    assert logits.dtype == jnp.float32
    for row, columns in ((0, slice(0, 3)), (0, slice(3, 7)), (1, slice(1, 5))):
        want = decoder_oracle(params, SPEC, TOKENS[row, columns])[1] @ head
        np.testing.assert_allclose(logits[row, columns], want, rtol=1e-5, atol=1e-5)
    # Without segments a row is one sequence from position 0.
    bare = jax.jit(lambda model: model(TOKENS))(model)
    np.testing.assert_allclose(bare, run(model, np.ones_like(IDS)), rtol=0, atol=1e-6)
    # Positions that are given are used.
    shifted = jax.jit(lambda model: model(TOKENS, positions_of(IDS) * 3, IDS))(model)
    assert np.abs(shifted - logits)[IDS > 0].max() > 1e-3


def test_bfloat16_activations_give_float32_logits(params):
    spec = dataclasses.replace(SPEC, dtype="bfloat16")
    logits = jax.jit(lambda model: model(TOKENS))(CausalLM.from_params(spec, params))
    assert logits.dtype == jnp.float32
    # Accumulated in float32: not all of them are numbers that bfloat16 has.
    assert (logits.astype(jnp.bfloat16).astype(jnp.float32) != logits).mean() > 0.5


def test_weights_go_in_and_out_without_a_copy(params):
    model = CausalLM.from_params(SPEC, params, origin=ORIGIN)
    out = nnx.to_pure_dict(nnx.state(model.decoder))
    assert named_leaves(out).keys() == named_leaves(params).keys()
    for name, leaf in named_leaves(out).items():
        assert leaf is named_leaves(params)[name], name
    assert model.spec == SPEC
    assert model.origin == ORIGIN
    # A fresh one has the same names and shapes.
    fresh = nnx.eval_shape(lambda: CausalLM(SPEC, rngs=nnx.Rngs(0)))
    shapes = {k: v.shape for k, v in named_leaves(nnx.to_pure_dict(nnx.state(fresh))).items()}
    assert shapes == {f"decoder/{k}": v.shape for k, v in named_leaves(params).items()}
    assert fresh.origin is None


def test_the_origin_is_no_weight(params):
    model = CausalLM.from_params(SPEC, params, origin=ORIGIN)
    graph, state = nnx.split(model)
    assert all(name.startswith("decoder/") for name in named_leaves(nnx.to_pure_dict(state)))
    again = nnx.merge(graph, jax.tree.map(lambda leaf: 2 * leaf, state))
    assert again.origin == ORIGIN
    np.testing.assert_array_equal(again.decoder.embed[...], 2 * params["embed"])
    np.testing.assert_array_equal(model.decoder.embed[...], params["embed"])
    # It is part of what a jitted function is compiled for.
    assert graph == nnx.split(CausalLM.from_params(SPEC, params, origin=ORIGIN))[0]
    assert graph != nnx.split(CausalLM.from_params(SPEC, params, origin="other"))[0]
    assert hash(graph) is not None


def test_gradients_by_nnx_are_those_of_the_tree(params):
    def nll(logits):
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, TOKENS[:, 1:, None], axis=-1))

    model = CausalLM.from_params(SPEC, params, origin=ORIGIN)
    value, grads = nnx.jit(nnx.value_and_grad(lambda model: nll(model(TOKENS))))(model)
    network = actor_network(SPEC)

    @jax.jit
    @jax.value_and_grad
    def of_tree(params):
        decoder = network.bind(params)
        ones = jnp.ones_like(TOKENS)
        hidden, _ = decoder(TOKENS, jnp.broadcast_to(jnp.arange(7), TOKENS.shape), ones)
        return nll(hidden @ decoder.head())

    want, tree = of_tree(params)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    got = named_leaves(nnx.to_pure_dict(grads))
    for name, leaf in named_leaves(tree).items():
        atol = 1e-5 * np.abs(leaf).max()
        np.testing.assert_allclose(got[f"decoder/{name}"], leaf, rtol=1e-4, atol=atol, err_msg=name)
