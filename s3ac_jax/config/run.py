"""RunConfig: every number of a run, checked within and across rooms when it is made."""

import dataclasses
import math
from typing import Literal

from s3ac_jax.algos.recipe import Recipe
from s3ac_jax.algos.selection import Accepting
from s3ac_jax.config.checks import at_least, positive
from s3ac_jax.config.devices import check_meshes
from s3ac_jax.config.evaluation import TrainingEvaluationConfig
from s3ac_jax.config.rollout import RolloutConfig
from s3ac_jax.config.tasks import TaskConfig
from s3ac_jax.config.watch import WatchConfig
from s3ac_jax.data.packing import worst_case_rows
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec

Offload = Literal["none", "optimizer", "idle"]


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
        positive(role, self, "lr", "clip")
        at_least(role, self, weight_decay=0, b1=0, b2=0, warmup_steps=0)
        for name in ("b1", "b2"):
            # Adam divides by 1 - b.
            if not getattr(self, name) < 1:
                raise ValueError(f"{role}.{name} must be below 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class CriticConfig(OptimizerConfig):
    """head_std: of the fresh value head, None for 1/(hidden_size + 1).

    Source: S3AC (2610.35518), stabilised critic.
    """

    head_std: float | None = None


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """The warm start that makes the base policy and its early and middle checkpoints.

    embedded: take the policies that ship with the package instead of training them.
    careful_steps: batches of careful demonstrations; the early policy stands at early_step, the
    middle one at their end. hasty_steps: batches whose writer gives up after each step with
    probability min(quit_most, quit_slope (n - 1)); the base (late) policy stands at their end.
    Source: ours; the coverage problem of S3AC (2610.35518) in miniature.
    """

    embedded: bool = True
    careful_steps: int = 1500
    early_step: int = 800
    hasty_steps: int = 300
    quit_slope: float = 0.15
    quit_most: float = 0.6
    batch_responses: int = 64
    careful_lr: float = 4e-3
    hasty_lr: float = 3e-3

    def __post_init__(self):
        at_least("sft", self, careful_steps=200, early_step=1, hasty_steps=1, batch_responses=1)
        positive("sft", self, "careful_lr", "hasty_lr")
        if not self.early_step < self.careful_steps:
            raise ValueError(
                f"sft.early_step ({self.early_step}) must come before sft.careful_steps "
                f"({self.careful_steps})"
            )
        for name in ("quit_most", "quit_slope"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"sft.{name} must be in 0..1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class ValuePretrainingConfig:
    """Pretraining of the critic on rollouts, for recipes that ask for it.

    early_prompts, middle_prompts, late_prompts: responses of each policy, 0 leaves it out; with
    on-policy pretraining all of them are the late (base) policy's. diagnose_steps: first steps
    watched in the two diagnoses (head init and clip), 0 for none.
    Source: S3AC (2610.35518): 2 epochs, plain MSE, attention frozen; ours: the shares.
    """

    early_prompts: int = 1024
    middle_prompts: int = 1024
    late_prompts: int = 8192
    epochs: int = 2
    batch_responses: int = 64
    lr: float = 2e-3
    warmup_steps: int = 10
    diagnose_steps: int = 20

    def prompts(self, pretraining: str) -> dict[str, int]:
        """Responses by policy, policies left out excluded, for a recipe's kind of pretraining.

        Source: ours: both kinds have the same number of responses.
        """
        named = {
            "early": self.early_prompts, "middle": self.middle_prompts, "late": self.late_prompts
        }  # fmt: skip
        if pretraining == "on_policy":
            named = {"late": sum(named.values())}
        return {name: count for name, count in named.items() if count}

    def __post_init__(self):
        at_least("value_pretraining", self, early_prompts=0, middle_prompts=0, late_prompts=0,
                 epochs=1, batch_responses=1, warmup_steps=0, diagnose_steps=0)  # fmt: skip
        positive("value_pretraining", self, "lr")
        if sum(self.prompts("coverage").values()) < self.batch_responses:
            raise ValueError(
                "value_pretraining: early_, middle_ and late_prompts together are fewer than "
                f"batch_responses ({self.batch_responses})"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The online loop. batch_prompts: per tick. minibatches: optimiser batches per tick.

    pack_tokens: length of a packed row. micro_rows: rows per forward and backward pass. offload:
    what lies in the host's memory in between: the optimisers' states, or ("idle") also the weights
    of the role that is not updated.
    Source: S3AC (2610.35518): 128 prompts, 8 optimiser steps per rollout batch at full size.
    """

    num_ticks: int
    batch_prompts: int
    pack_tokens: int
    micro_rows: int
    minibatches: int = 1
    offload: Offload = "none"

    def __post_init__(self):
        at_least("train", self, num_ticks=1, batch_prompts=1, pack_tokens=1, micro_rows=1,
                 minibatches=1)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """candidates: prompts per critic pass of DAPS. max_rounds: passes before the batch is filled.

    judge: the critic that selection asks: the learning one, the one that training began with
    ("stale"), or one that never learnt ("untrained"). value_noise: std of noise added to its
    V(s_0), in reward units. Both are there to see what selection owes to the critic.
    Source: ours.
    """

    candidates: int = 512
    max_rounds: int = 8
    judge: Literal["learning", "stale", "untrained"] = "learning"
    value_noise: float = 0.0

    def __post_init__(self):
        at_least("scheduler", self, candidates=1, max_rounds=1, value_noise=0)


@dataclasses.dataclass(frozen=True)
class CadenceConfig:
    """Every how many ticks to evaluate and to save; how many checkpoints to keep.

    Source: ours.
    """

    evaluate_every: int = 10
    save_every: int = 10
    keep_checkpoints: int = 2

    def __post_init__(self):
        at_least("cadence", self, evaluate_every=1, save_every=1, keep_checkpoints=1)


@dataclasses.dataclass(frozen=True)
class ReferenceConfig:
    """Rollouts of the base policy on every training prompt, before training: how hard each is.

    samples: responses per prompt, 0 for none. Metrics of selection refer to them, and a selection
    that keeps a success rate of each prompt (SPO) starts from them.
    Source: ours; SPO (2509.13232), offline value estimation.
    """

    samples: int = 0

    def __post_init__(self):
        at_least("reference", self, samples=0)


@dataclasses.dataclass(frozen=True)
class StartConfig:
    """Where the base policy comes from. hf: folder of a pretrained model in Hugging Face's format.

    Its weights are the base policy, its tokenizer and chat template are the task's. Empty: the
    warm start of `sft`. Source: ours.
    """

    hf: str = ""


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
    reference: ReferenceConfig
    value_pretraining: ValuePretrainingConfig
    actor: OptimizerConfig
    critic: CriticConfig
    train: TrainConfig
    scheduler: SchedulerConfig
    cadence: CadenceConfig
    mesh: MeshSpec
    sft: SftConfig = SftConfig()
    start: StartConfig = StartConfig()
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    evaluation: TrainingEvaluationConfig = dataclasses.field(
        default_factory=TrainingEvaluationConfig
    )

    @property
    def trains_policies(self) -> bool:
        """Whether the base policy is made by a warm start of this run's own. Source: ours."""
        return not self.start.hf and not self.sft.embedded

    @property
    def decode_mesh(self) -> MeshSpec:
        """How the devices share out sampling. Source: ours."""
        return self.rollout.mesh or self.mesh.for_decoding()

    @property
    def samples_in_place(self) -> bool:
        """Whether weights lie for sampling as they do for training. Source: ours."""
        return self.decode_mesh == self.mesh and self.mesh.fsdp * self.mesh.expert == 1

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt plus response. Source: ours."""
        return self.task.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def batch_responses(self) -> int:
        """Responses per tick. Source: ours."""
        return self.train.batch_prompts * self.recipe.responses_per_prompt

    @property
    def records_routing(self) -> bool:
        """Whether the sampler says which experts it chose. Source: ours."""
        return self.recipe.replay_routing and self.model.moe is not None

    @property
    def minibatches(self) -> int:
        """Optimiser batches per rollout batch: the recipe's, or else the run's. Source: ours."""
        return self.recipe.updates or self.train.minibatches

    def rows_for(self, num_responses: int) -> int:
        """Packed rows that always hold this many responses. Source: ours."""
        return worst_case_rows(
            num_responses, pack_tokens=self.train.pack_tokens, longest=self.longest,
            multiple=self.train.micro_rows,
        )  # fmt: skip

    def __post_init__(self):
        self.actor.check("actor")
        self.critic.check("critic")
        if self.critic.head_std is not None and not 0 <= self.critic.head_std < math.inf:
            raise ValueError(
                f"critic.head_std must be None or a finite number from 0 on, got "
                f"{self.critic.head_std}"
            )
        critic = self.recipe.critic
        if critic is not None and critic.warmup_ticks >= self.train.num_ticks:
            raise ValueError(
                f"recipe.critic.warmup_ticks ({critic.warmup_ticks}) must be below train.num_ticks "
                f"({self.train.num_ticks}), or the actor never learns"
            )
        asks = self.scheduler.judge != "learning" or self.scheduler.value_noise
        if asks and not self.recipe.select.reads_values:
            raise ValueError(
                "scheduler.judge and scheduler.value_noise are for selection that reads values; "
                f"{type(self.recipe.select).__name__} does not"
            )
        if self.records_routing and self.recipe.select.tracks_drift:
            raise ValueError(
                f"{type(self.recipe.select).__name__} compares log-probs over ticks, whose routing "
                "is not kept: recipe.replay_routing must be False with it"
            )
        if self.watch.tripwires.action == "rollback" and self.rollout.ahead:
            raise ValueError(
                "watch.tripwires.action=rollback needs rollout.ahead=0: what was made ahead comes "
                "from the weights that it leaves"
            )
        check_meshes(self)
        self._check_start()
        self._check_suites()
        if self.model.vocab_size < self.task.min_vocab_size:
            raise ValueError(
                f"model.vocab_size must be at least {self.task.min_vocab_size}, the tokens of the "
                f"task, got {self.model.vocab_size}"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in 0..{2**32 - 1}, got {self.seed}")
        if self.rollout.max_response_tokens < self.task.max_answer_tokens:
            raise ValueError(
                f"rollout.max_response_tokens ({self.rollout.max_response_tokens}) must hold the "
                f"longest right answer ({self.task.max_answer_tokens} tokens, from "
                f"{self.task.sized_by})"
            )
        if self.train.pack_tokens < self.longest:
            raise ValueError(
                f"train.pack_tokens ({self.train.pack_tokens}) must hold the longest prompt "
                f"({self.task.max_prompt_tokens} tokens, from {self.task.sized_by}) plus "
                f"rollout.max_response_tokens ({self.rollout.max_response_tokens})"
            )
        if self.batch_responses % self.minibatches:
            raise ValueError(
                f"train.minibatches or recipe.updates ({self.minibatches}) must divide the "
                f"{self.batch_responses} responses of a tick (train.batch_prompts x "
                "recipe.responses_per_prompt)"
            )
        for section, name in (("scheduler", "candidates"), ("train", "batch_prompts")):
            value, there = getattr(getattr(self, section), name), self.task.num_train
            if there is not None and value > there:
                raise ValueError(
                    f"{section}.{name} ({value}) must not exceed task.num_train ({there})"
                )
        walks = self.recipe.select.reads_values and isinstance(self.recipe.select, Accepting)
        looked_at = self.scheduler.candidates * self.scheduler.max_rounds
        if walks and looked_at < self.train.batch_prompts:
            raise ValueError(
                f"scheduler.candidates ({self.scheduler.candidates}) x scheduler.max_rounds "
                f"({self.scheduler.max_rounds}) can't fill train.batch_prompts "
                f"({self.train.batch_prompts}); raise one of the two"
            )

    def _check_suites(self) -> None:
        if not self.evaluation.every:
            return
        limits = {
            "max_prompt_tokens": ("task", self.task.max_prompt_tokens),
            "max_response_tokens": ("rollout", self.rollout.max_response_tokens),
        }
        for name, suite in self.evaluation.suites.items():
            for field, (section, limit) in limits.items():
                # The run's own held-out prompts fit.
                own = suite.source is None and section == "task"
                if not own and getattr(suite, field) > limit:
                    raise ValueError(
                        f"evaluation.suites.{name}.{field} ({getattr(suite, field)}) must not "
                        f"exceed {section}.{field} ({limit}), which the run's sampler is made for"
                    )

    def _check_start(self) -> None:
        if self.start.hf:
            kept = self.value_pretraining
            for name in ("early_prompts", "middle_prompts"):
                if getattr(kept, name):
                    raise ValueError(
                        f"value_pretraining.{name} ({getattr(kept, name)}) must be 0 with "
                        "start.hf: a pretrained model has no earlier policies; give their share "
                        "to late_prompts"
                    )
        elif not self.task.has_warm_start:
            raise ValueError(
                f"task.kind {type(self.task).__name__} has no warm start; set start.hf to the "
                "folder of a pretrained model"
            )
