"""SPO's tracker: a Beta belief (a, b) about each prompt's success rate, v = a / (a + b).

The belief takes the place of a group's mean as baseline. Before an outcome r in {0, 1} is added,
a <- factor a + r and b <- factor b + 1 - r, the old counts fade by `forgetting`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.core import masked


def initial_counts(
    successes: Int[Array, "P"], samples: Int[Array, "P"], *, n_0: float
) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
    """(a0, b0), a0 = n_0 (k + 1/2) / (n + 1) and b0 = n_0 - a0, from k successes in n samples.

    In counts. The belief is worth n_0 outcomes however many were sampled; n = 0 gives n_0 / 2
    each. Raises ValueError unless n_0 > 0.

    Source: SPO (2509.13232), initialisation of the tracker; n_0 8.
    """
    if not n_0 > 0:
        raise ValueError(f"n_0 must be positive, got {n_0}")
    successes = jnp.asarray(successes, jnp.float32)
    a = n_0 * ((successes + 0.5) / (jnp.asarray(samples, jnp.float32) + 1.0))
    return a, n_0 - a


def forgetting(
    drift: Float[Array, "..."], *, half_life: float = 0.06, low: float = 0.875, high: float = 0.96
) -> Float[Array, "..."]:
    """clip(2^(-D / half_life), low, high), the factor on the old counts, without unit.

    D and half_life: nats per token, mean |change of logp|. high < 1: something is forgotten even
    without drift. NaN gives 1, not high: a prompt that was never answered has its initial counts
    and nothing to forget. Raises ValueError unless half_life > 0 and 0 <= low <= high <= 1.

    Source: SPO (2509.13232), KL-adaptive forgetting; ours: NaN.
    """
    if not (half_life > 0 and 0 <= low <= high <= 1):
        raise ValueError(
            f"half_life must be positive and 0 <= low <= high <= 1, got {half_life}, {low}, {high}"
        )
    drift = jnp.asarray(drift, jnp.float32)
    return jnp.where(jnp.isnan(drift), 1.0, jnp.clip(jnp.exp2(-drift / half_life), low, high))


def sampling_weight(v: Float[Array, "..."], *, floor: float = 0.05) -> Float[Array, "..."]:
    """sqrt(v (1 - v)) + floor: unnormalised weight of drawing a prompt of success rate v.

    The std of its next outcome, so most at v = 1/2; the floor keeps every prompt in play.

    Source: SPO (2509.13232), prioritised sampling.
    """
    v = jnp.asarray(v, jnp.float32)
    # A division on an accelerator may leave v an ulp above 1, and NaN would upset the draw.
    return jnp.sqrt(jnp.maximum(v * (1.0 - v), 0.0)) + floor


def tracked_advantages(
    successes01: Float[Array, "B"], v: Float[Array, "B"], present: Bool[Array, "B"]
) -> Float[Array, "B"]:
    """r - v, minus its mean and divided by its population std over the present responses.

    Without unit. successes01: r in {0, 1}, not the reward in {-1, 1}; v: the belief before r was
    added to it. Exactly 0 where absent, and everywhere when all r - v are equal.

    Source: SPO (2509.13232), baseline and batch normalisation; ours: the exact 0.
    """
    surprise = jnp.asarray(successes01, jnp.float32) - jnp.asarray(v, jnp.float32)
    # `whiten` tells equal from unequal by the extremes, not by an eps under the std.
    return masked.whiten(surprise, present)
