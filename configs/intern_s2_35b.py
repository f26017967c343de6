"""S3AC on Intern-S2-Preview, a mixture of experts of 35 B weights, 3 B of them at work.

What: 1024 responses of up to 30,720 tokens a tick, 8 optimiser steps on them; the trainer sends
each token to the experts that the sampler chose. s3ac_group: 8 responses to each of 128 prompts;
s3ac_single: 1024 prompts.
Source: S3AC (2610.35518): 128 prompts, groups of 8, rates, clips; Intern-S2 report (2608.13505) for
the model; lengths, slots and mesh are ours.
Expected: the paper has 80.9 for single rollouts (REINFORCE++: 70.4). Nobody has run this config
here; that it fits its machine is what XLA's compiler says, docs/plans/intern_s2_35b_v5p_4x4x4.txt:
73.2 of 95.7 GiB at the fullest (actor step).
Machine: TPU v5p:4x4x4, 64 chips.
Command, on every host (docs/hosts.md), with folder and questions where the config has them:

  python launch/train.py --config=configs/intern_s2_35b.py:s3ac_group --distributed \\
    --workdir=SHARED

Plan: python launch/plan.py --config=configs/intern_s2_35b.py --topology=v5p:4x4x4
Presets: every recipe of docs/recipes.md; s3ac_group is the default, groups are of 8.
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
from s3ac_jax.models.spec import DecoderSpec, LinearAttentionSpec, MoeSpec
from s3ac_jax.parallel.mesh import MeshSpec

ACTOR_LR = 1e-6
PRESETS = ("s3ac_group", "s3ac_single")
# Per tick, however many belong to one prompt.
RESPONSES = 128 * 8
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 2048, 30720


def get_config(arg: str = "s3ac_group") -> config_dict.ConfigDict:
    if arg not in RECIPES:
        raise ConfigError(
            f"configs/intern_s2_35b.py has no preset {arg!r}; known: {', '.join(RECIPES)}"
        )
    recipe = RECIPES[arg]
    if isinstance(recipe.average, ConstantLength):
        average = dataclasses.replace(recipe.average, length=MAX_RESPONSE_TOKENS)
        recipe = dataclasses.replace(recipe, average=average)
    if recipe.responses_per_prompt > 1:
        recipe = dataclasses.replace(recipe, responses_per_prompt=8)
    batch_prompts = RESPONSES // recipe.responses_per_prompt
    run = RunConfig(
        name="intern_s2_35b",
        seed=0,
        task=Questions(
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            train={"math": FileSource("data/math_train.jsonl")},
            held_out={"imo": FileSource("imo_answerbench_v2")},
            instruction="Please reason step by step, and put your final answer within \\boxed{}.",
            thinking=True,
            graders=8,
        ),
        start=StartConfig(hf="models/Intern-S2-Preview"),
        model=DecoderSpec(
            vocab_size=251392,
            hidden_size=2048,
            num_layers=40,
            num_heads=16,
            num_kv_heads=2,
            head_dim=256,
            intermediate_size=512,
            rope_theta=1e7,
            rope_fraction=0.25,
            tie_embeddings=False,
            qkv_bias=False,
            qk_norm=True,
            gated_attention=True,
            zero_centred_norms=True,
            moe=MoeSpec(num_experts=256, per_token=8, width=512, shared_width=512),
            linear_attention=LinearAttentionSpec(
                key_heads=16, value_heads=32, key_dim=128, value_dim=128
            ),
            # Every fourth layer attends in full.
            full_attention=tuple(range(3, 40, 4)),
            dtype="bfloat16",
            remat=True,
        ),
        recipe=recipe,
        rollout=RolloutConfig(
            slots=512,
            max_response_tokens=MAX_RESPONSE_TOKENS,
            steps_per_dispatch=64,
            insert_batch=64,
            temperature=1.0,
            scan_layers=True,
            # A step of one token per row reads all weights of a device: the fewer, the faster.
            mesh=MeshSpec(data=2, expert=32),
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
            num_ticks=200,
            batch_prompts=batch_prompts,
            pack_tokens=MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
            micro_rows=64,
            minibatches=8,
        ),
        scheduler=SchedulerConfig(candidates=512),
        cadence=CadenceConfig(evaluate_every=20, save_every=5),
        mesh=MeshSpec(fsdp=8, expert=8),
    )
    return to_config_dict(run, recipe=arg)
