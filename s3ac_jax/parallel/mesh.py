"""The mesh, and which logical axis goes to which of its axes."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from s3ac_jax.core.types import PyTree

MESH_AXES = ("data", "fsdp", "tensor", "expert", "context")

# Logical axis -> mesh axes. Weights of one name on two mesh axes would collide; see `spec_of`.
RULES: dict[str | None, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "linear_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "head_dim": (),
    "layers": (),
    None: (),
}


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
        return self.data * self.fsdp

    def __post_init__(self):
        for axis, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ValueError(f"mesh.{axis} must be at least 1, got {size}")


def make_mesh(spec: MeshSpec, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over the first devices. Raises ValueError when there are too few.

    Source: ours.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < spec.num_devices:
        raise ValueError(
            f"mesh.data x mesh.fsdp x ... needs {spec.num_devices} devices, here: {len(devices)}; "
            "lower them (or, on CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=N)"
        )
    grid = np.array(devices[: spec.num_devices]).reshape(dataclasses.astuple(spec))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec_of(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Where an array with these logical axes goes; an axis that does not divide is replicated.

    Raises ValueError when an axis has no rule, or two axes of one array want the same mesh axis.
    Source: ours.
    """
    entries: list[tuple[str, ...]] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis not in RULES:
            raise ValueError(f"no sharding rule for logical axis {axis!r}; known: {list(RULES)}")
        wanted = RULES[axis]
        parts = math.prod(mesh.shape[name] for name in wanted)
        entries.append(wanted if parts and size % parts == 0 else ())
    used = [name for entry in entries for name in entry]
    if len(set(used)) < len(used):
        raise ValueError(f"logical axes {tuple(axes)} put one mesh axis on two dimensions: {used}")
    return PartitionSpec(*(entry or None for entry in entries))


def shardings(axes: PyTree, abstract: PyTree, mesh: Mesh) -> PyTree:
    """A NamedSharding for every leaf of `abstract`, from the logical axes beside it.

    Source: ours: shapes first, shardings second, arrays last.
    """
    return jax.tree.map(
        lambda leaf, names: NamedSharding(mesh, spec_of(names, leaf.shape, mesh)), abstract, axes
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device. Source: ours."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: Array, *axes: str | None) -> Array:
    """Inside a jitted function: where x goes by its logical axes. Nothing without a mesh.

    Source: ours: only this room names mesh axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec_of(axes, x.shape, mesh))


def over_experts(
    mix: Callable[[Array, Array, Array, dict[str, PyTree]], Array],
    x: Float[Array, "N D"],
    experts: Int[Array, "N k"],
    gates: Float[Array, "N k"],
    weights: dict[str, PyTree],
    axes: dict[str, tuple[str | None, ...]],
    *,
    num_experts: int,
) -> Float[Array, "N D"]:
    """mix(x, experts, gates, weights), each device doing its own experts for its own rows.

    weights: arrays, or several arrays that share the weight's axes; a size of 1 is on every device.
    axes: logical axes of the weights, the experts first. Each device sees the tokens of its row
    shard, numbers experts from its own first one, and the partial results are summed. mix must
    take a number out of range as nobody's.
    Source: GShard (2006.16668), section 3, without capacity: tokens stay, results are summed.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return mix(x, experts, gates, weights)
    specs = {
        name: jax.tree.map(lambda part, name=name: spec_of(axes[name], part.shape, mesh), w)
        for name, w in weights.items()
    }
    all_specs = jax.tree.leaves(specs)
    rows = spec_of(("rows", None), x.shape, mesh)
    summed = sorted({name for spec in all_specs for entry in spec for name in _names(entry)})
    shards = math.prod(mesh.shape[name] for name in _names(all_specs[0][0]))

    def local(x: Array, experts: Array, gates: Array, weights: dict[str, PyTree]) -> Array:
        count = num_experts // shards
        first = jax.lax.axis_index("expert") * count if shards > 1 else 0
        mine = experts - first
        mine = jnp.where((mine >= 0) & (mine < count), mine, count)
        y = mix(x, mine, gates, weights)
        return jax.lax.psum(y, summed) if summed else y

    return jax.shard_map(
        local, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=rows, check_vma=False
    )(x, experts, gates, weights)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec, which holds a single one as a bare string."""
    return (entry,) if isinstance(entry, str) else entry or ()
