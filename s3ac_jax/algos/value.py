"""The critic's loss and the measures of how good a critic is."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from s3ac_jax.core import masked


def clipped_mse(
    values: Float[Array, "..."],
    values_old: Float[Array, "..."],
    returns: Float[Array, "..."],
    *,
    clip: float | None,
) -> Float[Array, "..."]:
    """max((V - R)², (V_old + clip(V - V_old, ±clip) - R)²) per token, in squared reward units.

    No factor 1/2. clip = None is the plain squared error and does not read values_old. returns and
    values_old are constants.

    Source: PPO's reference code (openai/baselines, ppo2), there with 1/2 of the mean.
    """
    values = jnp.asarray(values, jnp.float32)
    returns = lax.stop_gradient(jnp.asarray(returns, jnp.float32))
    plain = jnp.square(values - returns)
    if clip is None:
        return plain
    values_old = lax.stop_gradient(jnp.asarray(values_old, jnp.float32))
    near = values_old + jnp.clip(values - values_old, -clip, clip)
    return jnp.maximum(plain, jnp.square(near - returns))


def clip_binds(
    values: Float[Array, "..."],
    values_old: Float[Array, "..."],
    returns: Float[Array, "..."],
    *,
    clip: float | None,
) -> Bool[Array, "..."]:
    """Where `clipped_mse` takes the clipped error, which has no gradient; nowhere for clip None.

    Source: PPO's reference code (openai/baselines, ppo2); ours: as a thing to watch.
    """
    if clip is None:
        return jnp.zeros(jnp.shape(values), bool)
    plain = jnp.square(jnp.asarray(values, jnp.float32) - returns)
    moved_far = jnp.abs(jnp.asarray(values, jnp.float32) - values_old) > clip
    return moved_far & (clipped_mse(values, values_old, returns, clip=clip) > plain)


def _unexplained(
    residual: Float[Array, "..."],
    target: Float[Array, "..."],
    mask: Bool[Array, "..."],
    *,
    rtol: float,
) -> Float[Array, ""]:
    defined = ~masked.is_constant(target, mask, rtol=rtol)
    variance = jnp.where(defined, masked.var(target, mask), 1.0)
    return jnp.where(defined, masked.var(residual, mask) / variance, jnp.nan)


def explained_variance(
    values: Float[Array, "..."], returns: Float[Array, "..."], mask: Bool[Array, "..."]
) -> Float[Array, ""]:
    """1 - Var(R - V) / Var(R) over the mask; 1 is perfect, 0 is no better than a constant.

    NaN ("n/a") where R is constant over the mask. Blind to bias: log `mean_error` beside it.

    Source: S3AC (2610.35518), critic diagnostics; ours: two passes, over the global batch.
    """
    values, returns = jnp.asarray(values, jnp.float32), jnp.asarray(returns, jnp.float32)
    return 1.0 - _unexplained(returns - values, returns, mask, rtol=1e-6)


def actor_target_ev(
    advantages: Float[Array, "..."], values: Float[Array, "..."], mask: Bool[Array, "..."]
) -> Float[Array, ""]:
    """1 - Var(A) / Var(A + V) over the mask, A the actor's raw advantages: the explained variance
    of V against the actor's own target. NaN where that target is constant.

    Source: S3AC (2610.35518) names it; ours: the formula.
    """
    advantages, values = jnp.asarray(advantages, jnp.float32), jnp.asarray(values, jnp.float32)
    # A + V carries the rounding of the recursion, up to 1e-5 at 32K tokens.
    return 1.0 - _unexplained(advantages, advantages + values, mask, rtol=3e-5)


def r_squared(
    values: Float[Array, "..."], returns: Float[Array, "..."], mask: Bool[Array, "..."]
) -> Float[Array, ""]:
    """1 - mean (R - V)² / Var(R) over the mask; below 0 a constant would be the better critic.

    Unlike `explained_variance` it counts a bias. NaN where R is constant over the mask.

    Source: the coefficient of determination, Wright 1921 (Correlation and Causation).
    """
    values, returns = jnp.asarray(values, jnp.float32), jnp.asarray(returns, jnp.float32)
    defined = ~masked.is_constant(returns, mask, rtol=1e-6)
    variance = jnp.where(defined, masked.var(returns, mask), 1.0)
    error = masked.mean(jnp.square(returns - values), mask)
    return jnp.where(defined, 1.0 - error / variance, jnp.nan)


def mean_error(
    values: Float[Array, "..."], returns: Float[Array, "..."], mask: Bool[Array, "..."]
) -> Float[Array, ""]:
    """Mean of V - R over the mask, in reward units; positive is an optimistic critic.

    Source: ours: the bias that explained variance cannot see.
    """
    error = jnp.asarray(values, jnp.float32) - jnp.asarray(returns, jnp.float32)
    return masked.mean(error, mask)
