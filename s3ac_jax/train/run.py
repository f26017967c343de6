"""A whole run: base policies, value pretraining, online training, report; each stage once."""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from s3ac_jax.config.boundary import ConfigError, completed, free_keys, to_dict
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import PyTree
from s3ac_jax.io.checkpoint import CheckpointError, Checkpoints
from s3ac_jax.io.workdir import Workdir, WorkdirError
from s3ac_jax.parallel import hosts
from s3ac_jax.report import log as metric_log
from s3ac_jax.report import summary, table
from s3ac_jax.report.critic_health import coverage_facts, whole_coverage
from s3ac_jax.report.live import Progress, make_progress
from s3ac_jax.report.tripwires import Coverage
from s3ac_jax.train import keys, sft, start, value_pretraining
from s3ac_jax.train import policies as policy_files
from s3ac_jax.train.build import Parts, build
from s3ac_jax.train.findings import outcome_lines, pretraining_lines, table_rows
from s3ac_jax.train.fitness import check_machine
from s3ac_jax.train.interrupt import Interrupted, StopRequest, resume_command
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.online import OnlineLoop
from s3ac_jax.train.profile import Profile
from s3ac_jax.train.programs import abstract_learner
from s3ac_jax.train.tick import evaluate, reference_success
from s3ac_jax.train.watch import PretrainingWatcher

STAGES = ["policies", "value_pretraining", "online", "report"]
PRETRAINED_CRITIC = "pretrained_critic"


