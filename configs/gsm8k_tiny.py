"""S3AC on real prompts with a model of 0.1 M parameters: the whole path, on a laptop, in minutes.

What: questions of GSM8K and generated one-digit sums, mixed half and half, as bytes; a warm start
teaches the policy to answer in a box; then S3AC with the grader of mathematical answers. GSM8K is
far out of reach for such a model: the sums show that it learns, GSM8K that the path is whole.
Source: S3AC (2610.35518) for the method; GSM8K (2110.14168) for the questions; sizes are ours.
Expected: held-out sums 4.0 % -> 19.4 %, GSM8K 0.9 % -> 1.5 %, acceptance of sums 60 % -> 84 %, of
GSM8K 39 % -> 21 % (seed 0; docs/prompts.md), in 6 minutes on two busy CPU cores.
Command:

  python launch/train.py --config=configs/gsm8k_tiny.py --workdir=runs/gsm8k_tiny
"""

from ml_collections import config_dict

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.boundary import to_config_dict
from s3ac_jax.config.evaluation import SuiteConfig, TrainingEvaluationConfig
from s3ac_jax.config.rollout import RolloutConfig
from s3ac_jax.config.run import (
    CadenceConfig,
    CriticConfig,
    OptimizerConfig,
    ReferenceConfig,
    RunConfig,
    SchedulerConfig,
    SftConfig,
    TrainConfig,
    ValuePretrainingConfig,
)
from s3ac_jax.config.sources import FileSource, SumsSource
from s3ac_jax.config.tasks import Questions
from s3ac_jax.data.tokenizer import ByteTokenizer
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec

ACTOR_LR = 5e-5
RECIPE = "s3ac_single"
MAX_PROMPT_TOKENS = 320  # bytes: four in five questions of GSM8K
MAX_RESPONSE_TOKENS = 24


def get_config() -> config_dict.ConfigDict:
    limits = {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_response_tokens": MAX_RESPONSE_TOKENS}
    run = RunConfig(
        name="gsm8k_tiny",
        seed=0,
        task=Questions(
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            train={
                "gsm8k": FileSource("gsm8k_train_2k", weight=1.0),
                "sums": SumsSource(400, digits=(1,), operators="+", weight=1.0),
            },
            held_out={
                "gsm8k": FileSource("gsm8k_test", limit=100),
                "sums": SumsSource(100, digits=(1,), operators="+", held_out=True),
            },
            instruction="",
        ),
        model=DecoderSpec(
            vocab_size=ByteTokenizer.vocab_size,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=192,
            init_std=0.125,
        ),
        recipe=RECIPES[RECIPE],
        rollout=RolloutConfig(
            slots=64,
            max_response_tokens=MAX_RESPONSE_TOKENS,
            steps_per_dispatch=8,
            insert_batch=32,
            temperature=1.0,
        ),
        reference=ReferenceConfig(),
        sft=SftConfig(
            embedded=False, careful_steps=400, early_step=200, hasty_steps=50, batch_responses=32
        ),
        value_pretraining=ValuePretrainingConfig(
            early_prompts=256, middle_prompts=256, late_prompts=512, batch_responses=64
        ),
        actor=OptimizerConfig(ACTOR_LR, clip=1.0, weight_decay=0.0),
        critic=CriticConfig(5 * ACTOR_LR, clip=10.0, weight_decay=0.0),
        train=TrainConfig(
            num_ticks=30, batch_prompts=128, pack_tokens=352, micro_rows=8, minibatches=4
        ),
        scheduler=SchedulerConfig(candidates=256),
        cadence=CadenceConfig(evaluate_every=10, save_every=10),
        mesh=MeshSpec(),
        evaluation=TrainingEvaluationConfig(
            every=15,
            suites={
                "sums": SuiteConfig(
                    SumsSource(30, digits=(1,), operators="+", held_out=True, seed=1),
                    samples=8,
                    pass_at=(8,),
                    maj_at=(8,),
                    instruction="",
                    **limits,
                ),
                "gsm8k": SuiteConfig(
                    FileSource("gsm8k_test", limit=50),
                    samples=8,
                    pass_at=(8,),
                    maj_at=(8,),
                    instruction="",
                    **limits,
                ),
            },
        ),
    )
    return to_config_dict(run, recipe=RECIPE)
