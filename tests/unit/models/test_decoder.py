"""The decoder against a float64 loop, and against itself in every layout it is used in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.models.cache import empty_cache, insert
from s3ac_jax.models.network import actor_network, critic_network
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.models.token_logp import before, token_logp
from tests.helpers import decoder_oracle, logp_oracle, random_params, tiny_spec

SPEC = tiny_spec()
LENGTHS = (7, 3, 9, 5)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def sequences(seed=0, lengths=LENGTHS):
    rng = np.random.default_rng(seed)
    return [rng.integers(SPEC.vocab_size, size=length) for length in lengths]


def layout(kind, rows):
    """(tokens, positions, segment ids) [B, T] and where each sequence lies: (row, columns)."""
    # One shape for all, so that one compilation serves them.
    shape = (4, 21)
    if kind == "packed":
        # Two rows: three sequences with a gap at the end, and one alone.
        cells = [(0, slice(0, 7)), (0, slice(7, 10)), (0, slice(10, 19)), (1, slice(0, 5))]
        segments = (1, 2, 3, 1)
    else:
        width = shape[1]
        starts = [width - len(x) if kind == "left" else 0 for x in rows]
        cells = [
            (n, slice(s, s + len(x))) for n, (s, x) in enumerate(zip(starts, rows, strict=True))
        ]
        segments = (1,) * len(rows)
    # What stands in the padding is anybody's guess.
    tokens, positions, ids = (np.full(shape, fill, np.int32) for fill in (3, 5, 0))
    for cell, segment, sequence in zip(cells, segments, rows, strict=True):
        tokens[cell], ids[cell], positions[cell] = sequence, segment, np.arange(len(sequence))
    return (tokens, positions, ids), cells


def run(spec, params, inputs, *, temperature=1.0):
    """Everything a row gives: layer outputs, logits, and log-prob of each token, aligned."""
    model = actor_network(spec).bind(params)
    hidden, kept = model(*inputs, keep=("layers",))
    flat = before(hidden).reshape(-1, hidden.shape[-1])
    tokens = jnp.asarray(inputs[0]).reshape(-1)
    logp, _ = token_logp(flat, model.head(), tokens, temperature=temperature)
    return kept.layers, hidden @ model.head(), logp.reshape(inputs[0].shape)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False, "qkv_bias": False, "num_kv_heads": 1, "rope_theta": 100.0},
        {"onehot_embedding": True, "num_kv_heads": 4, "rms_norm_eps": 0.1},
    ],
    ids=["tied-gqa", "untied-mqa", "onehot-mha"],
)
def test_oracle_in_every_layout(changes):
    spec = dataclasses.replace(SPEC, **changes)
    params = random_params(actor_network(spec), 1)
    assert ("lm_head" in params) != spec.tie_embeddings
    rows = sequences()
    head = np.asarray(params["embed"].T if spec.tie_embeddings else params["lm_head"], np.float64)
    want = [decoder_oracle(params, spec, sequence) for sequence in rows]
    want_logp = [logp_oracle(params, spec, sequence, temperature=0.7) for sequence in rows]
    jitted = jax.jit(lambda p, x: run(spec, p, x, temperature=0.7))
    for kind in ("right", "left", "packed"):
        inputs, cells = layout(kind, rows)
        layers, logits, logp = jitted(params, inputs)
        for (row, columns), (want_layers, hidden), want_n in zip(
            cells, want, want_logp, strict=True
        ):
            np.testing.assert_allclose(layers[:, row, columns], want_layers, err_msg=kind, **CLOSE)
            np.testing.assert_allclose(logits[row, columns], hidden @ head, err_msg=kind, **CLOSE)
            np.testing.assert_allclose(logp[row, columns][1:], want_n, err_msg=kind, **CLOSE)
        assert np.isfinite(logits).all()  # padding included


def test_layouts_give_the_same_parameter_gradients():
    # A critic whose backbone speaks too: values and log-probs from one pass.
    network = critic_network(SPEC)
    params = random_params(network, 2)
    rows = sequences(1)
    rng = np.random.default_rng(4)
    weights = [rng.normal(size=(2, len(sequence))) / 10 for sequence in rows]

    @jax.jit
    @jax.value_and_grad
    def loss(params, inputs, weight):
        critic = network.bind(params)
        hidden, _ = critic.backbone(*inputs)
        flat = before(hidden).reshape(-1, hidden.shape[-1])
        logp, _ = token_logp(flat, critic.backbone.head(), inputs[0].reshape(-1))
        values = before(critic(*inputs))
        return jnp.sum(weight[0] * logp.reshape(values.shape) + weight[1] * values)

    found = {}
    for kind in ("right", "left", "packed"):
        inputs, cells = layout(kind, rows)
        weight = np.zeros((2, *inputs[0].shape), np.float32)
        for (row, columns), w in zip(cells, weights, strict=True):
            weight[:, row, columns] = w
            weight[:, row, columns.start] = 0.0  # a first token is never trainable
        found[kind] = loss(params, inputs, weight)
    for kind in ("left", "packed"):
        np.testing.assert_allclose(found[kind][0], found["right"][0], **CLOSE)
        want = named_leaves(found["right"][1])
        for name, got in named_leaves(found[kind][1]).items():
            assert np.abs(want[name]).max() > 1e-3, name
            atol = 1e-5 * np.abs(want[name]).max()
            np.testing.assert_allclose(got, want[name], rtol=1e-5, atol=atol, err_msg=name)


def test_a_token_changes_only_what_is_read_after_it():
    # The value convention: V(s_t) stands at token t and has not seen it.
    network = critic_network(SPEC)
    params = random_params(network, 5)
    rows = sequences(2)
    (tokens, positions, ids), cells = layout("packed", rows)
    values = jax.jit(lambda tokens: before(network.bind(params)(tokens, positions, ids)))
    want = values(tokens)
    row, columns = cells[1]  # the middle one of three in its row
    for place in range(columns.start, columns.stop):
        changed = tokens.copy()
        changed[row, place] = (changed[row, place] + 1) % SPEC.vocab_size
        moved = np.argwhere(np.abs(values(changed) - want) > 1e-6)
        # Nothing up to the token; every later one of the sequence; and the first place of the
        # next sequence, which reads the last hidden state of this one and means nothing.
        assert moved.tolist() == [[row, after] for after in range(place + 1, columns.stop + 1)]


def test_value_is_the_head_times_the_hidden_state_before_the_token():
    network = critic_network(SPEC)
    params = random_params(network, 6)
    rows = sequences(3)
    inputs, cells = layout("left", rows)
    values = jax.jit(lambda p, x: before(network.bind(p)(*x)))(params, inputs)
    for (row, columns), sequence in zip(cells, rows, strict=True):
        _, hidden = decoder_oracle(params["backbone"], SPEC, sequence)
        want = hidden @ np.asarray(params["value_head"], np.float64)
        np.testing.assert_allclose(values[row, columns][1:], want[:-1], **CLOSE)


@pytest.mark.parametrize("chunk", [6, 2, 1])
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "onehot_embedding": True}])
def test_prefill_and_decode_are_the_full_forward(changes, chunk):
    spec = dataclasses.replace(SPEC, **changes)
    network = actor_network(spec)
    params = random_params(network, 7)
    rows = sequences(4, (9, 7, 11))
    prompts = np.array([4, 1, 6])
    (tokens, positions, ids), _ = layout("right", [*rows, rows[0]])
    tokens, positions, ids = (x[:3, :11] for x in (tokens, positions, ids))
    width = prompts.max()
    shown = (positions[:, :width] < 99) & (np.arange(width) < prompts[:, None] - 1)

    @jax.jit
    def prefill(params):
        model, rows, cache = network.bind(params), np.arange(3), empty_cache(spec, 3, 6)
        for start in range(0, width, chunk):
            part = slice(start, start + chunk)
            cache, _ = model.extend(tokens[:, part], start, shown[:, part], cache)
        return insert(empty_cache(spec, 3, 11), cache, rows, rows)

    @jax.jit
    def decode(params, token, position, cache):
        return network.bind(params).decode(token, position, cache)[:2]

    cache = prefill(params)
    read = [[] for _ in rows]
    # The last prompt token is decoded again; then every row goes on at its own position, and
    # one that has ended is held at a position beyond the cache, where nothing is written.
    for step in range(11):
        position = prompts - 1 + step
        live = position < [len(x) for x in rows]
        token = np.array(
            [x[min(p, len(x) - 1)] for x, p in zip(rows, position, strict=True)], np.int32
        )
        hidden, cache = decode(params, token, np.where(live, position, 11).astype(np.int32), cache)
        for n in np.flatnonzero(live):
            read[n].append(hidden[n])
    full = jax.jit(lambda p: network.bind(p)(tokens, positions, ids)[0])(params)
    for n, sequence in enumerate(rows):
        got = np.stack(read[n])
        np.testing.assert_allclose(got, full[n, prompts[n] - 1 : len(sequence)], **CLOSE)
        want = decoder_oracle(params, spec, sequence)[1][prompts[n] - 1 :]
        np.testing.assert_allclose(got, want, **CLOSE)


def test_remat_changes_no_gradient():
    rows = sequences(5)
    inputs, _ = layout("packed", rows)
    found = []
    for remat in (False, True):
        spec = dataclasses.replace(SPEC, remat=remat)
        params = random_params(actor_network(spec), 8)
        loss = lambda params, spec=spec: run(spec, params, inputs)[2].mean()  # noqa: E731
        traced = jax.make_jaxpr(jax.grad(loss))(params)
        assert ("remat" in str(traced)) == remat
        found.append(jax.jit(jax.grad(loss))(params))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def products(jaxpr):
    """Products of matrices in a traced function, those of a loop's body once."""
    inner = (sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params))
    return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns) + sum(
        map(products, inner)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_backward_pass_computes_again(dtype):
    inputs, _ = layout("packed", sequences(5))
    found = {}
    for remat, policy in ((False, "nothing"), (True, "nothing"), (True, "matmuls")):
        spec = dataclasses.replace(SPEC, remat=remat, remat_policy=policy, dtype=dtype)
        params = random_params(actor_network(spec), 8)
        loss = lambda params, spec=spec: run(spec, params, inputs)[0][-1].sum()  # noqa: E731
        found[remat, policy] = products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    # Of a layer: q, k, v, o, gate and up (nobody asks for down again), scores and their sums.
    assert found[True, "matmuls"] == found[False, "nothing"] + 2
    assert found[True, "nothing"] == found[False, "nothing"] + 6 + 2


def test_bfloat16_activations_stay_near_float32():
    spec = dataclasses.replace(SPEC, dtype="bfloat16")
    params = random_params(actor_network(spec), 9)
    inputs, _ = layout("packed", sequences(6))

    @jax.jit(static_argnums=0)
    def logp(spec):
        model = actor_network(spec).bind(params)
        hidden, _ = model(*inputs)
        flat = before(hidden).reshape(-1, hidden.shape[-1])
        return hidden, token_logp(flat, model.head(), inputs[0].reshape(-1))[0]

    (low, got), (high, want) = logp(spec), logp(SPEC)
    assert (low.dtype, high.dtype, got.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    cache = empty_cache(spec, 2, 5)
    # float32 on CPU, see `empty_cache`; these tests run there.
    assert cache.kv.keys.dtype == jnp.float32
    real = inputs[2].reshape(-1) > 0
    gap = np.abs(got - want)[real]
    assert 1e-4 < gap.mean() < 0.05  # it does round, and no more than rounds
    assert gap.max() < 0.5


def test_critic_has_the_names_of_the_actor_under_backbone():
    actor, critic = actor_network(SPEC), critic_network(SPEC)
    shapes = {name: leaf.shape for name, leaf in named_leaves(actor.abstract).items()}
    theirs = named_leaves(critic.abstract["backbone"])
    assert {name: leaf.shape for name, leaf in theirs.items()} == shapes
    assert set(critic.abstract) == {"backbone", "value_head"}  # no bias beside the head
    assert critic.abstract["value_head"].shape == (SPEC.hidden_size,)
    for network in (actor, critic):
        axes = jax.tree.map(
            lambda leaf, names: len(leaf.shape) == len(names), network.abstract, network.axes
        )
        assert all(jax.tree.leaves(axes))


def test_a_critic_of_zero_hidden_state_says_zero():
    # A bias hidden anywhere would show here.
    network = critic_network(SPEC)
    params = random_params(network, 10)
    params["backbone"]["final_norm"] = jnp.zeros(SPEC.hidden_size)
    inputs, _ = layout("right", sequences(7))
    values = jax.jit(lambda p: network.bind(p)(*inputs))(params)
    np.testing.assert_array_equal(values, np.zeros(inputs[0].shape))


@pytest.mark.parametrize(("head_std", "want"), [(None, 1 / 5), (0.01, 0.01)])
def test_head_of_a_fresh_critic(head_std, want):
    # Width 4: there 1/(H+1) is 20 % away from 1/H and 55 % from 1/sqrt(H).
    spec = tiny_spec(hidden_size=4, num_layers=1)
    network = critic_network(spec, head_std=head_std)
    heads = jax.jit(jax.vmap(lambda key: network.init(key)["value_head"]))
    head = np.asarray(heads(jax.random.split(jax.random.key(0), 1000)), np.float64).ravel()
    np.testing.assert_allclose(head.std(), want, rtol=0.04)
    assert abs(head.mean()) < 0.05 * want
    np.testing.assert_allclose(np.mean(np.abs(head) < want), 0.6827, atol=0.02)  # normal


def test_a_fresh_backbone():
    spec = tiny_spec(hidden_size=48, num_layers=2, init_std=0.05)
    params = jax.jit(actor_network(spec).init)(jax.random.key(1, impl="rbg"))
    for name, leaf in named_leaves(params).items():
        if "norm" in name or "bias" in name:
            np.testing.assert_array_equal(leaf, np.full(leaf.shape, float("norm" in name)), name)
        else:
            np.testing.assert_allclose(np.std(leaf), 0.05, rtol=0.1, err_msg=name)
    q = np.asarray(params["layers"]["attn"]["q"])
    assert np.abs(q[0] - q[1]).max() > 0.01  # each layer its own


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_layers": 0}, "model.num_layers"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"head_dim": 5}, "even"),
        ({"remat_policy": "matmuls"}, "model.remat_policy=matmuls is for model.remat=True"),
    ],
)
def test_impossible_specs(changes, word):
    with pytest.raises(ValueError, match=word):
        dataclasses.replace(SPEC, **changes)
    assert isinstance(SPEC, DecoderSpec)
