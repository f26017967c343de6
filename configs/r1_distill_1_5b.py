"""S3AC on DeepSeek-R1-Distill-Qwen-1.5B: long thoughts, groups of 16 or one response each.

What: 2048 responses of up to 15,360 tokens a tick, 8 optimiser steps on them. s3ac_group: 128
prompts; s3ac_single: 2048, so that both have as many responses.
Source: S3AC (2610.35518): 128 prompts, rates, clips; DeepSeek-R1 (2501.12948) for the model;
lengths, slots and mesh are ours.
Expected: the paper has 31.4 (group) and 29.8 (single) as the mean of its benchmarks. Nobody has run
this config here; that it fits its machine is what XLA's compiler says,
docs/plans/r1_distill_1_5b_v6e_4x4.txt.
Machine: TPU v6e:4x4, 16 chips.
Command, with the model's folder and the questions (docs/prompts.md) where the config has them:

  python launch/train.py --config=configs/r1_distill_1_5b.py:s3ac_group --workdir=runs/r1_distill

Plan: python launch/plan.py --config=configs/r1_distill_1_5b.py --topology=v6e:4x4
Presets: every recipe of docs/recipes.md; s3ac_group is the default.
"""

import dataclasses

from ml_collections import config_dict

from s3ac_jax.algos.averaging import ConstantLength
from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.boundary import ConfigError, to_config_dict
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
from s3ac_jax.config.sources import FileSource
from s3ac_jax.config.tasks import Questions
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec

ACTOR_LR = 1e-6
PRESETS = ("s3ac_group", "s3ac_single")
# Per tick, however many belong to one prompt.
RESPONSES = 128 * 16
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 1024, 15360


def get_config(arg: str = "s3ac_group") -> config_dict.ConfigDict:
    if arg not in RECIPES:
        raise ConfigError(
            f"configs/r1_distill_1_5b.py has no preset {arg!r}; known: {', '.join(RECIPES)}"
        )
    recipe = RECIPES[arg]
    if isinstance(recipe.average, ConstantLength):
        average = dataclasses.replace(recipe.average, length=MAX_RESPONSE_TOKENS)
        recipe = dataclasses.replace(recipe, average=average)
    batch_prompts = RESPONSES // recipe.responses_per_prompt
    run = RunConfig(
        name="r1_distill_1_5b",
        seed=0,
        task=Questions(
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            train={"math": FileSource("data/math_train.jsonl")},
            held_out={"imo": FileSource("imo_answerbench_v2")},
            instruction="Please reason step by step, and put your final answer within \\boxed{}.",
            graders=8,
        ),
        start=StartConfig(hf="models/DeepSeek-R1-Distill-Qwen-1.5B"),
        model=DecoderSpec(
            vocab_size=151936,
            hidden_size=1536,
            num_layers=28,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            intermediate_size=8960,
            tie_embeddings=False,
            dtype="bfloat16",
            remat=True,
        ),
        recipe=recipe,
        rollout=RolloutConfig(
            slots=128,
            max_response_tokens=MAX_RESPONSE_TOKENS,
            steps_per_dispatch=64,
            insert_batch=32,
            temperature=1.0,
            scan_layers=True,
        ),
        reference=ReferenceConfig(),
        value_pretraining=ValuePretrainingConfig(
            early_prompts=0,
            middle_prompts=0,
            late_prompts=8192,
            batch_responses=RESPONSES // 8,
            lr=5 * ACTOR_LR,
            warmup_steps=10,
            diagnose_steps=0,
        ),
        actor=OptimizerConfig(ACTOR_LR, clip=1.0, weight_decay=0.1),
        critic=CriticConfig(5 * ACTOR_LR, clip=10.0, weight_decay=0.1),
        train=TrainConfig(
            num_ticks=400,
            batch_prompts=batch_prompts,
            pack_tokens=MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
            micro_rows=16,
            minibatches=8,
        ),
        scheduler=SchedulerConfig(candidates=512),
        cadence=CadenceConfig(evaluate_every=20, save_every=5),
        mesh=MeshSpec(fsdp=16),
    )
    return to_config_dict(run, recipe=arg)
