"""Metrics on disk: one JSON line per tick, and the same numbers as TensorBoard events."""

import math
import os
import pathlib
from typing import Any

from tensorboardX import FileWriter

# Generated protobuf modules, whose classes no type checker sees.
from tensorboardX.proto.event_pb2 import (
    Event,  # pyrefly: ignore[missing-module-attribute]
    SessionLog,  # pyrefly: ignore[missing-module-attribute]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]

from s3ac_jax.report.lines import LineFile, read_lines


class MetricLog:
    """Appends to `metrics.jsonl` in the run's folder and to TensorBoard events below `tb/`.

    Every stage is a TensorBoard run of its own (`tb/<stage>`), so that equal names share a chart
    and a rewind of one stage leaves the others alone. A last line torn by a kill is cut off.
    writes: False for a process that is not to touch the files, for another one writes them.

    Raises OSError if the folder can't be written.
    Source: ours: a text file that any tool reads, flushed every tick.
    """

    def __init__(self, workdir_path: str | os.PathLike[str], *, writes: bool = True):
        folder = pathlib.Path(workdir_path)
        self.path = folder / "metrics.jsonl"
        self._lines = LineFile(self.path, writes=writes)
        self._writes, self._tensorboard = writes, folder / "tb"
        self._writers: dict[str, FileWriter] = {}

    def write(self, tick: int, metrics: dict[str, float], stage: str) -> None:
        """Appends {"stage", "tick", **metrics} and flushes; NaN and infinity become null.

        metrics: scalars; their names carry the units.

        Source: ours: strict JSON has no NaN, and a null still shows that the key was measured.
        """
        if not self._writes:
            return
        values = {name: float(value) for name, value in metrics.items()}
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines.append({"stage": stage, "tick": tick, **line})
        # One event per tick (0.2 ms): SummaryWriter.add_scalar queues one per metric (9 ms).
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer(stage).add_summary(Summary(value=points), tick)

    def rewind(self, stage: str, tick: int) -> None:
        """Drops lines of `stage` with tick >= `tick`: a resumed run writes them again.

        Source: ours: kill and resume must leave the log of an uninterrupted run.
        """
        if not self._writes:
            return
        self._lines.keep(
            lambda line: line["stage"] != stage or line["tick"] < tick, ("stage", "tick")
        )
        if stage in self._writers:
            self._writers.pop(stage).close()
        if (self._tensorboard / stage).exists():
            # TensorBoard drops the points at and after the step of a session's start.
            start = Event(session_log=SessionLog(status=SessionLog.START))
            self._writer(stage).add_event(start, tick)

    def close(self) -> None:
        """Closes the files; TensorBoard events are complete from here on.

        Source: ours: tensorboardX buffers for up to 10 s.
        """
        self._lines.close()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, stage: str) -> FileWriter:
        if stage not in self._writers:
            folder = self._tensorboard / stage
            # Files are named by the second: a second writer would overwrite the first one's.
            number = len(list(folder.iterdir())) if folder.exists() else 0
            self._writers[stage] = FileWriter(
                str(folder), flush_secs=10, filename_suffix=f".{number:04d}"
            )
        return self._writers[stage]


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl as dicts, oldest first; null becomes None. No file: no lines.

    Raises LinesError if a line other than the last is damaged (the last may be torn by a kill).
    Source: ours.
    """
    return read_lines(path, ("stage", "tick"))
