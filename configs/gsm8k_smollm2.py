"""S3AC on GSM8K with SmolLM2-135M-Instruct: real prompts, a real model, its chat template.

What: the model is shown twice how to answer in a box, and the grader of mathematical answers
decides. 135 M weights solve few of these questions: the point is the path, on two CPU cores or one
chip.
Source: S3AC (2610.35518) for the method; GSM8K (2110.14168) for the questions; SmolLM2 (2502.02737)
for the model; sizes are ours.
Expected: a run that goes through. In the three ticks that we ran, at seven minutes a tick on two
CPU cores shared with other work, none of 96 training answers was right.
Command, with the folder that `make smollm2` or launch/smollm2.py makes:

  python launch/train.py --config=configs/gsm8k_smollm2.py --workdir=runs/gsm8k_smollm2
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
from s3ac_jax.config.sources import FileSource
from s3ac_jax.config.tasks import Questions
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec

ACTOR_LR = 1e-5
RECIPE = "s3ac_single"
# Asked plainly, this model boxes none of its answers, and there is nothing to learn from.
SYSTEM = """Question: 2 + 3?
Reply: \\boxed{5}
Question: Tom has 4 apples and buys 6 more. How many has he?
Reply: \\boxed{10}"""


def get_config() -> config_dict.ConfigDict:
    run = RunConfig(
        name="gsm8k_smollm2",
        seed=0,
        task=Questions(
            max_prompt_tokens=256,
            train={"gsm8k": FileSource("gsm8k_train_2k")},
            held_out={"gsm8k": FileSource("gsm8k_test", limit=64)},
            system=SYSTEM,
            instruction="Reply with \\boxed{ANSWER} only.",
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
            max_response_tokens=96,
            steps_per_dispatch=16,
            insert_batch=16,
            temperature=0.7,
        ),
        reference=ReferenceConfig(),
        value_pretraining=ValuePretrainingConfig(
            early_prompts=0,
            middle_prompts=0,
            late_prompts=64,
            batch_responses=32,
            lr=5 * ACTOR_LR,
            warmup_steps=2,
            diagnose_steps=0,
        ),
        actor=OptimizerConfig(ACTOR_LR, clip=1.0, weight_decay=0.0),
        critic=CriticConfig(5 * ACTOR_LR, clip=10.0, weight_decay=0.0),
        train=TrainConfig(num_ticks=20, batch_prompts=32, pack_tokens=384, micro_rows=4),
        scheduler=SchedulerConfig(candidates=48),
        cadence=CadenceConfig(evaluate_every=10, save_every=5, keep_checkpoints=1),
        mesh=MeshSpec(),
    )
    return to_config_dict(run, recipe=RECIPE)
