"""The `advantage` column: credit of each token of a batch of packed responses.

`advantages` is in reward units, or normalised where the method's own formula does so; 0 outside
the mask. `scaled` is what the surrogate is given, after whitening over the batch if asked.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.algos.advantages import centred, gae, group_relative, length_adaptive_lambda
from s3ac_jax.algos.tracker import tracked_advantages
from s3ac_jax.core import masked
from s3ac_jax.core.types import Episodes


def _responses(episodes: Episodes) -> tuple[Float[Array, "N"], Bool[Array, "N"], Int[Array, "B T"]]:
    """Reward of each response, whether it is in the batch, and the response of each token."""
    num = episodes.baseline.shape[0]
    # Padding and prompts go to an entry of their own, cut off again.
    owner = jnp.where(episodes.mask, episodes.response, num)
    earned = jnp.where(episodes.mask, episodes.reward, 0.0)
    reward = jax.ops.segment_sum(earned.ravel(), owner.ravel(), num_segments=num + 1)[:num]
    tokens = jax.ops.segment_sum(
        episodes.mask.ravel().astype(jnp.int32), owner.ravel(), num_segments=num + 1
    )[:num]
    return reward, tokens > 0, owner


def _per_token(per_response: Float[Array, "N"], owner: Int[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.append(per_response, 0.0)[owner]


def _groups(present: Bool[Array, "N"], responses_per_prompt: int) -> tuple[Int[Array, "N"], int]:
    """Group of each response, absent ones in a group of their own, and the number of groups."""
    num = present.shape[0]
    groups = -(-num // responses_per_prompt)
    return jnp.where(present, jnp.arange(num) // responses_per_prompt, groups), groups + 1


@dataclasses.dataclass(frozen=True)
class _Whitened:
    # Whether the reward must be the outcome itself, -1 or 1.
    reads_success: ClassVar[bool] = False

    def scaled(
        self, advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """What the surrogate is given: raw A, or A whitened over all trainable tokens.

        Source: ours: apart from the raw ones, which the metrics need.
        """
        return masked.whiten(advantages, mask) if getattr(self, "whiten", False) else advantages


@dataclasses.dataclass(frozen=True)
class LengthAdaptiveGae(_Whitened):
    """GAE whose lambda grows with the response, whitened over the batch if asked.

    Source: VAPO (2504.05118); alpha 1.5 as in SAO (2607.07508).
    """

    alpha: float = 1.5
    whiten: bool = False
    reads_values: ClassVar[bool] = True
    needs_group: ClassVar[bool] = False

    def __post_init__(self):
        if not self.alpha > 0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")

    def advantages(self, episodes: Episodes, *, responses_per_prompt: int) -> Float[Array, "B T"]:
        """Raw A per token.

        Source: VAPO (2504.05118).
        """
        lam = length_adaptive_lambda(episodes.num_trainable, alpha=self.alpha)
        return gae(
            episodes.values, episodes.reward, episodes.mask, lam=lam,
            segment_ids=episodes.segment_ids,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Gae(_Whitened):
    """GAE of one lambda for all responses.

    Source: Schulman 2016 (1506.02438); VC-PPO (2503.01491): 0.95 for the actor.
    """

    lam: float = 0.95
    whiten: bool = False
    reads_values: ClassVar[bool] = True
    needs_group: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.lam <= 1:
            raise ValueError(f"lam must be in 0..1, got {self.lam}")

    def advantages(self, episodes: Episodes, *, responses_per_prompt: int) -> Float[Array, "B T"]:
        """Raw A per token.

        Source: Schulman 2016 (1506.02438), eq. 16.
        """
        return gae(
            episodes.values, episodes.reward, episodes.mask, lam=self.lam,
            segment_ids=episodes.segment_ids,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GroupRelative(_Whitened):
    """Reward against the other responses to the same prompt; one number per response.

    Source: GRPO (2402.03300); Dr.GRPO (2503.20783) without the std.
    """

    divide_by_std: bool = True
    reads_values: ClassVar[bool] = False
    needs_group: ClassVar[bool] = True

    def advantages(self, episodes: Episodes, *, responses_per_prompt: int) -> Float[Array, "B T"]:
        """(R - mean) / std of the response's group, the same at each of its tokens.

        Source: GRPO (2402.03300), section 4.1.2.
        """
        reward, present, owner = _responses(episodes)
        group, num_groups = _groups(present, responses_per_prompt)
        relative = group_relative(
            reward, group, num_groups=num_groups, divide_by_std=self.divide_by_std
        )
        return _per_token(jnp.where(present, relative, 0.0), owner)


@dataclasses.dataclass(frozen=True)
class Reinforce(_Whitened):
    """Reward minus a baseline; one number per response, whitened over the batch if asked.

    baseline: none, the mean of the batch, or the mean of the prompt's group.
    Source: REINFORCE++ (2501.03262): none and whitened, its baseline variant: group and whitened;
    FlashREINFORCE (public code, 2026-09): batch.
    """

    baseline: Literal["none", "batch", "group"] = "none"
    whiten: bool = False
    reads_values: ClassVar[bool] = False

    def __post_init__(self):
        if self.baseline not in ("none", "batch", "group"):
            raise ValueError(f"baseline is 'none', 'batch' or 'group', got {self.baseline!r}")

    @property
    def needs_group(self) -> bool:
        """Whether one response per prompt would have no advantage. Source: ours."""
        return self.baseline == "group"

    def advantages(self, episodes: Episodes, *, responses_per_prompt: int) -> Float[Array, "B T"]:
        """R - baseline, the same at each token of the response.

        Source: REINFORCE++ (2501.03262); FlashREINFORCE (public code, 2026-09).
        """
        reward, present, owner = _responses(episodes)
        if self.baseline == "batch":
            reward = centred(reward, present)
        elif self.baseline == "group":
            group, num_groups = _groups(present, responses_per_prompt)
            reward = group_relative(reward, group, num_groups=num_groups, divide_by_std=False)
        return _per_token(jnp.where(present, reward, 0.0), owner)


@dataclasses.dataclass(frozen=True)
class Tracked(_Whitened):
    """Success minus what the prompt's own tracker expected, normalised over the batch.

    Source: SPO (2509.13232).
    """

    reads_success: ClassVar[bool] = True
    reads_values: ClassVar[bool] = False
    needs_group: ClassVar[bool] = False

    def advantages(self, episodes: Episodes, *, responses_per_prompt: int) -> Float[Array, "B T"]:
        """(r - v) of the response, r in {0, 1}, minus its batch mean and divided by its std.

        Source: SPO (2509.13232): v from before this batch.
        """
        reward, present, owner = _responses(episodes)
        return _per_token(
            tracked_advantages((reward + 1.0) / 2.0, episodes.baseline, present), owner
        )


Advantage = LengthAdaptiveGae | Gae | GroupRelative | Reinforce | Tracked
