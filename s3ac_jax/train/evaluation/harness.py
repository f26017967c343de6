"""Answers suites chunk by chunk, records every response, and reads the numbers from the records."""

import concurrent.futures
import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from s3ac_jax.core.types import Rollout
from s3ac_jax.parallel import hosts
from s3ac_jax.report import evaluation as report
from s3ac_jax.report.evaluation import Result
from s3ac_jax.report.records import Header, Record, RecordFile, read
from s3ac_jax.rewards.answers import NO_BOX
from s3ac_jax.rewards.verdict import UNJUDGED
from s3ac_jax.rollout.backend import RolloutBackend, RolloutError
from s3ac_jax.train.evaluation.answers import answers_of, mark_same, texts_of
from s3ac_jax.train.evaluation.suites import EvaluationError, Prepared, Suite
from s3ac_jax.train.grading import graded

# Shares of responses whose reason is one of these, by the name that the table has for them.
SHARES = {"no_box": sorted(NO_BOX), "hung": sorted(UNJUDGED)}
_CHANNEL = "records"
# (suite, responses there are, responses wanted, numbers so far)
OnProgress = Callable[[str, int, int, dict[str, float]], None]


def evaluate_suites(
    prepared: Prepared,
    backend: RolloutBackend,
    folder: Path,
    version: int,
    on_progress: OnProgress = lambda *_: None,
    *,
    weights: str,
    keep: bool = False,
) -> dict[str, float]:
    """Answers what is not yet answered in `folder`, and gives the main numbers of all suites.

    backend: has the weights, whose number is `version`. folder: gets SUITE.jsonl for each suite;
    what is there is not made again. Records of other weights, or made with other settings, are
    made anew; with keep they are an EvaluationError instead. on_progress: after each chunk; may
    raise, then nothing is lost. weights: their fingerprint, or else who answers; not empty. Of
    several hosts all answer and grade together, and the first one has the records.
    Raises RolloutError, GraderError and OSError too.
    Source: ours.
    """
    if not weights:
        raise ValueError("weights must say what answers, got an empty text")
    if keep:
        check_records(prepared, folder, weights)
    for suite in prepared.suites:
        with contextlib.ExitStack() as opened:
            file = None
            if hosts.is_first():
                folder.mkdir(parents=True, exist_ok=True)
                file = opened.enter_context(
                    contextlib.closing(RecordFile(folder / f"{suite.name}.jsonl"))
                )
                _claim(file, suite, weights, version)
            _answer(prepared, suite, backend, file, on_progress)
    return hosts.from_first(_CHANNEL, lambda: report.metrics(results_of(prepared, folder)))


def results_of(prepared: Prepared, folder: Path) -> list[Result]:
    """Every number of every suite, from the records in `folder`.

    Raises EvaluationError where responses are missing. Source: ours.
    """
    found = []
    for suite in prepared.suites:
        header, records = records_of(suite, folder)
        asked = suite.config.reported
        result = report.suite_result(
            header, records, samples=suite.config.samples, pass_at=asked["pass"],
            maj_at=asked["maj"], resamples=prepared.config.bootstrap, shares=SHARES,
            levels=suite.levels,
        )  # fmt: skip
        found.append(result | {"config": suite.told})
    return found


def records_of(suite: Suite, folder: Path) -> tuple[Header, list[Record]]:
    """What a suite's numbers are made of: the header, and the samples wanted of each problem.

    Raises EvaluationError where responses are missing. Source: ours.
    """
    path, ids = folder / f"{suite.name}.jsonl", set(suite.ids)
    header, records = read(path)
    asked = [record for record in records if record["problem"] in ids]
    there = report.counted(asked, suite.config.samples)
    if header is None or len(there) < suite.rows:
        raise EvaluationError(
            f"{path} has {len(there)} of {suite.rows} responses; the command that began it makes "
            "the others"
        )
    return header, there


def _claim(file: RecordFile, suite: Suite, weights: str, version: int) -> None:
    """Begins the file, unless it holds responses of these weights and settings."""
    header = Header(
        suite=suite.name, weights=weights, version=version, made_with=suite.made_with,
        config=suite.told, problems=len(suite.ids), dropped=list(suite.dropped),
    )  # fmt: skip
    # A header alone commits nobody: the first command may have had a typo.
    if file.header is None or not file.records or _other(file.header, suite, weights):
        file.begin(header)


def check_records(prepared: Prepared, folder: Path, weights: str | None = None) -> None:
    """Raises EvaluationError for records in `folder` that were made with other settings.

    weights: what they have to be of, None where that is not known yet.
    Source: ours: told before anything is read or made that takes long.
    """
    for suite in prepared.suites:
        path = folder / f"{suite.name}.jsonl"
        header, records = read(path)
        if header is not None and records and (fault := _other(header, suite, weights)):
            raise EvaluationError(
                f"{path} holds answers {fault}; use another --workdir, or delete that file"
            )


