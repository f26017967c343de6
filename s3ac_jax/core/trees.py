"""Trees of weights: names of leaves, norms, health, fingerprints, and splitting by name."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt

from s3ac_jax.core.types import PyTree


def path_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf from its key path, such as 'layers/mlp/up'.

    Source: ours: one spelling of names for freezing, sharding, checkpoints and messages.
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaf by name, in the order in which jax flattens the tree.

    Source: ours: names are what people and messages refer to.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from leaves by name.

    Source: ours: the inverse of `named_leaves`, for trees of dicts.
    """
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def squared_norm(tree: PyTree) -> Float[Array, ""]:
    """Sum of squares over all leaves, accumulated in fp32; 0 for an empty tree.

    Source: ours: bf16 squares lose the tail of a large tree.
    """
    squares = [
        jnp.sum(jnp.square(jnp.asarray(leaf, jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return sum(squares, start=jnp.zeros((), jnp.float32))


def global_norm(tree: PyTree) -> Float[Array, ""]:
    """Euclidean norm over all leaves, fp32.

    Source: Pascanu 2013 (1211.5063), section 3.2, the norm that clipping compares.
    """
    return jnp.sqrt(squared_norm(tree))


def _inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether no floating leaf holds NaN or infinity; usable under `jit`.

    Source: ours: a step that would write NaN into the weights must be skippable in-graph.
    """
    checks = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree) if _inexact(leaf)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.array(True)


def first_nonfinite(tree: PyTree) -> str | None:
    """Name of the first leaf that holds NaN or infinity, or None. On the host only.

    Source: ours: the name is what a person needs to find the fault.
    """
    leaves = {name: leaf for name, leaf in named_leaves(tree).items() if _inexact(leaf)}
    # One program: of many small ones with collectives, several hosts on CPU may wait forever.
    checks = jax.jit(lambda x: jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), x))(leaves)
    fine = jax.device_get(checks)
    return next((name for name in leaves if not fine[name]), None)


def _mix(x: UInt[Array, "..."]) -> UInt[Array, "..."]:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _bits(leaf: Any) -> UInt[Array, "..."]:
    leaf = jnp.asarray(leaf)
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    # 8-byte leaves become a trailing axis of two words.
    width = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)


def fingerprint(tree: PyTree) -> UInt[Array, ""]:
    """32-bit checksum of names, shapes, dtypes and bits; in-graph or on the host.

    Moving, swapping or changing any element changes it (up to chance, 2**-32); how the arrays are
    sharded does not. Compare after casting: other dtype, other fingerprint. Call it under `jit`
    for large trees, where the mixing fuses into the sum. Every word is mixed with its index: a
    plain sum would forgive swapped slices.

    Source: ours: every weight sync is checked; the mixing is MurmurHash3's public-domain finaliser.
    """
    digest = jnp.uint32(0)
    for name, leaf in named_leaves(tree).items():
        words = _bits(leaf)
        # An index from one iota per axis: flattening a sharded array would gather it.
        index, stride = jnp.zeros(words.shape, jnp.uint32), 1
        for axis in reversed(range(words.ndim)):
            step = jnp.uint32(stride % 2**32)
            index += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * step
            stride *= words.shape[axis]
        seed = zlib.crc32(f"{name}:{jnp.shape(leaf)}:{jnp.result_type(leaf)}".encode())
        content = jnp.sum(_mix(words ^ _mix(index + jnp.uint32(1))), dtype=jnp.uint32)
        digest = _mix(digest * jnp.uint32(31) + _mix(content ^ jnp.uint32(seed)))
    return digest


def partition(
    tree: dict[str, Any], predicate: Callable[[str], bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits nested dicts into (leaves whose name satisfies the predicate, all others).

    Neither part has a place for the other's leaves, so frozen weights are absent from gradients
    and optimiser moments; a dict left empty is dropped. Raises TypeError on containers other than
    dicts, whose leaves could not be named back.

    Source: ours: `None` or zeros in place of frozen leaves would still reach the optimiser.
    """
    if not isinstance(tree, dict):
        raise TypeError(f"partition takes nested dicts, got {type(tree).__name__}")

    def split(node: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
        chosen, others = {}, {}
        for key, child in node.items():
            name = f"{prefix}{key}"
            if isinstance(child, dict):
                for side, part in zip((chosen, others), split(child, f"{name}/"), strict=True):
                    if part:
                        side[key] = part
            elif not jax.tree_util.treedef_is_leaf(jax.tree.structure(child)):
                raise TypeError(f"partition takes nested dicts, got {type(child)} at {name}")
            else:
                (chosen if predicate(name) else others)[key] = child
        return chosen, others

    return split(tree, "")


def combine(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Puts the two parts of `partition` together again.

    Raises ValueError when both hold a leaf, or a leaf and a dict, under the same name.

    Source: ours: the inverse of `partition`.
    """
    joined = {**a, **b}
    for key in a.keys() & b.keys():
        if not (isinstance(a[key], dict) and isinstance(b[key], dict)):
            raise ValueError(f"both trees hold {key!r}")
        joined[key] = combine(a[key], b[key])
    return joined
