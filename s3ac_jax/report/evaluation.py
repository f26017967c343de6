"""An evaluation's numbers, from its records alone: as a table, as text and as results.json."""

import collections
import json
import math
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from s3ac_jax.report import estimators
from s3ac_jax.report.estimators import Estimate
from s3ac_jax.report.records import Header, Record

_ABSENT = "-"

Result = dict[str, Any]


def suite_result(
    header: Header,
    records: Sequence[Record],
    *,
    samples: int,
    pass_at: Sequence[int],
    maj_at: Sequence[int],
    resamples: int,
    shares: Mapping[str, Collection[str]],
    levels: Mapping[str, str] | None = None,
) -> Result:
    """Every number of one suite.

    samples: of each problem, those beyond are left out; the k of pass_at and maj_at are at most
    that. resamples: for each interval. shares: names of further numbers, each the share of the
    responses whose reason is among these codes. levels: of each problem, where they have some; avg
    is also given for each.
    maj is NaN where nobody says what some right response answers: then nobody can count votes.
    Source: ours: the table can be made again, by anybody, from what was answered.
    """
    every = counted(records, samples)
    by_problem: dict[str, list[Record]] = collections.defaultdict(list)
    for record in every:
        by_problem[record["problem"]].append(record)
    problems = list(by_problem.values())
    correct = [[record["correct"] for record in rows] for rows in problems]
    drawn = estimators.over_samples(correct, resamples=resamples)

    def share(holds: Collection[bool]) -> float:
        return sum(holds) / len(every) if every else math.nan

    def of_problems(values: Sequence[float]) -> dict[str, float]:
        return _spelled(estimators.over_problems(values, resamples=resamples))

    votes = [_groups(rows) for rows in problems]
    known = not any(record["correct"] and record["same_as"] is None for record in every)
    by_level: dict[str, list[float]] = collections.defaultdict(list)
    for name, row in zip(by_problem, correct, strict=True):
        if levels:
            by_level[levels[name]].append(sum(row) / len(row))
    return {
        "suite": header["suite"],
        "weights": header["weights"],
        "version": header["version"],
        "problems": len(problems),
        "dropped": len(header["dropped"]),
        "samples": samples,
        "responses": len(every),
        "avg": of_problems([sum(row) / len(row) for row in correct])
        | {
            "low_samples": drawn.low,
            "high_samples": drawn.high,
            "std_samples": estimators.std_over_samples(correct),
        },
        "pass": {
            str(k): of_problems([estimators.pass_at(len(row), sum(row), k) for row in correct])
            for k in pass_at
        },
        "maj": {
            str(k): of_problems([estimators.maj_at(*vote, k) for vote in votes])
            if known
            else _spelled(Estimate(math.nan, math.nan, math.nan))
            for k in maj_at
        },
        "truncated": share([record["finish"] == "length" for record in every]),
        **{
            name: share([one["reason"] in codes for one in every]) for name, codes in shares.items()
        },
        "tokens": sum(one["tokens"] for one in every) / len(every) if every else math.nan,
        "reasons": dict(collections.Counter(one["reason"] for one in every).most_common()),
        "levels": {
            name: {"problems": len(values)} | of_problems(values)
            for name, values in by_level.items()
        },
        "made_with": header["made_with"],
    }


def counted(records: Sequence[Record], samples: int) -> list[Record]:
    """The records that numbers are made of: the first `samples` of each problem, in order.

    Should a sample be there twice, its first line counts. Source: ours.
    """
    by_problem: dict[str, dict[int, Record]] = collections.defaultdict(dict)
    for record in records:
        if 0 <= record["sample"] < samples:
            by_problem[record["problem"]].setdefault(record["sample"], record)
    return [rows[n] for rows in by_problem.values() for n in sorted(rows)]


def _groups(rows: Sequence[Record]) -> tuple[list[tuple[int, float]], int]:
    """How often each answer was given and which share of it is right; responses without one."""
    given: dict[int, list[bool]] = collections.defaultdict(list)
    for record in rows:
        if record["same_as"] is not None:
            given[record["same_as"]].append(record["correct"])
    groups = [(len(right), sum(right) / len(right)) for right in given.values()]
    return groups, len(rows) - sum(count for count, _ in groups)


