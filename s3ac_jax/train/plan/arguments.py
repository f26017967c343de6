"""Arguments of a run's programs as shapes with places: as large as the config lets them become."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from s3ac_jax.algos.selection import Ranking
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import ActorBatch, CriticBatch, Packed, PyTree
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.rollout.backend import MAX_STOP_IDS, Sampling

Struct = jax.ShapeDtypeStruct


def of(mesh: Mesh, shape: tuple[int, ...], dtype: Any = jnp.float32, *, rows: bool = True) -> Any:
    """An array as a run hands it over: by rows from two axes on, or else on every device.

    Source: ours.
    """
    axes = (
        ("rows",) + (None,) * (len(shape) - 1) if rows and len(shape) >= 2 else (None,) * len(shape)
    )
    return Struct(shape, dtype, sharding=NamedSharding(mesh, parallel.spec_of(axes, shape, mesh)))


def placed(shapes: PyTree, places: PyTree) -> PyTree:
    """Shapes at the places that a compiled program gives its results. Source: ours."""
    return jax.tree.map(
        lambda leaf, place: Struct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )


def shapes(mesh: Mesh, function: Callable[..., Any], *arguments: Any) -> PyTree:
    """Shapes of what a function returns on this mesh: some follow the platform. Source: ours."""
    with jax.set_mesh(mesh):
        return jax.eval_shape(function, *arguments)


def device_bytes(tree: PyTree) -> float:
    """Bytes of these arrays on one device; what the host holds is left out. Source: ours."""
    total = 0.0
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding is not None and leaf.sharding.memory_kind == "pinned_host":
            continue
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        count = 1
        for size in shape:
            count *= size
        total += count * _itemsize(leaf.dtype)
    return total


def _itemsize(dtype: Any) -> int:
    # A key is two numbers of 32 bits.
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(dtype).itemsize


def packed(config: RunConfig, mesh: Mesh, responses: int, *, routing: bool) -> Packed:
    """The packed rows of so many responses of any length. Source: ours."""
    shape = config.rows_for(responses), config.train.pack_tokens
    whole, floats = of(mesh, shape, jnp.int32), of(mesh, shape)
    recorded = None
    if routing and config.model.routing_shape is not None:
        recorded = of(mesh, (*shape, *config.model.routing_shape), jnp.int16)
    return Packed(
        tokens=whole, segment_ids=whole, positions=whole, mask=of(mesh, shape, bool),
        response=whole, num_trainable=whole, reward=floats, logp_rollout=floats,
        rows=of(mesh, (), jnp.int32), routing=recorded,
    )  # fmt: skip


def tick_rows(config: RunConfig, mesh: Mesh) -> Packed:
    """One optimiser batch of a tick. Source: ours."""
    each = -(-config.batch_responses // config.minibatches)
    return packed(config, mesh, each, routing=config.records_routing)


def actor_batch(config: RunConfig, mesh: Mesh, rows: Packed) -> ActorBatch:
    """What the actor step reads. Source: ours."""
    floats = of(mesh, rows.tokens.shape)
    imitation = floats if config.recipe.surrogate.imitation else None
    return ActorBatch(rows, floats, floats, floats, imitation, of(mesh, ()))


def critic_batch(mesh: Mesh, rows: Packed, *, clipped: bool) -> CriticBatch:
    """What a critic step reads; clipped: its loss looks at V_old. Source: ours."""
    floats = of(mesh, rows.tokens.shape)
    return CriticBatch(
        rows, of(mesh, rows.tokens.shape, bool), floats if clipped else None, floats, of(mesh, ()),
        of(mesh, (), bool),
    )  # fmt: skip


def prompts(config: RunConfig, mesh: Mesh, count: int) -> tuple[Any, Any]:
    """Right-padded prompts and their lengths. Source: ours."""
    tokens = of(mesh, (count, config.task.max_prompt_tokens), jnp.int32, rows=False)
    return tokens, of(mesh, (count,), jnp.int32)


def candidates(config: RunConfig) -> int:
    """Prompts of one pass of the critic when it selects; 0 when nobody asks it. Source: ours."""
    select, batch = config.recipe.select, config.train.batch_prompts
    if not select.reads_values:
        return 0
    if isinstance(select, Ranking):
        return select.pool(batch, config.task.num_train or 2**31)
    return config.scheduler.candidates


def sampling(mesh: Mesh, count: int) -> Sampling:
    """Settings of so many requests. Source: ours."""
    floats, whole = of(mesh, (count,)), of(mesh, (count,), jnp.int32)
    stops = of(mesh, (count, MAX_STOP_IDS), jnp.int32, rows=False)
    return Sampling(of(mesh, (count,), jnp.uint32), floats, whole, floats, whole, stops)
