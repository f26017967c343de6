"""The metric log: strict JSON lines, torn lines, rewinds, and events that TensorBoard can read."""

import json
import pathlib
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from s3ac_jax.report.lines import LinesError
from s3ac_jax.report.log import MetricLog, read

ROOT = pathlib.Path(__file__).parents[3]


def _reject(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_lines_are_strict_json_and_on_disk_at_once(tmp_path):
    log = MetricLog(tmp_path)
    log.write(3, {"reward": np.float32(0.5), "loss": float("nan"), "ev": -float("inf")}, "online")
    line = (tmp_path / "metrics.jsonl").read_text()
    log.close()
    assert json.loads(line, parse_constant=_reject) == {
        "stage": "online", "tick": 3, "reward": 0.5, "loss": None, "ev": None,
    }  # fmt: skip


def test_rewind_drops_only_that_stage_from_that_tick(tmp_path):
    log = MetricLog(tmp_path)
    for stage in ("value_pretraining", "online"):
        for tick in range(4):
            log.write(tick, {"x": tick}, stage)
    log.rewind("online", 2)
    log.write(2, {"x": 20.0}, "online")
    log.close()
    lines = [(m["stage"], m["tick"], m["x"]) for m in read(tmp_path / "metrics.jsonl")]
    assert lines[:4] == [("value_pretraining", t, t) for t in range(4)]
    assert lines[4:] == [("online", 0, 0), ("online", 1, 1), ("online", 2, 20.0)]
    assert [p.name for p in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"stage": "online", "ti', b'{"stage": "online"\xff'])
def test_a_torn_last_line_is_ignored_and_then_cut_off(tmp_path, torn):
    log = MetricLog(tmp_path)
    log.write(0, {"x": 1}, "online")
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + torn)
    assert [m["tick"] for m in read(path)] == [0]
    log = MetricLog(tmp_path)
    log.write(1, {"x": 2}, "online")
    log.rewind("online", 5)
    log.close()
    assert [m["tick"] for m in read(path)] == [0, 1]


def test_damage_elsewhere_names_the_line_and_no_file_is_no_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read(path) == []
    good = '{"stage": "online", "tick": 0}\n'
    for bad in ('{"ti\n', "5\n", '{"tick": 1}\n'):
        path.write_text(good + bad + good)
        with pytest.raises(LinesError, match="line 2 is no line of metrics; delete that line"):
            read(path)


WRITE_FOREVER = """
import sys
from s3ac_jax.report.log import MetricLog
log = MetricLog(sys.argv[1])
for tick in range(10**9):
    log.write(tick, {f"metric_{n}": tick for n in range(40)}, "online")
    print(tick, flush=True)
"""


def test_kill_loses_no_tick_that_was_written(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WRITE_FOREVER, str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child.stdout:
        while int(child.stdout.readline()) < 20:
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
    ticks = [m["tick"] for m in read(tmp_path / "metrics.jsonl")]
    assert ticks == list(range(len(ticks)))
    assert len(ticks) > 20
    log = MetricLog(tmp_path)
    log.rewind("online", 10)
    log.close()
    assert len(read(log.path)) == 10


def _events(folder):
    """All events in TFRecord framing: length, crc, bytes, crc."""
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        while raw:
            (length,) = struct.unpack("<Q", raw[:8])
            yield Event.FromString(raw[12 : 12 + length])
            raw = raw[16 + length :]


def test_tensorboard_events_hold_the_numbers_and_the_rewind(tmp_path):
    log = MetricLog(tmp_path)
    for tick in range(3):
        log.write(tick, {"held_out/accuracy": tick / 4}, "online")
    log.rewind("online", 1)
    log.write(1, {"held_out/accuracy": 1.0}, "online")
    log.close()
    events = list(_events(tmp_path / "tb" / "online"))
    values = [
        (e.step, v.tag, v.simple_value) for e in events if e.HasField("summary")
        for v in e.summary.value
    ]  # fmt: skip
    name = "held_out/accuracy"
    assert values == [(0, name, 0.0), (1, name, 0.25), (2, name, 0.5), (1, name, 1.0)]
    # TensorBoard drops what lies at or after a session start's step.
    starts = [e.step for e in events if e.HasField("session_log")]
    assert starts == [1]


def test_a_process_that_writes_nothing(tmp_path):
    written = MetricLog(tmp_path)
    written.write(0, {"loss": 1.0}, "online")
    silent = MetricLog(tmp_path, writes=False)
    silent.rewind("online", 0)
    silent.write(1, {"loss": 2.0}, "online")
    silent.close()
    written.close()
    assert silent.path == written.path
    assert read(silent.path) == [{"stage": "online", "tick": 0, "loss": 1.0}]
