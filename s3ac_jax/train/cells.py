"""The cells of a study: one ordinary run per arm and seed, and the tidy file made of them."""

import csv
import dataclasses
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from s3ac_jax.config.boundary import completed, free_keys, to_dict
from s3ac_jax.config.run import RunConfig
from s3ac_jax.config.study import Arm
from s3ac_jax.core.types import PyTree
from s3ac_jax.io.damage import damaged_file
from s3ac_jax.io.weights import WeightsError, load_weights
from s3ac_jax.io.workdir import Workdir, WorkdirError
from s3ac_jax.report import log as metric_log
from s3ac_jax.report.live import Progress
from s3ac_jax.report.study_data import KEYS, METRICS, MORE_METRICS
from s3ac_jax.train import value_pretraining
from s3ac_jax.train.build import Parts
from s3ac_jax.train.interrupt import StopRequest
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.online import fresh_state, judge_params
from s3ac_jax.train.run import PRETRAINED_CRITIC, Run, claim
from s3ac_jax.train.tick import evaluate, respond, run_tick


def cell_folder(study: Path, arm: Arm, seed: int) -> Path:
    """Where the run of this arm and seed lives. Source: ours."""
    return study / "cells" / arm.name / f"seed_{seed}"


def cell_done(study: Path, arm: Arm, seed: int) -> bool:
    """Whether that run has reached the last tick of its config.

    Raises WorkdirError when the folder holds a run of another config.
    Source: ours: old numbers must not appear under a new config.
    """
    path = cell_folder(study, arm, seed)
    if not (path / "config.json").exists():
        return False
    folder = Workdir(path)
    try:
        folder.claim(to_dict(arm.at(seed)), free_keys(arm.run), completed)
        if not folder.stage_done("cell"):
            return False
        return folder.stage_facts("cell", "num_ticks")["num_ticks"] >= arm.run.train.num_ticks
    finally:
        folder.close()


def run_cell(
    parts: Parts, study: Path, arm: Arm, progress: Progress, stop: StopRequest, *, warm: bool
) -> None:
    """One run, or what is left of it. warm: compile everything first, outside of all timings.

    What does not depend on the method is made once per study, below `shared/`, and copied.
    Source: ours: a cell is what launch/train.py makes, without the report.
    """
    seed = parts.config.seed
    folder = Workdir(cell_folder(study, arm, seed))
    try:
        claim(parts, folder)
        with parts.on_mesh():
            whole = Run(parts, folder, progress, stop)
            try:
                if parts.config.trains_policies:
                    _share(study, folder, "policies", whole, lambda run: run.policies())
                _share_stages(study, folder, whole, warm)
                whole.online(whole.before_online)
            finally:
                whole.log.close()
        folder.mark_stage("cell", {"num_ticks": parts.config.train.num_ticks})
    finally:
        folder.close()


def _share_stages(study: Path, folder: Workdir, whole: Run, warm: bool) -> None:
    """Those that need the policies."""
    policies = whole.policies()
    if warm:
        warm_up(whole.parts, policies)
    base = policies["late"]
    _share(study, folder, "reference", whole, lambda run: run.reference(base))
    _share(
        study, folder, "value_pretraining", whole, lambda run: run.value_pretraining(policies)
    )  # fmt: skip


