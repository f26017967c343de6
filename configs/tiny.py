"""S3AC on a decoder of 0.1 M parameters and chains of arithmetic: the whole method on a laptop.

What: the policy that ships with the package, or one trained here (sft.embedded=False), solves
chains of up to 8 operations; the critic is pretrained on policies of three strengths; then 100
ticks of 256 responses.
Source: S3AC (2610.35518) for the method and its constants; the sizes are ours, chosen so that a
tick takes seconds on two CPU cores.
Expected: held-out accuracy 33-34 % -> 97-98 % (seeds 0, 1, 2 of s3ac_single), in under 3 minutes on
two CPU cores.
Command:

  python launch/train.py --config=configs/tiny.py:s3ac_single --workdir=runs/tiny

Presets: every recipe of docs/recipes.md, s3ac_single is the default. The learning rates are those
of S3AC; configs/study_tiny.py has one for each.
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
    TrainConfig,
    ValuePretrainingConfig,
)
from s3ac_jax.config.tasks import Ladder
from s3ac_jax.config.watch import WatchConfig
from s3ac_jax.data.arithmetic import TOKENIZER
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec

ACTOR_LR = 5e-5
MAX_RESPONSE_TOKENS = 40


def get_config(arg: str = "s3ac_single") -> config_dict.ConfigDict:
    if arg not in RECIPES:
        raise ConfigError(f"configs/tiny.py has no preset {arg!r}; known: {', '.join(RECIPES)}")
    recipe = RECIPES[arg]
    if isinstance(recipe.average, ConstantLength):
        average = dataclasses.replace(recipe.average, length=MAX_RESPONSE_TOKENS)
        recipe = dataclasses.replace(recipe, average=average)
    if recipe.shaping is not None:
        # 8-step answers have 35 tokens: a buffer of a fifth of the limit would punish right ones.
        shaping = dataclasses.replace(recipe.shaping, buffer_share=0.1)
        recipe = dataclasses.replace(recipe, shaping=shaping)
    batch_prompts = 256 // recipe.responses_per_prompt
    run = RunConfig(
        name="tiny",
        seed=0,
        task=Ladder(max_steps=8, num_train=4096, num_held_out=512),
        model=DecoderSpec(
            vocab_size=TOKENIZER.vocab_size,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=192,
            init_std=0.125,
            onehot_embedding=True,
        ),
        recipe=recipe,
        rollout=RolloutConfig(
            slots=128,
            max_response_tokens=MAX_RESPONSE_TOKENS,
            steps_per_dispatch=8,
            insert_batch=32,
            temperature=1.0,
        ),
        # A history that starts from a success rate needs one.
        reference=ReferenceConfig(samples=8 if recipe.select.tracks_drift else 0),
        value_pretraining=ValuePretrainingConfig(),
        actor=OptimizerConfig(ACTOR_LR, clip=1.0, weight_decay=0.0),
        critic=CriticConfig(5 * ACTOR_LR, clip=10.0, weight_decay=0.0),
        train=TrainConfig(
            num_ticks=100, batch_prompts=batch_prompts, pack_tokens=64, micro_rows=8, minibatches=4
        ),
        scheduler=SchedulerConfig(candidates=2 * batch_prompts),
        cadence=CadenceConfig(evaluate_every=5, save_every=10),
        mesh=MeshSpec(),
        watch=WatchConfig(trajectories=2),
    )
    return to_config_dict(run, recipe=arg)
