"""The page of a run, or of several beside each other: one HTML file that needs nothing else."""

import base64
import collections
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from s3ac_jax.report import story
from s3ac_jax.report.page_curves import curve_cards, overlaid_cards, run_colours
from s3ac_jax.report.page_data import PageError, RunData, number, read_runs
from s3ac_jax.report.page_figures import Card, method_cards
from s3ac_jax.report.page_svg import css_colour, themed

# Of the token viewer, over the page: about 50 bytes each.
MAX_TOKENS = 60_000
_SERIES = {"value": 3, "advantage": 3, "logp_rollout": 4, "logp_old": 4, "ratio": 4, "weight": 3}


def write_page(
    folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None
) -> pathlib.Path:
    """Reads the workdirs and writes their page, whole or not at all; returns its path.

    out: WORKDIR/report.html if left out, which only one workdir may.
    Raises PageError or LinesError with a message of one line.
    Source: ours.
    """
    if not folders:
        raise PageError("no run was named: python launch/report.py WORKDIR [WORKDIR...]")
    if out is None and len(folders) > 1:
        raise PageError(f"--out is required for {len(folders)} runs, say --out=compared.html")
    text = page(read_runs(folders))
    path = pathlib.Path(out) if out is not None else pathlib.Path(folders[0]) / "report.html"
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        if temporary.is_file():
            temporary.unlink()
        raise PageError(f"can't write --out {path}: {error.strerror or error}") from error
    return path


def page(runs: Sequence[RunData], max_tokens: int = MAX_TOKENS) -> str:
    """The HTML of the page. max_tokens: of responses in the token viewers of all runs together.

    Equal files give equal pages. Source: ours.
    """
    files = resources.files("s3ac_jax.report") / "templates"
    texts = {
        name: (files / f"report.{name}").read_text(encoding="utf-8")
        for name in ("html.j2", "css", "js")
    }
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    several = len(runs) > 1
    with themed():
        shown = [_section(run, f"r{n}", max_tokens // len(runs)) for n, run in enumerate(runs)]
        compared = _comparison(runs) if several else None
    digest = hashlib.sha256(texts["js"].encode()).digest()
    return environment.from_string(texts["html.j2"]).render(
        title=" · ".join(run.name for run in runs),
        css=Markup(texts["css"]),
        js=Markup(texts["js"]),
        # Only this script runs, whatever a model has written.
        script_hash=base64.b64encode(digest).decode(),
        runs=shown,
        compared=compared,
    )


def _section(run: RunData, prefix: str, max_tokens: int) -> dict[str, Any]:
    chosen = within(run.trajectories, max_tokens)
    return {
        "prefix": prefix,
        "name": run.name,
        "recipe": story.recipe(run),
        "badges": story.badges(run),
        "sentences": story.sentences(run),
        "trips": story.trips(run),
        "levels": story.level_table(run),
        "versions": _versions(run),
        "method": _marked(method_cards(run, prefix)),
        "curves": _marked(curve_cards(run, prefix)),
        "kept": (len(chosen), len(run.trajectories)),
        "data": embedded({"responses": [_response(line) for line in chosen]}),
    }


def _comparison(runs: Sequence[RunData]) -> dict[str, Any]:
    colours = [css_colour(colour) for colour in run_colours(len(runs))]
    return {
        "legend": [(run.name, colour) for run, colour in zip(runs, colours, strict=True)],
        "table": story.comparison(runs),
        "differences": story.difference_table(runs),
        "curves": _marked(overlaid_cards(runs, "all")),
    }


def _marked(cards: Sequence[Card]) -> list[Card]:
    # Our own SVG, its texts escaped by matplotlib.
    return [card._replace(svg=card.svg and Markup(card.svg)) for card in cards]


def _versions(run: RunData) -> str:
    flat = {key: value for key, value in run.versions.items() if isinstance(value, str | int)}
    return ", ".join(f"{key} {value}" for key, value in flat.items())


def within(lines: Sequence[dict[str, Any]], max_tokens: int) -> list[dict[str, Any]]:
    """The responses of every k-th tick, with the least k that leaves at most `max_tokens`.

    Should one tick have more, its first ones, one at least.
    Source: ours: evenly over the run, and the same ones each time.
    """

    def size(line: dict[str, Any]) -> int:
        return len(line["tokens"]) + len(line["prompt_pieces"])

    by_tick: dict[int, int] = collections.defaultdict(int)
    for line in lines:
        by_tick[line["tick"]] += size(line)
    ticks, step = list(by_tick), 1
    while step < len(ticks) and sum(by_tick[tick] for tick in ticks[::step]) > max_tokens:
        step += 1
    wanted = set(ticks[::step])
    chosen = [line for line in lines if line["tick"] in wanted]
    left = sum(map(size, chosen))
    while len(chosen) > 1 and left > max_tokens:
        left -= size(chosen.pop())
    return chosen


def _response(line: dict[str, Any]) -> dict[str, Any]:
    """What the viewer needs of a response, short: "value" is absent without a critic."""
    kept = {
        "tick": line["tick"],
        "response": line["response"],
        "level": str(line["level"]),
        "prompt": [str(piece) for piece in line["prompt_pieces"]],
        "pieces": [str(piece) for piece in line["pieces"]],
        "tokens": line["tokens"],
        "reward": _rounded(line["reward"], 3),
        "success": bool(line["success"]),
        "stopped": bool(line.get("stopped", True)),
        "reason": None if line.get("reason") is None else str(line["reason"]),
    }
    for name, digits in _SERIES.items():
        if isinstance(line.get(name), list) and len(line[name]) == len(line["tokens"]):
            kept[name] = [_rounded(value, digits) for value in line[name]]
    return kept


def _rounded(value: Any, digits: int) -> float | int | None:
    known = number(value)
    if not math.isfinite(known):
        return None
    short = round(known, digits)
    return int(short) if short == int(short) else short


def embedded(data: Any) -> Markup:
    """JSON that nothing in it can end the script element of. Source: OWASP, HTML and JSON."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
