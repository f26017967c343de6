"""Metrics as a monoid: folded over micro-batches, steps and hosts, divided once at the end."""

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from s3ac_jax.core import masked
from s3ac_jax.core.types import record


def _selected(x: Any, mask: Any) -> tuple[Array, Array]:
    x = jnp.asarray(x, jnp.float32)
    mask = jnp.ones(x.shape, bool) if mask is None else jnp.asarray(mask, bool)
    return x, jnp.broadcast_to(mask, x.shape)


@record
class Mean:
    """A mean that has not been divided yet. total: sum of the terms, weight: their number.

    Source: levanter.metrics, where metrics are a monoid; ours: the weight is part of the value.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]

    @classmethod
    def of(cls, x: Float[Array, "..."], mask: Bool[Array, "..."] | None = None) -> Self:
        """Mean of x over the mask, or over all of x; NaN outside the mask is not read.

        Source: ours: the weight is the number of terms, never the number of micro-batches.
        """
        x, mask = _selected(x, mask)
        return cls(masked.total(x, mask), jnp.sum(mask, dtype=jnp.float32))

    @classmethod
    def zero(cls) -> Self:
        """The mean of nothing: the identity of `merge`.

        Source: ours: start value of a loop carry.
        """
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def merge(self, other: Self) -> Self:
        """The mean over both sets of terms.

        Source: ours: sums 10/10 and 2/1 are 12/11 in any split.
        """
        return type(self)(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        """total / weight as a python float; NaN when there was no term.

        Source: ours: the only division.
        """
        weight = float(self.weight)
        return float(self.total) / weight if weight else math.nan


@record
class Max:
    """The largest of the terms. peak: -inf when there was no term.

    Source: levanter.metrics, where metrics are a monoid.
    """

    peak: Float[Array, ""]

    @classmethod
    def of(cls, x: Float[Array, "..."], mask: Bool[Array, "..."] | None = None) -> Self:
        """Maximum of x over the mask, or over all of x.

        Source: ours: folds like `Mean`.
        """
        x, mask = _selected(x, mask)
        return cls(jnp.max(x, initial=-jnp.inf, where=mask))

    @classmethod
    def zero(cls) -> Self:
        """The maximum of nothing: the identity of `merge`.

        Source: ours: start value of a loop carry.
        """
        return cls(jnp.full((), -jnp.inf, jnp.float32))

    def merge(self, other: Self) -> Self:
        """The maximum over both sets of terms.

        Source: ours: NaN wins, so a broken term stays visible.
        """
        return type(self)(jnp.maximum(self.peak, other.peak))

    def value(self) -> float:
        """The maximum as a python float; NaN when there was no term.

        Source: ours: "n/a" is NaN in every metric.
        """
        return math.nan if float(self.peak) == -math.inf else float(self.peak)


@record
class Min:
    """The smallest of the terms. trough: +inf when there was no term.

    Source: levanter.metrics, where metrics are a monoid.
    """

    trough: Float[Array, ""]

    @classmethod
    def of(cls, x: Float[Array, "..."], mask: Bool[Array, "..."] | None = None) -> Self:
        """Minimum of x over the mask, or over all of x.

        Source: ours: folds like `Mean`.
        """
        x, mask = _selected(x, mask)
        return cls(jnp.min(x, initial=jnp.inf, where=mask))

    @classmethod
    def zero(cls) -> Self:
        """The minimum of nothing: the identity of `merge`.

        Source: ours: start value of a loop carry.
        """
        return cls(jnp.full((), jnp.inf, jnp.float32))

    def merge(self, other: Self) -> Self:
        """The minimum over both sets of terms.

        Source: ours: NaN wins, so a broken term stays visible.
        """
        return type(self)(jnp.minimum(self.trough, other.trough))

    def value(self) -> float:
        """The minimum as a python float; NaN when there was no term.

        Source: ours: "n/a" is NaN in every metric.
        """
        return math.nan if float(self.trough) == math.inf else float(self.trough)


def merge(a: Any, b: Any) -> Any:
    """Folds two metrics, or two (nested) dicts of them; a key on one side only is kept as it is.

    Raises TypeError when the two sides are of different kinds.

    Source: ours: associative, commutative, with `identity` as the neutral element.
    """
    if type(a) is not type(b):
        raise TypeError(f"cannot merge {type(a).__name__} with {type(b).__name__}")
    if isinstance(a, dict):
        both = {key: merge(a[key], b[key]) for key in a if key in b}
        return {**a, **b, **both}
    return a.merge(b)


def identity(metrics: Any) -> Any:
    """The neutral element for metrics of this structure: the first carry of a `lax` loop.

    Only the structure is read, so the result of `jax.eval_shape` will do.

    Source: ours: a loop carry needs its structure before the first step has run.
    """
    if isinstance(metrics, dict):
        return {key: identity(value) for key, value in metrics.items()}
    return type(metrics).zero()


def finalize(metrics: Any) -> Any:
    """A python float for a metric, a (nested) dict of them for a dict; NaN where no term came in.

    Waits for the device once, whatever the number of metrics.

    Source: ours: divided once, after all folding.
    """

    def close(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: close(value) for key, value in node.items()}
        return node.value()

    return close(jax.device_get(metrics))
