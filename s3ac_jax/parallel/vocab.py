"""Reading hidden states against a head whose vocabulary lies on several devices."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from s3ac_jax.core.types import PyTree
from s3ac_jax.parallel.mesh import mesh_in_context, names, spec_of


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A device's part of the head, and how to speak with the devices that have the others.

    width: mesh axes that the head's width is stored along. parts: those of its vocabulary.
    Source: Megatron-LM (1909.08053), section 3.
    """

    width: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def whole(self, head: Float[Array, "D V"]) -> Float[Array, "D V"]:
        """This part of the vocabulary at its full width. Source: ZeRO (1910.02054), stage 3."""
        if not self.width:
            return head
        return jax.lax.all_gather(head, self.width, axis=0, tiled=True)

    def stored(self, gradient: Float[Array, "D V"]) -> Float[Array, "D V"]:
        """The inverse for a gradient: summed, each device keeps its share. Source: ZeRO."""
        if not self.width:
            return gradient
        return jax.lax.psum_scatter(gradient, self.width, scatter_dimension=0, tiled=True)

    def first(self, size: int) -> Int[Array, ""] | int:
        """Number of the first token here, of `size`. Source: ours."""
        return jax.lax.axis_index(self.parts) * size if self.parts else 0

    def total(self, x: Array) -> Array:
        """The sum over all parts. Source: ours."""
        return jax.lax.psum(x, self.parts) if self.parts else x

    def most(self, x: Array) -> Array:
        """The maximum over all parts. Source: ours."""
        return jax.lax.pmax(x, self.parts) if self.parts else x


def over_vocabulary(
    read: Callable[[Array, Array, Array, Vocabulary], PyTree],
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "N"],
) -> PyTree:
    """read(hidden, head, targets, vocabulary) -> arrays [N], each device for its own tokens.

    read sees a device's tokens and its stored part of the head. Where it has a gradient of its own,
    that has to sum what it is given over `vocabulary.parts`.
    Source: Megatron-LM (1909.08053), section 3, for the vocabulary.
    """
    mesh = mesh_in_context()
    if mesh is None:
        return read(hidden, head, targets, Vocabulary())
    tokens = spec_of(("tokens",), targets.shape, mesh)
    where = spec_of(("embed", "vocab"), head.shape, mesh)
    vocabulary = Vocabulary(names(where[0]), names(where[1]))
    return jax.shard_map(
        lambda hidden, head, targets: read(hidden, head, targets, vocabulary), mesh=mesh,
        in_specs=(PartitionSpec(*tokens, None), where, tokens), out_specs=tokens, check_vma=False,
    )(hidden, head, targets)  # fmt: skip


def look_up(
    table: Float[Array, "V D"], tokens: Int[Array, "N"], dtype: DTypeLike
) -> Float[Array, "N D"]:
    """table[tokens] in `dtype`, each device for its own tokens.

    A device looks up its columns for the tokens of all devices that have other columns, and they
    exchange what they found; so neither the table nor its gradient is ever whole.
    Source: Megatron-LM (1909.08053), section 3, for the vocabulary; ours: the exchange.
    """
    mesh = mesh_in_context()
    if mesh is None:
        return table[tokens].astype(dtype)
    spec = spec_of(("tokens",), tokens.shape, mesh)
    where = spec_of(("vocab", "embed"), table.shape, mesh)
    vocabulary, exchanged = Vocabulary((), names(where[0])), names(where[1])
    if not set(exchanged) <= set(names(spec[0])):
        # Devices with the same tokens have nothing to exchange: each reads all columns.
        where, exchanged = PartitionSpec(where[0], None), ()

    def local(table: Array, tokens: Array) -> Array:
        if exchanged:
            tokens = jax.lax.all_gather(tokens, exchanged, axis=0, tiled=True)
        places = tokens - vocabulary.first(len(table))
        here = (places >= 0) & (places < len(table))
        rows = jnp.where(here[:, None], table[jnp.where(here, places, 0)], 0).astype(dtype)
        if exchanged:
            rows = jax.lax.all_to_all(rows, exchanged, split_axis=0, concat_axis=1, tiled=True)
        return vocabulary.total(rows)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(where, spec), out_specs=PartitionSpec(*spec, None),
        check_vma=False,
    )(table, tokens)  # fmt: skip
