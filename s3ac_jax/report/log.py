"""Metrics on disk: one JSON line per tick, and the same numbers as TensorBoard events."""

import json
import math
import os
import pathlib
from typing import Any, TextIO

from tensorboardX import FileWriter

# Generated protobuf modules, whose classes no type checker sees.
from tensorboardX.proto.event_pb2 import (
    Event,  # pyrefly: ignore[missing-module-attribute]
    SessionLog,  # pyrefly: ignore[missing-module-attribute]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]

from s3ac_jax.core.errors import RunError


class MetricLogError(RunError, ValueError):
    """A metrics.jsonl that can't be read; the message is one line for the user.

    Source: ours: a run that stops has to say in one line what to do.
    """


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
        self._tensorboard = folder / "tb"
        self._writers: dict[str, FileWriter] = {}
        self._file: TextIO | None = None
        if not writes:
            return
        if self.path.exists():
            whole = self.path.read_bytes().rpartition(b"\n")
            os.truncate(self.path, len(whole[0]) + len(whole[1]))
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, tick: int, metrics: dict[str, float], stage: str) -> None:
        """Appends {"stage", "tick", **metrics} and flushes; NaN and infinity become null.

        metrics: scalars; their names carry the units.

        Source: ours: strict JSON has no NaN, and a null still shows that the key was measured.
        """
        if self._file is None:
            return
        values = {name: float(value) for name, value in metrics.items()}
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"stage": stage, "tick": tick, **line}) + "\n")
        self._file.flush()
        # One event per tick (0.2 ms): SummaryWriter.add_scalar queues one per metric (9 ms).
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer(stage).add_summary(Summary(value=points), tick)

    def rewind(self, stage: str, tick: int) -> None:
        """Drops lines of `stage` with tick >= `tick`: a resumed run writes them again.

        Source: ours: kill and resume must leave the log of an uninterrupted run.
        """
        if self._file is None:
            return
        kept = [r for r in read(self.path) if r["stage"] != stage or r["tick"] < tick]
        self._file.close()
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
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
        if self._file is not None:
            self._file.close()
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

    Raises MetricLogError if a line other than the last is damaged (the last may be torn by a
    kill).
    Source: ours: a log must be readable while it is written and after any crash.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not (isinstance(record, dict) and {"stage", "tick"} <= record.keys()):
                raise ValueError("no metrics")
            records.append(record)
        except ValueError as error:
            if number < len(lines):
                raise MetricLogError(
                    f"{path}, line {number} is no line of metrics; delete that line"
                ) from error
    return records
