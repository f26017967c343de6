"""One evaluation in one folder: what is asked for, answered, told and kept."""

import contextlib
import shlex
from pathlib import Path
from typing import Any

from s3ac_jax.config.boundary import plain
from s3ac_jax.config.evaluate import FREE_KEYS, EvaluateConfig
from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.io.workdir import Workdir, WorkdirError
from s3ac_jax.report import evaluation as report
from s3ac_jax.report import evaluation_figure
from s3ac_jax.report.live import Progress, make_progress
from s3ac_jax.report.records import read
from s3ac_jax.rewards.verdict import UNJUDGED
from s3ac_jax.train.evaluation.harness import SHARES, evaluate_suites, results_of
from s3ac_jax.train.evaluation.suites import Prepared, prepare_suites
from s3ac_jax.train.evaluation.target import Target, Wanted, read_target, run_of
from s3ac_jax.train.interrupt import Interrupted, StopRequest
from s3ac_jax.train.run import resume_command


def evaluate(config: EvaluateConfig, wanted: Wanted, workdir: str | None) -> dict[str, Any]:
    """Does the whole evaluation, or what is left of it; returns what results.json holds.

    workdir: of the evaluation; None for a folder of the run's own, `evaluations/tick_N`, where
    evaluations inside training are too.
    Raises RunError, in one line. Source: ours.
    """
    if not workdir and (not wanted.checkpoint or wanted.address):
        raise CommandLineError(
            "--workdir is required with --hf and --address: the folder of the evaluation, say "
            "--workdir=runs/evaluation"
        )
    reading = read_target(wanted)
    if reading.run is not None:
        config = config.of_run(reading.run.rollout.max_response_tokens)
    with contextlib.ExitStack() as ends:
        ends.callback(reading.close)
        prepared = prepare_suites(config, reading.tokenizer, reading.template, reading.held_out)
        ends.callback(prepared.close)
        with make_progress(list(config.suites), unit="responses") as progress:
            if reading.plain and any(suite.source for suite in config.suites.values()):
                progress.note(f"questions are asked as plain text: {reading.plain}")
            _tell_dropped(prepared, progress)
            progress.note(f"loading {wanted.address or wanted.checkpoint or wanted.hf}")
            longest = {
                "max_prompt_tokens": max(suite.tokens.shape[1] for suite in prepared.suites),
                "max_response_tokens": config.max_response_tokens,
            }
            with Target(wanted, reading, config, **longest) as target:
                folder = Path(workdir or _beside(wanted, target))
                return _in_folder(prepared, config, target, folder, progress)


def _beside(wanted: Wanted, target: Target) -> Path:
    assert wanted.checkpoint
    return run_of(wanted.checkpoint) / "evaluations" / f"tick_{target.version:06d}"


def _in_folder(
    prepared: Prepared, config: EvaluateConfig, target: Target, folder: Path, progress: Progress
) -> dict[str, Any]:
    known = "" if target.weights == target.told else f", fingerprint {target.weights}"
    progress.note(f"evaluating {target.told}{known}, into {folder}")
    workdir = Workdir(folder)
    suite_now = None
    try:
        workdir.claim(plain(config), FREE_KEYS)
        with StopRequest() as stop:

            def on_progress(suite: str, done: int, total: int, numbers: dict[str, float]) -> None:
                nonlocal suite_now
                if suite != suite_now:
                    suite_now = suite
                    progress.stage(suite, total)
                progress.update(done, numbers)
                if stop.asked:
                    raise Interrupted(
                        f"stopped; {done} of {total} responses of {suite} are recorded, go on "
                        f"with: {resume_command()}"
                    )

            evaluate_suites(
                prepared, target.backend, folder, target.version, on_progress, keep=True,
                weights=target.weights,
            )  # fmt: skip
        return _report(prepared, target, folder, progress)
    except OSError as error:
        raise WorkdirError(
            f"can't write to --workdir {shlex.quote(str(folder))}: {error.strerror or error}; "
            f"make room, then go on with: {resume_command()}"
        ) from error
    finally:
        workdir.close()


def _tell_dropped(prepared: Prepared, progress: Progress) -> None:
    for suite in prepared.suites:
        if suite.dropped:
            progress.note(
                f"{suite.name}: {len(suite.dropped)} of {len(suite.dropped) + len(suite.ids)} "
                f"problems have prompts of more than {suite.config.max_prompt_tokens} tokens and "
                f"are left out, the first is {suite.dropped[0]}"
            )


def _report(prepared: Prepared, target: Target, folder: Path, progress: Progress) -> dict[str, Any]:
    results = results_of(prepared, folder)
    facts = {"evaluated": target.told, "weights": target.weights, "version": target.version}
    report.write_results(results, facts, folder)
    records = {suite.name: read(folder / f"{suite.name}.jsonl")[1] for suite in prepared.suites}
    evaluation_figure.draw(results, records, SHARES, target.told, folder / "evaluation.png")
    for result in results:
        if unjudged := sum(result["reasons"].get(code, 0) for code in UNJUDGED):
            progress.note(
                f"{result['suite']}: {unjudged} of {result['responses']} answers were judged by "
                "nobody and count as wrong; their reasons are in the records"
            )
    progress.note(f"records, results.json, table.txt and evaluation.png: {folder}")
    progress.finish(report.evaluation_table(results))
    return {**facts, "suites": {result["suite"]: result for result in results}}
