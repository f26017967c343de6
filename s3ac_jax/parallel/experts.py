"""A mixture of experts whose experts live on different devices."""

import functools
import math
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from s3ac_jax.core.types import PyTree
from s3ac_jax.parallel.mesh import WIDTHS, mesh_in_context, names, spec_of


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

    weights: arrays, that mix gets in the dtype of x and whose gradients are summed over devices in
    their own; or several arrays that share the weight's axes and stay as they are, a size of 1 on
    every device. axes: logical axes of the weights, the experts first. The devices that share out
    the experts see each other's tokens, number experts from their own first one, and the partial
    results are summed and shared out again. mix must take a number out of range as nobody's;
    shards: how many devices share out the experts, so that most numbers are.
    Source: GShard (2006.16668), section 3, without capacity: tokens are gathered, results summed.
    """
    mesh = mesh_in_context()
    if mesh is None:
        as_read = {
            name: w.astype(x.dtype) if isinstance(w, jax.Array) else w
            for name, w in weights.items()
        }
        return mix(x, experts, gates, as_read, shards=1)
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
    partial = {
        name for key, w in specs.items() for spec in jax.tree.leaves(w)
        for axis, entry in zip(axes[key], spec, strict=True) if axis not in WIDTHS
        for name in names(entry)
    }  # fmt: skip
    summed = tuple(sorted(partial - set(apart)))

    def local(x: Array, experts: Array, gates: Array, weights: dict[str, PyTree]) -> Array:
        weights = {
            name: _as_read(w, specs[name], axes[name], x.dtype) for name, w in weights.items()
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


def _as_read(w: PyTree, specs: PyTree, axes: tuple[str | None, ...], dtype: DTypeLike) -> PyTree:
    """A device's part of a weight, without the cut that only stores it."""
    axis = next((n for n, axis in enumerate(axes) if axis in WIDTHS), None)

    def whole(part: Array, spec: PartitionSpec, dtype: DTypeLike) -> Array:
        if axis is None or not names(spec[axis]):
            return part.astype(dtype)
        return gather_part(part, axis, names(spec[axis]), dtype)

    if isinstance(w, jax.Array):
        return whole(w, specs, dtype)
    return jax.tree.map(lambda part, spec: whole(part, spec, part.dtype), w, specs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_part(w: Array, axis: int, name: tuple[str, ...], dtype: DTypeLike) -> Array:
    """Inside a shard_map: all parts of `w` along `axis`, in `dtype`. Its gradient is summed in
    float32, and has the dtype of w.

    Source: ZeRO (1910.02054), stage 3; ours: cast before half the bytes travel.
    """
    return jax.lax.all_gather(w.astype(dtype), name, axis=axis, tiled=True)


def _gather_forward(w: Array, axis: int, name: tuple[str, ...], dtype: DTypeLike):
    # An empty array tells the dtype.
    return gather_part(w, axis, name, dtype), jnp.zeros(0, w.dtype)


def _gather_backward(axis: int, name: tuple[str, ...], dtype: DTypeLike, like: Array, dw: Array):
    exact = jax.lax.psum_scatter(dw.astype(jnp.float32), name, scatter_dimension=axis, tiled=True)
    return (exact.astype(like.dtype),)


gather_part.defvjp(_gather_forward, _gather_backward)
