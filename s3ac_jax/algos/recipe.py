"""Recipes: an algorithm is a value, one entry per column, and each entry brings its own maths.

    select     which prompts are worth drawing        surrogate  loss per token of the actor
    keep       which responses are trained on         guard      sampler-trainer mismatch
    advantage  credit of each token                   critic     its targets and its loss
    entropy    scaling against collapse, or None

A new method is a new entry in a column, never a question about a recipe's name. Columns select
with `where` before they compute, so padding may hold anything.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.algos.advantages import gae, length_adaptive_lambda, monte_carlo_returns
from s3ac_jax.algos.difficulty import acceptance, decay_history, fuse, success_prior
from s3ac_jax.algos.entropy import gepo_scale, update_thresholds
from s3ac_jax.algos.guards import Guard, MismatchGuard
from s3ac_jax.algos.policy import cispo, ppo_clip
from s3ac_jax.algos.value import clipped_mse
from s3ac_jax.core import masked


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every prompt is drawn when its turn comes.

    Source: ours: the baseline that selection has to beat.
    """

    reads_values: ClassVar[bool] = False

    def acceptance(
        self, value: Float[Array, "P"], successes: Float[Array, "P"], attempts: Float[Array, "P"]
    ) -> Float[Array, "P"]:
        """1 for each prompt.

        Source: ours: no selection.
        """
        return jnp.ones(jnp.shape(value), jnp.float32)

    def decayed(
        self,
        successes: Float[Array, "P"],
        attempts: Float[Array, "P"],
        steps_since: Int[Array, "P"],
    ) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
        """(S, N) as they are.

        Source: ours: nothing reads the age of the history.
        """
        return successes, attempts


@dataclasses.dataclass(frozen=True)
class Daps:
    """Difficulty-adaptive selection. n_c: attempts that the critic's word is worth.

    Source: S3AC (2610.35518), DAPS; ours: n_c and decay.
    """

    n_c: float = 4.0
    a_min: float = 0.1
    decay: float = 0.99
    reads_values: ClassVar[bool] = True

    def __post_init__(self):
        if not self.n_c >= 0:
            raise ValueError(f"n_c must not be negative, got {self.n_c}")
        for name in ("a_min", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}")
        if self.a_min == self.n_c == 0:
            raise ValueError("with a_min and n_c both 0 no prompt might ever be accepted")

    def acceptance(
        self, value: Float[Array, "P"], successes: Float[Array, "P"], attempts: Float[Array, "P"]
    ) -> Float[Array, "P"]:
        """Probability of drawing each prompt, from V(s_0) and its decayed history.

        Source: S3AC (2610.35518), DAPS.
        """
        p = fuse(success_prior(value), successes, attempts, n_c=self.n_c)
        return acceptance(p, a_min=self.a_min)

    def decayed(
        self,
        successes: Float[Array, "P"],
        attempts: Float[Array, "P"],
        steps_since: Int[Array, "P"],
    ) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
        """(S, N) as of now.

        Source: ours: lazy decay, see `decay_history`.
        """
        return decay_history(successes, attempts, steps_since, decay=self.decay)


@dataclasses.dataclass(frozen=True)
class KeepAll:
    """Every graded response is trained on, truncated ones included.

    Source: S3AC (2610.35518); ours: truncation is a wrong answer, not a missing one.
    """

    def responses(
        self, success: Bool[Array, "B"], group_ids: Int[Array, "B"], *, num_groups: int
    ) -> Bool[Array, "B"]:
        """True for each response.

        Source: ours: no filter.
        """
        return jnp.ones(jnp.shape(success), bool)


