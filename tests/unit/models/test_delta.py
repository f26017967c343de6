"""The gated delta rule against a float64 loop over tokens, in every layout of a row."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from s3ac_jax.models import delta
from s3ac_jax.models.delta import (
    LinearAttention,
    LinearState,
    causal_conv,
    chunked,
    runs,
    step,
)
from s3ac_jax.models.spec import LinearAttentionSpec
from tests.helpers import tiny_spec

LINEAR = LinearAttentionSpec(key_heads=2, value_heads=4, key_dim=3, value_dim=5, chunk=4)
SPEC = tiny_spec(num_layers=2, linear_attention=LINEAR)
# Padding in front, between and behind; segments of one token; one that is longer than a chunk; ids
# that come again in the next row; and a row of nothing but padding.
IDS = np.array([
    [0, 0, 1, 1, 1, 2, 0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 0, 0, 0],
    [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2],
    [0] * 21,
])  # fmt: skip
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
HEADS, DK, DV = 2, 3, 5


def segments_of(ids):
    """(first, behind the last) token of each segment of one row."""
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1), len(ids)]
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges) if ids[a] > 0]


def make_case(seed, *, strong=False):
    """q, k, v, log decay and beta, [B, H, T, ...]; padding decays nothing and adds nothing."""
    rng = np.random.default_rng(seed)
    shape = (len(IDS), HEADS, IDS.shape[1])
    q, k = rng.normal(size=(2, *shape, DK))
    v = rng.normal(size=(*shape, DV))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay = -rng.exponential(0.3, size=shape)
    if strong:
        decay = np.where(rng.random(shape) < 0.7, -80.0, decay)
    real = np.broadcast_to(IDS[:, None] > 0, shape)
    beta = np.where(real, rng.random(shape), 0.0)
    arrays = q, k, v, np.where(real, decay, 0.0), beta
    return tuple(x.astype(np.float32) for x in arrays)


def delta_loop(q, k, v, log_decay, beta, ids):
    """Outputs, 0 at padding, and the state after the last segment of each row; float64."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    out = np.zeros(v.shape)
    last = np.zeros((*v.shape[:2], q.shape[-1], v.shape[-1]))
    for b, h in np.ndindex(*v.shape[:2]):
        for start, end in segments_of(ids[b]):
            state = np.zeros(last.shape[2:])
            for t in range(start, end):
                state *= np.exp(log_decay[b, h, t])
                correction = beta[b, h, t] * (v[b, h, t] - k[b, h, t] @ state)
                state = state + np.outer(k[b, h, t], correction)
                out[b, h, t] = q[b, h, t] @ state
            last[b, h] = state
    return out, last


@functools.partial(jax.jit, static_argnums=1)
def run_chunked(case, chunk):
    return chunked(*case, runs(jnp.asarray(IDS)), chunk)


def test_runs_by_hand():
    want = [
        [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4],
        [1] + [2] * 20,
        [0] * 21,
    ]
    np.testing.assert_array_equal(runs(jnp.asarray(IDS)), want)


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_chunks_of_any_size_are_the_loop(chunk):
    case = make_case(chunk)
    out, state = run_chunked(case, chunk)
    want, want_state = delta_loop(*case, IDS)
    real = np.broadcast_to(IDS[:, None] > 0, out.shape[:3])
    np.testing.assert_allclose(out[real], want[real], **CLOSE)
    # Row 0 ends in padding, row 1 in the middle of a chunk: the state is that of the last token.
    np.testing.assert_allclose(state, want_state, **CLOSE)
    assert np.isfinite(out).all()
    assert out.dtype == state.dtype == jnp.float32


@pytest.mark.parametrize("at_once", [4, 8])
def test_long_rows_are_prepared_in_parts(monkeypatch, at_once):
    """21 tokens in chunks of 4, one or two of them at a time: the state goes from part to part."""
    case, run = make_case(5), runs(IDS)

    def both():
        def loss(*case):
            out, state = chunked(*case, run, 4)
            return jnp.sum(jnp.sin(out)) + jnp.sum(state**2), (out, state)

        return jax.jit(jax.grad(loss, argnums=range(5), has_aux=True))(*case)

    want_grads, (_, want_state) = both()
    monkeypatch.setattr(delta, "_AT_ONCE", at_once)
    grads, (out, state) = both()
    oracle, last = delta_loop(*case, IDS)
    np.testing.assert_allclose(np.where(IDS[:, None, :, None] > 0, out, 0), oracle, **CLOSE)
    np.testing.assert_allclose(state, last, **CLOSE)
    np.testing.assert_allclose(state, want_state, **CLOSE)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_decay_of_80_nats_a_token():
    """Where most tokens forget everything, and some nothing."""
    case = make_case(2, strong=True)
    for chunk in (8, 64):
        out, state = run_chunked(case, chunk)
        want, want_state = delta_loop(*case, IDS)
        # Decays within a chunk are differences of sums of 1500 nats: float32 has 1e-4 of them.
        np.testing.assert_allclose(out, np.where(IDS[:, None, :, None], want, out), atol=2e-4)
        np.testing.assert_allclose(state, want_state, atol=2e-4)
        assert np.isfinite(out).all()


