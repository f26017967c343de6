"""Routing and experts against float64 loops over tokens, values and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from s3ac_jax.models.moe import MoE, mix, route
from s3ac_jax.models.spec import MoeSpec
from tests.helpers import tiny_spec

EXAMPLE = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
MOE = MoeSpec(num_experts=5, per_token=2, width=7, shared_width=6)
SPEC = tiny_spec(num_layers=2, moe=MOE)
TOKENS = 13


def softmax(logits):
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def test_the_example_of_the_method():
    """Logits [2, 1, 0, -1], experts 1 and 2 replayed: their gates are those of [1, 0]."""
    for replay, want in (([1, 2], [0.731059, 0.268941]), ([2, 1], [0.268941, 0.731059])):
        chosen, gates = route(EXAMPLE, jnp.array([replay]), per_token=2, renormalise=True)
        assert chosen.tolist() == [replay]
        np.testing.assert_allclose(gates, [want], atol=1e-6)
    # Not divided by their sum: what the softmax over all four gives them.
    _, gates = route(EXAMPLE, jnp.array([[1, 2]]), per_token=2, renormalise=False)
    e = np.exp([2.0, 1.0, 0.0, -1.0])
    np.testing.assert_allclose(gates, [e[1:3] / e.sum()], rtol=1e-6)


def test_live_routing_takes_the_likeliest():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 6)).astype(np.float32)
    order = np.argsort(-logits, axis=1)[:, :3]
    p = softmax(logits.astype(float))
    want = np.take_along_axis(p, order, axis=1)
    for renormalise in (False, True):
        chosen, gates = route(logits, None, per_token=3, renormalise=renormalise)
        np.testing.assert_array_equal(chosen, order)
        total = want.sum(axis=1, keepdims=True) if renormalise else 1.0
        np.testing.assert_allclose(gates, want / total, rtol=1e-5)
        assert gates.dtype == jnp.float32


def test_what_was_not_recorded_is_routed_anew():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 5)).astype(np.float32)
    replay = np.array([[4, 0], [-1, -1], [3, -1], [1, 2]], np.int16)
    order = np.argsort(-logits, axis=1)[:, :2]
    chosen, gates = route(logits, jnp.asarray(replay), per_token=2, renormalise=True)
    assert chosen[0].tolist() == [4, 0]
    np.testing.assert_array_equal(chosen[1:3], order[1:3])
    assert chosen[3].tolist() == [1, 2]
    want = softmax(np.take_along_axis(logits.astype(float), np.asarray(chosen), axis=1))
    np.testing.assert_allclose(gates, want, rtol=1e-5)


@pytest.mark.parametrize("renormalise", [False, True])
def test_gates_of_replayed_experts_have_the_gradient_of_the_softmax(renormalise):
    """Through the gates, not through the choice; the experts left out hear of it or not."""
    rng = np.random.default_rng(2)
    logits, upstream = rng.normal(size=(6, 5)), rng.normal(size=(6, 2))
    replay = np.stack([rng.permutation(5)[:2] for _ in range(6)])

    def loss(logits):
        _, gates = route(logits, jnp.asarray(replay), per_token=2, renormalise=renormalise)
        return jnp.vdot(gates, upstream)

    got = jax.jit(jax.grad(loss))(jnp.asarray(logits, jnp.float32))
    want = np.zeros_like(logits)
    for n, (pair, up) in enumerate(zip(replay, upstream, strict=True)):
        if renormalise:
            g = softmax(logits[n, pair])
            want[n, pair] = g * (up - g @ up)
        else:
            p, full = softmax(logits[n]), np.zeros(5)
            full[pair] = up
            want[n] = p * (full - p @ full)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert np.abs(want).max() > 0.05


def test_replayed_experts_far_behind_have_finite_gates():
    """Their probabilities are all 0 in float32, and 0 / 0 would be NaN."""
    logits = jnp.array([[300.0, 1.0, 0.0, -1.0]])

    def gates(logits):
        return route(logits, jnp.array([[1, 2]]), per_token=2, renormalise=True)[1]

    np.testing.assert_allclose(gates(logits), [[0.731059, 0.268941]], atol=1e-6)
    slope = jax.jit(jax.jacobian(gates))(logits)[0, 0, 0]
    np.testing.assert_allclose(slope, [0.0, 0.196612, -0.196612, 0.0], atol=1e-6)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def swiglu_loop(x, gate, up, down):
    """One token through one expert, and a function from dy to the gradients of all four."""
    g, u = x @ gate, x @ up
    s = 1 / (1 + np.exp(-g))
    hidden = g * s * u

    def pullback(dy):
        dh = down @ dy
        dg, du = dh * u * s * (1 + g * (1 - s)), dh * g * s
        return gate @ dg + up @ du, np.outer(x, dg), np.outer(x, du), np.outer(hidden, dy)

    return hidden @ down, pullback


def mix_loop(x, chosen, gates, weights, upstream):
    """Float64, assignment by assignment: outputs and the gradients of x, gates and weights."""
    x, gates, upstream = (np.asarray(y, np.float64) for y in (x, gates, upstream))
    w = {name: np.asarray(y, np.float64) for name, y in weights.items()}
    out, dx, dgates = np.zeros(upstream.shape), np.zeros(x.shape), np.zeros(gates.shape)
    dw = {name: np.zeros(y.shape) for name, y in w.items()}
    for n, j in np.ndindex(*chosen.shape):
        e = int(chosen[n, j])
        if not 0 <= e < len(w["gate"]):
            continue
        y, pullback = swiglu_loop(x[n], *(w[name][e] for name in ("gate", "up", "down")))
        out[n] += gates[n, j] * y
        dgates[n, j] = upstream[n] @ y
        one, *each = pullback(gates[n, j] * upstream[n])
        dx[n] += one
        for name, new in zip(("gate", "up", "down"), each, strict=True):
            dw[name][e] += new
    return out, dx, dgates, dw


@functools.partial(jax.jit, static_argnums=(4, 6))
def mixed(x, chosen, gates, weights, matmul, upstream, shards):
    out, pullback = jax.vjp(
        lambda *args: mix(args[0], chosen, *args[1:], matmul, shards=shards), x, gates, weights
    )
    return out, *pullback(upstream)


# In windows of a third: full, half full, empty, and one that is filled up.
@pytest.mark.parametrize(
    ("matmul", "shards"),
    [("blocked", 1), ("ragged", 1), ("megablox", 1), ("dense", 1), ("blocked", 3), ("ragged", 3)],
)
def test_mix_is_the_loop(matmul, shards):
    experts, width = MOE.num_experts, MOE.width
    x, upstream, gates, gate, up, down = draw(
        3, (TOKENS, 4), (TOKENS, 4), (TOKENS, 2), (experts, 4, width), (experts, 4, width),
        (experts, width, 4),
    )  # fmt: skip
    weights = {"gate": gate, "up": up, "down": down}
    rng = np.random.default_rng(4)
    everywhere = np.stack([rng.permutation(experts)[:2] for _ in range(TOKENS)])
    batches = {
        "some get none": np.where(everywhere < 3, everywhere, 3 - everywhere % 2),
        "one gets all": np.stack([np.full(TOKENS, 4), np.full(TOKENS, experts)], axis=1),
        "nobody's": np.where(rng.random((TOKENS, 2)) < 0.5, rng.choice([-1, 5, 77]), everywhere),
    }
    for kind, chosen in batches.items():
        got = mixed(x, chosen, gates, weights, matmul, upstream, shards)
        want = mix_loop(x, chosen, gates, weights, upstream)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=kind)
        idle = np.array([e for e in range(experts) if e not in chosen], int)
        assert idle.size or kind == "nobody's"
        for grad in got[3].values():
            np.testing.assert_array_equal(grad[idle], 0.0)


def a_layer(seed, spec=SPEC):
    """(graph, weights of the second of two layers)."""
    rng = np.random.default_rng(seed)
    graph, stacked = nnx.split(nnx.eval_shape(lambda: MoE(spec, rngs=nnx.Rngs(0))))
    return graph, jax.tree.map(
        lambda leaf: jnp.asarray(0.6 * rng.normal(size=leaf.shape[1:]), jnp.float32), stacked
    )


def layer_loop(w, x, replay, renormalise=True):
    """One token at a time, float64: outputs and experts."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(w))
    out, experts = [], []
    for n, x_n in enumerate(np.asarray(x, np.float64)):
        p = softmax(x_n @ w["router"])
        chosen = np.argsort(-p)[:2] if replay is None or replay[n, 0] < 0 else replay[n]
        gates = p[chosen] / (p[chosen].sum() if renormalise else 1.0)
        y = sum(
            g * swiglu_loop(x_n, *(w[name][e] for name in ("gate", "up", "down")))[0]
            for g, e in zip(gates, chosen, strict=True)
        )
        shared = swiglu_loop(x_n, *(w["shared"][name] for name in ("gate", "up", "down")))[0]
        out.append(y + shared / (1 + np.exp(-x_n @ w["shared_gate"])))
        experts.append(chosen)
    return np.stack(out), np.stack(experts)


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_layer_is_the_loop(renormalise):
    spec = dataclasses.replace(SPEC, moe=dataclasses.replace(MOE, renormalise=renormalise))
    graph, weights = a_layer(5, spec)
    (x,) = draw(6, (TOKENS, SPEC.hidden_size))
    rng = np.random.default_rng(7)
    replay = np.stack([rng.permutation(5)[:2] for _ in range(TOKENS)]).astype(np.int16)
    replay[::4] = -1
    run = jax.jit(lambda w, x, replay: nnx.merge(graph, w)(x, np.ones(TOKENS, bool), replay))
    for given in (None, replay):
        got, chosen = run(weights, x, given)
        want, experts = layer_loop(weights, x, given, renormalise)
        np.testing.assert_array_equal(chosen, experts)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_padding_is_sent_nowhere():
    """No expert's gradient knows of it, whatever stands there."""
    graph, weights = a_layer(8)
    x, other = draw(9, *[(TOKENS, SPEC.hidden_size)] * 2)
    real = np.arange(TOKENS) % 3 != 1

    @jax.jit
    def run(weights, x):
        def loss(weights):
            y, _ = nnx.merge(graph, weights)(x, real, None)
            # Also where nobody should look: a leak would show in the gradients.
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, has_aux=True)(weights)

    (want, y), (got, z) = run(weights, x), run(weights, np.where(real[:, None], x, 10 * other))
    for name in ("gate", "up", "down"):
        assert np.abs(want[name][...]).max() > 1e-3
        np.testing.assert_array_equal(got[name][...], want[name][...])
    np.testing.assert_array_equal(z[real], y[real])