class Run:
    """One run in one workdir. Source: ours: a stage whose result is there is not run again."""

    def __init__(
        self, parts: Parts, workdir: Workdir, progress: Progress, stop: StopRequest,
        *, profile: bool = False,
    ):  # fmt: skip
        self.parts, self.workdir = parts, workdir
        self.progress, self.stop = progress, stop
        self.profile = Profile(workdir.path / "profile" if profile else None)
        self.log = metric_log.MetricLog(workdir.path, writes=hosts.is_first())

    def policies(self) -> dict[str, PyTree]:
        """The early, middle and late policies: embedded, trained now, or trained before.

        Of a pretrained model there is only the late one. Source: ours.
        """
        self.progress.stage("policies", 0)
        return self._policies()

    def _policies(self) -> dict[str, PyTree]:
        folder, names = self.workdir.path / "policies", policy_files.POLICIES
        network = self.parts.actor.network
        if self.parts.config.start.hf:
            hosts.from_first(
                "run", lambda: start.remember_origin(self.parts.config, self.workdir.path)
            )
            return start.base_policy(self.parts)
        if self.parts.config.sft.embedded:
            return policy_files.load_policies(policy_files.embedded_folder(), network, names)
        if not self.workdir.stage_done("policies"):
            config = self.parts.config.sft
            self.progress.stage("policies", config.careful_steps + config.hasty_steps)
            self.log.rewind("policies", 0)
            made = sft.train_policies(self.parts, self._update("policies"))
            facts = policy_files.policy_facts(self.parts.config)
            policy_files.save_policies(folder, made, facts, "float32")
            self.workdir.mark_stage("policies", facts)
        return policy_files.load_policies(folder, network, names)

    def reference(self, base: PyTree) -> np.ndarray | None:
        """Success rate of the base policy on each training prompt [P], None if not asked for.

        Source: ours; SPO (2509.13232), offline value estimation.
        """
        samples = self.parts.config.reference.samples
        if not samples:
            return None
        path = self.workdir.path / "reference.npy"
        if not self.workdir.stage_done("reference"):
            prompts = len(self.parts.train.prompts)
            self.progress.note(f"answering {prompts} prompts {samples} times, as a reference")
            start = time.perf_counter()
            rate = reference_success(self.parts, base)
            if hosts.is_first():
                np.save(path, rate)
            seconds = time.perf_counter() - start
            self.workdir.mark_stage(
                "reference", {"success_rate": float(rate.mean()), "seconds": seconds}
            )
        return np.asarray(hosts.from_first("run", lambda: _rates(path)), np.float32)

    def refer_to(self, reference: np.ndarray | None) -> None:
        """Lets metrics and selection know how hard each prompt was. Source: ours."""
        self.parts = dataclasses.replace(self.parts, reference=reference)

    def value_pretraining(self, policies: dict[str, PyTree]) -> PyTree | None:
        """The weights that the critic starts from; None for a method without a critic.

        Says what the diagnoses found.
        Source: S3AC (2610.35518), stabilised critic.
        """
        parts = self.parts
        if parts.config.recipe.critic is None:
            return None
        if not value_pretraining.wanted_prompts(parts.config):
            return params_of(value_pretraining.fresh_critic(parts, parts.critic, policies["late"]))
        folder = self.workdir.path / PRETRAINED_CRITIC
        if not self.workdir.stage_done("value_pretraining"):
            self._pretrain(policies, folder)
        else:
            self.progress.stage("value_pretraining", 0)
        needed = ("success_rates", "diagnoses", "explained_variance")
        for line in pretraining_lines(self.workdir.stage_facts("value_pretraining", *needed)):
            self.progress.note(line)
        saved = Checkpoints(folder, 1)
        try:
            return saved.restore(0, params_of(abstract_learner(parts.critic, parts.mesh)))[0]
        except CheckpointError as error:
            marker = self.workdir.path / "stage_value_pretraining.json"
            fault, _, _ = str(error).partition(";")
            raise WorkdirError(f"{fault}; delete {marker} to pretrain the critic again") from error
        finally:
            saved.close()

    def _pretrain(self, policies: dict[str, PyTree], folder: Path) -> None:
        parts, config = self.parts, self.parts.config.value_pretraining
        responses = sum(value_pretraining.wanted_prompts(parts.config).values())
        steps = max(1, responses // config.batch_responses) * config.epochs
        self.progress.stage("value_pretraining", steps)
        self.log.rewind("value_pretraining", 0)
        key = keys.stage_key(parts.config.seed, keys.VALUE_ROLLOUTS)
        self.progress.note(f"rolling out {responses} prompts for the critic")
        start, backbone = time.perf_counter(), policies["late"]
        scored, rates, coverage = value_pretraining.coverage_rollouts(parts, policies, key)
        with PretrainingWatcher(parts, self.workdir.path, rates, self.progress) as watcher:
            update = self._update("value_pretraining")

            def on_step(done: int, metrics: dict[str, float]) -> None:
                update(done, metrics)
                watcher.judge(done, metrics, resume_command())

            critic = value_pretraining.pretrain_critic(parts, scored, backbone, on_step)
        seconds = time.perf_counter() - start
        if config.diagnose_steps:
            self.progress.note(f"diagnosing the first {config.diagnose_steps} steps, twice")
        found = value_pretraining.diagnose(parts, scored, backbone)
        compared = value_pretraining.compared_prompts(parts)
        self.progress.note(f"comparing it with {compared} fresh responses of the base policy")
        explained = value_pretraining.on_base_policy(parts, backbone, critic, key)
        # Of an attempt that was killed before its marker was there.
        hosts.from_first("run", lambda: shutil.rmtree(folder, ignore_errors=True))
        saved = Checkpoints(folder, 1)
        try:
            saved.save(0, critic, {"run": parts.config.name})
        finally:
            saved.close()
        facts = {
            "success_rates": rates, "coverage": coverage_facts(coverage), "diagnoses": found,
            "seconds": seconds, **explained,
        }  # fmt: skip
        self.workdir.mark_stage("value_pretraining", facts)

    def before_online(self) -> tuple[PyTree, PyTree | None]:
        """All stages before online training: the policy and the critic's weights to begin with.

        Source: ours.
        """
        policies = self.policies()
        self.refer_to(self.reference(policies["late"]))
        return policies["late"], self.value_pretraining(policies)

    def online(self, start: Callable[[], tuple[PyTree, PyTree | None]]) -> PyTree:
        """The trained policy's weights. start: makes the policy and the critic to begin with.

        Source: S3AC (2610.35518); ours: nobody else holds what the learners have copied.
        """
        policy, critic = start()
        keep = self.parts.config.cadence.keep_checkpoints
        checkpoints = Checkpoints(self.workdir.path / "checkpoints", keep)
        try:
            loop = OnlineLoop(
                self.parts, self.log, checkpoints, self.progress, self._coverage(), self.profile
            )
            state, judge = loop.begin(policy, critic)
            del policy, critic
            state = loop.go_on(state, judge, self.stop, resume_command())
        finally:
            checkpoints.close()
        return params_of(state.actor)

    def _coverage(self) -> Coverage | None:
        """Of what the critic was pretrained on; None where it was not, or long ago."""
        if not self.workdir.stage_done("value_pretraining"):
            return None
        return whole_coverage(self.workdir.stage_facts("value_pretraining").get("coverage"))

    def report(self, trained: PyTree) -> dict[str, Any]:
        """Table, figure and results.json: base against trained policy on the held-out problems.

        The base policy is read again: all through training nobody needs it.
        Source: ours.
        """
        self.progress.stage("report", 0)
        base = self._policies()["late"]
        key = keys.stage_key(self.parts.config.seed, keys.REPORT)
        outcomes = {}
        for name, params in (("base", base), ("trained", trained)):
            self.progress.note(f"held-out problems: four samples and a greedy one, {name} policy")
            outcomes[name] = {
                "sampled": evaluate(self.parts, params, key, samples=4),
                "greedy": evaluate(self.parts, params, key, temperature=0.0),
            }
        facts = dict(outcomes)
        if self.workdir.stage_done("value_pretraining"):
            facts["value_pretraining"] = self.workdir.stage_facts("value_pretraining")
        if not hosts.is_first():
            return facts
        path = self.workdir.path / "results.json"
        temporary = path.with_name("results.json.tmp")
        temporary.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
        temporary.replace(path)
        rows, totals = table_rows(self.parts, outcomes)
        called = self.parts.held_out.prompts.called
        shown = {
            "name": self.parts.config.name,
            "base_accuracy": totals["base_accuracy"],
            "final_accuracy": totals["accuracy"],
            "levels": called,
        }
        picture = self.workdir.path / "summary.png"
        summary.draw(metric_log.read(self.log.path), shown, picture)
        for line in outcome_lines(outcomes, self.parts.held_out.verifier):
            self.progress.note(line)
        self.progress.note(f"figure: {picture}   numbers: {path}   metrics: {self.log.path}")
        self.progress.note(f"a page of it all: python launch/report.py {self.workdir.path}")
        self.progress.finish(table.accuracy_table(rows, totals, called.heading))
        return facts

    def _update(self, stage: str):
        def update(done: int, metrics: dict[str, float]) -> None:
            self.log.write(done, metrics, stage)
            self.progress.update(done, metrics)
            if self.stop.asked:
                raise Interrupted(
                    f"stopped during {stage}, which begins anew with: {resume_command()}"
                )

        return update


def _rates(path: Path) -> list[float]:
    try:
        return np.load(path).tolist()
    except (OSError, ValueError) as error:
        raise WorkdirError(
            f"{path} can't be read ({error}); delete {path.parent}/stage_reference.json to make it "
            "again"
        ) from error


def claim(parts: Parts, folder: Workdir) -> None:
    """Claims the folder, or compares config and questions with those it was begun with.

    Raises WorkdirError naming the first difference.
    Source: ours: a file may hold other questions under the same name.
    """
    folder.claim(to_dict(parts.config), free_keys(parts.config), completed)
    facts = parts.task.facts()
    if not folder.stage_done("task"):
        folder.mark_stage("task", facts)
        return
    kept = folder.stage_facts("task", *facts)
    for half, levels in facts.items():
        for name in dict.fromkeys([*kept[half], *levels]):
            was, now = (side.get(name, [0, ""]) for side in (kept[half], levels))
            if was != now:
                counts = f"{was[0]} then, {now[0]} now" if was[0] != now[0] else (
                    f"{now[0]} as then, but others or in another order"
                )  # fmt: skip
                raise WorkdirError(
                    f"{folder.path} was made with other questions: {half}, {name}: {counts}; give "
                    "it the files that it was made with, or use another --workdir"
                )


def run(config: RunConfig, workdir: str | Path, *, profile: bool = False) -> dict[str, Any]:
    """Does the whole run, or what is left of it; returns what results.json holds.

    profile: whether one tick is traced, into profile/ of the workdir.
    Raises ConfigError, WorkdirError, WeightsError, CheckpointError, NonfiniteError or
    Interrupted, each with a message of one line.
    Source: ours.
    """
    check_machine(config)
    try:
        # Before the workdir is claimed: a rejected start must leave it to the next one.
        if config.start.hf:
            start.check_model(config)
        parts = build(config)
        for half, levels in parts.task.facts().items() if hosts.count() > 1 else ():
            hosts.check_same(
                "questions", f"{half} questions", levels, "give all hosts the same files"
            )
        if not config.start.hf and config.sft.embedded:
            policy_files.load_policies(
                policy_files.embedded_folder(), parts.actor.network, policy_files.POLICIES
            )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except MemoryError as error:
        raise ConfigError(f"the task does not fit into memory ({error})") from error
    folder = Workdir(workdir)
    try:
        claim(parts, folder)
        shown = hosts.is_first()
        with make_progress(STAGES, shown=shown) as progress, StopRequest() as stop, parts.on_mesh():
            whole = Run(parts, folder, progress, stop, profile=profile)
            try:
                for note in parts.task.notes:
                    progress.note(note)
                return whole.report(whole.online(whole.before_online))
            finally:
                whole.log.close()
    except OSError as error:
        # What is not a checkpoint: metrics, events, markers, the figure.
        raise WorkdirError(
            f"can't write to --workdir {folder.path}: {error.strerror or error}; make room, then "
            f"go on with: {resume_command()}"
        ) from error
    finally:
        parts.close()
        folder.close()
