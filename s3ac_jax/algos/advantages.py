"""Advantages and returns from values and rewards."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.core import masked

# 8 was the fastest unrolling measured, on CPU with 64 x 32768 tokens: 12 ms.
_UNROLL = 8


# Closes over nothing: outside `jit`, a new function per call would compile anew each time.
def _gae_step(carry, token):
    gamma, next_value, next_return = carry
    value, reward, one_minus_lam, live, end = token
    next_value, next_return = (jnp.where(end, 0.0, x) for x in (next_value, next_return))
    # Gₜ = Aₜ + V(sₜ). At lambda 1 it does not touch V: error 2e-7 at 32K tokens, against 2e-5 for
    # the recursion on A.
    target = reward + gamma * (next_return + one_minus_lam * (next_value - next_return))
    carry = gamma, jnp.where(live, value, next_value), jnp.where(live, target, next_return)
    return carry, jnp.where(live, target - value, 0.0)


def gae(
    values: Float[Array, "B T"],
    rewards: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    lam: float | Float[Array, ""] | Float[Array, "B"] | Float[Array, "B T"],
    gamma: float = 1.0,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """Generalised advantage estimates over the trainable tokens, in reward units; 0 elsewhere.

        δₜ = rₜ + γ V(sₜ₊₁) - V(sₜ)        Aₜ = δₜ + γ λₜ Aₜ₊₁

    t + 1 is the next *trainable* token of the same segment: tokens outside the mask (tool output,
    padding) are passed over without decay, and neither their value nor their reward is read. After
    the last trainable token V and A are 0. values[t] speaks of the state before token t. The
    reward has to stand on a trainable token. lam: one number, one per row, or one per token.
    Nothing is whitened or detached. Raises ValueError when the shapes of values, rewards, mask and
    segment_ids differ.

    Source: Schulman 2016 (1506.02438), eq. 16; ours: skipped positions and segments.
    """
    mask = jnp.asarray(mask, bool)
    shapes = [jnp.shape(x) for x in (values, rewards, mask, segment_ids) if x is not None]
    if len(set(shapes)) > 1:
        raise ValueError(f"values, rewards, mask and segment_ids differ in shape: {shapes}")
    # True where the next token is another segment's: the recursion starts afresh.
    ends = jnp.zeros(mask.shape, bool)
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
        mask = mask & (segment_ids > 0)
        ends = ends.at[:, :-1].set(segment_ids[:, :-1] != segment_ids[:, 1:])
    values = jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)
    rewards = jnp.where(mask, jnp.asarray(rewards, jnp.float32), 0.0)
    lam = jnp.asarray(lam, jnp.float32)
    lam = lam[:, None] if lam.ndim == 1 else lam
    one_minus_lam = jnp.where(mask, 1.0 - lam, 0.0)
    zeros = jnp.zeros_like(values[:, 0])
    start = jnp.float32(gamma), zeros, zeros
    time_major = jax.tree.map(jnp.transpose, (values, rewards, one_minus_lam, mask, ends))
    _, advantages = lax.scan(_gae_step, start, time_major, reverse=True, unroll=_UNROLL)
    return advantages.T


def monte_carlo_returns(
    rewards: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 1.0,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """Discounted sum of the rewards from each trainable token on, in reward units; 0 elsewhere.

    Discounting counts trainable tokens. With gamma = 1 and one reward R at the end it is R, bit
    for bit, at every trainable token. Raises ValueError when the shapes differ.

    Source: Schulman 2016 (1506.02438), eq. 18: GAE of lambda 1 plus the baseline, here 0.
    """
    zeros = jnp.zeros(jnp.shape(rewards), jnp.float32)
    return gae(zeros, rewards, mask, lam=1.0, gamma=gamma, segment_ids=segment_ids)


def length_adaptive_lambda(num_tokens: Int[Array, "..."], *, alpha: float) -> Float[Array, "..."]:
    """λ = max(0, 1 - 1 / (α l)) for a response of l trainable tokens, without unit; 0 for l = 0.

    The weights of the TD errors then sum to α l: bias and variance keep their proportion at every
    length. Raises ValueError unless alpha > 0.

    Source: VAPO (2504.05118), length-adaptive GAE; alpha: VAPO 0.05, BPCO 0.4, SAO 1.5.
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    num_tokens = jnp.asarray(num_tokens, jnp.float32)
    safe = jnp.where(num_tokens > 0, num_tokens, 1.0)
    return jnp.where(num_tokens > 0, jnp.maximum(0.0, 1.0 - 1.0 / (alpha * safe)), 0.0)


def group_relative(
    rewards: Float[Array, "B"],
    group_ids: Int[Array, "B"],
    *,
    num_groups: int,
    divide_by_std: bool,
) -> Float[Array, "B"]:
    """Reward minus the mean of its group, divided by the group's std (ddof 1) if asked.

    In reward units, or without unit when divided. Exactly 0 for a group of one and for a group of
    equal rewards, which takes the place of an eps in the denominator. group_ids run from 0 to
    num_groups - 1, in any order.

    Source: GRPO (2402.03300), section 4.1.2; Dr.GRPO (2503.20783) without std; ours: the exact 0.
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    group_ids = jnp.asarray(group_ids)

    def sums(x: Float[Array, "B"]) -> Float[Array, "P"]:
        return jax.ops.segment_sum(x, group_ids, num_segments=num_groups)

    count = sums(jnp.ones_like(rewards))
    centred = rewards - (sums(rewards) / jnp.maximum(count, 1.0))[group_ids]
    # By extremes, not by std: the fp32 mean of equal numbers leaves a residue that a std of the
    # same size would turn into advantages near 1.
    low = jax.ops.segment_min(rewards, group_ids, num_segments=num_groups)
    high = jax.ops.segment_max(rewards, group_ids, num_segments=num_groups)
    varied = (high > low)[group_ids]
    if divide_by_std:
        variance = sums(jnp.square(centred)) / jnp.maximum(count - 1.0, 1.0)
        centred = centred / jnp.sqrt(jnp.where(varied, variance[group_ids], 1.0))
    return jnp.where(varied, centred, 0.0)


def centred(rewards: Float[Array, "B"], present: Bool[Array, "B"]) -> Float[Array, "B"]:
    """Reward minus the mean over the present responses, in reward units; 0 where absent.

    Exactly 0 for one present response and for equal rewards. A reward that is absent is not read.

    Source: FlashREINFORCE (public code, 2026-09), batch-mean baseline; ours: the exact 0.
    """
    rewards = jnp.where(present, jnp.asarray(rewards, jnp.float32), 0.0)
    varied = ~masked.is_constant(rewards, present)
    return jnp.where(present & varied, rewards - masked.mean(rewards, present), 0.0)
