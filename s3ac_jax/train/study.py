"""A study: many runs over recipes, seeds and changes; one tidy file, tables and figures."""

import contextlib
import dataclasses
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from s3ac_jax.config.boundary import ConfigError
from s3ac_jax.config.run import RunConfig
from s3ac_jax.config.study import Arm, StudyConfig
from s3ac_jax.core.errors import RunError
from s3ac_jax.io.workdir import Workdir, WorkdirError
from s3ac_jax.report import study_data, study_figure, study_table
from s3ac_jax.report.live import Progress, make_progress
from s3ac_jax.train import cells
from s3ac_jax.train.build import Parts, build
from s3ac_jax.train.interrupt import Interrupted, StopRequest
from s3ac_jax.train.run import resume_command


class StudyError(RunError):
    """A cell that failed; the message names it and says what its run said.

    Source: ours: finished cells are kept.
    """


@dataclasses.dataclass(frozen=True)
class _Said:
    """What a worker tells: a tick, a finished cell, an error, or the end of its work."""

    kind: str
    cell: str = ""
    text: str = ""
    done: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class _CellProgress:
    """Progress of one cell, handed on. Source: ours."""

    def __init__(self, cell: str, tell: Callable[[_Said], None]):
        self._cell, self._tell, self._stage = cell, tell, ""
        self.accuracy = float("nan")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def stage(self, name: str, total: int) -> None:
        """Remembers the stage: only online ticks are counted. Source: ours."""
        self._stage = name

    def update(self, done: int, metrics: dict[str, float]) -> None:
        """Hands an online tick on. Source: ours."""
        self.accuracy = metrics.get("held_out/accuracy", self.accuracy)
        if self._stage == "online":
            self._tell(_Said("tick", self._cell, done=done, metrics=metrics))

    def note(self, text: str) -> None:
        """Says nothing: a hundred runs' notes would hide the study's. Source: ours."""

    def finish(self, summary: object) -> None:
        """Cells have no report of their own. Source: ours."""


def run_study(config: StudyConfig, workdir: str | Path) -> dict[str, Any]:
    """Runs what is missing of the study, then writes results.csv, study.md and the figures.

    Raises ConfigError, WorkdirError, StudyError or Interrupted, each with a message of one line.
    Source: ours.
    """
    folder = Workdir(workdir)
    try:
        total = sum(arm.run.train.num_ticks * len(arm.seeds) for arm in config.arms)
        with make_progress(["study", "report"]) as progress, StopRequest() as stop:
            progress.stage("study", total)
            watch = _Watch(config, folder.path, progress, total)
            blocks = _blocks(config, folder.path)
            if blocks:
                watch.run(blocks, stop)
            progress.stage("report", 0)
            return report(config, folder.path, progress)
    except OSError as error:
        raise WorkdirError(
            f"can't write to --workdir {folder.path}: {error.strerror or error}; make room, then "
            f"go on with: {resume_command()}"
        ) from error
    finally:
        folder.close()


def _blocks(config: StudyConfig, study: Path) -> list[tuple[Arm, tuple[int, ...]]]:
    """The seeds that each arm still lacks; they stay together, for they share programs."""
    lacking = [
        (arm, tuple(seed for seed in arm.seeds if not cells.cell_done(study, arm, seed)))
        for arm in config.arms
    ]
    return [(arm, seeds) for arm, seeds in lacking if seeds]


