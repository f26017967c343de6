"""Rows of one array put into rows of another that devices share out."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped

from s3ac_jax.parallel.mesh import mesh_in_context, names, spec_of


def put_rows(
    old: Shaped[Array, "..."],
    new: Shaped[Array, "..."],
    rows: Int[Array, "N"],
    slots: Int[Array, "N"],
    axes: Sequence[str | None],
) -> Shaped[Array, "..."]:
    """old with row rows[i] of `new` in place of row slots[i]; a slot out of range is skipped.

    axes: logical axes of old, one of them "rows". new may be shorter along the others; what is
    beyond it stays.
    Source: ours: each device picks what its own rows get; left to the partitioner, a scatter into
    shared-out rows makes all rows on every device.
    """
    lead = axes.index("rows")
    part = tuple(slice(0, size) for size in (*new.shape[:lead], None, *new.shape[lead + 1 :]))
    mesh = mesh_in_context()
    if mesh is None:
        taken = jnp.take(new, rows, axis=lead, mode="clip").astype(old.dtype)
        return old.at[(*part[:lead], slots, *part[lead + 1 :])].set(taken, mode="drop")
    where = spec_of(axes, old.shape, mesh)
    over = names(where[lead])
    # The rows of `new` on every device, all else as in `old`.
    whole = PartitionSpec(*where[:lead], None, *where[lead + 1 :])
    count = old.shape[lead] // math.prod(mesh.shape[name] for name in over)

    def local(old: Array, new: Array, rows: Array, slots: Array) -> Array:
        first = jax.lax.axis_index(over) * count if over else 0
        mine = slots[None, :] == (first + jnp.arange(count))[:, None]
        source = rows[jnp.argmax(mine, axis=1)]
        taken = jnp.take(new, source, axis=lead, mode="clip").astype(old.dtype)
        filled = jnp.any(mine, axis=1).reshape(-1, *(1,) * (old.ndim - lead - 1))
        return old.at[part].set(jnp.where(filled, taken, old[part]))

    return jax.shard_map(
        local, mesh=mesh, in_specs=(where, whole, PartitionSpec(), PartitionSpec()),
        out_specs=where, check_vma=False,
    )(old, new, rows, slots)  # fmt: skip
