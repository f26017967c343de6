"""Which axis of an array goes where, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.models.network import critic_network
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh, spec_of
from tests.helpers import tiny_spec


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshSpec(fsdp=2, tensor=2))


@pytest.mark.parametrize(
    ("axes", "shape", "want"),
    [
        (("rows", None), (4, 3), ("fsdp", None)),
        (("vocab", "embed"), (6, 4), ("tensor", "fsdp")),
        (("layers", "embed", "heads", "head_dim"), (2, 4, 4, 2), (None, "fsdp", "tensor", None)),
        (("layers", "mlp", "embed"), (2, 4, 6), (None, "tensor", "fsdp")),
        (("embed",), (8,), ("fsdp",)),
        ((), (), ()),
        # What does not divide is on every device.
        (("vocab", "embed"), (17, 4), (None, "fsdp")),
        (("embed", "kv_heads"), (4, 1), ("fsdp", None)),
        (("rows", None), (3, 4), (None, None)),
    ],
)
def test_spec_of(mesh, axes, shape, want):
    got = spec_of(axes, shape, mesh)
    assert got == PartitionSpec(*want)
    # And it is a sharding that jax takes.
    array = jax.device_put(np.ones(shape), jax.sharding.NamedSharding(mesh, got))
    local = array.addressable_shards[0].data.shape
    parts = [1 if w is None else 2 for w in want]
    assert local == tuple(n // p for n, p in zip(shape, parts, strict=True))


def test_an_axis_takes_as_many_mesh_axes_as_divide_it():
    mesh = make_mesh(MeshSpec(data=2, expert=2))
    for rows, want in ((4, ("data", "expert")), (6, "data"), (3, None)):
        assert spec_of(("rows", "context"), (rows, 8), mesh) == PartitionSpec(want, None)
    assert spec_of(("experts", "expert_embed"), (4, 4), mesh) == PartitionSpec("expert", None)
    assert spec_of(("embed", "heads"), (4, 4), mesh) == PartitionSpec("expert", None)


def test_unknown_axis(mesh):
    with pytest.raises(ValueError, match=r"no sharding rule for logical axis 'width'"):
        spec_of(("width",), (4,), mesh)


@pytest.mark.parametrize("axes", [("heads", "mlp"), ("rows", "embed"), ("vocab", "kv_heads")])
def test_two_dimensions_on_one_mesh_axis(mesh, axes):
    with pytest.raises(ValueError, match=r"one mesh axis on two dimensions"):
        spec_of(axes, (4, 4), mesh)


def test_names_and_dimensions_must_match(mesh):
    with pytest.raises(ValueError, match="zip"):
        spec_of(("rows",), (4, 3), mesh)


def test_every_weight_of_the_networks_has_a_place(mesh):
    network = critic_network(tiny_spec(tie_embeddings=False))
    places = parallel.shardings(network.axes, network.abstract, mesh)
    found = {name: place.spec for name, place in named_leaves(places).items()}
    # Vectors are whole everywhere.
    assert found["value_head"] == found["backbone/final_norm"] == PartitionSpec(None)
    assert found["backbone/layers/attn/k"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert found["backbone/embed"] == PartitionSpec(None, "fsdp")  # 17 characters do not divide
    assert len(found) == len(named_leaves(network.abstract))


def test_mesh_spec():
    spec = MeshSpec(data=3, fsdp=2, tensor=5)
    assert (spec.num_devices, spec.row_shards) == (30, 6)
    # Devices that hold other experts have other rows; those along a row have the same.
    spec = MeshSpec(data=3, fsdp=2, tensor=5, expert=7, context=11)
    assert (spec.num_devices, spec.row_shards) == (2310, 42)
    assert spec.for_decoding() == MeshSpec(data=66, tensor=5, expert=7)
    with pytest.raises(ValueError, match=r"mesh.fsdp must be at least 1, got 0"):
        MeshSpec(fsdp=0)


def test_mesh_needs_its_devices():
    mesh = make_mesh(MeshSpec(data=2), jax.devices()[1:4])
    assert mesh.axis_names == parallel.MESH_AXES
    assert mesh.devices.ravel().tolist() == jax.devices()[1:3]
    with pytest.raises(ValueError, match=r"needs 8 devices, here: 4; lower them"):
        make_mesh(MeshSpec(data=8))


def test_constrain(mesh):
    assert parallel.constrain(jnp.ones((4, 3)), "rows", None).shape == (4, 3)  # no mesh, no effect
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: parallel.constrain(2 * x, "rows", None))(jnp.ones((4, 3)))
    assert out.addressable_shards[0].data.shape == (2, 3)
    np.testing.assert_array_equal(out, np.full((4, 3), 2.0))


def test_replicated(mesh):
    array = jax.device_put(np.ones((4, 3)), parallel.replicated(mesh))
    assert {shard.data.shape for shard in array.addressable_shards} == {(4, 3)}
    assert len(array.addressable_shards) == 4