OF_OUT = np.random.default_rng(0).normal(size=(*IDS.shape, HEADS, DV)).swapaxes(1, 2)
OF_OUT = np.where(IDS[:, None, :, None] > 0, OF_OUT, 0.0)
OF_STATE = np.random.default_rng(1).normal(size=(len(IDS), HEADS, DK, DV))


def scanned(q, k, v, log_decay, beta):
    """The same in jax, one token at a time, for its gradient."""
    before = np.pad(IDS[:, :-1], ((0, 0), (1, 0)))
    fresh = (IDS > 0) & (before != IDS)

    def turn(state, xs):
        fresh, q, k, v, log_decay, beta = xs
        state = jnp.where(fresh[:, None, None, None], 0.0, state)
        state = state * jnp.exp(log_decay)[..., None, None]
        correction = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., None] * correction[:, :, None]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    xs = (fresh.T, *(jnp.moveaxis(x, 2, 0) for x in (q, k, v, log_decay, beta)))
    state, out = jax.lax.scan(turn, jnp.zeros((len(IDS), HEADS, DK, DV)), xs)
    return jnp.moveaxis(out, 0, 2), state


@pytest.fixture(scope="module")
def gradients_of():
    """One compilation of each for both kinds of decay."""

    def of(f):
        def loss(case):
            out, state = f(*case)
            return jnp.vdot(OF_OUT, out) + jnp.vdot(OF_STATE, state)

        return jax.jit(jax.grad(loss))

    return of(lambda *case: chunked(*case, runs(jnp.asarray(IDS)), 8)), of(scanned)


@pytest.mark.parametrize("strong", [False, True])
def test_gradients_are_those_of_the_loop(gradients_of, strong):
    case = make_case(5, strong=strong)
    got, want = (gradient(case) for gradient in gradients_of)
    for name, a, b in zip(("q", "k", "v", "log_decay", "beta"), got, want, strict=True):
        assert np.isfinite(a).all(), name
        assert np.abs(b).max() > 0.1, name
        close = {"rtol": 1e-3, "atol": 1e-3} if strong else {"rtol": 2e-4, "atol": 2e-5}
        np.testing.assert_allclose(a, b, err_msg=name, **close)


def test_gradients_are_finite_differences_of_the_loop(gradients_of):
    case, rng = make_case(6), np.random.default_rng(7)
    for place, grad in enumerate(gradients_of[0](case)):
        direction = rng.normal(size=case[place].shape) * (np.abs(case[place]) > 0)
        ends = []
        for sign in (1, -1):
            moved = [np.asarray(x, np.float64) for x in case]
            moved[place] = moved[place] + sign * 1e-5 * direction
            out, state = delta_loop(*moved, IDS)
            ends.append(np.vdot(OF_OUT, out) + np.vdot(OF_STATE, state))
        slope = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(np.vdot(grad, direction), slope, rtol=1e-4)


def test_steps_are_the_loop():
    case = make_case(8)
    state, got, one = jnp.zeros((1, HEADS, DK, DV)), [], jax.jit(step)
    for t in range(1, IDS.shape[1]):  # the long segment of row 1
        out, state = one(*(x[1:2, :, t] for x in case), state)
        got.append(out)
    want, last = delta_loop(*case, IDS)
    np.testing.assert_allclose(np.stack(got, axis=2), want[1:2, :, 1:], **CLOSE)
    np.testing.assert_allclose(state, last[1:2], **CLOSE)


