"""Loops over the micro-batches of a packed batch: static shapes, as many turns as rows are used.

The rows of a batch are sized for the worst case; `Packed.rows` says how many hold anything, and
the loop ends there. So a short batch costs what its tokens cost and nothing compiles anew.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from s3ac_jax.core import metrics
from s3ac_jax.core.types import PyTree
from s3ac_jax.parallel.mesh import constrain

_C = TypeVar("_C")


def fold(
    body: Callable[[_C, PyTree, Int[Array, ""]], _C],
    carry: _C,
    batch: PyTree,
    rows: Int[Array, ""],
    micro_rows: int,
) -> _C:
    """carry = body(carry, micro-batch, its number) over ceil(rows / micro_rows) micro-batches.

    Arrays [R, T, ...] of `batch` are cut into [micro_rows, T, ...]; scalars are handed on whole.
    Raises ValueError when R is no multiple of micro_rows.
    Source: ours: a while loop with a traced bound; nobody differentiates through it.
    """

    def cut(x: Array) -> Array:
        if x.ndim < 2:
            return x
        if x.shape[0] % micro_rows:
            raise ValueError(f"{x.shape[0]} rows are no multiple of micro_rows = {micro_rows}")
        # Each micro-batch is spread over all devices that share out rows, and their tokens.
        rest = (None,) * (x.ndim - 2)
        cut = x.reshape(-1, micro_rows, *x.shape[1:])
        return constrain(cut, None, "rows", "context", *rest)

    cut_batch = jax.tree.map(cut, batch)

    def turn(number: Int[Array, ""], carry: _C) -> _C:
        micro = jax.tree.map(lambda x: x[number] if x.ndim > 2 else x, cut_batch)
        return body(carry, micro, number)

    return jax.lax.fori_loop(0, -(-rows // micro_rows), turn, carry)


def gradients(
    loss: Callable[[PyTree, PyTree], tuple[Array, tuple[dict[str, Any], PyTree]]],
    trainable: PyTree,
    batch: PyTree,
    rows: Int[Array, ""],
    micro_rows: int,
) -> tuple[Array, dict[str, Any], PyTree, PyTree]:
    """Summed loss, merged metrics, per-token outputs and summed float32 gradients.

    `loss(trainable, micro)` returns the loss, already divided by the denominator of the whole
    batch so that any split gives the same numbers, and (metrics, arrays [micro_rows, T] or None);
    the arrays come back as [R, T], 0 in rows not used.
    Source: ours: method notes, trap 6 (means per micro-batch).
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def body(carry, micro, number):
        total, merged, laid, grads = carry
        (value, (report, read)), new = value_and_grad(trainable, micro)
        laid = jax.tree.map(lambda out, part: out.at[number].set(part), laid, read)
        grads = jax.tree.map(jnp.add, grads, new)
        return total + value, metrics.merge(merged, report), laid, grads

    (_, (report, read)), _ = jax.eval_shape(value_and_grad, trainable, _first(batch, micro_rows))
    laid, total_rows = _unlaid(read, batch, micro_rows)
    zeros = jax.tree.map(jnp.zeros_like, trainable)
    start = jnp.zeros(()), metrics.identity(report), laid, zeros
    total, merged, laid, grads = fold(body, start, batch, rows, micro_rows)
    return total, merged, _joined(laid, total_rows), grads


def per_token(
    read: Callable[[PyTree], PyTree], batch: PyTree, rows: Int[Array, ""], micro_rows: int
) -> PyTree:
    """`read(micro) -> arrays [micro_rows, T]` laid back into [R, T]; 0 in rows not used.

    Source: ours.
    """
    carry, total_rows = _unlaid(jax.eval_shape(read, _first(batch, micro_rows)), batch, micro_rows)

    def body(carry, micro, number):
        return jax.tree.map(lambda out, new: out.at[number].set(new), carry, read(micro))

    return _joined(fold(body, carry, batch, rows, micro_rows), total_rows)


def _first(batch: PyTree, micro_rows: int) -> PyTree:
    return jax.tree.map(lambda x: x[:micro_rows] if x.ndim >= 2 else x, batch)


def _unlaid(shapes: PyTree, batch: PyTree, micro_rows: int) -> tuple[PyTree, int]:
    """Zeros for the outputs of every micro-batch, and the rows of the whole batch."""
    total = next(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim >= 2)
    zeros = jax.tree.map(lambda s: jnp.zeros((total // micro_rows, *s.shape), s.dtype), shapes)
    return zeros, total


def _joined(laid: PyTree, total: int) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(total, *x.shape[2:]), laid)
