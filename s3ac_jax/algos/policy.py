"""Surrogate losses of the actor, per token and unreduced.

A token whose logp is NaN gets a NaN gradient whatever is selected afterwards, except in `banded`:
replace masked inputs first (the surrogates of `recipe.py` do).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# exp(20) = 4.9e8 stays finite in fp32 with room for the advantage and the sum.
MAX_LOG_RATIO = 20.0


def _ratio(logp: Float[Array, "..."], logp_old: Float[Array, "..."]) -> Float[Array, "..."]:
    log_ratio = jnp.asarray(logp, jnp.float32) - lax.stop_gradient(
        jnp.asarray(logp_old, jnp.float32)
    )
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def cispo(
    logp: Float[Array, "..."],
    logp_old: Float[Array, "..."],
    advantages: Float[Array, "..."],
    *,
    eps_low: float,
    eps_high: float,
) -> Float[Array, "..."]:
    """-sg[clip(r, 1 - eps_low, 1 + eps_high) A] logp per token, r = exp(logp - logp_old).

    In nats times reward units. Its gradient in logp is -clip(r) A: clipping bounds the weight of a
    token and never silences it. logp_old and advantages are constants.

    Source: MiniMax-M1 (2506.13585), eq. 4-5.
    """
    ratio = jnp.clip(_ratio(logp, logp_old), 1.0 - eps_low, 1.0 + eps_high)
    coefficient = lax.stop_gradient(ratio * jnp.asarray(advantages, jnp.float32))
    return -coefficient * jnp.asarray(logp, jnp.float32)


def ppo_clip(
    logp: Float[Array, "..."],
    logp_old: Float[Array, "..."],
    advantages: Float[Array, "..."],
    *,
    eps_low: float,
    eps_high: float,
) -> Float[Array, "..."]:
    """max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A) per token, in reward units.

    No gradient once r has left the interval in the direction that A pushes. logp_old and
    advantages are constants.

    Source: Schulman 2017 (1707.06347), eq. 7; two bounds as in DAPO (2503.14476), eq. 10.
    """
    ratio = _ratio(logp, logp_old)
    advantages = lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
    clipped = jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high)
    return jnp.maximum(-ratio * advantages, -clipped * advantages)


def policy_gradient(
    logp: Float[Array, "..."], advantages: Float[Array, "..."]
) -> Float[Array, "..."]:
    """-sg[A] logp per token, in nats times reward units. Its gradient in logp is -A.

    The policy gradient at the policy that sampled the token, biased at any other unless a weight
    (see `guards.py`) corrects it. advantages are constants.

    Source: REINFORCE (Williams 1992, Machine Learning 8), section 4.
    """
    advantages = lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
    return -advantages * jnp.asarray(logp, jnp.float32)


def banded(
    logp: Float[Array, "..."],
    logp_rollout: Float[Array, "..."],
    advantages: Float[Array, "..."],
    *,
    low: float,
    high: float,
) -> Float[Array, "..."]:
    """-sg[r 1(low < r < high) A] logp per token, r = exp(logp - logp_rollout).

    In nats times reward units. The band is strict on both sides and whatever the sign of A: on or
    beyond a bound the token has neither loss nor gradient, and NaN in logp or logp_rollout counts
    as beyond. logp_rollout and advantages are constants.

    Source: SAO (2607.07508), the strict two-sided band: 0.7-6 for math, 0.2-4 for code.
    """
    logp = jnp.asarray(logp, jnp.float32)
    ratio = lax.stop_gradient(_ratio(logp, logp_rollout))
    inside = (low < ratio) & (ratio < high)
    # Both factors are selected: 0 * NaN and 0 * -inf are NaN.
    advantages = lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
    coefficient = jnp.where(inside, ratio * advantages, 0.0)
    return -coefficient * jnp.where(inside, logp, 0.0)
