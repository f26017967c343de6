"""The final table, as text and by rich."""

import io

from rich.console import Console

from s3ac_jax.report.table import accuracy_table, accuracy_text

ROWS = [
    {"level": 2, "problems": 40, "base_accuracy": 0.5, "accuracy": 0.975,
     "base_step_accuracy": 0.7, "step_accuracy": 0.99},
    {"level": 3, "problems": 60, "base_accuracy": 0.25, "accuracy": 0.2},
]  # fmt: skip
TOTALS = {"problems": 100, "base_accuracy": 0.35, "accuracy": 0.51, "base_step_accuracy": None}


def test_text():
    text = accuracy_text(ROWS, TOTALS)
    assert text.isascii()
    lines = [line.split("  ") for line in text.splitlines()]
    cells = [[c.strip() for c in line if c.strip()] for line in lines]
    assert cells[2] == ["2", "40", "50.0 %", "97.5 %", "+47.5", "70.0 %", "99.0 %"]
    assert cells[3] == ["3", "60", "25.0 %", "20.0 %", "-5.0", "-", "-"]
    assert cells[-1] == ["all", "100", "35.0 %", "51.0 %", "+16.0", "-", "-"]
    assert len({len(line) for line in text.splitlines()}) == 1


def test_no_rows_still_gives_totals():
    assert accuracy_text([], {}).splitlines()[-1].split() == ["all", *"----"]


def test_rich_table_holds_the_same_cells():
    console = Console(file=io.StringIO(), width=100)
    console.print(accuracy_table(ROWS, TOTALS))
    printed = console.file.getvalue()
    for cell in ("Held-out problems", "+47.5", "97.5 %", "all", "+16.0"):
        assert cell in printed


def test_columns_are_those_that_the_task_has():
    rows = [{"level": "1-digit +", "problems": 5, "base_accuracy": 0.2, "accuracy": 0.4}]
    totals = {"problems": 5, "base_accuracy": 0.2, "accuracy": 0.4}
    text = accuracy_text(rows, totals, "sums").splitlines()
    assert text[0].split() == ["sums", "problems", "base", "trained", "gain"]
    assert text[2].split() == ["1-digit", "+", "5", "20.0", "%", "40.0", "%", "+20.0"]
    header = accuracy_text(ROWS, TOTALS).splitlines()[0]
    assert header.endswith("step accuracy, base  step accuracy, trained")
