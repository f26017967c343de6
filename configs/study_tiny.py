"""A study on the tiny task: is the critic worth it, over seeds, at equal ticks and equal time?

What: every recipe, and the changes of S3AC that show what each part does, on the task and the base
policies of configs/tiny.py. Each method has the learning rate that was best for it in the preset
`rates` (a grid of its own, on other seeds), the critic five times the actor's.
Source: S3AC (2610.35518) for the questions; the design is ours.
Expected: docs/study.md.
Command:

  python launch/study.py --config=configs/study_tiny.py --workdir=runs/study

Presets: all (the default), main (the six methods of the main comparison), rates (learning rates),
ahead (rollouts a tick ahead of the training; two devices, docs/devices.md has the command).
"""

import dataclasses
import pathlib
import runpy
from typing import Any

from ml_collections import config_dict

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.boundary import ConfigError
from s3ac_jax.parallel.mesh import MeshSpec

TICKS = 30
# Of the six methods of the main comparison, and of every other arm.
MAIN_SEEDS, OTHER_SEEDS = 10, 5
# Best mean accuracy over the run in the preset `rates`.
RATES = {
    "s3ac_single": 4e-4,
    "reinforce_pp": 4e-4,
    "flash_reinforce": 8e-4,
    "s3ac_group": 2e-4,
    "grpo_x": 4e-4,
    "dapo": 4e-4,
    "spo": 4e-4,
    "ppo": 4e-4,
    "vc_ppo": 4e-4,
    "sao": 4e-4,
    "grpo": 2e-4,
    "dr_grpo": 2e-4,
    "reinforce_pp_baseline": 2e-4,
    "pcl": 4e-4,
    "vapo": 2e-4,
}
# The main six on seeds 100 and 101, the others on seed 100 around what was best for those. One
# update per batch asks for longer steps.
MAIN_GRID, OTHER_GRID, ONE_UPDATE = (1e-4, 2e-4, 4e-4, 8e-4), (2e-4, 4e-4), 1.6e-3

# Of the preset `ahead`: as the tiny run has them.
AHEAD_TICKS, TINY_RATE = 100, 5e-5

MAIN_SINGLE = ("s3ac_single", "reinforce_pp", "flash_reinforce")
MAIN_GROUP = ("s3ac_group", "grpo_x", "dapo")
OTHER_SINGLE = ("spo", "ppo", "vc_ppo", "sao")
OTHER_GROUP = ("grpo", "dr_grpo", "reinforce_pp_baseline", "pcl", "vapo")

HIDDEN = 64
UNIFORM = {"recipe.select": {"kind": "Uniform"}}
FILTERED = {"recipe.keep": {"kind": "VariedGroups"}}
# name: (recipe, what is changed)
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "single-on_policy": ("s3ac_single", {"recipe.critic.pretraining": "on_policy"}),
    "single-no_pretraining": ("s3ac_single", {"recipe.critic.pretraining": "none"}),
    "single-head_ordinary-clip_1": (
        "s3ac_single", {"critic.head_std": HIDDEN**-0.5, "critic.clip": 1.0},
    ),
    "single-head_ordinary-clip_10": ("s3ac_single", {"critic.head_std": HIDDEN**-0.5}),
    "single-head_small-clip_1": ("s3ac_single", {"critic.clip": 1.0}),
    "single-unfrozen": ("s3ac_single", {"recipe.critic.freeze_attention": False}),
    "single-one_epoch": ("s3ac_single", {"recipe.critic.epochs": 1}),
    "single-uniform": ("s3ac_single", UNIFORM),
    "single-noise_5e-1": ("s3ac_single", {"scheduler.value_noise": 0.5}),
    "single-noise_2": ("s3ac_single", {"scheduler.value_noise": 2.0}),
    "single-stale": ("s3ac_single", {"scheduler.judge": "stale"}),
    "single-untrained": ("s3ac_single", {"scheduler.judge": "untrained"}),
    "single-n_c_1": ("s3ac_single", {"recipe.select.n_c": 1.0}),
    "single-n_c_16": ("s3ac_single", {"recipe.select.n_c": 16.0}),
    "single-alpha_5e-2": ("s3ac_single", {"recipe.advantage.alpha": 0.05}),
    "single-alpha_4e-1": ("s3ac_single", {"recipe.advantage.alpha": 0.4}),
    "single-lambda_1": ("s3ac_single", {"recipe.advantage": {"kind": "Gae", "lam": 1.0}}),
    "group-uniform": ("s3ac_group", UNIFORM),
    "group-filtered": ("s3ac_group", FILTERED),
    "group-filtered-uniform": ("s3ac_group", FILTERED | UNIFORM),
}  # fmt: skip

