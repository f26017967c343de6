"""Rows sorted by expert, laid out in blocks, and multiplied: against loops, gradients included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.models import grouped

EXPERTS, TOKENS, PER_TOKEN, WIDTH, OUT = 5, 37, 2, 3, 4


def routings(num_experts=EXPERTS):
    """Experts [tokens, k] of every kind of batch."""
    rng = np.random.default_rng(0)
    shape = (TOKENS, PER_TOKEN)
    mixed = rng.integers(num_experts, size=shape)
    return {
        "mixed": mixed,
        "one has all": np.full(shape, 3),
        "first and last": np.where(mixed < 3, 0, num_experts - 1),
        "most are nobody's": np.where(mixed == 2, 2, rng.choice([-1, num_experts, 99], size=shape)),
        "nobody's": np.full(shape, num_experts),
    }


def test_layout_by_hand():
    """Two of expert 0, none of 1, three of 2, one of 3; 9 and -1 are nobody's."""
    experts = jnp.array([[2, 9], [0, 2], [-1, 0], [3, 2]])
    bare = grouped.lay_out(experts, 4, None)
    assert bare.sizes.tolist() == [2, 0, 3, 1]
    assert bare.sources.tolist() == [2, 5, 0, 3, 7, 6, 8, 8]
    assert bare.slots.tolist() == [[2, 8], [0, 3], [8, 1], [5, 4]]
    assert bare.block_expert is None
    # In blocks of two: one of expert 0, two of expert 2, one of expert 3, and what is to spare.
    laid = grouped.lay_out(experts, 4, 2)
    assert laid.sources.tolist() == [2, 5, 0, 3, 7, 8, 6, 8, *[8] * 8]
    assert laid.slots.tolist() == [[2, 16], [0, 3], [16, 1], [6, 4]]
    assert laid.block_expert[:4].tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize(
    ("assignments", "num_experts", "want"),
    [(1, 8, 8), (512, 8, 8), (576, 8, 16), (680, 5, 32), (512, 4, 16), (9999, 4, 128)],
)
def test_block_rows_by_hand(assignments, num_experts, want):
    assert grouped.block_rows(assignments, num_experts) == want


@pytest.mark.parametrize("kind", routings())
@pytest.mark.parametrize("block", [4, 16, None])
def test_every_assignment_has_a_row_of_its_expert(kind, block):
    experts = routings()[kind]
    slots, sources, sizes, block_expert = grouped.lay_out(jnp.asarray(experts), EXPERTS, block)
    flat, slots, sources = experts.reshape(-1), np.asarray(slots).reshape(-1), np.asarray(sources)
    inside = (flat >= 0) & (flat < EXPERTS)
    counts = np.bincount(flat[inside], minlength=EXPERTS)
    np.testing.assert_array_equal(sizes, counts)
    # Out and back is where one came from; nobody else's is in between.
    np.testing.assert_array_equal(sources[slots[inside]], np.flatnonzero(inside))
    np.testing.assert_array_equal(slots[~inside], len(sources))
    filled = np.flatnonzero(sources < flat.size)
    np.testing.assert_array_equal(np.sort(slots[inside]), filled)
    if block is None:
        np.testing.assert_array_equal(flat[sources[filled]], np.sort(flat[inside]))
        return
    np.testing.assert_array_equal(np.asarray(block_expert)[filled // block], flat[sources[filled]])
    # Blocks in use are filled but for the last one of each expert.
    assert len(set(filled // block)) == sum(-(-count // block) for count in counts)
    assert len(sources) == block * len(block_expert)


def linear(rows, weights, product):
    return product(rows, weights["w"])


@functools.partial(jax.jit, static_argnums=3)
def outputs_and_gradients(x, experts, w, matmul, upstream):
    def outputs(x, w):
        return grouped.expert_outputs(x, experts, {"w": w}, linear, matmul)

    out, pullback = jax.vjp(outputs, x, w)
    return out, *pullback(upstream)


def loops(x, experts, w, upstream):
    """Float64, assignment by assignment: outputs, gradients of x and of w."""
    x, w, upstream = (np.asarray(y, np.float64) for y in (x, w, upstream))
    out, dx, dw = np.zeros((*experts.shape, OUT)), np.zeros(x.shape), np.zeros(w.shape)
    for n, j in np.ndindex(*experts.shape):
        e = experts[n, j]
        if 0 <= e < EXPERTS:
            out[n, j] = x[n] @ w[e]
            dx[n] += w[e] @ upstream[n, j]
            dw[e] += np.outer(x[n], upstream[n, j])
    return out, dx, dw


def arrays(seed):
    rng = np.random.default_rng(seed)
    shapes = (TOKENS, WIDTH), (EXPERTS, WIDTH, OUT), (TOKENS, PER_TOKEN, OUT)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def compare(kind, matmul):
    experts = routings()[kind]
    x, w, upstream = arrays(1)
    got = outputs_and_gradients(x, experts, w, matmul, upstream)
    for a, b in zip(got, loops(x, experts, w, upstream), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    idle = [e for e in range(EXPERTS) if e not in experts]
    np.testing.assert_array_equal(got[2][np.array(idle, int)], 0.0)


@pytest.mark.parametrize("kind", routings())
@pytest.mark.parametrize("matmul", ["blocked", "ragged"])
def test_outputs_and_gradients_are_the_loop(kind, matmul):
    compare(kind, matmul)


@jax.custom_vjp
def careless_ragged_dot(rows, w, sizes):
    """As a device may do it: NaN in the rows behind the last group, forward and backward."""
    return _careless_forward(rows, w, sizes)[0]


def _careless(rows, sizes):
    ends = jnp.cumsum(sizes)
    place = jnp.arange(len(rows))
    expert = jnp.searchsorted(ends, place, side="right")
    return jax.nn.one_hot(expert, len(sizes)), (place < ends[-1])[:, None]


def _careless_forward(rows, w, sizes):
    of, inside = _careless(rows, sizes)
    clean = jnp.where(inside, rows, 0.0)
    y = jnp.einsum("me,mi,eio->mo", of, clean, w)
    return jnp.where(inside, y, jnp.nan), (rows, w, sizes)


def _careless_backward(saved, dy):
    rows, w, sizes = saved
    of, inside = _careless(rows, sizes)
    clean, dy = jnp.where(inside, rows, 0.0), jnp.where(inside, dy, 0.0)
    dx = jnp.where(inside, jnp.einsum("me,mo,eio->mi", of, dy, w), jnp.nan)
    return dx, jnp.einsum("me,mi,mo->eio", of, clean, dy), None


careless_ragged_dot.defvjp(_careless_forward, _careless_backward)


def test_what_lies_behind_the_last_group_is_not_read(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_dot", careless_ragged_dot)
    outputs_and_gradients.clear_cache()
    try:
        compare("most are nobody's", "ragged")
    finally:
        outputs_and_gradients.clear_cache()


def test_gradients_of_many_bfloat16_rows_are_summed_in_float32():
    # 512 ones and then 64 of 1/256: in bfloat16 the sum would stay at 512.
    rows = jnp.concatenate([jnp.ones((512, 1)), jnp.full((64, 1), 1 / 256)]).astype(jnp.bfloat16)
    w, blocks = jnp.ones((2, 1, 1), jnp.float32), jnp.zeros(72, jnp.int32)
    up = jnp.ones((576, 1), jnp.bfloat16)

    def dot(w):
        return jnp.vdot(up, grouped.block_matmul(rows, w.astype(jnp.float32), blocks))

    np.testing.assert_allclose(jax.grad(dot)(w)[:, 0, 0], [512.25, 0.0], rtol=1e-6)
