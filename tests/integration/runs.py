"""Small whole runs: one set of overrides of configs/tiny.py, in this process or through the app."""

import contextlib
import fcntl
import hashlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.report import log
from s3ac_jax.train import policies

ROOT = Path(__file__).resolve().parents[2]
APP = str(ROOT / "launch" / "train.py")
TINY = ROOT / "configs" / "tiny.py"

# The network is the one that the embedded policies have; all else is as small as it can be. All
# runs share these shapes, and so the cache of compilations.
SMALL = {
    "task.num_train": 64,
    "task.num_held_out": 32,
    "rollout.slots": 16,
    "rollout.insert_batch": 8,
    "value_pretraining.early_prompts": 16,
    "value_pretraining.middle_prompts": 16,
    "value_pretraining.late_prompts": 32,
    "value_pretraining.batch_responses": 16,
    "value_pretraining.epochs": 6,  # long enough to be met by a signal
    "value_pretraining.diagnose_steps": 1,
    "train.num_ticks": 8,
    "train.batch_prompts": 8,
    "train.micro_rows": 2,
    "train.minibatches": 2,
    "scheduler.candidates": 16,
    "cadence.save_every": 2,
    "cadence.evaluate_every": 4,
}


def tiny(preset="s3ac_single"):
    """configs/tiny.py as it is."""
    return runpy.run_path(str(TINY))["get_config"](preset)


def small_config(changes=None, preset="s3ac_single"):
    """The RunConfig of SMALL; changes: by dotted name."""
    config = tiny(preset)
    config.update_from_flattened_dict(SMALL | (changes or {}))
    return from_config_dict(config)


def command(workdir, changes=None, code=None):
    """The command line of the run of SMALL; code: Python in the place of the app."""
    app = [APP] if code is None else ["-c", code]
    flags = [f"--config.{name}={value}" for name, value in (SMALL | (changes or {})).items()]
    return [
        sys.executable, "-W", "error", *app, f"--config={TINY}", *flags, f"--workdir={workdir}"
    ]  # fmt: skip


def start(workdir, changes=None, code=None):
    """The app as a process of its own, its output kept."""
    return subprocess.Popen(
        command(workdir, changes, code),
        cwd=workdir.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """(exit code, stdout, stderr) of the app when it has ended."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def launch(workdir, changes=None, code=None):
    """(exit code, stdout, stderr) of the app."""
    return finish(start(workdir, changes, code))


@contextlib.contextmanager
def only_once(tmp_path_factory, name):
    """A folder shared by all workers of this session, and whether this worker has to fill it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (base / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = base / name
        yield folder, not folder.exists()


def digests(folder):
    """What every file below `folder` holds; the empty lock of the run aside."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def metric_lines(workdir, stage):
    """Lines of metrics.jsonl as text, without what depends on the clock and the process."""
    timed = ("time/", "tokens_per_second", "memory/")
    lines = [line for line in log.read(workdir / "metrics.jsonl") if line["stage"] == stage]
    return [
        json.dumps({name: value for name, value in line.items() if not name.startswith(timed)})
        for line in lines
    ]


def late_policy(parts):
    """The embedded base policy."""
    folder = policies.embedded_folder()
    return policies.load_policies(folder, parts.actor.network, ("late",))["late"]
