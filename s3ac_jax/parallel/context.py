"""Attention shared out: rows, heads and the tokens of a row, each device its part."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from s3ac_jax.parallel.mesh import mesh_in_context, names, spec_of

# attend(q [B, H, T, d], k, v [B, K, S, d], ids of the queries [B, T] and keys [B, S], offset):
# query t stands at place offset + t of the row.
Attend = Callable[[Array, Array, Array, Array, Array, Array | int], Array]


def over_parts(
    attend: Attend,
    q_BHTd: Float[Array, "B H T d"],
    k_BKTd: Float[Array, "B K T d"],
    v_BKTd: Float[Array, "B K T d"],
    segment_ids_BT: Int[Array, "B T"],
) -> Float[Array, "B H T d"]:
    """What attend gives for whole rows, each device doing its rows, heads and tokens.

    Keys and values of a row are gathered where its tokens are shared out, and their gradients
    summed and cut again.
    Source: Llama 3 (2407.21783), section 3.3.2: gathering is simpler than a ring, takes any mask,
    and grouped keys and values are small beside the queries.
    """
    mesh = mesh_in_context()
    if mesh is None:
        return attend(q_BHTd, k_BKTd, v_BKTd, segment_ids_BT, segment_ids_BT, 0)
    q_spec = spec_of(("rows", "heads", "context", None), q_BHTd.shape, mesh)
    kv_spec = spec_of(("rows", "kv_heads", "context", None), k_BKTd.shape, mesh)
    rows, _, context, _ = q_spec
    shared, parts = names(context), _shards(mesh, context)
    pick = _picker(mesh, q_spec[1], kv_spec[1], q_BHTd.shape[1], k_BKTd.shape[1])

    def local(q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array) -> Array:
        k, v, offset = pick(k), pick(v), 0
        if parts > 1:
            k, v = (jax.lax.all_gather(x, shared, axis=2, tiled=True) for x in (k, v))
            offset = jax.lax.axis_index(shared) * q.shape[2]
        return attend(q, k, v, q_ids, k_ids, offset)

    of_tokens, of_rows = PartitionSpec(rows, context), PartitionSpec(rows, None)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(q_spec, kv_spec, kv_spec, of_tokens, of_rows),
        out_specs=q_spec, check_vma=False,
    )(q_BHTd, k_BKTd, v_BKTd, segment_ids_BT, segment_ids_BT)  # fmt: skip


def _shards(mesh: AbstractMesh, entry: str | tuple[str, ...] | None) -> int:
    return math.prod(mesh.shape[name] for name in names(entry))


def _picker(mesh: AbstractMesh, heads, kv_heads, num_heads: int, num_kv_heads: int):
    """Of all key heads on a device, those that its query heads read.

    heads, kv_heads: entries of their PartitionSpecs. The key heads are whole where there are fewer
    of them than devices that share out the query heads, or they don't divide.
    """
    shards = _shards(mesh, heads)
    if shards == _shards(mesh, kv_heads):
        return lambda x: x
    mine, group = num_heads // shards, num_heads // num_kv_heads

    def pick(x: Array) -> Array:
        first = jax.lax.axis_index(names(heads)) * mine
        if group % mine == 0:
            return jax.lax.dynamic_slice_in_dim(x, first // group, 1, axis=1)
        return jnp.take(x, (first + jnp.arange(mine)) // group, axis=1)

    return pick
