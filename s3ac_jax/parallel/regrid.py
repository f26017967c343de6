"""The same devices under other axis sizes, so that weights need not be gathered to get there."""

import dataclasses
import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from s3ac_jax.core.types import PyTree
from s3ac_jax.parallel.mesh import MESH_AXES, MeshSpec, mesh_of, names

Pieces = tuple[str, ...]
# What weights are cut along where their width is whole, and where more of it comes from.
_MODEL = ("tensor", "expert")
_FREE = ("fsdp", "context", "data", *_MODEL)


@dataclasses.dataclass(frozen=True)
class Regrid:
    """From one mesh to another of the same devices.

    between: the first, its axes cut into pieces. target: the second. pieces: those of each axis of
    the first mesh; parts: those that make up each of the target that weights are cut along. The
    first varies slowest.
    Source: ours.
    """

    between: Mesh
    target: Mesh
    pieces: dict[str, Pieces]
    parts: dict[str, Pieces]

    def moved(self, tree: PyTree, here: PyTree, there: PyTree, dtypes: PyTree) -> PyTree:
        """Inside a jitted function with `between` in context: arrays in other dtypes, where
        `after` takes them.

        here, there: shardings on the first mesh and on the target; of these by tensor and expert.
        Source: ours: XLA's partitioner takes such a way for a sum over all devices, and then each
        holds whole weights for a while (64 GiB for experts of which it keeps 1/128).
        """

        def move(x: Array, here: NamedSharding, there: NamedSharding, dtype: DTypeLike) -> Array:
            held, wanted = self._cuts(here, self.pieces), self._cuts(there, self.parts)
            return jax.shard_map(
                lambda x: _exchanged(x.astype(dtype), held, wanted), mesh=self.between,
                in_specs=_spec(held), out_specs=_spec(wanted), check_vma=False,
            )(x)  # fmt: skip

        return jax.tree.map(move, tree, here, there, dtypes)

    def _cuts(self, place: NamedSharding, pieces: dict[str, Pieces]) -> list[Pieces]:
        """The pieces that each dimension is cut along, of more than one device."""
        size = self.between.shape
        return [
            tuple(p for name in names(entry) for p in pieces[name] if size[p] > 1)
            for entry in place.spec
        ]

    def after(self, tree: PyTree, places: PyTree) -> PyTree:
        """What `moved` has made, as arrays of the target; nothing is copied.

        Source: ours: a program has its devices in one order, and the target has another.
        """

        def renamed(x: jax.Array, place: NamedSharding) -> jax.Array:
            shards = [shard.data for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, place, shards)

        return jax.tree.map(renamed, tree, places)


def _spec(cuts: list[Pieces]) -> PartitionSpec:
    return PartitionSpec(*(cut or None for cut in cuts))


def _exchanged(x: Array, held: list[Pieces], wanted: list[Pieces]) -> Array:
    """Inside a shard_map: x cut along `held`, by its dimensions, cut along `wanted`."""
    cuts = list(held)
    # Widths last: what they give up may be what another dimension then takes.
    for axis in sorted(range(x.ndim), key=lambda axis: not wanted[axis]):
        while cuts[axis] != wanted[axis][: len(cuts[axis])]:
            # The last varies fastest, so that what comes together is in order.
            *rest, piece = cuts[axis]
            cuts[axis] = tuple(rest)
            taker = next(
                (n for n, cut in enumerate(cuts) if (*cut, piece) == wanted[n][: len(cut) + 1]),
                None,
            )
            if taker is None:
                x = jax.lax.all_gather(x, piece, axis=axis, tiled=True)
            else:
                x = jax.lax.all_to_all(x, piece, taker, axis, tiled=True)
                cuts[taker] = (*cuts[taker], piece)
    for axis, cut in enumerate(cuts):
        for piece in wanted[axis][len(cut) :]:
            size = x.shape[axis] // jax.lax.axis_size(piece)
            start = jax.lax.axis_index(piece) * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis)
    return x


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
    parts: dict[str, Pieces] = {}
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
    between = mesh_of(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes))
    order = [free[axis] for axis in MESH_AXES] + [piece for axis in _MODEL for piece in parts[axis]]
    grid = between.devices.transpose([list(sizes).index(name) for name in order])
    sides = ("data", "fsdp", "context", *_MODEL)
    grid = grid.reshape([getattr(spec, side) for side in sides])
    grid = grid.transpose([sides.index(axis) for axis in MESH_AXES])
    names_of = {axis: tuple(sizes) for axis, sizes in pieces.items()}
    return Regrid(between, mesh_of(grid), names_of, parts)


def _with(pieces: dict[str, int], of: str, given: str, share: int) -> dict[str, int]:
    """The pieces of an axis once the free one has given a share, which varies faster."""
    found = {}
    for name, size in pieces.items():
        found |= {of: size // share, given: share} if name == of else {name: size}
    return found
