"""How activations and weights lie while they are computed with."""

import functools
import math

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Shaped

from s3ac_jax.parallel.mesh import WIDTHS, mesh_in_context, names, spec_of

Axes = tuple[str | None, ...]


def _shares(mesh: AbstractMesh, shape: tuple[int, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes that share out the rows, and those that share out the tokens of each."""
    rows, context = spec_of(("rows", "context"), shape, mesh)
    return names(rows), names(context)


def _sizes(mesh: AbstractMesh, shape: tuple[int, int]) -> tuple[int, int]:
    rows, context = _shares(mesh, shape)
    return math.prod(mesh.shape[n] for n in rows), math.prod(mesh.shape[n] for n in context)


def hold(x: Shaped[Array, "N ..."], shape: tuple[int, int]) -> Shaped[Array, "N ..."]:
    """x where `flatten` puts the tokens of rows of this shape [B, T]. Source: ours."""
    mesh = mesh_in_context()
    if mesh is None:
        return x
    rows, context = _shares(mesh, shape)
    spec = PartitionSpec((*rows, *context) or None, *(None,) * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, spec)


def flatten(x: Shaped[Array, "B T ..."]) -> Shaped[Array, "N ..."]:
    """The tokens of all rows one after the other, each where it was.

    Where the tokens of a row are shared out, those of one device stand together: tokens are in
    the order of the rows only without `context`. `unflatten` is the inverse.
    Source: ours: a plain reshape would gather the rows on every device.
    """
    shape, rest = x.shape[:2], x.shape[2:]
    mesh = mesh_in_context()
    rows, context = (1, 1) if mesh is None else _sizes(mesh, shape)
    if context == 1:
        return hold(x.reshape(-1, *rest), shape)
    x = _rows(x).reshape(rows, shape[0] // rows, context, shape[1] // context, *rest)
    return hold(x.swapaxes(1, 2).reshape(-1, *rest), shape)


def unflatten(x: Shaped[Array, "N ..."], shape: tuple[int, int]) -> Shaped[Array, "B T ..."]:
    """Rows of `shape` [B, T] from what `flatten` made of them. Source: ours."""
    rest = x.shape[1:]
    mesh = mesh_in_context()
    rows, context = (1, 1) if mesh is None else _sizes(mesh, shape)
    if context == 1:
        return x.reshape(*shape, *rest)
    x = hold(x, shape).reshape(rows, context, shape[0] // rows, shape[1] // context, *rest)
    return _rows(x.swapaxes(1, 2).reshape(*shape, *rest))


def _rows(x: Array) -> Array:
    mesh = mesh_in_context()
    if mesh is None:
        return x
    spec = spec_of(("rows", "context", *(None,) * (x.ndim - 2)), x.shape, mesh)
    return jax.lax.with_sharding_constraint(x, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(w: Array, axes: Axes) -> Array:
    """A dense weight as a product reads it: whole, but for what `tensor` shares out.

    axes: its logical axes. Its gradient goes back to where the weight is stored.
    Source: ZeRO (1910.02054), stage 3; ours: said where the weight has its dtype of computation,
    so that half the bytes travel.
    """
    return _placed(w, axes, stored=False)


def _gathered_forward(w: Array, axes: Axes):
    return gathered(w, axes), None


def _gathered_backward(axes: Axes, _: None, dw: Array):
    return (stored(dw, axes),)


gathered.defvjp(_gathered_forward, _gathered_backward)


def stored(w: Array, axes: Axes) -> Array:
    """A weight, or its gradient, where the weight is stored. Source: ZeRO (1910.02054)."""
    return _placed(w, axes, stored=True)


def _placed(w: Array, axes: Axes, *, stored: bool) -> Array:
    mesh = mesh_in_context()
    if mesh is None:
        return w
    if not stored:
        axes = tuple(None if axis in WIDTHS else axis for axis in axes)
    return jax.lax.with_sharding_constraint(w, spec_of(axes, w.shape, mesh))
