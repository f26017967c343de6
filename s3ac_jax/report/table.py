"""The final table: accuracy on held-out problems before and after, by difficulty level."""

from typing import Any

from rich import box
from rich.table import Table

_ABSENT = "-"


def accuracy_table(
    rows: list[dict[str, Any]], totals: dict[str, Any], heading: str = "steps"
) -> Table:
    """A rich table, one line per row and an "all" line.

    rows, totals: `level` (rows only), `problems`, and as fractions `base_accuracy`, `accuracy`,
    and pairs `base_x`, `x` of whatever else there is; an absent or None entry is shown as "-".
    heading: what a level is.

    Source: ours: the one result that a newcomer looks for.
    """
    others = _others(rows, totals)
    table = Table(box=box.SIMPLE_HEAD, title="Held-out problems", title_style="bold")
    for header in _headers(heading, others):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(*_cells(row, str(row["level"]), others))
    table.add_section()
    table.add_row(*_cells(totals, "all", others), style="bold")
    return table


def accuracy_text(
    rows: list[dict[str, Any]], totals: dict[str, Any], heading: str = "steps"
) -> str:
    """The same table as plain ASCII text without a trailing newline.

    rows, totals, heading: as for `accuracy_table`.

    Source: ours: for logs, files and terminals without colour.
    """
    others = _others(rows, totals)
    lines = [_headers(heading, others)]
    lines += [_cells(row, str(row["level"]), others) for row in rows]
    lines.append(_cells(totals, "all", others))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    rule = "-" * len(text[0])
    return "\n".join([text[0], rule, *text[1:-1], rule, text[-1]])


def _others(rows: list[dict[str, Any]], totals: dict[str, Any]) -> list[str]:
    """What has a pair of columns beside the accuracy."""
    names = dict.fromkeys(name for row in [*rows, totals] for name in row)
    pairs = [name.removeprefix("base_") for name in names if name.startswith("base_")]
    return [name for name in pairs if name != "accuracy"]


def _headers(heading: str, others: list[str]) -> list[str]:
    pairs = [f"{name.replace('_', ' ')}, {who}" for name in others for who in ("base", "trained")]
    return [heading, "problems", "base", "trained", "gain", *pairs]


def _cells(row: dict[str, Any], label: str, others: list[str]) -> list[str]:
    base, after = row.get("base_accuracy"), row.get("accuracy")
    gain = _ABSENT if base is None or after is None else f"{100 * (after - base):+.1f}"
    problems = row.get("problems")
    pairs = [_percent(row.get(f"{prefix}{name}")) for name in others for prefix in ("base_", "")]
    return [
        label,
        _ABSENT if problems is None else str(problems),
        _percent(base),
        _percent(after),
        gain,
        *pairs,
    ]


def _percent(fraction: float | None) -> str:
    return _ABSENT if fraction is None else f"{100 * fraction:.1f} %"
