"""The same devices under other axis sizes, so that weights need not be gathered to get there."""

import dataclasses
import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from s3ac_jax.core.types import PyTree
from s3ac_jax.parallel.mesh import MESH_AXES, MeshSpec, names

# What weights are cut along where their width is whole, and where more of it comes from.
_MODEL = ("tensor", "expert")
_FREE = ("fsdp", "context", "data", *_MODEL)


@dataclasses.dataclass(frozen=True)
class Regrid:
    """From one mesh to another of the same devices.

    between: the first, its axes cut into pieces. target: the second. parts: which pieces make up
    its tensor and its expert axis, the first varies slowest.
    Source: ours.
    """

    between: Mesh
    target: Mesh
    parts: dict[str, tuple[str, ...]]

    def before(self, place: NamedSharding) -> NamedSharding:
        """Where an array lies by `place` on the target, in terms of the pieces.

        Raises ValueError for another axis than tensor and expert. Source: ours.
        """
        entries = []
        for entry in place.spec:
            if other := set(names(entry)) - set(_MODEL):
                raise ValueError(f"only tensor and expert have pieces, not {sorted(other)}")
            entries.append(tuple(piece for name in names(entry) for piece in self.parts[name]))
        return NamedSharding(self.between, PartitionSpec(*(entry or None for entry in entries)))

    def after(self, tree: PyTree, places: PyTree) -> PyTree:
        """Arrays laid out by `before(place)`, as arrays of the target; nothing is copied.

        Source: ours: a program has its devices in one order, and the target has another.
        """

        def renamed(x: jax.Array, place: NamedSharding) -> jax.Array:
            shards = [shard.data for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, place, shards)

        return jax.tree.map(renamed, tree, places)


def regrid(mesh: Mesh, spec: MeshSpec) -> Regrid:
    """The devices of `mesh` so that a device keeps, of each weight, a part of what it has.

    The target's tensor and expert axis begin with what they have in common with those of the mesh;
    what is missing comes from fsdp, then from the others. So fsdp turns into experts by an exchange
    within fsdp, where any other order of devices would have each gather all experts.
    Raises ValueError when there are not as many devices.
    Source: ours.
    """
    if spec.num_devices != mesh.size:
        raise ValueError(
            f"rollout.mesh must have as many devices as mesh ({mesh.size}), got {spec.num_devices}"
        )
    # Of each axis its pieces, the first varies slowest: what it keeps, what is free, what it gives.
    pieces: dict[str, dict[str, int]] = {axis: {axis: mesh.shape[axis]} for axis in MESH_AXES}
    free = {axis: axis for axis in MESH_AXES}
    parts: dict[str, tuple[str, ...]] = {}
    for axis in _MODEL:
        common = math.gcd(mesh.shape[axis], getattr(spec, axis))
        free[axis] = f"{axis}_rest"
        pieces[axis] = {axis: common, free[axis]: mesh.shape[axis] // common}
        parts[axis] = (axis,)
    for axis in _MODEL:
        missing = getattr(spec, axis) // pieces[axis][axis]
        for giver in _FREE:
            share = math.gcd(pieces[giver][free[giver]], missing)
            if share > 1:
                given = f"{giver}_to_{axis}"
                pieces[giver] = _with(pieces[giver], free[giver], given, share)
                parts[axis] += (given,)
                missing //= share
    sizes = {name: size for axis in MESH_AXES for name, size in pieces[axis].items()}
    between = _mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes))
    order = [free[axis] for axis in MESH_AXES] + [piece for axis in _MODEL for piece in parts[axis]]
    grid = between.devices.transpose([list(sizes).index(name) for name in order])
    sides = ("data", "fsdp", "context", *_MODEL)
    grid = grid.reshape([getattr(spec, side) for side in sides])
    grid = grid.transpose([sides.index(axis) for axis in MESH_AXES])
    return Regrid(between, _mesh(grid, MESH_AXES), parts)


def _with(pieces: dict[str, int], of: str, given: str, share: int) -> dict[str, int]:
    """The pieces of an axis once the free one has given a share, which varies faster."""
    found = {}
    for name, size in pieces.items():
        found |= {of: size // share, given: share} if name == of else {name: size}
    return found


def _mesh(grid, axes: tuple[str, ...]) -> Mesh:
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))
