"""One evaluation in one folder: what is asked for, answered, told and kept."""

import contextlib
import dataclasses
import errno
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import Any

from s3ac_jax.config.boundary import plain
from s3ac_jax.config.evaluate import FREE_KEYS, EvaluateConfig
from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.io.workdir import Workdir, WorkdirError
from s3ac_jax.report import evaluation as report
from s3ac_jax.report import evaluation_figure
from s3ac_jax.report.live import Progress, make_progress
from s3ac_jax.rewards.pool import GraderPool
from s3ac_jax.rewards.verdict import UNJUDGED
from s3ac_jax.train.evaluation.harness import (
    SHARES,
    check_records,
    evaluate_suites,
    records_of,
    results_of,
)
from s3ac_jax.train.evaluation.suites import Prepared, prepare_suites
from s3ac_jax.train.evaluation.target import Target, Wanted, checkpoint_of, read_target, run_of
from s3ac_jax.train.interrupt import Interrupted, StopRequest
from s3ac_jax.train.run import resume_command

# What a full disk is called.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def evaluate(config: EvaluateConfig, wanted: Wanted, workdir: str | None) -> dict[str, Any]:
    """Does the whole evaluation, or what is left of it; returns what results.json holds.

    workdir: of the evaluation; None for a folder of the run's own, `evaluated/tick_N`, which is not
    where evaluations inside training are: those are made anew when a tick is.
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
        grader = GraderPool(config.graders, deadline_seconds=config.deadline_s)
        ends.enter_context(grader)
        if any(suite.source for suite in config.suites.values()):
            grader.start()  # while questions are read
        prepared = prepare_suites(
            config, reading.tokenizer, reading.template, reading.held_out, grader
        )
        if {kind for suite in prepared.suites for kind in suite.kinds} - {"", "choice"}:
            grader.check_algebra()
        # All that can be refused without weights is, before they are read.
        if workdir:
            folder = Path(workdir)
        else:
            assert wanted.checkpoint
            found, tick = checkpoint_of(wanted.checkpoint)
            folder = run_of(wanted.checkpoint) / "evaluated" / f"tick_{tick:06d}"
            wanted = dataclasses.replace(wanted, checkpoint=str(found))
        home = Workdir(folder)
        ends.callback(home.close)
        with _disk(folder):
            home.claim(plain(config), FREE_KEYS, anew=not _begun(folder))
            check_records(prepared, folder)
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
                return _in_folder(prepared, target, folder, progress)


def _begun(folder: Path) -> bool:
    """Whether some response is on record there: a file has a line beside its first one."""
    files = (path for path in folder.glob("*.jsonl") if path.is_file())
    return any(path.read_bytes().count(b"\n") > 1 for path in files)


def _in_folder(
    prepared: Prepared, target: Target, folder: Path, progress: Progress
) -> dict[str, Any]:
    known = "" if target.weights == target.told else f", fingerprint {target.weights}"
    progress.note(f"evaluating {target.told}{known}, into {folder}")
    suite_now = None
    with _disk(folder), StopRequest() as stop, target.memory():

        def on_progress(suite: str, done: int, total: int, numbers: dict[str, float]) -> None:
            nonlocal suite_now
            if suite != suite_now:
                suite_now = suite
                progress.stage(suite, total)
            progress.update(done, numbers)
            if stop.asked:
                raise Interrupted(
                    f"stopped; {done} of {total} responses of {suite} are recorded, go on with: "
                    f"{resume_command()}"
                )

        evaluate_suites(
            prepared, target.backend, folder, target.version, on_progress, keep=True,
            weights=target.weights,
        )  # fmt: skip
    with _disk(folder):
        return _report(prepared, target, folder, progress)


@contextlib.contextmanager
def _disk(folder: Path) -> Generator[None]:
    """Says in one line which file can't be used, and why."""
    try:
        yield
    except OSError as error:
        where = shlex.quote(str(error.filename or folder))
        fix = "make room" if error.errno in _FULL else "mend that"
        raise WorkdirError(
            f"can't use {where}: {error.strerror or error}; {fix}, then go on with: "
            f"{resume_command()}"
        ) from error


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
    records = {suite.name: records_of(suite, folder)[1] for suite in prepared.suites}
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
