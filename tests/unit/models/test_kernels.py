"""The platforms' kernels against plain attention, and programs with them for TPU and CUDA."""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from s3ac_jax.models import kernels
from s3ac_jax.models.attention import attend_rows, choose
from s3ac_jax.parallel.mesh import MESH_AXES, MeshSpec, make_mesh

TOKENS = 256


def plain(q, k, v, q_ids, k_ids, offset):
    """softmax(q k^T) v written once more, over all pairs."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, precision="highest") / q.shape[3] ** 0.5
    places = np.arange(k.shape[2]) <= (offset + np.arange(q.shape[2]))[:, None]
    mask = places & (q_ids[:, :, None] == k_ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9), axis=-1)
    return jnp.einsum("bhts,bhsd->bhtd", weights, v, precision="highest")


def case(heads, kv_heads, dim, tokens=TOKENS, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.zeros((2, tokens), np.int32)
    ids[0, : tokens - 40] = 1 + np.arange(tokens - 40) // 75
    ids[1, 40:] = 1
    q = rng.normal(size=(2, heads, tokens, dim))
    k, v = rng.normal(size=(2, 2, kv_heads, tokens, dim))
    weights = rng.normal(size=q.shape) * (ids > 0)[:, None, :, None]
    return *(x.astype(np.float32) for x in (q, k, v, weights)), ids


def with_gradients(attend, q, k, v, weights):
    def total(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(out * weights), out

    grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


def assert_same(got, want, ids):
    real = (ids > 0)[:, None, :, None]
    got, want = (got[0] * real, *got[1:]), (want[0] * real, *want[1:])
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (7, 1, 128)])
def test_splash_equals_plain_attention(heads, kv_heads, dim):
    q, k, v, weights, ids = case(heads, kv_heads, dim)
    splash = functools.partial(kernels.splash, interpret=True)
    got = with_gradients(lambda *x: splash(*x, ids, ids), q, k, v, weights)
    want = with_gradients(lambda *x: plain(*x, ids, ids, 0), q, k, v, weights)
    assert_same(got, want, ids)


def test_splash_of_one_part_of_the_queries():
    q, k, v, weights, ids = case(2, 1, 64, tokens=512)
    splash = functools.partial(kernels.splash, interpret=True)

    def last_quarter(attend):
        def cut(q, k, v):
            return attend(q[:, :, 384:], k, v, ids[:, 384:], ids, 384)

        return with_gradients(cut, q, k, v, weights[:, :, 384:])

    traced = jax.jit(splash)  # its offset is no number here
    got, want = last_quarter(traced), last_quarter(plain)
    assert_same(got, want, ids[:, 384:])


def test_splash_names_what_it_cannot_take():
    q = jnp.zeros((1, 2, 200, 16))
    with pytest.raises(ValueError, match="got 200 of 200; use another"):
        attend_rows(q, q, q, jnp.ones((1, 200), jnp.int32), kind="splash")


def test_a_kind_that_is_none():
    q = jnp.zeros((1, 2, 8, 16))
    with pytest.raises(ValueError, match="unknown kind of attention 'sparse'"):
        attend_rows(q, q, q, jnp.ones((1, 8), jnp.int32), kind="sparse")


@pytest.mark.parametrize("whole", [True, False])
def test_cudnns_pieces_equal_plain_attention(monkeypatch, whole):
    # The pieces, by another library: cuDNN itself needs a CUDA device.
    monkeypatch.setattr(kernels, "_CUDNN_QUERIES", 100)
    q, k, v, weights, ids = case(4, 2, 16)
    pieces = functools.partial(kernels.cudnn, implementation="xla")
    start = 0 if whole else 128

    def cut(attend):
        return with_gradients(
            lambda q, k, v: attend(q[:, :, start:], k, v, ids[:, start:], ids, start),
            q, k, v, weights[:, :, start:],
        )  # fmt: skip

    assert_same(cut(pieces), cut(plain), ids[:, start:])


# libtpu's compiler, without its notes on a machine that has no TPU.
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}  # fmt: skip


def tpu_mesh(spec):
    from jax.experimental import topologies

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    return make_mesh(spec, topology.devices)


@pytest.mark.parametrize("context", [1, 2])
def test_splash_compiles_for_a_tpu(context):
    pytest.importorskip("libtpu")
    mesh = tpu_mesh(MeshSpec(tensor=4 // context, context=context))
    tokens = 8192

    def shape(heads, *rest, dtype=jnp.bfloat16):
        spec = PartitionSpec(None, "tensor", "context") if heads else PartitionSpec(None, "context")
        sizes = (1, heads, tokens, *rest) if heads else (1, tokens)
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    q, k, ids = shape(8, 128), shape(4, 128), shape(0, dtype=jnp.int32)

    def step(q, k, v, ids):
        return jax.grad(
            lambda *x: jnp.sum(attend_rows(*x, ids).astype(jnp.float32)), argnums=(0, 1, 2)
        )(q, k, v)

    with jax.set_mesh(mesh):
        program = jax.jit(step).lower(q, k, k, ids).compile()
    assert program.as_text().count("splash_mha") > 0
    # Scores of one head alone would take 256 MiB in float32.
    assert program.memory_analysis().temp_size_in_bytes < 2**27


def abstract_mesh(platform, **sizes):
    device = jax.sharding.AbstractDevice(device_kind=platform, num_cores=1, platform=platform)
    shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    return AbstractMesh(shape, MESH_AXES, axis_types=kinds, abstract_device=device)


@pytest.mark.parametrize(
    ("platform", "tokens", "dim", "want"),
    [
        ("cpu", 512, 64, "dense"), ("cpu", 513, 64, "chunked"), ("tpu", 512, 64, "dense"),
        ("tpu", 1024, 256, "splash"), ("tpu", 1100, 64, "chunked"), ("cuda", 512, 64, "dense"),
        ("cuda", 1024, 256, "chunked"),
    ],
)  # fmt: skip
def test_the_choice_follows_the_platform(platform, tokens, dim, want):
    q = jax.ShapeDtypeStruct((1, 2, tokens, dim), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(abstract_mesh(platform)):
        assert choose(q, q) == want


@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="needs JAX's CUDA plugin (no device)",
)
def test_cudnn_is_lowered_for_cuda():
    mesh = abstract_mesh("cuda", tensor=2, context=2)
    q = jax.ShapeDtypeStruct((1, 4, 8192, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32)

    def step(q, k, v, ids):
        return jax.grad(
            lambda *x: jnp.sum(attend_rows(*x, ids).astype(jnp.float32)), argnums=(0, 1, 2)
        )(q, k, v)

    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(step).trace(q, q, q, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert "cudnn$fmhaScaleBias" in text
    assert "cudnn$fmhaScaleBiasSoftmaxBackward" in text