class _Watch:
    """The parent's side: starts workers, shows progress, ends them all when one fails."""

    def __init__(self, config: StudyConfig, study: Path, progress: Progress, total: int):
        self.config, self.study, self.progress = config, study, progress
        self.cells = sum(len(arm.seeds) for arm in config.arms)
        self.ticks = {
            f"{arm.name} seed {seed}": arm.run.train.num_ticks
            for arm in config.arms
            for seed in arm.seeds
            if cells.cell_done(study, arm, seed)
        }
        self.finished, self.total = len(self.ticks), total
        self.begun, self.ahead = time.monotonic(), sum(self.ticks.values())
        if self.finished:
            progress.note(f"{self.finished} of {self.cells} runs are done already")
            progress.update(self.ahead, {})

    def hear(self, said: _Said) -> None:
        """Takes in one message of a worker. Raises what a worker failed with."""
        if said.kind == "tick":
            self.ticks[said.cell] = said.done
            self.progress.update(sum(self.ticks.values()), said.metrics)
        elif said.kind == "cell":
            self.finished += 1
            done = sum(self.ticks.values())
            spent = time.monotonic() - self.begun
            left = spent * (self.total - done) / max(done - self.ahead, 1)
            self.progress.note(
                f"{self.finished}/{self.cells} {said.cell}: {said.text}, about "
                f"{left / 60:.0f} min left"
            )
        elif said.kind == "interrupted":
            raise Interrupted(f"stopped; go on with: {resume_command()}")
        elif said.kind == "error":
            raise StudyError(f"{said.cell}: {said.text} (finished runs are kept)")
        elif said.kind == "bug":
            raise RuntimeError(f"{said.cell} failed:\n{said.text}")

    def run(self, blocks: list[tuple[Arm, tuple[int, ...]]], stop: StopRequest) -> None:
        """Does all blocks in this process or in workers."""
        if self.config.workers == 1:
            todo = iter(blocks)
            _work(lambda: next(todo, None), self.hear, self.study, stop)
            return
        context = multiprocessing.get_context("spawn")
        said, turn = context.Queue(), context.Value("i", 0)
        workers = [
            context.Process(
                target=_worker, args=(number, self.config.workers, blocks, turn, said, self.study),
                daemon=True,
            )
            for number in range(self.config.workers)
        ]  # fmt: skip
        # Ctrl-C goes to the whole process group; the workers are told by SIGTERM, once.
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for worker in workers:
                worker.start()
        finally:
            signal.signal(signal.SIGINT, heard)
        try:
            self._listen(workers, said, stop)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.terminate()  # SIGTERM: it saves and ends
            # A worker ends when all it said has been taken: a full pipe would hold it for ever.
            patience = time.monotonic() + 60
            while any(worker.is_alive() for worker in workers) and time.monotonic() < patience:
                with contextlib.suppress(queue.Empty):
                    said.get(timeout=0.2)
            for worker in workers:
                worker.kill()
                worker.join()

    def _listen(self, workers: list, said: Any, stop: StopRequest) -> None:
        while True:
            if stop.asked:
                self.progress.note("stopping: the runs in progress are saved first")
                raise Interrupted(f"stopped; go on with: {resume_command()}")
            try:
                message = said.get(timeout=0.5)
            except queue.Empty:
                alive = [worker for worker in workers if worker.is_alive()]
                died = [worker for worker in workers if worker.exitcode]
                if died and said.empty():
                    raise StudyError(
                        f"a worker ended with code {died[0].exitcode} (out of memory?); go on with "
                        f"fewer --config.workers or: {resume_command()}"
                    ) from None
                if not alive and said.empty():
                    return
                continue
            self.hear(message)


def _worker(
    number: int, workers: int, blocks: list[tuple[Arm, tuple[int, ...]]], turn: Any, said: Any,
    study: Path,
) -> None:  # fmt: skip
    """A process that does the blocks whose turn it is, until none is left. Source: ours."""
    _end_with_parent()

    def next_block() -> tuple[Arm, tuple[int, ...]] | None:
        with turn.get_lock():
            position, turn.value = turn.value, turn.value + 1
        return blocks[position] if position < len(blocks) else None

    with StopRequest(signal.SIGTERM) as stop, _told(said.put, f"worker {number}"):
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) >= workers:
            # Before the backend starts, which sizes its thread pool by what it may use.
            os.sched_setaffinity(0, cores[number::workers])
        if jax.default_backend() != "cpu":
            raise ConfigError(
                f"workers = {workers} would share one accelerator; set --config.workers=1"
            )
        _work(next_block, said.put, study, stop)