@dataclasses.dataclass(frozen=True)
class LengthAdaptiveGae:
    """GAE whose lambda grows with the response, whitened over the batch if asked.

    Source: VAPO (2504.05118); alpha 1.5 as in SAO (2607.07508).
    """

    alpha: float = 1.5
    whiten: bool = False

    def advantages(
        self,
        values: Float[Array, "B T"],
        rewards: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        num_trainable: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T"]:
        """Raw A per token, 0 where not mask; num_trainable: tokens of the token's response.

        Source: VAPO (2504.05118).
        """
        lam = length_adaptive_lambda(num_trainable, alpha=self.alpha)
        return gae(values, rewards, mask, lam=lam, segment_ids=segment_ids)

    def scaled(
        self, advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """What the surrogate is given: raw A, or A whitened over the batch.

        Source: ours: apart from the raw ones, which the metrics need.
        """
        return masked.whiten(advantages, mask) if self.whiten else advantages


@dataclasses.dataclass(frozen=True)
class _Clipped:
    eps_low: float
    eps_high: float

    def __post_init__(self):
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
        inputs = (jnp.where(mask, x, 0.0) for x in (logp, logp_old, advantages))
        return cispo(*inputs, eps_low=self.eps_low, eps_high=self.eps_high)


@dataclasses.dataclass(frozen=True)
class PpoClip(_Clipped):
    """The clipped surrogate.

    Source: Schulman 2017 (1707.06347), eq. 7.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2

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
        inputs = (jnp.where(mask, x, 0.0) for x in (logp, logp_old, advantages))
        return ppo_clip(*inputs, eps_low=self.eps_low, eps_high=self.eps_high)


@dataclasses.dataclass(frozen=True)
class CriticSpec:
    """epochs: passes over each rollout batch. lam: of its targets. clip: None for none.

    Source: S3AC (2610.35518); ours: clip 0.5, as targets span 2.
    """

    epochs: int = 2
    lam: float = 1.0
    clip: float | None = 0.5

    def returns(
        self,
        values: Float[Array, "B T"],
        rewards: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T"]:
        """Targets in reward units, A + V of raw GAE; 0 where not mask.

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
        values_old: Float[Array, "B T"],
        returns: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """Half the clipped squared error per token, 0 where not mask; log the error unhalved.

        Source: S3AC (2610.35518): the gradient in the value is the error itself.
        """
        inputs = (jnp.where(mask, x, 0.0) for x in (values, values_old, returns))
        return 0.5 * clipped_mse(*inputs, clip=self.clip)


@dataclasses.dataclass(frozen=True)
class Gepo:
    """Entropy control by group. alpha: factors, beta: thresholds in std, rate: of their average.

    Source: GEPO (2607.16850).
    """

    alpha_low: float = 0.5
    alpha_high: float = 0.2
    beta_low: float = 0.2
    beta_high: float = 0.3
    rate: float = 0.01

    def update(
        self, low: Float[Array, ""], high: Float[Array, ""], group_entropy: Float[Array, "P"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Thresholds after this batch, in nats; start from NaN.

        Source: GEPO (2607.16850).
        """
        return update_thresholds(
            low,
            high,
            group_entropy,
            beta_low=self.beta_low,
            beta_high=self.beta_high,
            rate=self.rate,
        )

    def scale(
        self,
        advantages: Float[Array, "..."],
        group_entropy: Float[Array, "..."],
        low: Float[Array, ""],
        high: Float[Array, ""],
    ) -> Float[Array, "..."]:
        """Advantages of groups beyond the thresholds, shrunk.

        Source: GEPO (2607.16850).
        """
        return gepo_scale(
            advantages,
            group_entropy,
            h_low=low,
            h_high=high,
            alpha_low=self.alpha_low,
            alpha_high=self.alpha_high,
        )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One method. Hashable: it can be a static argument of a jitted function.

    Source: ours: an algorithm is a value.
    """

    select: Uniform | Daps
    keep: KeepAll
    advantage: LengthAdaptiveGae
    surrogate: Cispo | PpoClip
    guard: Guard
    critic: CriticSpec
    entropy: Gepo | None
    responses_per_prompt: int


s3ac_single = Recipe(
    select=Daps(n_c=4.0, a_min=0.1, decay=0.99),
    keep=KeepAll(),
    advantage=LengthAdaptiveGae(alpha=1.5, whiten=False),
    surrogate=Cispo(eps_low=1.0, eps_high=4.0),
    guard=MismatchGuard(low=0.5, high=5.0, veto=20.0, denominator="kept"),
    critic=CriticSpec(epochs=2, lam=1.0, clip=0.5),
    entropy=None,
    responses_per_prompt=1,
)

s3ac_group = Recipe(
    select=Daps(n_c=4.0, a_min=0.1, decay=0.99),
    keep=KeepAll(),
    advantage=LengthAdaptiveGae(alpha=1.5, whiten=False),
    surrogate=Cispo(eps_low=1.0, eps_high=4.0),
    guard=MismatchGuard(low=0.5, high=5.0, veto=20.0, denominator="kept"),
    critic=CriticSpec(epochs=2, lam=1.0, clip=0.5),
    entropy=None,
    responses_per_prompt=16,
)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {"s3ac_single": s3ac_single, "s3ac_group": s3ac_group}
)
