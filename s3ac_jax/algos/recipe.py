"""Recipes: an algorithm is a value, one entry per column, and each entry brings its own maths.

    select     which prompts are worth drawing        average    token losses to one number
    keep       which responses are trained on         guard      sampler-trainer mismatch
    shaping    what the reward becomes, or None       critic     its targets and loss, or None
    advantage  credit of each token                   entropy    scaling against collapse, or None
    surrogate  loss per token of the actor            updates    optimiser batches per rollout

A new method is a new entry in a column, never a question about a recipe's name. Columns select
with `where` before they compute, so padding may hold anything.

No recipe has a KL term to a reference policy (beta = 0), as in DAPO and Dr.GRPO. Routing replay
(R3, 2510.11370) joins `grpo_x` and S3AC with the models that have a router.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxtyping import Array, Float

from s3ac_jax.algos.averaging import Average, ConstantLength, ResponseMean, TokenMean
from s3ac_jax.algos.credit import (
    Advantage,
    Gae,
    GroupRelative,
    LengthAdaptiveGae,
    Reinforce,
    Tracked,
)
from s3ac_jax.algos.critic import CriticSpec
from s3ac_jax.algos.entropy import gepo_scale, update_thresholds
from s3ac_jax.algos.filtering import Keep, KeepAll, SoftOverlong, VariedGroups
from s3ac_jax.algos.guards import BinaryKlMask, Guard, MismatchGuard, NoGuard
from s3ac_jax.algos.selection import Daps, Pcl, Select, Spo, Uniform
from s3ac_jax.algos.surrogates import Band, Cispo, PolicyGradient, PpoClip, Surrogate


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One method. Hashable: it can be a static argument of a jitted function.

    responses_per_prompt: size of a group. updates: optimiser batches that a rollout batch is cut
    into, None for the run's own `train.minibatches`. replay_routing: the trainer's policy sends
    each token to the experts that the sampler chose (R3); without experts there is nothing to
    replay.
    Raises ValueError when columns contradict each other.
    Source: ours: an algorithm is a value.
    """

    select: Select
    keep: Keep
    shaping: SoftOverlong | None
    advantage: Advantage
    surrogate: Surrogate
    average: Average
    guard: Guard
    critic: CriticSpec | None
    entropy: Gepo | None
    responses_per_prompt: int
    updates: int | None = None
    replay_routing: bool = False

    def __post_init__(self):
        if self.responses_per_prompt < 1:
            raise ValueError(
                f"responses_per_prompt must be at least 1, got {self.responses_per_prompt}"
            )
        if self.updates is not None and self.updates < 1:
            raise ValueError(f"updates must be None or at least 1, got {self.updates}")
        for name in ("select", "advantage"):
            column = getattr(self, name)
            if column.reads_values and self.critic is None:
                raise ValueError(f"{name} {type(column).__name__} reads values: it needs a critic")
        for name in ("keep", "advantage"):
            column = getattr(self, name)
            if column.needs_group and self.responses_per_prompt == 1:
                raise ValueError(
                    f"{name} {type(column).__name__} compares the responses of a prompt: "
                    "responses_per_prompt must be above 1"
                )
        if self.advantage.reads_success and self.shaping is not None:
            raise ValueError(
                f"advantage {type(self.advantage).__name__} takes the reward for the outcome: it "
                "can't have one that is shaped"
            )
        if self.critic is not None and self.critic.at == "prompt" and self.advantage.reads_values:
            raise ValueError(
                f"advantage {type(self.advantage).__name__} reads V at every token, but critic.at "
                "is 'prompt'"
            )
        if self.surrogate.against_sampler and not isinstance(self.guard, NoGuard):
            raise ValueError(
                f"surrogate {type(self.surrogate).__name__} has the sampler in its ratio: with a "
                "guard the mismatch would count twice; use NoGuard"
            )

    @property
    def reads_values(self) -> bool:
        """Whether V must be read for every token before the update. Source: ours."""
        return self.critic is not None and (self.advantage.reads_values or self.critic.reads_values)

    @property
    def first_step_reads(self) -> bool:
        """Whether the first critic step of a rollout batch may come before V_old is read.

        At lambda 1 its targets are outcomes, and V_old is what its own forward pass finds.
        Source: ours: a forward pass saved, with the same numbers.
        """
        return self.critic is not None and self.critic.lam == 1.0 and self.reads_values


_MISMATCH = MismatchGuard(low=0.5, high=5.0, veto=20.0, denominator="kept")

# S3AC (2610.35518).
s3ac_single = Recipe(
    select=Daps(n_c=4.0, a_min=0.1, decay=0.99),
    keep=KeepAll(),
    shaping=None,
    advantage=LengthAdaptiveGae(alpha=1.5, whiten=False),
    surrogate=Cispo(eps_low=1.0, eps_high=4.0),
    average=TokenMean(),
    guard=_MISMATCH,
    critic=CriticSpec(epochs=2, lam=1.0, clip=0.5, pretraining="coverage"),
    entropy=None,
    responses_per_prompt=1,
    replay_routing=True,
)
s3ac_group = dataclasses.replace(s3ac_single, responses_per_prompt=16)

# GRPO (2402.03300): one mean per response, then over responses.
grpo = Recipe(
    select=Uniform(),
    keep=KeepAll(),
    shaping=None,
    advantage=GroupRelative(divide_by_std=True),
    surrogate=PpoClip(eps_low=0.2, eps_high=0.2),
    average=ResponseMean(),
    guard=NoGuard(),
    critic=None,
    entropy=None,
    responses_per_prompt=16,
)