@pytest.mark.parametrize(("tokens", "width"), [(21, 4), (21, 1), (2, 4)])
def test_causal_conv_is_the_loop(tokens, width):
    rng = np.random.default_rng(width)
    ids = IDS[:, :tokens]
    x = rng.normal(size=(*ids.shape, 2, 3)).astype(np.float32) * (ids > 0)[..., None, None]
    taps = rng.normal(size=(width, 2, 3)).astype(np.float32)
    want = np.zeros(x.shape)
    for b, row in enumerate(ids):
        for start, end in segments_of(row):
            for t in range(start, end):
                for back in range(min(width, t - start + 1)):
                    want[b, t] += x[b, t - back].astype(float) * taps[width - 1 - back]
    got = causal_conv(x, taps, runs(jnp.asarray(ids)))
    np.testing.assert_allclose(got[ids > 0], want[ids > 0], **CLOSE)


def a_layer(seed, spec=SPEC):
    """(graph, weights of the second of two layers), no zero or one among them."""
    rng = np.random.default_rng(seed)
    graph, stacked = nnx.split(nnx.eval_shape(lambda: LinearAttention(spec, rngs=nnx.Rngs(0))))
    draw = lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape[1:]) + 0.1, jnp.float32)  # noqa: E731
    weights = jax.tree.map(draw, stacked)
    # Head by head from hardly any decay to 20 nats a token.
    weights["A_log"] = weights["A_log"].replace(jnp.log(jnp.array([0.01, 0.3, 3.0, 20.0])))
    return graph, weights


def layer_loop(weights, x):
    """The layer on one bare sequence [T, D] -> outputs [T, D], its state; float64, by the paper."""
    w = {name: np.asarray(leaf, np.float64) for name, leaf in nnx.to_pure_dict(weights).items()}
    x = np.asarray(x, np.float64)
    sigmoid = lambda y: 1 / (1 + np.exp(-y))  # noqa: E731
    columns = {name: np.einsum("td,dhe->the", x, w[name]) for name in "qkv"}
    width = len(w["conv_q"])
    mixed = {}
    for name, column in columns.items():
        padded = np.concatenate([np.zeros((width - 1, *column.shape[1:])), column])
        y = sum(w[f"conv_{name}"][n] * padded[n : n + len(x)] for n in range(width))
        mixed[name] = y * sigmoid(y)
    unit = lambda y: y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    share = LINEAR.value_heads // LINEAR.key_heads
    q, k = (unit(mixed[name]).repeat(share, axis=1) for name in "qk")
    q, v = q / np.sqrt(LINEAR.key_dim), mixed["v"]
    beta = sigmoid(x @ w["b"])
    log_decay = -np.exp(w["A_log"]) * np.log1p(np.exp(x @ w["a"] + w["dt_bias"]))
    swap = lambda y: y.swapaxes(0, 1)[None]  # noqa: E731
    out, state = delta_loop(*map(swap, (q, k, v, log_decay, beta)), np.ones((1, len(x)), int))
    out = out[0].swapaxes(0, 1)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + SPEC.rms_norm_eps) * w["norm"]
    z = np.einsum("td,dhe->the", x, w["z"])
    columns = {
        name: np.concatenate([np.zeros((width - 1, *y.shape[1:])), y])[-(width - 1) :]
        for name, y in columns.items()
    }
    y = np.einsum("the,hed->td", out * z * sigmoid(z), w["out"])
    return y, LinearState(*(columns[name] for name in "qkv"), state[0])


def hidden_states(seed, ids=IDS):
    x = np.random.default_rng(seed).normal(size=(*ids.shape, SPEC.hidden_size))
    return x.astype(np.float32).reshape(ids.size, -1)


@functools.partial(jax.jit, static_argnums=0)
def run_layer(graph, weights, x, ids):
    return nnx.merge(graph, weights)(x, ids)


def empty_state(rows, dtype=jnp.float32):
    key, value = (LINEAR.key_heads, LINEAR.key_dim), (LINEAR.value_heads, LINEAR.value_dim)
    column = rows, LINEAR.conv_width - 1
    q, k, v = (jnp.zeros((*column, *heads), dtype) for heads in (key, key, value))
    return LinearState(q, k, v, jnp.zeros((rows, value[0], key[1], value[1])))


@functools.partial(jax.jit, static_argnums=(0, 4))
def extend_layer(graph, weights, x, ids, chunk):
    """Right-padded rows in chunks: outputs, and the state after the last real token of each."""
    rows, tokens = ids.shape
    x, out, state = x.reshape(rows, tokens, -1), [], empty_state(rows, x.dtype)
    for start in range(0, tokens, chunk):
        part = x[:, start : start + chunk]
        real = ids[:, start : start + chunk] > 0
        y, state = nnx.merge(graph, weights).extend(part.reshape(-1, x.shape[-1]), real, state)
        out.append(y.reshape(part.shape))
    return jnp.concatenate(out, axis=1).reshape(rows * tokens, -1), state


