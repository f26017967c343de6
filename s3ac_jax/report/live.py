"""Progress of a run: a live view on a terminal, one line at a time anywhere else."""

import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_SECONDS_PER_LINE = 10.0
_REFRESHES_PER_SECOND = 2
_SPARK_COLUMNS = 40
_SPARKS = "▁▂▃▄▅▆▇█"
_SHOWN = (
    ("held_out/accuracy", "held-out accuracy", "percent"),
    ("solved", "solved", "percent"),
    ("cut_off", "cut off", "percent"),
    ("reward", "reward", ".3f"),
    ("explained_variance", "explained variance", ".2f"),
    ("value_loss", "value loss", ".4f"),
    ("response_tokens", "response length", ".0f"),
    ("tokens_per_second", "tokens/s", ",.0f"),
)


class Progress(Protocol):
    """How a run tells where it stands; a context manager, so that a crash restores the terminal.

    Source: ours: the loop knows neither terminals nor log files.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def stage(self, name: str, total: int) -> None:
        """Begins stage `name` of `total` ticks (0: not countable); the one before is done.

        Source: ours: stages run one after another.
        """

    def update(self, done: int, metrics: dict[str, float]) -> None:
        """`done` ticks of the stage are done; absent metrics keep their last value.

        Source: ours: called every tick, so it only stores.
        """

    def note(self, text: str) -> None:
        """Says one line that stays on the screen.

        Source: ours: warnings and decisions of the run.
        """

    def finish(self, summary: RenderableType) -> None:
        """Ends the view and shows `summary` (text, or anything that rich renders).

        Source: ours: the result is the last thing on the screen.
        """


def make_progress(
    stages: list[str], file: TextIO | None = None, *, unit: str = "ticks", shown: bool = True
) -> Progress:
    """The live view if `file` (default: stdout) is a terminal, plain lines otherwise.

    stages: names in the order in which they will run. unit: what is counted in them. shown: False
    for a process that says nothing, because another one does.

    Source: ours: a log file must hold no escape codes.
    """
    if not shown:
        return NoProgress()
    file = sys.stdout if file is None else file
    console = Console(file=file)
    # Not console.is_terminal: FORCE_COLOR, which CI services set, makes that true for pipes.
    if file.isatty() and not console.is_dumb_terminal:
        return LiveProgress(stages, console)
    return PlainProgress(stages, file, unit)


class NoProgress:
    """Says nothing.

    Source: ours: of several processes one speaks.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        pass

    def stage(self, name: str, total: int) -> None:
        """See `Progress.stage`.

        Source: ours: see `Progress`.
        """

    def update(self, done: int, metrics: dict[str, float]) -> None:
        """See `Progress.update`.

        Source: ours: see `Progress`.
        """

    def note(self, text: str) -> None:
        """See `Progress.note`.

        Source: ours: see `Progress`.
        """

    def finish(self, summary: RenderableType) -> None:
        """See `Progress.finish`.

        Source: ours: see `Progress`.
        """


class _Standing:
    """Where the current stage stands."""

    def __init__(self, stages: list[str]):
        self.names = list(stages)
        self.current: str | None = None
        self.finished: set[str] = set()
        self.begin("", 0)
        self.current = None

    def begin(self, name: str, total: int) -> None:
        if self.current is not None:
            self.finished.add(self.current)
        if name and name not in self.names:
            self.names.append(name)
        self.current = name
        self.total = total
        self.done = 0
        self.metrics: dict[str, float] = {}
        self.history: dict[str, list[float]] = {"held_out/accuracy": [], "reward": []}
        self._first: tuple[int, float] | None = None

    def update(self, done: int, metrics: dict[str, float]) -> None:
        # A resumed stage does not begin at 0: the pace counts from what this process saw first.
        self._first = self._first or (done, time.monotonic())
        self.done = done
        self.metrics = {**self.metrics, **metrics}
        for name, values in self.history.items():
            if name in metrics:
                values.append(float(metrics[name]))

    def seconds_left(self) -> float | None:
        if self._first is None or self.done <= self._first[0] or not self.total:
            return None
        pace = (time.monotonic() - self._first[1]) / (self.done - self._first[0])
        return pace * max(0, self.total - self.done)

    def shown(self) -> list[tuple[str, str]]:
        return [
            (label, f"{100 * self.metrics[n]:.1f} %" if form == "percent" else
             format(self.metrics[n], form))
            for n, label, form in _SHOWN
            if n in self.metrics
        ]  # fmt: skip

    def split(self) -> str:
        phases = {
            name.removeprefix("time/"): seconds
            for name, seconds in self.metrics.items()
            if name.startswith("time/") and name != "time/tick"
        }
        whole = self.metrics.get("time/tick") or sum(phases.values())
        if not whole > 0:
            return ""
        largest = sorted(phases.items(), key=lambda item: -item[1])
        return "  ".join(f"{name} {100 * s / whole:.0f} %" for name, s in largest)


