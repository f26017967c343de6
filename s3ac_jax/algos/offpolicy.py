"""Mismatch between the sampler and the trainer: importance weights and rejection.

rho = pi_old / mu, pi_old the trainer before the update, mu the sampler. Both log-probs are of the
same processed distribution (same temperature). Every weight and decision is a constant. NaN at a
trainable token rejects it, never keeps it. Where pi_old := mu (bypass), rho is exactly 1.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.core import segments

# exp(20) = 4.9e8: beyond any bound in use, and finite.
_MAX_LOG_RATIO = 20.0


def _log_ratio(
    logp_train: Float[Array, "B T"], logp_rollout: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    difference = jnp.asarray(logp_train, jnp.float32) - jnp.asarray(logp_rollout, jnp.float32)
    # Selected before any `exp`; constants by definition.
    return lax.stop_gradient(jnp.where(mask, difference, 0.0))


def _ratio(
    logp_train: Float[Array, "B T"], logp_rollout: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    log_ratio = _log_ratio(logp_train, logp_rollout, mask)
    return jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def token_weights(
    logp_train: Float[Array, "B T"],
    logp_rollout: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float,
    high: float,
) -> Float[Array, "B T"]:
    """clip(rho, low, high) per token, without unit; 0 where not mask. low = 0 only truncates.

    Unlike the decisions below it hands NaN on. The lower bound is that of the S3AC lab's public RL
    config.

    Source: TIS (Yao 2025, "Your efficient RL framework secretly brings you off-policy training").
    """
    ratio = jnp.clip(_ratio(logp_train, logp_rollout, mask), low, high)
    return jnp.where(mask, ratio, 0.0)


def token_keep(
    logp_train: Float[Array, "B T"],
    logp_rollout: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float,
    high: float,
) -> Bool[Array, "B T"]:
    """Whether low <= rho <= high; False where not mask.

    Source: IcePop (Ling team 2025, 2510.18855), the double-sided mask.
    """
    ratio = _ratio(logp_train, logp_rollout, mask)
    return mask & (low <= ratio) & (ratio <= high)


def _per_row(per_token: Array, segment_ids: Int[Array, "B T"] | None) -> Array:
    return per_token[:, 0] if segment_ids is None else per_token


def sequence_keep(
    logp_train: Float[Array, "B T"],
    logp_rollout: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    veto: float,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B"] | Bool[Array, "B T"]:
    """Whether no trainable token of the response has rho > veto; True without any token.

    One answer per row, or with segment_ids one per segment, handed to all its tokens (and True at
    padding: combine with the mask).

    Source: ours: catastrophic-token veto, as in the S3AC lab's public RL config.
    """
    vetoed = ~(_ratio(logp_train, logp_rollout, mask) <= veto)
    return _per_row(~segments.segment_any(vetoed, segment_ids, mask), segment_ids)


def geometric_mean_keep(
    logp_train: Float[Array, "B T"],
    logp_rollout: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float,
    high: float,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B"] | Bool[Array, "B T"]:
    """Whether the geometric mean of rho over a response lies in [low, high]; bounds > 0.

    Shapes as in `sequence_keep`; a response without trainable token has the mean 1.

    Source: GSPO (2507.18071), the length-normalised sequence ratio, here used as a mask.
    """
    log_ratio = _log_ratio(logp_train, logp_rollout, mask)
    mean = segments.segment_mean(log_ratio, segment_ids, mask)
    return _per_row((math.log(low) <= mean) & (mean <= math.log(high)), segment_ids)


def product_keep(
    logp_train: Float[Array, "B T"],
    logp_rollout: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float,
    high: float,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Bool[Array, "B"] | Bool[Array, "B T"]:
    """Whether the product of rho over a response lies in [low, high]; bounds > 0.

    Shapes as in `sequence_keep`; compared in nats, so a long product does not overflow.

    Source: ours: the unbiased sequence ratio (Precup 2000, per-decision IS) used as a mask.
    """
    total = segments.segment_sum(_log_ratio(logp_train, logp_rollout, mask), segment_ids, mask)
    return _per_row((math.log(low) <= total) & (total <= math.log(high)), segment_ids)


def binary_kl_keep(
    logp: Float[Array, "B T"],
    logp_rollout: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    delta: float,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B"], Bool[Array, "B"]] | tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Mean over a response of KL(mu || pi) of "this token or another", nats, and whether <= delta.

        KL = p ln(p/q) + (1-p) ln((1-p)/(1-q)),  p = mu(a), q = pi(a), within [1e-6, 1 - 1e-6]

    Shapes as in `sequence_keep`; 0 and True for a response without trainable token.

    Source: FlashREINFORCE (public code, 2026-09).
    """

    def logs(x: Float[Array, "B T"]) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        x = lax.stop_gradient(jnp.where(mask, jnp.asarray(x, jnp.float32), -1.0))
        x = jnp.clip(x, math.log(1e-6), math.log1p(-1e-6))
        # 1 - exp(x) cancels near x = 0, where most sampled tokens are.
        return x, jnp.log(-jnp.expm1(x))

    (p, not_p), (q, not_q) = logs(logp_rollout), logs(logp)
    divergence = jnp.exp(p) * (p - q) + jnp.exp(not_p) * (not_p - not_q)
    mean = segments.segment_mean(divergence, segment_ids, mask)
    return _per_row(mean, segment_ids), _per_row(mean <= delta, segment_ids)


def effective_sample_size(
    weights: Float[Array, "..."], mask: Bool[Array, "..."]
) -> Float[Array, ""]:
    """(sum w)² / sum w² over the mask, in tokens: as many equal weights as would do; 0 for none.

    Source: Kish 1965, Survey Sampling.
    """
    weights = jnp.where(mask, jnp.asarray(weights, jnp.float32), 0.0)
    squares = jnp.sum(jnp.square(weights))
    return jnp.square(jnp.sum(weights)) / jnp.where(squares > 0, squares, 1.0)