def _end_with_parent() -> None:
    """kill -9 of the study must not leave workers behind."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _work(
    next_block: Callable[[], tuple[Arm, tuple[int, ...]] | None],
    tell: Callable[[_Said], None],
    study: Path,
    stop: StopRequest,
) -> None:
    """Does blocks and tells of them; what goes wrong is told too, not raised."""
    before = jax.config.values["jax_compilation_cache_dir"]
    if before is None:
        # Shared by the workers, and there when a killed study goes on.
        jax.config.update("jax_compilation_cache_dir", str((study / ".cache").absolute()))
    parts: Parts | None = None
    try:
        while (block := next_block()) is not None:
            arm, seeds = block
            for position, seed in enumerate(seeds):
                cell = f"{arm.name} seed {seed}"
                with _told(tell, cell) as outcome:
                    parts = _build(arm.at(seed), parts)
                    progress = _CellProgress(cell, tell)
                    cells.run_cell(parts, study, arm, progress, stop, warm=position == 0)
                    text = f"held-out accuracy {100 * progress.accuracy:.1f} %"
                    tell(_Said("cell", cell, text))
                if outcome.failed:
                    return
    finally:
        if parts is not None:
            parts.close()
        jax.config.update("jax_compilation_cache_dir", before)


def _build(config: RunConfig, like: Parts | None) -> Parts:
    try:
        parts = build(config, like)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if like is not None:
        like.close(kept=parts)
    return parts


@dataclasses.dataclass
class _Outcome:
    failed: bool = False


@contextlib.contextmanager
def _told(tell: Callable[[_Said], None], cell: str) -> Iterator[_Outcome]:
    outcome = _Outcome()
    try:
        yield outcome
    except Interrupted:
        outcome.failed = True
        tell(_Said("interrupted", cell))
    except RunError as error:
        outcome.failed = True
        tell(_Said("error", cell, str(error)))
    except OSError as error:
        outcome.failed = True
        tell(_Said("error", cell, f"can't read or write: {error.strerror or error}"))
    except Exception:
        outcome.failed = True
        tell(_Said("bug", cell, traceback.format_exc()))


def report(config: StudyConfig, study: Path, progress: Progress) -> dict[str, Any]:
    """results.csv, study.md and one figure per title, from the finished cells.

    Source: ours.
    """
    rows = cells.tidy_rows(study, config.arms)
    if not rows:
        raise ConfigError("the study has no finished run to report")
    path = study / "results.csv"
    cells.write_tidy(path, rows)
    results = study_data.load(path)
    sections = [f"# {config.name}\n"]
    for title, arms in config.figures:
        for family in ("single", "group"):
            known = [arm for arm in arms if arm in results.arms_of(family)]
            if known:
                sections += [
                    f"## {title.replace('_', ' ')} ({family})\n",
                    study_table.main_table(results, family, known),
                    study_table.time_table(results, known),
                ]
    if config.questions:
        sections += [
            "## Questions\n",
            study_table.comparison_table(results, config.questions),
        ]
    names = [arm.name for arm in config.arms]
    sections += ["## Cost\n", study_table.cost_table(results, names, config.cost_baseline)]
    text = "\n".join(sections)
    (study / "study.md").write_text(text)
    for title, arms in config.figures:
        drawn = [arm for arm in arms if arm in results.arms]
        if drawn:
            named = title.replace("_", " ")
            study_figure.draw(results, drawn, study / f"{title}.png", named)
            study_figure.draw_time(results, drawn, study / f"{title}_time.png", named)
    progress.note(f"tables: {study / 'study.md'}   every tick: {path}   figures beside them")
    progress.finish(text)
    return {"rows": len(rows), "results": str(path)}
