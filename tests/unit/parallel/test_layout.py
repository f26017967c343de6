"""Where activations lie: any mesh gives back what went in, and each device has its share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.parallel.layout import flatten, gathered, hold, unflatten
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh, platform

MESHES = (
    MeshSpec(), MeshSpec(data=2, context=2), MeshSpec(context=4), MeshSpec(expert=2, context=2),
    MeshSpec(fsdp=2, tensor=2),
)  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(4, 8), (2, 6), (3, 5)])
def test_unflatten_undoes_flatten(mesh, shape):
    x = np.arange(np.prod(shape) * 3, dtype=np.float32).reshape(*shape, 3)
    with jax.set_mesh(make_mesh(mesh)):
        flat, back = jax.jit(lambda x: (flatten(x), unflatten(flatten(x), x.shape[:2])))(x)
    np.testing.assert_array_equal(back, x)
    # The same tokens, each once, whole.
    assert sorted(map(tuple, np.asarray(flat))) == sorted(map(tuple, x.reshape(-1, 3)))


def test_a_device_has_the_tokens_of_its_rows_and_places():
    x = jnp.arange(4 * 8).reshape(4, 8)
    mesh = make_mesh(MeshSpec(data=2, context=2))
    with jax.set_mesh(mesh):
        flat = jax.jit(flatten)(x)
    for shard in flat.addressable_shards:
        ((row, *_, place),) = np.argwhere(mesh.devices == shard.device)
        want = np.asarray(x)[2 * row : 2 * row + 2, 4 * place : 4 * place + 4]
        np.testing.assert_array_equal(np.asarray(shard.data), want.reshape(-1))


def test_without_context_tokens_are_in_the_order_of_the_rows():
    x = jnp.arange(4 * 8).reshape(4, 8)
    with jax.set_mesh(make_mesh(MeshSpec(data=2, fsdp=2))):
        np.testing.assert_array_equal(jax.jit(flatten)(x), np.arange(32))
    np.testing.assert_array_equal(flatten(x), np.arange(32))


def test_a_gathered_weight_is_whole_and_its_gradient_is_stored_in_parts():
    mesh = make_mesh(MeshSpec(fsdp=2, tensor=2))
    w = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)

    def loss(w):
        y = gathered(w, ("embed", "mlp"))
        return jnp.sum(y * y), y

    with jax.set_mesh(mesh):
        grad, y = jax.jit(jax.grad(loss, has_aux=True))(w)
    np.testing.assert_array_equal(y, w)
    np.testing.assert_allclose(grad, 2 * w, rtol=1e-6)
    assert {shard.data.shape for shard in y.addressable_shards} == {(4, 3)}
    assert {shard.data.shape for shard in grad.addressable_shards} == {(2, 3)}


def test_platform_is_that_of_the_mesh():
    assert platform() == "cpu"
    device = jax.sharding.AbstractDevice(device_kind="TPU v5p", num_cores=2, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert platform() == "tpu"
        x = jnp.ones((2, 3))
        assert hold(flatten(x), (2, 3)).shape == (6,)
