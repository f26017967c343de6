"""Progress: plain lines without escape codes, a live view that is cheap and ends cleanly."""

import io
import os
import pathlib
import pty
import subprocess
import sys
import time

import pytest
from rich.table import Table

from s3ac_jax.report import live
from s3ac_jax.report.live import LiveProgress, PlainProgress, make_progress, sparkline

ROOT = pathlib.Path(__file__).parents[3]
METRICS = {
    "reward": 0.25, "held_out/accuracy": 0.5, "explained_variance": 0.3, "response_tokens": 31.6,
    "tokens_per_second": 4321.0, "time/rollout": 3.0, "time/critic": 1.0, "time/tick": 4.0,
}  # fmt: skip
RUN = f"""
from rich.table import Table
from s3ac_jax.report.live import make_progress
table = Table("steps", title="result")
table.add_row("17")
with make_progress(["diagnose", "online"]) as progress:
    progress.stage("diagnose", 0)
    progress.note("found [1, 2] problems")
    progress.stage("online", 3)
    for done in (1, 2, 3):
        progress.update(done, {METRICS})
    progress.finish(table)
"""


def _command(code):
    return [sys.executable, "-W", "error", "-c", code]


def _on_a_terminal(code):
    """Output of `code` run with a real pseudo-terminal as stdout, and its exit status."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    child = subprocess.Popen(
        _command(code), cwd=ROOT, stdout=slave, stderr=subprocess.PIPE, env=environment
    )
    os.close(slave)
    output = b""
    try:
        while block := os.read(master, 65536):
            output += block
    except OSError:  # how Linux says that the other end was closed
        pass
    os.close(master)
    with child.stderr:
        errors = child.stderr.read().decode()
    return output.decode(), errors, child.wait()


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}])
def test_a_pipe_gets_plain_flushed_lines(variables):
    done = subprocess.run(
        _command(RUN), cwd=ROOT, capture_output=True, check=True,
        env={**os.environ, **variables, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    text = done.stdout.decode()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[:2] == ["[diagnose] starts", "found [1, 2] problems"]
    assert lines[2] == "[online] starts, 3 ticks"
    assert lines[3].startswith("[online 1/3]  held-out accuracy 50.0 %  reward 0.250")
    assert "tokens/s 4,321" in lines[3]
    assert lines[4].startswith("[online 3/3]"), "tick 2 came within 10 s, tick 3 is the last"
    assert "result" in text
    assert "17" in text


def test_a_terminal_gets_the_live_view():
    output, errors, status = _on_a_terminal(RUN)
    assert (errors, status) == ("", 0)
    for piece in ("✓ diagnose", "✓ online", "3/3", "found [1, 2] problems", "result", "17",
                  "rollout 75 %", "critic 25 %", "held-out accuracy", "50.0 %"):  # fmt: skip
        assert piece in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor is visible again"


def test_a_crash_gives_the_cursor_back():
    output, errors, status = _on_a_terminal(RUN.replace("progress.finish(table)", "1 / 0"))
    assert status == 1
    assert "ZeroDivisionError" in errors + output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_which_view_is_chosen(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress(["a"], Terminal()), LiveProgress)
    assert isinstance(make_progress(["a"], io.StringIO()), PlainProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(["a"], Terminal()), PlainProgress)


def test_plain_lines_come_every_ten_seconds_with_time_left(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    file = io.StringIO()
    progress = make_progress(["online"], file)
    progress.stage("online", 1000)
    for done in range(500, 531):  # resumed at 500, one second per tick
        progress.update(done, {"reward": done})
        clock[0] += 1
    lines = file.getvalue().splitlines()[1:]
    assert [line.split("]")[0] for line in lines] == [
        "[online 500/1000", "[online 510/1000", "[online 520/1000", "[online 530/1000",
    ]  # fmt: skip
    assert lines[1].endswith("8 min left")


def test_update_and_drawing_are_cheap(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    with make_progress(["online"], Terminal()) as progress:
        progress.stage("online", 2000)
        start = time.perf_counter()
        for done in range(2000):
            progress.update(done, METRICS)
        assert (time.perf_counter() - start) / 2000 < 1e-3


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, float("nan"), 7.0]) == "▁ █"
    assert sparkline([float("nan")]) == " "
    long = sparkline([float(n) for n in range(1000)])
    assert len(long) == 40
    assert list(long) == sorted(long)


def test_plain_finish_renders_tables_and_keeps_brackets_of_text():
    file = io.StringIO()
    progress = make_progress([], file)
    table = Table("x")
    table.add_row("[red]7[/red]")
    progress.finish(table)
    progress.finish("a [b] c")
    assert "\x1b" not in file.getvalue()
    assert file.getvalue().endswith("a [b] c\n")
