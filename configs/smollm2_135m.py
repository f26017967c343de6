"""S3AC on a real pretrained model, SmolLM2-135M-Instruct, and sums of one and two digits.

What: all 135 M weights learn from right and wrong alone, on two CPU cores; the critic starts from
the same weights, is pretrained on the model's own answers, and learns beside it.
Source: S3AC (2610.35518) for the method and its constants; SmolLM2 (2502.02737) for the model; the
sizes are ours, for an hour on two CPU cores.
Expected: 128 held-out sums 12 % -> 64 %, one-digit additions 33 % -> 99 % (seed 0, sampled),
in about an hour on two CPU cores; docs/smollm2.md.
Command:

  make smollm2

or, with the folder made by launch/smollm2.py:

  python launch/train.py --config=configs/smollm2_135m.py --workdir=runs/smollm2
"""

from ml_collections import config_dict

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.boundary import to_config_dict
from s3ac_jax.config.rollout import RolloutConfig
from s3ac_jax.config.run import (
    CadenceConfig,
    CriticConfig,
    OptimizerConfig,
    ReferenceConfig,
    RunConfig,
    SchedulerConfig,
    StartConfig,
    TrainConfig,
    ValuePretrainingConfig,
)
from s3ac_jax.config.tasks import Sums
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec

ACTOR_LR = 1e-5
RECIPE = "s3ac_single"


def get_config() -> config_dict.ConfigDict:
    run = RunConfig(
        name="smollm2_135m",
        seed=0,
        task=Sums(
            max_prompt_tokens=32,
            digits=(1, 2),
            operators="+-",
            wordings=("{a} {op} {b}", "{a}{op}{b}"),
            num_train=384,
            num_held_out=128,
            system="You are a calculator. Reply with the result only.",
        ),
        start=StartConfig(hf="runs/models/smollm2_135m"),
        model=DecoderSpec(
            vocab_size=49152,
            hidden_size=576,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            intermediate_size=1536,
            rope_theta=100000.0,
            rms_norm_eps=1e-5,
            # On a CPU without matrix units for bfloat16 that is slower (decoding: 3.4 times).
            dtype="float32",
        ),
        recipe=RECIPES[RECIPE],
        rollout=RolloutConfig(
            slots=32,
            max_response_tokens=16,
            steps_per_dispatch=8,
            insert_batch=16,
            temperature=0.5,
        ),
        reference=ReferenceConfig(),
        value_pretraining=ValuePretrainingConfig(
            early_prompts=0,
            middle_prompts=0,
            late_prompts=256,
            batch_responses=32,
            lr=5 * ACTOR_LR,
            warmup_steps=2,
            diagnose_steps=0,
        ),
        actor=OptimizerConfig(ACTOR_LR, clip=1.0, weight_decay=0.0),
        critic=CriticConfig(5 * ACTOR_LR, clip=10.0, weight_decay=0.0),
        train=TrainConfig(num_ticks=32, batch_prompts=32, pack_tokens=96, micro_rows=8),
        scheduler=SchedulerConfig(candidates=48),
        cadence=CadenceConfig(evaluate_every=10, save_every=20, keep_checkpoints=1),
        mesh=MeshSpec(),
    )
    return to_config_dict(run, recipe=RECIPE)
