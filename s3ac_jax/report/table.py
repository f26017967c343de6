"""The final table: accuracy on held-out problems before and after, by number of steps."""

from typing import Any

from rich import box
from rich.table import Table

_HEADERS = (
    "steps",
    "problems",
    "base",
    "trained",
    "gain",
    "step accuracy, base",
    "step accuracy, trained",
)
_ABSENT = "-"


def accuracy_table(rows: list[dict[str, Any]], totals: dict[str, Any]) -> Table:
    """A rich table, one line per row and an "all" line.

    rows, totals: `steps` (rows only), `problems`, and as fractions `base_accuracy`, `accuracy`,
    `base_step_accuracy`, `step_accuracy`; an absent or None entry is shown as "-".

    Source: ours: the one result that a newcomer looks for.
    """
    table = Table(box=box.SIMPLE_HEAD, title="Held-out problems", title_style="bold")
    for header in _HEADERS:
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(*_cells(row, str(row["steps"])))
    table.add_section()
    table.add_row(*_cells(totals, "all"), style="bold")
    return table


def accuracy_text(rows: list[dict[str, Any]], totals: dict[str, Any]) -> str:
    """The same table as plain ASCII text without a trailing newline.

    rows, totals: as for `accuracy_table`.

    Source: ours: for logs, files and terminals without colour.
    """
    lines = [list(_HEADERS), *(_cells(row, str(row["steps"])) for row in rows)]
    lines.append(_cells(totals, "all"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    rule = "-" * len(text[0])
    return "\n".join([text[0], rule, *text[1:-1], rule, text[-1]])


def _cells(row: dict[str, Any], label: str) -> list[str]:
    base, after = row.get("base_accuracy"), row.get("accuracy")
    gain = _ABSENT if base is None or after is None else f"{100 * (after - base):+.1f}"
    problems = row.get("problems")
    return [
        label,
        _ABSENT if problems is None else str(problems),
        _percent(base),
        _percent(after),
        gain,
        _percent(row.get("base_step_accuracy")),
        _percent(row.get("step_accuracy")),
    ]


def _percent(fraction: float | None) -> str:
    return _ABSENT if fraction is None else f"{100 * fraction:.1f} %"
