"""A mixture of experts whose experts live on different devices."""

import functools
import math
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from s3ac_jax.core.types import PyTree
from s3ac_jax.parallel.mesh import mesh_in_context, names, spec_of


class Mix(Protocol):
    """What one device does; see `over_experts`."""

    def __call__(
        self, x: Array, experts: Array, gates: Array, weights: dict[str, PyTree], /, *, shards: int
    ) -> Array:
        """Gated sums of the experts' outputs. Source: ours."""
        ...


def over_experts(
    mix: Mix,
    x: Float[Array, "N D"],
    experts: Int[Array, "N k"],
    gates: Float[Array, "N k"],
    weights: dict[str, PyTree],
    axes: dict[str, tuple[str | None, ...]],
    *,
    num_experts: int,
) -> Float[Array, "N D"]:
    """mix(x, experts, gates, weights, shards), each device doing its own experts.

    weights: arrays, or several arrays that share the weight's axes; a size of 1 is on every device.
    axes: logical axes of the weights, the experts first. The devices that share out the experts see
    each other's tokens, number experts from their own first one, and the partial results are summed
    and shared out again. mix must take a number out of range as nobody's; shards: how many devices
    share out the experts, so that most numbers are.
    Source: GShard (2006.16668), section 3, without capacity: tokens are gathered, results summed.
    """
    mesh = mesh_in_context()
    if mesh is None:
        return mix(x, experts, gates, weights, shards=1)
    specs = {
        name: jax.tree.map(lambda part, name=name: spec_of(axes[name], part.shape, mesh), w)
        for name, w in weights.items()
    }
    tokens = spec_of(("tokens", None), x.shape, mesh)
    all_specs = jax.tree.leaves(specs)
    over = names(all_specs[0][0])
    shards = math.prod(mesh.shape[name] for name in over)
    # Tokens that lie apart along the experts' axis come together; all else stays where it is.
    apart = tuple(name for name in over if name in names(tokens[0]))
    partial = {name for spec in all_specs for entry in spec for name in names(entry)}
    summed = tuple(sorted(partial - set(apart) - {"fsdp"}))

    def local(x: Array, experts: Array, gates: Array, weights: dict[str, PyTree]) -> Array:
        weights = {
            name: jax.tree.map(lambda part, spec: _whole(part, spec), w, specs[name])
            for name, w in weights.items()
        }
        for name in apart:
            x, experts, gates = (
                jax.lax.all_gather(part, name, axis=0, tiled=True) for part in (x, experts, gates)
            )
        count = num_experts // shards
        first = jax.lax.axis_index(over) * count if shards > 1 else 0
        mine = experts - first
        mine = jnp.where((mine >= 0) & (mine < count), mine, count)
        y = mix(x, mine, gates, weights, shards=shards)
        for name in apart:
            y = jax.lax.psum_scatter(y, name, scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, summed) if summed else y

    return jax.shard_map(
        local, mesh=mesh, in_specs=(tokens, tokens, tokens, specs), out_specs=tokens,
        check_vma=False,
    )(x, experts, gates, weights)  # fmt: skip


def _whole(w: Array, spec: PartitionSpec) -> Array:
    """A device's part of a weight, without the cut that only stores it."""
    for axis, entry in enumerate(spec):
        if "fsdp" in names(entry):
            w = gather_part(w, axis, "fsdp")
    return w


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_part(w: Array, axis: int, name: str | tuple[str, ...]) -> Array:
    """Inside a shard_map: all parts of `w` along `axis`. Its gradient is summed in float32.

    Source: ZeRO (1910.02054), stage 3.
    """
    return jax.lax.all_gather(w, name, axis=axis, tiled=True)


def _gather_forward(w: Array, axis: int, name: str | tuple[str, ...]):
    return gather_part(w, axis, name), None


def _gather_backward(axis: int, name: str | tuple[str, ...], _: None, dw: Array):
    exact = jax.lax.psum_scatter(dw.astype(jnp.float32), name, scatter_dimension=axis, tiled=True)
    return (exact.astype(dw.dtype),)


gather_part.defvjp(_gather_forward, _gather_backward)
