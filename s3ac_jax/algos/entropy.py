"""GEPO: entropy control by scaling the advantages of groups that are too sure or too unsure."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.core import masked


def group_surprisal(
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    group_ids: Int[Array, "B"] | Int[Array, "B T"],
    num_groups: int,
) -> Float[Array, "P"]:
    """Mean of -logp over all trainable tokens of each group, nats per token; NaN without any.

    group_ids: from 0 to num_groups - 1, one per row, or one per token for packed rows (there
    padding may hold any number).

    Source: GEPO (2607.16850), group entropy.
    """
    mask = jnp.asarray(mask, bool)
    group_ids = jnp.asarray(group_ids)
    if group_ids.ndim == 1:
        group_ids = group_ids[:, None]
    group_ids = jnp.where(mask, group_ids, 0).ravel()
    surprisal = jnp.where(mask, -jnp.asarray(logp, jnp.float32), 0.0)

    def sums(x: Float[Array, "B T"]) -> Float[Array, "P"]:
        return jax.ops.segment_sum(x.ravel(), group_ids, num_segments=num_groups)

    count = sums(mask.astype(jnp.float32))
    return jnp.where(count > 0, sums(surprisal) / jnp.maximum(count, 1.0), jnp.nan)


def update_thresholds(
    low: Float[Array, ""],
    high: Float[Array, ""],
    group_entropy: Float[Array, "P"],
    *,
    beta_low: float,
    beta_high: float,
    rate: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Moving averages of mu - beta_low sigma and mu + beta_high sigma over the batch's groups.

    In nats per token; sigma is the population std. NaN in low or high means "no batch seen yet"
    and takes the batch's own; groups with NaN entropy do not count, and a batch without any
    leaves the thresholds alone.

    Source: GEPO (2607.16850), adaptive thresholds.
    """
    group_entropy = jnp.asarray(group_entropy, jnp.float32)
    counted = jnp.isfinite(group_entropy)
    centre = masked.mean(group_entropy, counted)
    sigma = jnp.sqrt(masked.var(group_entropy, counted))

    def moved(old: Float[Array, ""], batch: Float[Array, ""]) -> Float[Array, ""]:
        old = jnp.asarray(old, jnp.float32)
        new = jnp.where(jnp.isnan(old), batch, (1.0 - rate) * old + rate * batch)
        return jnp.where(jnp.any(counted), new, old)

    return moved(low, centre - beta_low * sigma), moved(high, centre + beta_high * sigma)


def gepo_scale(
    advantages: Float[Array, "..."],
    group_entropy: Float[Array, "..."],
    *,
    h_low: float | Float[Array, ""],
    h_high: float | Float[Array, ""],
    alpha_low: float,
    alpha_high: float,
) -> Float[Array, "..."]:
    """alpha_low A where A > 0 and H < h_low, alpha_high A where A < 0 and H > h_high, else A.

    group_entropy: nats per token, of the group each advantage belongs to. NaN in it or in a
    threshold leaves A as it is.

    Source: GEPO (2607.16850), advantage scaling.
    """
    advantages = jnp.asarray(advantages, jnp.float32)
    sure = (advantages > 0) & (group_entropy < h_low)
    unsure = (advantages < 0) & (group_entropy > h_high)
    factor = jnp.where(sure, alpha_low, jnp.where(unsure, alpha_high, 1.0))
    return advantages * factor