FIGURES = (
    ("single", MAIN_SINGLE),
    ("group", MAIN_GROUP),
    ("other_single", ("s3ac_single", *OTHER_SINGLE)),
    ("other_group", ("s3ac_group", *OTHER_GROUP)),
    ("pretraining", ("s3ac_single", "single-on_policy", "single-no_pretraining")),
    ("head_and_clip", (
        "s3ac_single", "single-head_ordinary-clip_1", "single-head_ordinary-clip_10",
        "single-head_small-clip_1",
    )),
    ("critic_training", ("s3ac_single", "single-unfrozen", "single-one_epoch")),
    ("selection_single", (
        "s3ac_single", "single-uniform", "single-stale", "single-untrained", "single-noise_5e-1",
        "single-noise_2",
    )),
    ("selection_group", (
        "s3ac_group", "group-uniform", "group-filtered", "group-filtered-uniform",
    )),
    ("n_c", ("single-n_c_1", "s3ac_single", "single-n_c_16")),
    ("lambda", ("single-alpha_5e-2", "single-alpha_4e-1", "s3ac_single", "single-lambda_1")),
)  # fmt: skip

ACCURACY = "held_out_accuracy"
# (A, B, metric, first tick, last tick, what it asks)
MAIN_QUESTIONS = (
    ("s3ac_single", "reinforce_pp", ACCURACY, 0, TICKS, "S3AC or REINFORCE++, whole run"),
    ("s3ac_single", "reinforce_pp", ACCURACY, TICKS, TICKS, "S3AC or REINFORCE++, at the end"),
    ("s3ac_single", "flash_reinforce", ACCURACY, 0, TICKS, "S3AC or FlashREINFORCE, whole run"),
    ("s3ac_single", "flash_reinforce", ACCURACY, TICKS, TICKS, "S3AC or Flash, at the end"),
    ("s3ac_group", "grpo_x", ACCURACY, 0, TICKS, "S3AC or GRPO-X, whole run"),
    ("s3ac_group", "grpo_x", ACCURACY, TICKS, TICKS, "S3AC or GRPO-X, at the end"),
    ("s3ac_group", "dapo", ACCURACY, 0, TICKS, "S3AC or DAPO, whole run"),
    ("s3ac_group", "dapo", ACCURACY, TICKS, TICKS, "S3AC or DAPO, at the end"),
)
EARLY = 9
CHANGE_QUESTIONS = (
    ("s3ac_single", "single-on_policy", "explained_variance", 0, EARLY, "coverage: EV early"),
    ("s3ac_single", "single-on_policy", "value_loss", 0, EARLY, "coverage: value loss early"),
    ("s3ac_single", "single-on_policy", ACCURACY, 0, TICKS, "coverage: accuracy"),
    ("s3ac_single", "single-no_pretraining", ACCURACY, 0, TICKS, "pretraining: accuracy"),
    (
        "s3ac_single",
        "single-head_ordinary-clip_1",
        "explained_variance",
        0,
        EARLY,
        "head, clip: EV",
    ),
    ("s3ac_single", "single-head_ordinary-clip_1", ACCURACY, 0, TICKS, "head, clip: accuracy"),
    ("s3ac_single", "single-unfrozen", ACCURACY, 0, TICKS, "freezing: accuracy"),
    ("s3ac_single", "single-one_epoch", ACCURACY, 0, TICKS, "two critic epochs: accuracy"),
    ("s3ac_single", "single-uniform", ACCURACY, 0, TICKS, "DAPS, single: accuracy"),
    ("s3ac_single", "single-uniform", "reference_mid", 0, EARLY, "DAPS, single: middling prompts"),
    ("s3ac_single", "single-untrained", ACCURACY, 0, TICKS, "DAPS: trained or untrained critic"),
    ("s3ac_single", "single-stale", ACCURACY, 0, TICKS, "DAPS: fresh or stale critic"),
    ("s3ac_single", "single-noise_2", ACCURACY, 0, TICKS, "DAPS: clean or noisy critic"),
    ("s3ac_group", "group-uniform", ACCURACY, 0, TICKS, "DAPS, group: accuracy"),
    ("s3ac_group", "group-uniform", "reference_mid", 0, EARLY, "DAPS, group: middling prompts"),
    ("s3ac_group", "group-uniform", "equal_outcome", 0, TICKS, "DAPS, group: uninformative groups"),
    ("group-filtered", "group-filtered-uniform", "dropped", 0, TICKS, "DAPS: dropped trajectories"),
    ("s3ac_single", "single-alpha_5e-2", ACCURACY, 0, TICKS, "alpha 1.5 or 0.05"),
    ("s3ac_single", "single-lambda_1", ACCURACY, 0, TICKS, "alpha 1.5 or lambda 1"),
)