def _spelled(estimate: Estimate) -> dict[str, float]:
    return dict(estimate._asdict())


def metrics(results: Sequence[Result]) -> dict[str, float]:
    """The main numbers as scalars, `evaluation/SUITE/avg`, `.../pass_4` and so on.

    Source: ours: for the log of a run, whose tools know no "@".
    """
    found = {}
    for result in results:
        numbers = {"avg": result["avg"]["value"]}
        for kind in ("pass", "maj"):
            numbers |= {
                f"{kind}_{k}": one["value"]
                for k, one in result[kind].items()
                if not math.isnan(one["value"])
            }
        numbers |= {name: result[name] for name in _rates(result)}
        numbers["tokens"] = result["tokens"]
        found |= {f"evaluation/{result['suite']}/{name}": x for name, x in numbers.items()}
    return found


def write_results(results: Sequence[Result], facts: Mapping[str, Any], folder: str | os.PathLike):
    """Writes results.json ({"suites": ..., **facts}) and table.txt into `folder`, each whole.

    NaN becomes null. Raises OSError. Source: ours.
    """
    folder = pathlib.Path(folder)
    whole = _strict({**facts, "suites": {result["suite"]: result for result in results}})
    texts = {
        "results.json": json.dumps(whole, indent=2) + "\n",
        "table.txt": evaluation_text(results) + "\n",
    }
    for name, text in texts.items():
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text)
        temporary.replace(folder / name)


def _strict(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _strict(value) for key, value in node.items()}
    return None if isinstance(node, float) and not math.isfinite(node) else node


def evaluation_table(results: Sequence[Result]) -> Table:
    """A rich table, a line for each suite. Source: ours."""
    headers, lines = _cells(results)
    # Narrow: a terminal of 100 columns has to hold all of it.
    table = Table(box=box.SIMPLE_HEAD, title="Evaluation", title_style="bold", padding=(0, 1, 0, 0))
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right")
    for line in lines:
        table.add_row(*line)
    return table


def evaluation_text(results: Sequence[Result]) -> str:
    """The same as plain ASCII text without a trailing newline.

    Source: ours: for logs, files and comparisons.
    """
    headers, rows = _cells(results)
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    text = [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (headers, *rows)
    ]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def _cells(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    wanted = [
        (kind, k)
        for kind in ("pass", "maj")
        for k in sorted({k for result in results for k in result[kind]}, key=int)
    ]
    rates = list(dict.fromkeys(name for result in results for name in _rates(result)))
    headers = ["suite", "problems", "n", "avg@n", "95 %"]
    headers += [f"{kind}@{k}" for kind, k in wanted]
    headers += [name.replace("_", " ") for name in rates] + ["tokens"]
    # Problems with too long a prompt: nearly always none.
    dropped = any(result["dropped"] for result in results)
    headers += ["too long"] * dropped
    lines = []
    for result in results:
        avg = result["avg"]
        line = [result["suite"], str(result["problems"]), str(result["samples"])]
        line += [_percent(avg["value"]), _interval(avg)]
        line += [
            _percent(result[kind][k]["value"]) if k in result[kind] else _ABSENT
            for kind, k in wanted
        ]
        line += [_percent(result.get(name, math.nan)) for name in rates]
        tokens = result["tokens"]
        line += [_ABSENT if math.isnan(tokens) else f"{tokens:.0f}"]
        line += [str(result["dropped"])] * dropped
        lines.append(line)
    return headers, lines


def _rates(result: Result) -> list[str]:
    """Names of the shares of responses, in order."""
    named = list(result)
    return named[named.index("truncated") : named.index("tokens")]


def _interval(estimate: Mapping[str, float]) -> str:
    if math.isnan(estimate["low"]):
        return _ABSENT
    return f"{100 * estimate['low']:.1f}..{100 * estimate['high']:.1f}"


def _percent(fraction: float) -> str:
    return _ABSENT if math.isnan(fraction) else f"{100 * fraction:.1f}"
