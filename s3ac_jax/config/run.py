"""RunConfig: every number of a run, checked within and across rooms when it is made."""

import dataclasses

from s3ac_jax.algos.recipe import Recipe
from s3ac_jax.data.packing import worst_case_rows
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec


def _at_least(section: str, config: object, **least: float) -> None:
    for name, low in least.items():
        if not getattr(config, name) >= low:
            raise ValueError(f"{section}.{name} must be at least {low}, got {getattr(config, name)}")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The arithmetic ladder. seed: of the problem sets, apart from the run's seed.

    Source: ours.
    """

    max_steps: int = 8
    num_train: int = 4096
    num_held_out: int = 512
    seed: int = 0

    def __post_init__(self):
        _at_least("task", self, max_steps=1, num_train=1, num_held_out=1, seed=0)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt of the ladder. Source: ours."""
        return 2 * self.max_steps + 2

    @property
    def max_answer_tokens(self) -> int:
        """Longest right response of the ladder, stop token included. Source: ours."""
        return 4 * self.max_steps + 3


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """slots: responses in flight. steps_per_dispatch: tokens per slot between two host looks.

    temperature: of sampling and of every log-prob in training. insert_batch: requests
    prefilled per call. Source: ours.
    """

    slots: int
    max_response_tokens: int
    steps_per_dispatch: int = 8
    insert_batch: int = 32
    temperature: float = 1.0

    def __post_init__(self):
        _at_least("rollout", self, slots=1, max_response_tokens=1, steps_per_dispatch=1,
                  insert_batch=1)  # fmt: skip
        if not self.temperature > 0:
            raise ValueError(
                f"rollout.temperature must be positive, got {self.temperature}: a greedy sampler "
                "has no log-probs to learn from"
            )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW of one role. clip: global gradient norm; warmup_steps: linear from 0.

    Source: method defaults of S3AC (2610.35518): (0.9, 0.999), decay 0.1, clip 1 and 10.
    """

    lr: float
    clip: float
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    warmup_steps: int = 0

    def check(self, role: str) -> None:
        """Raises ValueError naming `role` and the field. Source: ours."""
        if not self.lr > 0:
            raise ValueError(f"{role}.lr must be positive, got {self.lr}")
        if not self.clip > 0:
            raise ValueError(f"{role}.clip must be positive, got {self.clip}")
        _at_least(role, self, weight_decay=0, b1=0, b2=0, warmup_steps=0)


@dataclasses.dataclass(frozen=True)
class CriticConfig(OptimizerConfig):
    """head_std: of the fresh value head, None for 1/(hidden_size + 1). freeze_attention: as in
    the paper.

    Source: S3AC (2610.35518), stabilised critic.
    """

    head_std: float | None = None
    freeze_attention: bool = True


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """The warm start that makes the base policy and its early and middle checkpoints.

    embedded: take the policies that ship with the package instead of training them.
    careful_steps: of batches of careful demonstrations, the middle policy stands at their end,
    the early one at early_step. hasty_steps: of batches whose writer quits with quit_rate after
    each step; the base (late) policy stands at their end.
    Source: ours; the coverage problem of S3AC (2610.35518) in miniature.
    """

    embedded: bool = True
    careful_steps: int = 1300
    early_step: int = 800
    hasty_steps: int = 200
    quit_rate: float = 0.4
    batch_responses: int = 64
    careful_lr: float = 4e-3
    hasty_lr: float = 1e-3

    def __post_init__(self):
        _at_least("sft", self, careful_steps=200, early_step=1, hasty_steps=1, batch_responses=1)
        if not self.early_step < self.careful_steps:
            raise ValueError(
                f"sft.early_step ({self.early_step}) must come before sft.careful_steps "
                f"({self.careful_steps})"
            )
        if not 0 <= self.quit_rate <= 1:
            raise ValueError(f"sft.quit_rate is a probability, got {self.quit_rate}")


@dataclasses.dataclass(frozen=True)
class ValuePretrainingConfig:
    """Coverage pretraining of the critic: rollouts of policies of several strengths.

    policies: any of early, middle, late. prompts_per_policy: responses of each.
    diagnose_steps: first steps watched in the two diagnoses (head init and clip), 0 for none.
    Source: S3AC (2610.35518): 2 epochs, plain MSE, attention frozen.
    """

    policies: tuple[str, ...] = ("early", "middle", "late")
    prompts_per_policy: int = 2048
    epochs: int = 2
    batch_responses: int = 256
    lr: float = 1e-3
    warmup_steps: int = 0
    diagnose_steps: int = 20

    def __post_init__(self):
        _at_least("value_pretraining", self, prompts_per_policy=1, epochs=1, batch_responses=1,
                  warmup_steps=0, diagnose_steps=0)  # fmt: skip
        unknown = [name for name in self.policies if name not in ("early", "middle", "late")]
        if unknown or not self.policies:
            raise ValueError(
                f"value_pretraining.policies must name some of early, middle, late; got "
                f"{self.policies}"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The online loop. batch_prompts: per tick. minibatches: optimiser batches per tick.

    pack_tokens: length of a packed row. micro_rows: rows per forward and backward pass.
    Source: S3AC (2610.35518): 128 prompts, 8 optimiser steps per rollout batch at full size.
    """

    num_ticks: int
    batch_prompts: int
    pack_tokens: int
    micro_rows: int
    minibatches: int = 1

    def __post_init__(self):
        _at_least("train", self, num_ticks=1, batch_prompts=1, pack_tokens=1, micro_rows=1,
                  minibatches=1)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """candidates: prompts per critic pass of DAPS. max_rounds: passes before the batch is filled.

    Source: ours.
    """

    candidates: int = 512
    max_rounds: int = 8

    def __post_init__(self):
        _at_least("scheduler", self, candidates=1, max_rounds=1)