def test_the_layer_is_the_loop_in_packed_rows():
    graph, weights = a_layer(1)
    x = hidden_states(2)
    out = run_layer(graph, weights, x, IDS)
    out, x = (y.reshape(*IDS.shape, -1) for y in (out, x))
    for b, row in enumerate(IDS):
        for start, end in segments_of(row):
            want, _ = layer_loop(weights, x[b, start:end])
            np.testing.assert_allclose(out[b, start:end], want, rtol=1e-4, atol=1e-5)


RIGHT_PADDED = (np.arange(9) < np.array([9, 4, 2, 0])[:, None]).astype(np.int32)


@pytest.mark.parametrize("chunk", [9, 4, 1])
def test_the_state_after_a_prompt_is_the_loops_and_decoding_goes_on_from_it(chunk):
    graph, weights = a_layer(3)
    x = hidden_states(4, RIGHT_PADDED)
    read, state = extend_layer(graph, weights, x, RIGHT_PADDED, chunk)
    read = read.reshape(*RIGHT_PADDED.shape, -1)
    rest = np.random.default_rng(5).normal(size=(3, 4, SPEC.hidden_size)).astype(np.float32)
    decode = jax.jit(lambda weights, x, state: nnx.merge(graph, weights).decode(x, state))
    got, after = [], state
    for new in rest:
        out, after = decode(weights, new, after)
        got.append(out)
    x = x.reshape(*RIGHT_PADDED.shape, -1)
    for b, length in enumerate(RIGHT_PADDED.sum(axis=1)):
        if length:
            want, state_b = layer_loop(weights, x[b, :length])
            np.testing.assert_allclose(read[b, :length], want, rtol=1e-4, atol=1e-5)
            want = state_b
            for have, wanted in zip(state, want, strict=True):
                np.testing.assert_allclose(have[b], wanted, rtol=1e-4, atol=1e-5)
        whole = np.concatenate([x[b, :length], rest[:, b]])
        want, last = layer_loop(weights, whole)
        np.testing.assert_allclose(np.stack(got)[:, b], want[length:], rtol=1e-4, atol=1e-5)
        for have, wanted in zip(after, last, strict=True):
            np.testing.assert_allclose(have[b], wanted, rtol=1e-4, atol=1e-5)


def test_poison_in_the_padding_reaches_nothing():
    """Neither outputs nor gradients know what stands there, not even when it is NaN."""
    graph, weights = a_layer(6)
    x, pads = hidden_states(7), IDS.reshape(-1) == 0

    @jax.jit
    def value_and_grads(weights, x):
        def loss(weights, x):
            out = nnx.merge(graph, weights)(x, IDS)
            _, state = nnx.merge(graph, weights).extend(x, IDS > 0, empty_state(len(IDS)))
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.square(state.memory)), (out, state)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, x)

    want = value_and_grads(weights, np.where(pads[:, None], 0.0, x))
    assert jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), want))
    got = value_and_grads(weights, np.where(pads[:, None], np.nan, x))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(got[1][1][pads], 0.0)


def test_bfloat16_activations_keep_a_float32_state():
    graph, weights = a_layer(8)
    low = jnp.asarray(hidden_states(9, RIGHT_PADDED), jnp.bfloat16)
    out, state = extend_layer(graph, weights, low, RIGHT_PADDED, 9)
    assert (out.dtype, state.q.dtype, state.memory.dtype) == (jnp.bfloat16,) * 2 + (jnp.float32,)
    want, exact = extend_layer(graph, weights, low.astype(jnp.float32), RIGHT_PADDED, 9)
    np.testing.assert_allclose(state.memory, exact.memory, rtol=0, atol=0.03)
    assert np.abs(out.astype(jnp.float32) - want).mean() < 0.01
    graph_of, decode = graph, LinearAttention.decode
    after = jax.jit(lambda w, x, s: decode(nnx.merge(graph_of, w), x, s)[1])(
        weights, low[:4], state
    )
    assert (after.q.dtype, after.memory.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_fresh_layer_has_its_rates_in_float32_and_away_from_zero():
    @jax.jit
    def fresh(key):
        layer = LinearAttention(SPEC, rngs=nnx.Rngs(params=key))
        return layer.A_log[...], layer.dt_bias[...]

    logs, biases = fresh(jax.random.key(0))
    assert logs.dtype == biases.dtype == jnp.float32
    rates = np.exp(np.asarray(logs))
    assert rates.min() >= 1
    assert rates.max() <= 16
    assert len(np.unique(rates)) == rates.size