def get_config(arg: str = "all") -> config_dict.ConfigDict:
    presets = {"all": _all, "main": _main, "rates": _rates, "ahead": _ahead}
    if arg not in presets:
        raise ConfigError(
            f"configs/study_tiny.py has no preset {arg!r}; known: {', '.join(presets)}"
        )
    common = {
        "train": {"num_ticks": TICKS},
        "cadence": {"evaluate_every": 3, "save_every": 15, "keep_checkpoints": 1},
        "reference": {"samples": 8},
        "value_pretraining": {"diagnose_steps": 0},
    }
    study = {
        "name": f"study_tiny:{arg}", "workers": 2, "seeds": MAIN_SEEDS, "first_seed": 0,
        "common": common, "questions": (), "figures": (), "cost_baseline": "grpo_x",
    }  # fmt: skip
    return config_dict.ConfigDict(study | presets[arg]())


def _arm(recipe: str, changes: dict[str, Any] | None = None, rate: float | None = None):
    # By path: configs is a folder, not a package.
    tiny = runpy.run_path(str(pathlib.Path(__file__).with_name("tiny.py")))
    run = tiny["get_config"](recipe)
    run.actor.lr = RATES[recipe] if rate is None else rate
    run.critic.lr = 5 * run.actor.lr
    for dotted, value in (changes or {}).items():
        *path, last = dotted.split(".")
        section = run
        for key in path:
            section = section[key]
        with section.ignore_type():
            section[last] = config_dict.ConfigDict(value) if isinstance(value, dict) else value
    return {"run": run}


def _main() -> dict[str, Any]:
    return {
        "arms": {name: _arm(name) for name in (*MAIN_SINGLE, *MAIN_GROUP)},
        "questions": MAIN_QUESTIONS,
        "figures": FIGURES[:2],
    }


def _all() -> dict[str, Any]:
    others = {name: _arm(name) for name in (*OTHER_SINGLE, *OTHER_GROUP)}
    changed = {name: _arm(recipe, changes) for name, (recipe, changes) in CHANGES.items()}
    fewer = {name: arm | {"seeds": OTHER_SEEDS} for name, arm in (others | changed).items()}
    return {
        "arms": _main()["arms"] | fewer,
        "questions": MAIN_QUESTIONS + CHANGE_QUESTIONS,
        "figures": FIGURES,
    }


def _rates() -> dict[str, Any]:
    main = MAIN_SINGLE + MAIN_GROUP
    arms, names = {}, {}
    for recipe in (*main, *OTHER_SINGLE, *OTHER_GROUP):
        grid = MAIN_GRID if recipe in main else OTHER_GRID
        grid += (ONE_UPDATE,) * (RECIPES[recipe].updates == 1)
        rates = {f"{recipe}-lr_{round(1e6 * rate)}e-6": rate for rate in grid}
        for name, rate in rates.items():
            arms[name] = _arm(recipe, rate=rate) | {"seeds": 2 if recipe in main else 1}
        names[recipe] = tuple(rates)
    return {
        "arms": arms, "figures": tuple(names.items()), "seeds": 2, "first_seed": 100,
        "cost_baseline": names["grpo_x"][0],
    }  # fmt: skip


def _ahead() -> dict[str, Any]:
    """One step off or not: at the rate of the tiny run, and at the rate of this study."""
    off = {"rollout.mesh": dataclasses.asdict(MeshSpec()), "rollout.apart": True}
    arms, questions = {}, []
    for pace, rate in (("tiny", TINY_RATE), ("fast", RATES["s3ac_single"])):
        a, b = f"{pace}-ahead", f"{pace}-in_turns"
        arms |= {
            a: _arm("s3ac_single", off | {"rollout.ahead": 1}, rate),
            b: _arm("s3ac_single", off | {"rollout.ahead": 0}, rate),
        }
        questions += [
            (a, b, ACCURACY, 0, AHEAD_TICKS, f"one step off, {pace}: whole run"),
            (a, b, ACCURACY, AHEAD_TICKS, AHEAD_TICKS, f"one step off, {pace}: at the end"),
            (a, b, "mismatch_abs_log", 1, AHEAD_TICKS, f"one step off, {pace}: mismatch"),
        ]
    common = {
        "train": {"num_ticks": AHEAD_TICKS},
        "cadence": {"evaluate_every": 5, "save_every": 50, "keep_checkpoints": 1},
        "reference": {"samples": 0},
        "value_pretraining": {"diagnose_steps": 0},
    }
    return {
        "arms": arms, "figures": (("ahead", tuple(arms)),), "questions": tuple(questions),
        "seeds": OTHER_SEEDS, "common": common, "cost_baseline": "tiny-in_turns", "workers": 1,
    }  # fmt: skip
