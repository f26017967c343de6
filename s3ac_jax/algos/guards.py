"""Guards against mismatch between sampler and trainer: the presets of `offpolicy.py`.

Each says through `weigh` what a token's loss is multiplied by and whether it was kept, and through
`counted` which tokens enter the denominator. Both are constants to the gradient.
"""

import dataclasses
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.algos import offpolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Guard:
    denominator: Literal["kept", "all"] = "kept"
    # Whether the band is compared in nats, where 0 has no place.
    in_logs: ClassVar[bool] = False

    def __post_init__(self):
        if self.denominator not in ("kept", "all"):
            raise ValueError(f"denominator is 'kept' or 'all', got {self.denominator!r}")
        low, high = getattr(self, "low", 0.0), getattr(self, "high", math.inf)
        if not 0 <= low <= high or not high > 0:
            raise ValueError(f"the band must have 0 <= low <= high, got {low}, {high}")
        if self.in_logs and not low > 0:
            raise ValueError(f"the band must have low > 0, got {low}")
        for name in ("veto", "cap", "delta"):
            if not getattr(self, name, 1.0) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def counted(self, keep: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
        """Tokens that the actor's denominator counts; perhaps none when all were rejected.

        Source: ours: both conventions are in use, so it is a field.
        """
        return jnp.asarray(keep if self.denominator == "kept" else mask, bool)

    def _close(
        self, weights: Float[Array, "B T"], keep: Bool[Array, "..."], mask: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        keep = mask & (keep[:, None] if keep.ndim == 1 else keep)
        return jnp.where(keep, weights, 0.0), keep


@dataclasses.dataclass(frozen=True)
class NoGuard(_Guard):
    """Weight 1 for every trainable token; the mismatch is not corrected and not even read.

    Source: ours: what methods do whose papers take the sampler for the trainer.
    """

    def weigh(
        self,
        logp_old: Float[Array, "B T"],
        logp_rollout: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """(weight, keep) per token, both the mask.

        Source: ours: no correction.
        """
        mask = jnp.asarray(mask, bool)
        return mask.astype(jnp.float32), mask


@dataclasses.dataclass(frozen=True)
class MismatchGuard(_Guard):
    """Clipped weights; tokens outside [low, high] go, and so does a response with rho > veto.

    Source: ours: the S3AC lab's public RL config for the same model family.
    """

    low: float = 0.5
    high: float = 5.0
    veto: float = 20.0

    def weigh(
        self,
        logp_old: Float[Array, "B T"],
        logp_rollout: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """(weight, keep) per token, weight 0 where not kept.

        Source: ours: the S3AC lab's public RL config for the same model family.
        """
        args, band = (logp_old, logp_rollout, mask), {"low": self.low, "high": self.high}
        whole = offpolicy.sequence_keep(*args, veto=self.veto, segment_ids=segment_ids)
        keep = offpolicy.token_keep(*args, **band)
        keep &= whole[:, None] if whole.ndim == 1 else whole
        return self._close(offpolicy.token_weights(*args, **band), keep, mask)


@dataclasses.dataclass(frozen=True)
class TruncatedImportance(_Guard):
    """min(rho, cap); nothing is rejected.

    Source: TIS (Yao 2025).
    """

    cap: float = 2.0

    def weigh(
        self,
        logp_old: Float[Array, "B T"],
        logp_rollout: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """(weight, keep) per token.

        Source: TIS (Yao 2025).
        """
        weights = offpolicy.token_weights(logp_old, logp_rollout, mask, low=0.0, high=self.cap)
        return self._close(weights, jnp.asarray(mask, bool), mask)


@dataclasses.dataclass(frozen=True)
class MaskedImportance(_Guard):
    """rho where low <= rho <= high, 0 elsewhere.

    Source: IcePop (2510.18855).
    """

    low: float = 0.5
    high: float = 5.0

    def weigh(
        self,
        logp_old: Float[Array, "B T"],
        logp_rollout: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """(weight, keep) per token.

        Source: IcePop (2510.18855).
        """
        args, band = (logp_old, logp_rollout, mask), {"low": self.low, "high": self.high}
        keep = offpolicy.token_keep(*args, **band)
        # Inside the band the clip of `token_weights` does nothing.
        return self._close(offpolicy.token_weights(*args, **band), keep, mask)


@dataclasses.dataclass(frozen=True)
class GeometricMeanMask(_Guard):
    """Weight 1 for responses whose geometric-mean rho lies in [low, high], 0 for the others.

    Source: GSPO (2507.18071) for the ratio; ours: as a mask.
    """

    low: float
    high: float
    in_logs: ClassVar[bool] = True

    def weigh(
        self,
        logp_old: Float[Array, "B T"],
        logp_rollout: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """(weight, keep) per token.

        Source: GSPO (2507.18071) for the ratio; ours: as a mask.
        """
        keep = offpolicy.geometric_mean_keep(
            logp_old, logp_rollout, mask, low=self.low, high=self.high, segment_ids=segment_ids
        )
        return self._close(jnp.ones(jnp.shape(mask), jnp.float32), keep, mask)


@dataclasses.dataclass(frozen=True)
class ProductMask(_Guard):
    """Weight 1 for responses whose product of rho lies in [low, high], 0 for the others.

    Source: ours: the strictest of the sequence masks.
    """

    low: float
    high: float
    in_logs: ClassVar[bool] = True

    def weigh(
        self,
        logp_old: Float[Array, "B T"],
        logp_rollout: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """(weight, keep) per token.

        Source: ours: the strictest of the sequence masks.
        """
        keep = offpolicy.product_keep(
            logp_old, logp_rollout, mask, low=self.low, high=self.high, segment_ids=segment_ids
        )
        return self._close(jnp.ones(jnp.shape(mask), jnp.float32), keep, mask)


@dataclasses.dataclass(frozen=True)
class BinaryKlMask(_Guard):
    """rho for responses whose mean binary KL(mu || pi_old) is at most delta nats, 0 for the others.

    rho is bounded by e^±20 alone. One update per batch, as the source has it, makes pi_old the
    present policy. Rejected tokens stay in the denominator.

    Source: FlashREINFORCE (public code, 2026-09); delta 3e-3, 5e-3 for R1-type models.
    """

    delta: float = 3e-3
    denominator: Literal["kept", "all"] = dataclasses.field(default="all", kw_only=True)

    def weigh(
        self,
        logp_old: Float[Array, "B T"],
        logp_rollout: Float[Array, "B T"],
        mask: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """(weight, keep) per token, weight 0 where not kept.

        Source: FlashREINFORCE (public code, 2026-09).
        """
        args = logp_old, logp_rollout, mask
        _, keep = offpolicy.binary_kl_keep(*args, delta=self.delta, segment_ids=segment_ids)
        return self._close(offpolicy.token_weights(*args, low=0.0, high=math.inf), keep, mask)


Guard = (
    NoGuard
    | MismatchGuard
    | TruncatedImportance
    | MaskedImportance
    | GeometricMeanMask
    | ProductMask
    | BinaryKlMask
)
