"""Reductions over the positions of a mask. fp32; what stands outside the mask is never read."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def _live(
    x: Float[Array, "..."], mask: Bool[Array, "..."]
) -> tuple[Float[Array, "..."], Bool[Array, "..."]]:
    x = jnp.asarray(x, jnp.float32)
    mask = jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)
    # `where`, not a product: 0 * NaN is NaN, in the value and in the gradient.
    return jnp.where(mask, x, 0.0), mask


def total(x: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Sum of x over the mask, in the unit of x; 0 for an empty mask.

    The numerator of token means whose denominator spans several micro-batches.

    Source: ours: the one place where a masked sum selects before it adds.
    """
    return jnp.sum(_live(x, mask)[0])


def mean(x: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Mean of x over the mask, in the unit of x; 0 for an empty mask.

    Source: ours: fp32 and NaN-proof at masked positions.
    """
    x, mask = _live(x, mask)
    return jnp.sum(x) / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def var(x: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Population variance of x over the mask, in squared units of x; 0 for an empty mask.

    Source: ours: two passes, since E[x^2] - E[x]^2 cancels in fp32.
    """
    x, mask = _live(x, mask)
    return mean(jnp.square(x - mean(x, mask)), mask)


def is_constant(
    x: Float[Array, "..."], mask: Bool[Array, "..."], *, rtol: float = 1e-6
) -> Bool[Array, ""]:
    """Whether x does not vary over the mask beyond `rtol` of its size; True for an empty mask.

    Source: ours: an fp32 mean of equal numbers is off by an ulp, so a variance is never exactly 0.
    """
    x, mask = _live(x, mask)
    high = jnp.max(x, initial=-jnp.inf, where=mask)
    low = jnp.min(x, initial=jnp.inf, where=mask)
    return high - low <= rtol * jnp.maximum(jnp.abs(high), jnp.abs(low))


def whiten(x: Float[Array, "..."], mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """(x - mean) / population std over the mask, without unit; 0 where not mask.

    All zeros when x is constant over the mask or the mask is empty, so that rounding residue is
    never blown up to unit variance.

    Source: REINFORCE++ (2501.03262), global advantage normalisation; ours: exact 0 for eps.
    """
    x, mask = _live(x, mask)
    variance = var(x, mask)
    spread = ~is_constant(x, mask)
    std = jnp.sqrt(jnp.where(spread, variance, 1.0))
    return jnp.where(mask & spread, (x - mean(x, mask)) / std, 0.0)
