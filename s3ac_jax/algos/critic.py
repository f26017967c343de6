"""The `critic` column: what the critic is pretrained on, its targets, its loss."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.algos.advantages import gae, monte_carlo_returns
from s3ac_jax.algos.value import clipped_mse
from s3ac_jax.core import segments


@dataclasses.dataclass(frozen=True)
class CriticSpec:
    """How a critic is trained.

    epochs: passes over each rollout batch. lam: of its targets. clip: of the value loss, None for
    none. at: every token, or V(s_0) alone. pretraining: on policies of several strengths, on the
    base policy alone, or none. freeze_attention: attention learns neither in pretraining nor
    online. warmup_ticks: first ticks in which the critic learns and the actor does not.
    Source: S3AC (2610.35518); ours: clip 0.5, as targets span 2.
    """

    epochs: int = 2
    lam: float = 1.0
    clip: float | None = 0.5
    at: Literal["tokens", "prompt"] = "tokens"
    pretraining: Literal["coverage", "on_policy", "none"] = "coverage"
    freeze_attention: bool = True
    warmup_ticks: int = 0

    def __post_init__(self):
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}")
        if self.warmup_ticks < 0:
            raise ValueError(f"warmup_ticks must not be negative, got {self.warmup_ticks}")
        if not 0 <= self.lam <= 1:
            raise ValueError(f"lam must be in 0..1, got {self.lam}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")

    @property
    def reads_values(self) -> bool:
        """Whether its targets or its loss need V from before the update. Source: ours."""
        return self.clip is not None or self.lam < 1

    def learns(
        self, mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> Bool[Array, "B T"]:
        """Tokens whose value is trained: all trainable ones, or the first of each response.

        Source: PCL (2510.01135) trains a value of the prompt alone.
        """
        if self.at == "tokens":
            return mask
        return segments.first_masked(mask, segment_ids)

    def returns(
        self,
        values: Float[Array, "B T"] | None,
        rewards: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T"]:
        """Targets in reward units, A + V of raw GAE; 0 where not mask. At lam 1 values may be None.

        Source: Schulman 2016 (1506.02438); VC-PPO (2503.01491) for a lambda of the critic's own.
        """
        if self.lam == 1.0:
            # A + V without its rounding: exactly R at every trainable token.
            return monte_carlo_returns(rewards, mask, segment_ids=segment_ids)
        raw = gae(values, rewards, mask, lam=self.lam, segment_ids=segment_ids)
        return raw + jnp.where(mask, values, 0.0)

    def token_loss(
        self,
        values: Float[Array, "B T"],
        values_old: Float[Array, "B T"] | None,
        returns: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """Half the clipped squared error per token, 0 where not mask; log the error unhalved.

        values_old may be None without a clip.
        Source: S3AC (2610.35518): the gradient in the value is the error itself.
        """
        values, returns = jnp.where(mask, values, 0.0), jnp.where(mask, returns, 0.0)
        old = values if values_old is None else jnp.where(mask, values_old, 0.0)
        return 0.5 * clipped_mse(values, old, returns, clip=self.clip)
