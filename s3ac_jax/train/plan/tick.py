"""What the steps of a plan add up to: a tick, its phases, the critic's share, chip-hours."""

import dataclasses
from collections.abc import Sequence

from s3ac_jax.config.run import RunConfig
from s3ac_jax.train.plan.roofline import Bound
from s3ac_jax.train.plan.steps import Step
from s3ac_jax.train.plan.target import Target

BEFORE = ("start", "pretraining")
# The order of a tick.
PHASES = ("select", "sync", "rollout", "score", "prepare", "critic", "actor")


@dataclasses.dataclass(frozen=True)
class Tick:
    """Seconds of a tick at least, every response as long as it may be, by phase.

    tokens: prompts and responses of a tick. critic: share of all phases' time that is the critic's.
    mfu: what the method asks for, of all chips' peak over this time. pretraining: seconds, its
    rollouts included. overlaps: the next tick's selection and rollouts run beside the rest.
    Source: ours.
    """

    phases: dict[str, float]
    tokens: int
    critic: float
    mfu: float
    pretraining: float
    overlaps: bool = False

    @property
    def seconds(self) -> float:
        """All phases, one after the other, or those of sampling beside the others. Source: ours."""
        return _seconds(self.phases, self.overlaps)

    @property
    def tokens_per_second(self) -> float:
        """On all chips. Source: ours."""
        return self.tokens / self.seconds if self.seconds else 0.0


def tick_of(config: RunConfig, target: Target, steps: Sequence[tuple[Step, Bound]]) -> Tick:
    """The tick that these steps make up. Source: ours: sums of bounds, so a bound itself."""
    overlaps = config.rollout.apart and config.rollout.ahead > 0
    phases = dict.fromkeys(PHASES, 0.0)
    critic = pretraining = arithmetic = 0.0
    for step, bound in steps:
        seconds = step.times * bound.seconds
        if step.phase == "pretraining":
            pretraining += seconds
        if step.phase in BEFORE:
            continue
        phases[step.phase] += seconds
        critic += step.critic * seconds
        arithmetic += step.times * step.flops.model / len(target.devices)
    total, seconds = sum(phases.values()), _seconds(phases, overlaps)
    if pretraining:
        spec = config.recipe.critic
        assert spec is not None
        responses = sum(config.value_pretraining.prompts(spec.pretraining).values())
        pretraining += phases["rollout"] * responses / config.batch_responses
    return Tick(
        phases, config.batch_responses * config.longest, critic / total if total else 0.0,
        arithmetic / target.chip.flops / seconds if seconds else 0.0, pretraining, overlaps,
    )  # fmt: skip


def _seconds(phases: dict[str, float], overlaps: bool) -> float:
    total = sum(phases.values())
    if not overlaps:
        return total
    ahead = phases["select"] + phases["rollout"]
    return max(ahead, total - ahead)


def chip_hours(tick: Tick, target: Target, ticks: int) -> float:
    """Of so many ticks and the value pretraining before them, at least. Source: ours."""
    return (tick.seconds * ticks + tick.pretraining) * target.chips / 3600
