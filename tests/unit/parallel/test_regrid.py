"""Weights go from mesh to mesh: the same numbers, where they belong, without being gathered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    (MeshSpec(fsdp=2, context=2), MeshSpec(tensor=2, expert=2)),
    (MeshSpec(context=4), MeshSpec(tensor=2, expert=2)),
]
AXES, SHAPE = ("layers", "experts", "expert_embed", "mlp"), (2, 4, 8, 12)


def places(first, second):
    """(Where experts' weights are trained, the way, where they are sampled from)."""
    mesh = make_mesh(first)
    grids, abstract = regrid(mesh, second), jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    here = parallel.shardings(AXES, abstract, mesh)
    return here, grids, parallel.shardings(AXES, abstract, grids.target, whole=True)


def moving(here, grids, there, dtype=jnp.float32):
    return jax.jit(lambda x: grids.moved(x + 1, here, there, dtype))


@pytest.mark.parametrize(("first", "second"), CASES)
def test_every_number_is_where_it_belongs(first, second):
    here, grids, there = places(first, second)
    wanted = {axis: getattr(second, axis) for axis in parallel.MESH_AXES}
    assert dict(grids.target.shape) == wanted
    assert set(grids.target.devices.flat) == set(jax.devices())
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    with jax.set_mesh(grids.between):
        moved = moving(here, grids, there)(jax.device_put(x, here))
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


@pytest.mark.parametrize(
    ("first", "second", "wires"),
    [
        (MeshSpec(fsdp=2, expert=2), MeshSpec(expert=4), {"all-to-all"}),
        (MeshSpec(fsdp=4), MeshSpec(tensor=2, expert=2), {"all-to-all"}),
        (MeshSpec(fsdp=2, context=2), MeshSpec(data=2, expert=2), {"all-to-all", "all-gather"}),
        (MeshSpec(fsdp=4), MeshSpec(data=4), {"all-gather"}),
        (MeshSpec(expert=4), MeshSpec(tensor=2, expert=2), {"all-to-all"}),
        (MeshSpec(data=4), MeshSpec(tensor=4), set()),
    ],
)
def test_nothing_is_gathered_that_is_only_exchanged(first, second, wires):
    here, grids, there = places(first, second)
    with jax.set_mesh(grids.between):
        made = moving(here, grids, there, jnp.bfloat16).lower(
            jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=here)
        )
        text = made.compile().as_text()
    every = "all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter"
    assert set(re.findall(rf" ({every})(?:-start)?\(", text)) == wires
    assert made.out_info.dtype == jnp.bfloat16


def test_another_number_of_devices():
    with pytest.raises(ValueError, match=r"as many devices as mesh \(4\), got 2"):
        regrid(make_mesh(MeshSpec(fsdp=4)), MeshSpec(data=2))
