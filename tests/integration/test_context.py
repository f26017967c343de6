"""Rows shared out over devices by tokens and heads: the same attention, the same gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from s3ac_jax.models.attention import attend_rows
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh, spec_of

AXES = (("rows", "heads", "context", None), ("rows", "kv_heads", "context", None))


def case(heads, kv_heads, dim, rows, tokens):
    rng = np.random.default_rng(heads)
    ids = np.zeros((rows, tokens), np.int32)
    for row in range(rows):
        start = int(rng.integers(tokens // 4))
        ids[row, start : tokens - 9 * row] = 1 + np.arange(tokens - 9 * row - start) // 23
    q, weights = rng.normal(size=(2, rows, heads, tokens, dim))
    k, v = rng.normal(size=(2, rows, kv_heads, tokens, dim))
    return *(jnp.asarray(x, jnp.float32) for x in (2 * q, k, v, weights)), jnp.asarray(ids)


def with_gradients(q, k, v, weights, ids, kind):
    def total(q, k, v):
        out = attend_rows(q, k, v, ids, kind=kind)
        return jnp.sum(out * weights), out

    grads, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, *grads


def placed(mesh, q, k, v, weights, ids):
    axes = (AXES[0], AXES[1], AXES[1], AXES[0], ("rows", "context"))
    return [
        jax.device_put(x, NamedSharding(mesh, spec_of(names, x.shape, mesh)))
        for x, names in zip((q, k, v, weights, ids), axes, strict=True)
    ]


def compare(spec, sizes, kind):
    args = case(*sizes)
    want = jax.jit(functools.partial(with_gradients, kind="dense"))(*args)
    mesh = make_mesh(spec)
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(with_gradients, kind=kind))
        got = step(*placed(mesh, *args))
    for one, other in zip(got, want, strict=True):
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize(
    ("spec", "heads", "kv_heads"),
    [
        (MeshSpec(context=4), 4, 2),
        (MeshSpec(tensor=2, context=2), 4, 2),
        (MeshSpec(tensor=2, context=2), 6, 1),
        (MeshSpec(data=2, context=2), 3, 3),
        (MeshSpec(fsdp=2, tensor=2), 4, 2),
        # Key heads whole on every device, which takes one of them, or one for each query head.
        (MeshSpec(tensor=4), 12, 2),
        (MeshSpec(tensor=4), 12, 3),
        (MeshSpec(tensor=4), 12, 6),
        # Query heads that do not divide either.
        (MeshSpec(tensor=2, context=2), 3, 1),
    ],
)
def test_devices_agree_with_one_device(spec, heads, kv_heads):
    compare(spec, (heads, kv_heads, 8, 2, 64), "chunked")


def test_whole_scores_agree():
    compare(MeshSpec(tensor=2, context=2), (4, 2, 8, 2, 64), "dense")


def test_what_does_not_divide_is_done_by_all():
    compare(MeshSpec(data=2, context=2), (4, 2, 8, 3, 51), "chunked")


def test_chunks_of_long_rows_agree():
    compare(MeshSpec(context=4), (2, 1, 16, 1, 4 * 300), "chunked")


@pytest.mark.parametrize("spec", [MeshSpec(context=2), MeshSpec(tensor=2, context=2)])
def test_splash_agrees(spec):
    compare(spec, (4, 2, 16, 1, 512), "splash")


def test_keys_and_values_are_gathered_and_their_gradients_scattered():
    mesh = make_mesh(MeshSpec(context=4))
    args = placed(mesh, *case(4, 2, 8, 1, 64))
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(with_gradients, kind="chunked"))
        text = step.lower(*args).as_text()
    assert text.count("stablehlo.all_gather") >= 2
    assert text.count("stablehlo.reduce_scatter") == 2


def test_each_device_keeps_its_part_of_the_memory():
    sizes = (4, 2, 64, 1, 4096)

    def temporaries(spec):
        mesh = make_mesh(spec)
        args = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, where))
            for x, where in _shapes(mesh, *sizes)
        ]
        with jax.set_mesh(mesh):
            step = jax.jit(functools.partial(with_gradients, kind="chunked"))
            return step.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(MeshSpec(tensor=2, context=2)) < 0.5 * temporaries(MeshSpec())


def _shapes(mesh, heads, kv_heads, dim, rows, tokens):
    for count in (heads, kv_heads, kv_heads, heads):
        x = jax.ShapeDtypeStruct((rows, count, tokens, dim), jnp.float32)
        yield x, spec_of(AXES[0], x.shape, mesh)
    x = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    yield x, spec_of(("rows", "context"), x.shape, mesh)
