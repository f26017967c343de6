"""The mesh, and which logical axis goes to which of its axes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from s3ac_jax.core.types import PyTree

MESH_AXES = ("data", "fsdp", "tensor", "expert", "context")

# Logical axis -> mesh axes. Weights of one name on two mesh axes would collide; see `spec_of`.
# Devices that hold other experts share out the rows too: all else would be done once for each.
# What devices do for other tokens is summed in any case: so each stores a part of the weight.
RULES: dict[str | None, tuple[str, ...]] = {
    "rows": ("data", "fsdp", "expert"),
    "context": ("context",),
    "tokens": ("data", "fsdp", "expert", "context"),
    "vocab": ("tensor",),
    "embed": ("fsdp", "expert", "context"),
    "expert_embed": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "linear_heads": ("tensor",),
    "whole_row_heads": ("tensor", "context"),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "head_dim": (),
    "layers": (),
    None: (),
}

# What is cut only so that a device has less to store.
WIDTHS = ("embed", "expert_embed")


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Devices along each mesh axis; their product is the number of devices used.

    Source: ours: the axes of the project's design.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1

    @property
    def num_devices(self) -> int:
        """Product of all axes. Source: ours."""
        return math.prod(dataclasses.astuple(self))

    @property
    def row_shards(self) -> int:
        """Devices that share out the rows of a batch. Source: ours."""
        return math.prod(getattr(self, name) for name in RULES["rows"])

    def for_decoding(self) -> "MeshSpec":
        """The same devices without a share of each weight's width, or of a row's tokens.

        Source: ours: a step of one token per row would gather every weight first.
        """
        return MeshSpec(
            data=self.data * self.fsdp * self.context, tensor=self.tensor, expert=self.expert
        )

    def __post_init__(self):
        for axis, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ValueError(f"mesh.{axis} must be at least 1, got {size}")


def make_mesh(spec: MeshSpec, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over the first devices. Raises ValueError when there are too few, or when they
    are no block of a TPU slice.

    Source: ours.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < spec.num_devices:
        raise ValueError(
            f"mesh.data x mesh.fsdp x ... needs {spec.num_devices} devices, here: {len(devices)}; "
            "lower them (or, on CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=N)"
        )
    grid = _grid(list(devices[: spec.num_devices]), dataclasses.astuple(spec))
    return mesh_of(grid)


def mesh_of(grid: np.ndarray, axes: tuple[str, ...] = MESH_AXES) -> Mesh:
    """The mesh of these devices, whose shardings the compiler works out. Source: ours."""
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def _grid(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """Devices so that the last axes are neighbours; slices of a TPU pod lie along the first."""
    if devices[0].platform != "tpu" or len(devices) == 1:
        return np.array(devices).reshape(shape)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        try:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except (AssertionError, NotImplementedError) as error:
            # An assertion is JAX's word for devices that are no block of the torus.
            raise ValueError(
                f"a mesh of {len(devices)} devices can't be laid on a part of a TPU slice that is "
                "no whole block of it; take all of it, or halves"
            ) from error
    # Between slices only gradients travel: over data, or over fsdp where that is all there is.
    axis = next((n for n in (0, 1) if shape[n] % slices == 0), None)
    if axis is None:
        raise ValueError(
            f"mesh.data or mesh.fsdp must be a multiple of the {slices} slices of the TPU pod"
        )
    between = [1] * len(shape)
    within, between[axis] = list(shape), slices
    within[axis] //= slices
    return mesh_utils.create_hybrid_device_mesh(
        within, between, devices, allow_split_physical_axes=True
    )


def platform() -> str:
    """What the mesh in context is made of ("cpu", "tpu", "cuda"), else what this process has.

    Source: ours: a program planned for a TPU on another machine must be the TPU's.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    found = jax.default_backend() if device is None else device.platform
    return "cuda" if found == "gpu" else found


def spec_of(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Where an array with these logical axes goes.

    An axis goes to as many of its rule's mesh axes, from the first on, as divide it.
    Raises ValueError when an axis has no rule, or two axes of one array want the same mesh axis.
    Source: ours.
    """
    entries: list[tuple[str, ...]] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis not in RULES:
            raise ValueError(f"no sharding rule for logical axis {axis!r}; known: {list(RULES)}")
        wanted = tuple(name for name in RULES[axis] if mesh.shape[name] > 1)
        while wanted and size % math.prod(mesh.shape[name] for name in wanted):
            wanted = wanted[:-1]
        entries.append(wanted if size else ())
    used = [name for entry in entries for name in entry]
    if len(set(used)) < len(used):
        raise ValueError(f"logical axes {tuple(axes)} put one mesh axis on two dimensions: {used}")
    return PartitionSpec(*(entry or None for entry in entries))


def shardings(axes: PyTree, abstract: PyTree, mesh: Mesh, *, whole: bool = False) -> PyTree:
    """A NamedSharding for every leaf of `abstract`, from the logical axes beside it.

    whole: weights are not cut along the model's width, for sampling: each step would gather them.
    Source: ours: shapes first, shardings second, arrays last.
    """

    def place(leaf: Any, axes: tuple[str | None, ...]) -> NamedSharding:
        if whole:
            axes = tuple(None if axis in WIDTHS else axis for axis in axes)
        return NamedSharding(mesh, spec_of(axes, leaf.shape, mesh))

    return jax.tree.map(place, abstract, axes)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device. Source: ours."""
    return NamedSharding(mesh, PartitionSpec())


def on_host(tree: PyTree) -> PyTree:
    """The arrays in the memory of the hosts of their devices, laid out as before; those given are
    deleted. Of shapes, where such arrays lie. Source: ours."""
    return _in_memory(tree, "pinned_host")


def on_device(tree: PyTree) -> PyTree:
    """The arrays in the memory of their devices, laid out as before; those given are deleted.

    Of shapes, where such arrays lie. Source: ours.
    """
    return _in_memory(tree, "device")


def _in_memory(tree: PyTree, kind: str) -> PyTree:
    def move(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
        if x.sharding.memory_kind == kind:
            return x
        place = x.sharding.with_memory_kind(kind)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        # Not donated to the copy: that is not implemented between memories.
        moved = jax.device_put(x, place)
        x.delete()
        return moved

    return jax.tree.map(move, tree)


def mesh_in_context() -> AbstractMesh | None:
    """The mesh in context; None without one, or with one of a single device. Source: ours."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec, which holds a single one as a bare string.

    Source: JAX's PartitionSpec.
    """
    return (entry,) if isinstance(entry, str) else entry or ()


def for_host(tree: PyTree) -> PyTree:
    """Inside a jitted function: the same arrays on every device, so that every host can read them.

    Source: ours.
    """
    return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), tree)


def constrain(x: Array, *axes: str | None) -> Array:
    """Inside a jitted function: where x goes by its logical axes. Nothing without a mesh.

    Source: ours: only this room names mesh axes.
    """
    mesh = mesh_in_context()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, spec_of(axes, x.shape, mesh))