def _other(header: Header, suite: Suite, weights: str | None) -> str | None:
    """What a suite's file was made with that is different now."""
    if header["suite"] != suite.name:
        return f"of suite {header['suite']}, this is {suite.name}"
    if weights not in (None, header["weights"]):
        return f"of weights {header['weights']}, these are {weights}"
    if header["made_with"] == suite.made_with:
        return None
    name, was, now = _difference(header["made_with"], suite.made_with)
    return f"made with {name} {was!r}, now it is {now!r}"


def _difference(old: dict, new: dict) -> tuple[str, object, object]:
    return next(
        (name, old.get(name), new.get(name))
        for name in dict.fromkeys([*new, *old])
        if old.get(name) != new.get(name)
    )


def _answer(
    prepared: Prepared, suite: Suite, backend: RolloutBackend, file: RecordFile | None,
    on_progress: OnProgress,
) -> None:  # fmt: skip
    records = file.records if file else []
    known = hosts.from_first(_CHANNEL, lambda: [(r["problem"], r["sample"]) for r in records])
    there = {(problem, sample) for problem, sample in known}
    problem, sample, _ = suite.places(np.arange(suite.rows))
    todo = np.array(
        [
            row
            for row in range(suite.rows)
            if (suite.ids[problem[row]], int(sample[row])) not in there
        ],
        np.int64,
    )
    done, size = suite.rows - len(todo), prepared.config.chunk_rows
    on_progress(suite.name, done, suite.rows, _so_far(records))
    with concurrent.futures.ThreadPoolExecutor(1) as grading:
        # One chunk is graded and written while the next is answered.
        open_chunk: concurrent.futures.Future[int] | None = None
        for start in range(0, len(todo), size):
            rows = todo[start : start + size]
            rollout = _respond(suite, backend, rows)
            before, told = open_chunk, {}
            if before is not None:
                done, told = done + before.result(), _so_far(records)
            open_chunk = grading.submit(_record, prepared, suite, rows, rollout, file)
            if before is not None:
                # Only now, for it may raise: the chunk in hand is recorded first.
                on_progress(suite.name, done, suite.rows, told)
        if open_chunk is not None:
            done += open_chunk.result()
            on_progress(suite.name, done, suite.rows, _so_far(records))


def _respond(suite: Suite, backend: RolloutBackend, rows: np.ndarray) -> Rollout:
    rollout = backend.generate(suite.prompt(rows), suite.sampling(rows), keep_routing=False)
    if rollout.aborted is not None:
        raise RolloutError(
            f"{int(np.sum(rollout.aborted))} of {len(rows)} responses were aborted; the same "
            "command makes them again"
        )
    return rollout


def _record(
    prepared: Prepared, suite: Suite, rows: np.ndarray, rollout: Rollout, file: RecordFile | None
) -> int:
    """Grades a chunk and writes its records, if there is a file for them; how many there are."""
    scored = graded("suites", suite.verifier, rollout)
    if file is None:
        return len(rows)
    texts = texts_of(rollout, prepared.tokenizer)
    seeds = suite.seeds(rows)
    problem, sample, prompt = suite.places(rows)
    kinds = [suite.kinds[one] if suite.kinds else "" for one in prompt]
    answers = answers_of(rollout, texts, kinds, suite.verifier)
    made = []
    for n in range(len(rows)):
        stopped = bool(rollout.stopped[n])
        letters = str(suite.letters[sample[n] % len(suite.letters), problem[n]])
        right = bool(scored.success[n])
        reason = scored.reasons[n] if scored.reasons is not None else "verifier"
        made.append(
            Record(
                problem=suite.ids[problem[n]],
                sample=int(sample[n]),
                seed=int(seeds[n]),
                tokens=int(rollout.num_tokens[n]),
                finish="stop" if stopped else "length",
                answer=answers[n],
                correct=right,
                reason=str(reason),
                same_as=None,
                letters=letters or None,
                response=texts[n],
            )
        )
    asked = {record["problem"] for record in made}
    earlier = [record for record in file.records if record["problem"] in asked]
    mark_same(made, earlier, kinds, prepared.grader.same)
    file.append(made)
    return len(made)


def _so_far(records: list[Record]) -> dict[str, float]:
    """Numbers for whoever watches."""
    if not records:
        return {}
    return {
        "solved": float(np.mean([record["correct"] for record in records])),
        "cut_off": float(np.mean([record["finish"] == "length" for record in records])),
        "response_tokens": float(np.mean([record["tokens"] for record in records])),
    }
