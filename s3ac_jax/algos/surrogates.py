"""The `surrogate` column: the actor's loss per token, selected with `where` before computing.

imitation: weight of the language-model loss on successful responses, beside the surrogate
(VAPO 2504.05118, positive-example loss); 0 for none.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from s3ac_jax.algos.policy import banded, cispo, policy_gradient, ppo_clip


@dataclasses.dataclass(frozen=True)
class _Surrogate:
    imitation: float = 0.0
    # Whether logp_old is the sampler's own log-prob instead of the trainer's before the update.
    against_sampler: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.imitation < math.inf:
            raise ValueError(f"imitation must be finite and not negative, got {self.imitation}")


@dataclasses.dataclass(frozen=True)
class _Clipped(_Surrogate):
    eps_low: float = 0.2
    eps_high: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        if not (self.eps_low >= 0 and self.eps_high >= 0):
            raise ValueError(
                f"eps_low and eps_high must not be negative, got {self.eps_low}, {self.eps_high}"
            )

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the policy ratio.

        Source: ours: "cap 5" is eps_high 4 here, 5 in TRL.
        """
        return 1.0 - self.eps_low, 1.0 + self.eps_high


def _safe(mask: Bool[Array, "B T"], *arrays: Float[Array, "B T"]) -> list[Float[Array, "B T"]]:
    return [jnp.where(mask, x, 0.0) for x in arrays]


@dataclasses.dataclass(frozen=True)
class Cispo(_Clipped):
    """Policy gradient with clipped, detached ratio.

    Source: MiniMax-M1 (2506.13585), eq. 4-5; ours: an upper bound of 5 and no lower.
    """

    eps_low: float = 1.0
    eps_high: float = 4.0

    def token_loss(
        self,
        logp: Float[Array, "B T"],
        logp_old: Float[Array, "B T"],
        advantages: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """Loss per token, 0 where not mask.

        Source: MiniMax-M1 (2506.13585), eq. 4-5.
        """
        return cispo(
            *_safe(mask, logp, logp_old, advantages), eps_low=self.eps_low, eps_high=self.eps_high
        )


@dataclasses.dataclass(frozen=True)
class PpoClip(_Clipped):
    """The clipped surrogate.

    Source: Schulman 2017 (1707.06347), eq. 7; DAPO (2503.14476), eq. 10, for two bounds.
    """

    def token_loss(
        self,
        logp: Float[Array, "B T"],
        logp_old: Float[Array, "B T"],
        advantages: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """Loss per token, 0 where not mask.

        Source: Schulman 2017 (1707.06347), eq. 7.
        """
        return ppo_clip(
            *_safe(mask, logp, logp_old, advantages), eps_low=self.eps_low, eps_high=self.eps_high
        )


@dataclasses.dataclass(frozen=True)
class PolicyGradient(_Surrogate):
    """-A log pi: no ratio, for one update per batch.

    Source: Williams 1992, REINFORCE.
    """

    interval: ClassVar[tuple[float, float]] = (0.0, math.inf)

    def token_loss(
        self,
        logp: Float[Array, "B T"],
        logp_old: Float[Array, "B T"],
        advantages: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """Loss per token, 0 where not mask; logp_old is not read.

        Source: Williams 1992, REINFORCE.
        """
        return policy_gradient(*_safe(mask, logp, advantages))


@dataclasses.dataclass(frozen=True)
class Band(_Surrogate):
    """-ratio A log pi where low < ratio < high, nothing elsewhere; ratio = pi / mu, the sampler's.

    With the sampler in the ratio there is no mismatch left to correct: guard with `NoGuard`.
    Source: SAO (2607.07508): 0.7 to 6 for mathematics, 0.2 to 4 for code.
    """

    low: float = 0.7
    high: float = 6.0
    against_sampler: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.low < 1 < self.high:
            raise ValueError(f"must be 0 <= low < 1 < high, got {self.low}, {self.high}")

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the policy ratio. Source: SAO (2607.07508)."""
        return self.low, self.high

    def token_loss(
        self,
        logp: Float[Array, "B T"],
        logp_old: Float[Array, "B T"],
        advantages: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """Loss per token, 0 where not mask; logp_old is the sampler's.

        Source: SAO (2607.07508), strict two-sided band.
        """
        return banded(*_safe(mask, logp, logp_old, advantages), low=self.low, high=self.high)


Surrogate = Cispo | PpoClip | PolicyGradient | Band