def warm_up(parts: Parts, policies: dict[str, PyTree]) -> None:
    """Two ticks, an evaluation and two pretraining steps on states that are thrown away.

    Source: ours: what compiles must not be timed.
    """
    key, base, critic = jax.random.key(2**32 - 1), policies["late"], None
    if parts.config.recipe.critic is not None:
        learner = value_pretraining.fresh_critic(parts, parts.critic, base)
        critic = params_of(learner)
    state = fresh_state(parts, base, critic)
    judge = judge_params(parts, critic)
    for _ in range(2):
        if parts.config.recipe.critic is not None:
            # Past its warm-up, in which the actor's step would not be met.
            state = dataclasses.replace(
                state, tick=np.int32(parts.config.recipe.critic.warmup_ticks)
            )
        state, _, _ = run_tick(parts, state, key, judge)
    evaluate(parts, base, key)
    wanted = sum(value_pretraining.wanted_prompts(parts.config).values())
    if wanted:
        batches = max(1, wanted // parts.config.value_pretraining.batch_responses)
        index = np.arange(-(-wanted // batches)) % len(parts.train.prompts)
        scored = respond(parts, parts.train, index, key)
        value_pretraining.pretrain_critic(parts, scored, base, lambda done, metrics: None)


def _stage_key(config: RunConfig, stage: str) -> dict[str, Any] | None:
    """All that a stage depends on; None where the config has no such stage."""
    whole = to_dict(config)
    names = ["task", "model", "sft", "start", "rollout"]
    if config.trains_policies:
        names += ["seed", "train"]
    if stage == "reference":
        if not config.reference.samples:
            return None
        names.append("reference")
    if stage != "value_pretraining":
        return {name: whole[name] for name in names}
    if not value_pretraining.wanted_prompts(config):
        return None
    key = {name: whole[name] for name in {*names, "seed", "value_pretraining"}}
    # Learning rate and warm-up are value_pretraining's own.
    own = ("lr", "warmup_steps")
    key["critic"] = {name: x for name, x in whole["critic"].items() if name not in own}
    key["train"] = [config.train.pack_tokens, config.train.micro_rows]
    column = whole["recipe"]["critic"]
    return key | {"recipe": [column[name] for name in ("at", "pretraining", "freeze_attention")]}


def _share(
    study: Path, cell: Workdir, stage: str, whole: Run, make: Callable[[Run], object]
) -> None:
    """Makes a stage once for all cells that would make the same, and copies it into this one."""
    key = _stage_key(whole.parts.config, stage)
    if key is None or cell.stage_done(stage):
        return
    # Of the same files another arm's suites may leave other questions to train on.
    key["questions"] = whole.parts.task.facts()["train"]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    folder = study / "shared" / f"{stage}_{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".making").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it: wait
        shared = Workdir(folder)
        try:
            if not shared.stage_done(stage):
                run = Run(whole.parts, shared, whole.progress, whole.stop)
                try:
                    make(run)
                finally:
                    run.log.close()
            for path in folder.rglob("*"):
                if path.suffix in (".npy", ".safetensors"):
                    _check_readable(path, folder)
                    copy = cell.path / path.relative_to(folder)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, copy)
            if (critic := folder / PRETRAINED_CRITIC).exists():
                if fault := damaged_file(critic / "0"):
                    raise _damaged(critic, folder, f" ({fault})")
                shutil.copytree(critic, cell.path / PRETRAINED_CRITIC, dirs_exist_ok=True)
            cell.mark_stage(stage, shared.stage_facts(stage))
        finally:
            shared.close()


def _check_readable(path: Path, folder: Path) -> None:
    try:
        np.load(path) if path.suffix == ".npy" else load_weights(path)
    except (OSError, ValueError, WeightsError) as error:
        raise _damaged(path, folder) from error


def _damaged(path: Path, folder: Path, how: str = "") -> WorkdirError:
    return WorkdirError(
        f"{path} can't be read{how}; delete {folder} and the same command makes it again"
    )


def tidy_rows(study: Path, arms: Iterable[Arm]) -> list[dict[str, Any]]:
    """One row per arm, seed and tick of the finished cells, in the order of the arms.

    seconds: of the ticks before, evaluation and checkpoints excluded. offline_seconds: of value
    pretraining and, where the method needs it, of the reference.
    Source: ours: tidy data, one observation per row.
    """
    rows = []
    for arm in arms:
        for seed in arm.seeds:
            if cell_done(study, arm, seed):
                rows += _cell_rows(study, arm, seed)
    return rows


def _cell_rows(study: Path, arm: Arm, seed: int) -> list[dict[str, Any]]:
    folder, offline, spent = cell_folder(study, arm, seed), 0.0, 0.0
    stages = ["value_pretraining"] + ["reference"] * arm.run.recipe.select.tracks_drift
    for stage in stages:
        path = folder / f"stage_{stage}.json"
        if path.exists():
            offline += json.loads(path.read_text())["seconds"]
    lines = [
        line for line in metric_log.read(folder / "metrics.jsonl") if line["stage"] == "online"
    ]
    if [line["tick"] for line in lines] != list(
        range(max(arm.run.train.num_ticks + 1, len(lines)))
    ):
        raise WorkdirError(
            f"{folder / 'metrics.jsonl'} lacks ticks of a finished run; delete {folder} and the "
            "same command runs it again"
        )
    rows = []
    for line in lines:
        tidy = {name.replace("/", "_"): value for name, value in line.items()}
        found = {name: tidy.get(name, "") for name in (*METRICS, *MORE_METRICS)}
        about = (arm.name, arm.family, arm.recipe, seed, line["tick"], spent, offline)
        rows.append(dict(zip(KEYS, about, strict=True)) | found)
        spent += line.get("time/tick", 0.0)
    return rows


def write_tidy(path: Path, rows: list[dict[str, Any]]) -> None:
    """results.csv, whole or not at all. Source: ours."""
    temporary = path.with_name(path.name + ".tmp")
    names = [*KEYS, *METRICS, *MORE_METRICS]
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)