class PlainProgress:
    """One line at most every 10 s and at the end of a stage; no escape codes, always flushed.

    Source: ours: for pipes, notebooks, CI and batch jobs.
    """

    def __init__(self, stages: list[str], file: TextIO, unit: str = "ticks"):
        self._standing = _Standing(stages)
        self._file, self._unit = file, unit
        self._last_line = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._file.flush()

    def stage(self, name: str, total: int) -> None:
        """See `Progress.stage`.

        Source: ours: see `Progress`.
        """
        self._standing.begin(name, total)
        self._last_line = float("-inf")
        self._say(f"[{name}] starts" + (f", {total} {self._unit}" if total else ""))

    def update(self, done: int, metrics: dict[str, float]) -> None:
        """See `Progress.update`; the metrics of ticks without a line are merged into the next.

        Source: ours: see `Progress`.
        """
        standing = self._standing
        standing.update(done, metrics)
        now = time.monotonic()
        if now - self._last_line < _SECONDS_PER_LINE and done != standing.total:
            return
        self._last_line = now
        parts = [f"[{standing.current} {done}/{standing.total}]" if standing.total
                 else f"[{standing.current} {done}]"]  # fmt: skip
        parts += [f"{label} {value}" for label, value in standing.shown()]
        if left := standing.seconds_left():
            parts.append(f"{_duration(left)} left")
        self._say("  ".join(parts))

    def note(self, text: str) -> None:
        """See `Progress.note`.

        Source: ours: see `Progress`.
        """
        self._say(text)

    def finish(self, summary: RenderableType) -> None:
        """See `Progress.finish`.

        Source: ours: see `Progress`.
        """
        if not isinstance(summary, str):
            console = Console(
                file=self._file, width=100, color_system=None, force_terminal=False, highlight=False
            )
            console.print(summary)
            self._file.flush()
        else:
            self._say(summary)

    def _say(self, text: str) -> None:
        print(text, file=self._file, flush=True)


class LiveProgress:
    """Stages with check marks, a bar with time left, and a panel of the numbers that matter.

    A thread draws twice a second; `update` only stores (microseconds), so ticks don't wait.

    Source: ours: one look says whether the run learns.
    """

    def __init__(self, stages: list[str], console: Console):
        self._standing = _Standing(stages)
        self._console = console
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._live.stop()  # also shows the cursor again

    def stage(self, name: str, total: int) -> None:
        """See `Progress.stage`.

        Source: ours: see `Progress`.
        """
        self._standing.begin(name, total)
        self._live.start()

    def update(self, done: int, metrics: dict[str, float]) -> None:
        """See `Progress.update`.

        Source: ours: see `Progress`.
        """
        self._standing.update(done, metrics)

    def note(self, text: str) -> None:
        """See `Progress.note`.

        Source: ours: see `Progress`.
        """
        self._console.print(text, markup=False, highlight=False)

    def finish(self, summary: RenderableType) -> None:
        """See `Progress.finish`.

        Source: ours: see `Progress`.
        """
        self._standing.finished.update(self._standing.names)
        self._live.stop()
        self._console.print(summary)

    def _render(self) -> RenderableType:
        standing = self._standing
        parts: list[RenderableType] = [self._stages()]
        if standing.total:
            parts.append(self._bar())
        if panel := self._panel():
            parts.append(panel)
        return Group(*parts)

    def _stages(self) -> Text:
        line = Text()
        for name in self._standing.names:
            if name in self._standing.finished:
                line.append(f"✓ {name}   ", style="green")
            elif name == self._standing.current:
                line.append(f"● {name}   ", style="bold cyan")
            else:
                line.append(f"○ {name}   ", style="dim")
        return line

    def _bar(self) -> Table:
        standing = self._standing
        left = standing.seconds_left()
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            ProgressBar(total=standing.total, completed=standing.done, width=44),
            f"{standing.done}/{standing.total}",
            "" if left is None else f"{_duration(left)} left",
        )
        return grid

    def _panel(self) -> Panel | None:
        standing = self._standing
        shown = standing.shown()
        if not shown:
            return None
        grid = Table.grid(padding=(0, 2))
        for _ in range(3):
            grid.add_column(style="dim")
            grid.add_column(justify="right", min_width=7)
        for i in range(0, len(shown), 3):
            grid.add_row(*(cell for pair in shown[i : i + 3] for cell in pair))
        rows: list[RenderableType] = [grid]
        accuracies, rewards = standing.history["held_out/accuracy"], standing.history["reward"]
        name = "held-out accuracy" if len(accuracies) > 1 else "reward"
        values = accuracies if len(accuracies) > 1 else rewards
        if len(values) > 1:
            rows.append(Text.assemble((f"{name}  ", "dim"), (sparkline(values), "cyan")))
        if split := standing.split():
            rows.append(Text.assemble(("time  ", "dim"), split))
        return Panel(Group(*rows), expand=False, title=standing.current, border_style="dim")


def sparkline(values: list[float]) -> str:
    """At most 40 block characters from the lowest to the highest of `values`; NaN is a space.

    More values than that are averaged in runs of equal length.

    Source: ours: a trend in one line of text.
    """
    run = -(-len(values) // _SPARK_COLUMNS) if values else 1
    means = [sum(values[i : i + run]) / len(values[i : i + run])
             for i in range(0, len(values), run)]  # fmt: skip
    finite = [m for m in means if m == m and abs(m) != float("inf")]
    if not finite:
        return " " * len(means)
    low, span = min(finite), max(finite) - min(finite)
    top = len(_SPARKS) - 1
    return "".join(
        " " if m not in finite else _SPARKS[round(top * (m - low) / span) if span else 0]
        for m in means
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