@dataclasses.dataclass(frozen=True)
class CadenceConfig:
    """Every how many ticks to evaluate and to save; how many checkpoints to keep.

    Source: ours.
    """

    evaluate_every: int = 10
    save_every: int = 10
    keep_checkpoints: int = 2

    def __post_init__(self):
        _at_least("cadence", self, evaluate_every=1, save_every=1, keep_checkpoints=1)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run. Raises ValueError, naming the fields, on what can't work together.

    Source: ours: a config is checked before anything is compiled.
    """

    name: str
    seed: int
    task: TaskConfig
    model: DecoderSpec
    recipe: Recipe
    rollout: RolloutConfig
    sft: SftConfig
    value_pretraining: ValuePretrainingConfig
    actor: OptimizerConfig
    critic: CriticConfig
    train: TrainConfig
    scheduler: SchedulerConfig
    cadence: CadenceConfig
    mesh: MeshSpec

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt plus response. Source: ours."""
        return self.task.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def batch_responses(self) -> int:
        """Responses per tick. Source: ours."""
        return self.train.batch_prompts * self.recipe.responses_per_prompt

    def rows_for(self, num_responses: int) -> int:
        """Packed rows that always hold this many responses. Source: ours."""
        return worst_case_rows(
            num_responses, pack_tokens=self.train.pack_tokens, longest=self.longest,
            multiple=self.train.micro_rows,
        )  # fmt: skip

    def __post_init__(self):
        self.actor.check("actor")
        self.critic.check("critic")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        self.rows_for(1)
        if self.batch_responses % self.train.minibatches:
            raise ValueError(
                f"train.minibatches ({self.train.minibatches}) must divide the "
                f"{self.batch_responses} responses of a tick (train.batch_prompts x "
                "recipe.responses_per_prompt)"
            )
        if self.train.micro_rows % self.mesh.row_shards:
            raise ValueError(
                f"train.micro_rows ({self.train.micro_rows}) must be a multiple of mesh.data x "
                f"mesh.fsdp ({self.mesh.row_shards})"
            )
        for name in ("candidates", "batch_prompts"):
            section = self.scheduler if name == "candidates" else self.train
            if getattr(section, name) > self.task.num_train:
                raise ValueError(
                    f"{name} ({getattr(section, name)}) exceeds task.num_train "
                    f"({self.task.num_train})"
                )
