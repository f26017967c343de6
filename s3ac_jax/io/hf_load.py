"""From tensors on disk to stacked weights on their devices, one layer's piece at a time."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from s3ac_jax.core.trees import named_leaves, nest
from s3ac_jax.core.types import PyTree
from s3ac_jax.io.hf_config import HfError
from s3ac_jax.io.hf_files import Folder
from s3ac_jax.io.hf_layout import Part, Span, Tensor

_Piece = list[tuple[str, Part]]  # one tensor, or one for each expert


def load_tree(
    folder: Folder,
    wanted: list[Tensor],
    *,
    shardings: PyTree | None,
    dtype_of: Callable[[str], Any],
    critic: bool,
    progress: Callable[[int, int], None] | None = None,
) -> PyTree:
    """The tensors as nested dicts of our weights, each made as a stack and filled layer by layer.

    A layer's piece goes to its devices as shares of it, each read from disk alone, and is written
    into the stack, whose buffer is donated. dtype_of: of the weight with this name.

    Raises HfError if shardings lack a weight. Source: ours: no array ever exists unsharded.
    """
    places = named_leaves(shardings) if shardings is not None else {}
    leaves: dict[str, dict[tuple[int, ...], _Piece]] = {}
    for tensor in wanted:
        for part in tensor.parts:
            pieces = leaves.setdefault(part.leaf, {})
            pieces.setdefault(part.place[:1], []).append((tensor.name, part))
    done, total = 0, sum(len(pieces) for pieces in leaves.values())
    params: dict[str, Any] = {}
    for leaf, pieces in leaves.items():
        name = leaf if leaf == "value_head" or not critic else f"backbone/{leaf}"
        if shardings is not None and name not in places:
            raise HfError(f"shardings have no place for {name}")
        sharding = places.get(name)
        kept = jnp.dtype(dtype_of(name))
        stack: Any = None
        for layer, piece in pieces.items():
            if not layer:
                stack = _copied(kept, sharding)(_placed(folder, piece, sharding))
            else:
                values = _placed(folder, piece, _of_layer(sharding))
                if stack is None:
                    stack = _zeros((len(pieces), *values.shape), kept, sharding)()
                stack = _written(sharding)(stack, values, layer[0])
            # Or the host would run ahead of the device, holding what it read.
            stack.block_until_ready()
            done += 1
            if progress:
                progress(done, total)
        params[name] = stack
    return nest(params)


def _placed(folder: Folder, piece: _Piece, sharding: Sharding | None) -> jax.Array:
    """One layer's piece of a weight, on its devices."""
    (_, first), *_ = piece
    each = len(first.place) > 1
    shape = (len(piece), *first.shape) if each else first.shape
    seen: dict[tuple[Span, ...], np.ndarray] = {}

    def cut(one: tuple[str, Part], spans: tuple[Span, ...]) -> np.ndarray:
        name, part = one
        return part.cut(functools.partial(folder.read, name), spans)

    def experts(which: Span, *spans: Span) -> np.ndarray:
        low, high = which
        first = cut(piece[low], spans)
        filled = np.empty((high - low, *first.shape), first.dtype)
        filled[0] = first
        for n in range(low + 1, high):
            filled[n - low] = cut(piece[n], spans)
        return filled

    def share(index: tuple[slice, ...] | None) -> np.ndarray:
        spans = tuple(one.indices(size)[:2] for one, size in zip(index or (), shape, strict=True))
        if spans not in seen:  # devices that hold the same share
            if each:
                seen[spans] = experts(*spans)
            else:
                seen[spans] = np.ascontiguousarray(cut(piece[0], spans))
        return seen[spans]

    if sharding is None:
        return jnp.asarray(share(tuple(slice(None) for _ in shape)))
    return jax.make_array_from_callback(shape, sharding, share)


def _of_layer(sharding: Sharding | None) -> Sharding | None:
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


@functools.lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> Callable[[], Any]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _copied(dtype: Any, sharding: Sharding | None) -> Callable[[Any], Any]:
    # A copy: what was made from numpy may be numpy's memory, which a donated buffer must not.
    return jax.jit(lambda x: jnp.copy(x).astype(dtype), out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _written(sharding: Sharding | None) -> Callable[[Any, Any, int], Any]:
    def write(stack: Any, values: Any, layer: Any) -> Any:
        return jax.lax.dynamic_update_index_in_dim(stack, values.astype(stack.dtype), layer, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)
