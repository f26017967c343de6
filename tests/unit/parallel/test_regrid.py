"""Weights go from mesh to mesh: the same numbers, where they belong, without being gathered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh
from s3ac_jax.parallel.regrid import regrid

CASES = [
    (MeshSpec(fsdp=4), MeshSpec(data=4)),
    (MeshSpec(fsdp=4), MeshSpec(data=2, tensor=2)),
    (MeshSpec(fsdp=4), MeshSpec(tensor=2, expert=2)),
    (MeshSpec(fsdp=2, expert=2), MeshSpec(expert=4)),
    (MeshSpec(fsdp=2, expert=2), MeshSpec(data=2, expert=2)),
    (MeshSpec(expert=4), MeshSpec(tensor=2, expert=2)),
    (MeshSpec(tensor=4), MeshSpec(expert=4)),
    (MeshSpec(tensor=2, context=2), MeshSpec(data=2, tensor=2)),
    (MeshSpec(data=2, tensor=2), MeshSpec(tensor=4)),
    (MeshSpec(expert=2, context=2), MeshSpec(expert=4)),
]
AXES, SHAPE = ("layers", "experts", "expert_embed", "mlp"), (2, 4, 8, 12)


def places(first, second):
    """(Where experts' weights are trained, the way, where they are sampled from)."""
    mesh = make_mesh(first)
    grids, abstract = regrid(mesh, second), jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    here = parallel.shardings(AXES, abstract, mesh)
    return here, grids, parallel.shardings(AXES, abstract, grids.target, whole=True)


@pytest.mark.parametrize(("first", "second"), CASES)
def test_every_number_is_where_it_belongs(first, second):
    here, grids, there = places(first, second)
    wanted = {axis: getattr(second, axis) for axis in parallel.MESH_AXES}
    assert dict(grids.target.shape) == wanted
    assert set(grids.target.devices.flat) == set(jax.devices())
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    program = jax.jit(lambda x: x + 1, out_shardings=grids.before(there))
    moved = program(jax.device_put(x, here))
    pointers = {shard.device: shard.data.unsafe_buffer_pointer() for shard in
                moved.addressable_shards}  # fmt: skip
    got = grids.after(moved, there)
    np.testing.assert_array_equal(got, x + 1)
    assert got.sharding == there
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index] + 1)
        assert shard.data.unsafe_buffer_pointer() == pointers[shard.device]
    # And a program on the target takes it as it is.
    with jax.set_mesh(grids.target):
        np.testing.assert_allclose(jax.jit(jnp.sum)(got), (x + 1).sum())


@pytest.mark.parametrize(("first", "second"), CASES)
def test_a_device_keeps_a_part_of_what_it_has(first, second):
    """Of each dimension that both cut, by hand: what a device needs lies within what it holds."""
    here, _, there = places(first, second)
    held, wanted = (place.devices_indices_map(SHAPE) for place in (here, there))
    for axis, dimension in (("expert", 1), ("tensor", 3)):
        few, many = sorted((getattr(first, axis), getattr(second, axis)))
        if many % few:
            continue
        for device in jax.devices():
            a, b = (set(range(*of[device][dimension].indices(SHAPE[dimension])))
                    for of in (held, wanted))  # fmt: skip
            assert a <= b or b <= a


def test_widths_turn_into_experts_by_an_exchange():
    here, grids, there = places(MeshSpec(fsdp=2, expert=2), MeshSpec(expert=4))
    program = jax.jit(lambda x: x + 1, out_shardings=grids.before(there))
    text = program.lower(jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=here)).compile()
    text = text.as_text()
    assert "all-to-all" in text
    assert not re.search("all-gather|all-reduce|collective-permute", text)


def test_what_has_no_pieces():
    mesh = make_mesh(MeshSpec(fsdp=4))
    with pytest.raises(ValueError, match=r"as many devices as mesh \(4\), got 2"):
        regrid(mesh, MeshSpec(data=2))
    rows = NamedSharding(regrid(mesh, MeshSpec(data=4)).target, PartitionSpec("data"))
    with pytest.raises(ValueError, match=r"only tensor and expert .* not \['data'\]"):
        regrid(mesh, MeshSpec(data=4)).before(rows)