# Dr.GRPO (2503.20783): no std, no division by length. length: the response limit at full size.
dr_grpo = dataclasses.replace(
    grpo, advantage=GroupRelative(divide_by_std=False), average=ConstantLength(length=3000)
)

# DAPO (2503.14476): clip-higher, token mean, dynamic sampling, soft overlong penalty.
dapo = dataclasses.replace(
    grpo,
    keep=VariedGroups(max_rounds=8),
    shaping=SoftOverlong(buffer_share=0.2),
    surrogate=PpoClip(eps_low=0.2, eps_high=0.28),
    average=TokenMean(),
)

# GRPO-X: inferred from S3AC (2610.35518), its group baseline; R3 (2510.11370).
grpo_x = dataclasses.replace(
    dapo, shaping=None, guard=_MISMATCH, entropy=Gepo(), replay_routing=True
)

# REINFORCE++ (2501.03262).
reinforce_pp = dataclasses.replace(
    grpo,
    advantage=Reinforce(baseline="none", whiten=True),
    average=TokenMean(),
    responses_per_prompt=1,
)
reinforce_pp_baseline = dataclasses.replace(
    reinforce_pp, advantage=Reinforce(baseline="group", whiten=True), responses_per_prompt=16
)

# FlashREINFORCE (public code, 2026-09): one update per batch, denominators B and T_i stay.
flash_reinforce = dataclasses.replace(
    grpo,
    advantage=Reinforce(baseline="batch", whiten=False),
    surrogate=PolicyGradient(),
    average=ResponseMean(),
    guard=BinaryKlMask(delta=3e-3, denominator="all"),
    responses_per_prompt=1,
    updates=1,
)

# SPO (2509.13232).
spo = dataclasses.replace(
    grpo,
    select=Spo(),
    advantage=Tracked(),
    surrogate=PpoClip(eps_low=0.2, eps_high=0.28),
    average=TokenMean(),
    responses_per_prompt=1,
)

# PCL (2510.01135): a value of the prompt chooses prompts, and nothing else.
pcl = dataclasses.replace(
    grpo,
    select=Pcl(pool_factor=4, tau=0.5),
    advantage=GroupRelative(divide_by_std=False),
    average=TokenMean(),
    critic=CriticSpec(
        epochs=1, lam=1.0, clip=None, at="prompt", pretraining="none", freeze_attention=False
    ),
)

# PPO (1707.06347): one lambda for actor and critic, a critic that starts from nothing.
ppo = dataclasses.replace(
    reinforce_pp,
    advantage=Gae(lam=0.95, whiten=True),
    critic=CriticSpec(epochs=1, lam=0.95, clip=0.5, pretraining="none", freeze_attention=False),
)

# VC-PPO (2503.01491): value pretraining on the base policy, the critic's lambda decoupled.
vc_ppo = dataclasses.replace(
    ppo,
    critic=CriticSpec(epochs=1, lam=1.0, clip=0.5, pretraining="on_policy", freeze_attention=False),
)

# VAPO (2504.05118): groups, length-adaptive lambda, clip-higher, loss on positive examples.
vapo = dataclasses.replace(
    vc_ppo,
    advantage=LengthAdaptiveGae(alpha=0.05, whiten=True),
    surrogate=PpoClip(eps_low=0.2, eps_high=0.28, imitation=0.1),
    responses_per_prompt=16,
)

# SAO (2607.07508).
sao = dataclasses.replace(
    s3ac_single,
    select=Uniform(),
    surrogate=Band(low=0.7, high=6.0),
    guard=NoGuard(),
    critic=CriticSpec(
        epochs=2, lam=1.0, clip=0.5, pretraining="none", freeze_attention=True, warmup_ticks=10
    ),
    replay_routing=False,
)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "s3ac_single": s3ac_single,
        "s3ac_group": s3ac_group,
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "dapo": dapo,
        "grpo_x": grpo_x,
        "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": reinforce_pp_baseline,
        "flash_reinforce": flash_reinforce,
        "spo": spo,
        "pcl": pcl,
        "ppo": ppo,
        "vc_ppo": vc_ppo,
        "vapo": vapo,
        "sao": sao,
    }
)

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "s3ac_single": "S3AC (2610.35518), R3; ours: n_c, decay, clip 0.5, interval 0..5",
        "s3ac_group": "S3AC (2610.35518), with a group per prompt",
        "grpo": "GRPO (2402.03300), without the KL term",
        "dr_grpo": "Dr.GRPO (2503.20783); length: to be set to the response limit",
        "dapo": "DAPO (2503.14476); ours: a refill draws only what is missing",
        "grpo_x": "inferred from S3AC (2610.35518), its group baseline; GEPO (2607.16850), R3",
        "reinforce_pp": "REINFORCE++ (2501.03262), without the KL term",
        "reinforce_pp_baseline": "REINFORCE++ (2501.03262), baseline variant",
        "flash_reinforce": "FlashREINFORCE (public code, 2026-09)",
        "spo": "SPO (2509.13232)",
        "pcl": "PCL (2510.01135)",
        "ppo": "PPO (1707.06347), GAE (1506.02438)",
        "vc_ppo": "VC-PPO (2503.01491)",
        "vapo": "VAPO (2504.05118)",
        "sao": "SAO (2607.07508); ours: warm-up steps as ticks without actor updates",
    }
)
