"""launch/train.py as a program: exit codes, one line on stderr, the run that it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
APP = str(ROOT / "launch" / "train.py")
TINY = f"--config={ROOT / 'configs' / 'tiny.py'}"

# Runs the app with a stand-in for s3ac_jax.train.run, which heavier tests run for real.
STUBBED = f"""
import json, runpy, sys, types

def run(config, workdir, profile):
    kept = config.watch.trajectories
    print(json.dumps([config.name, config.seed, config.critic.lr, workdir, kept, profile]))

sys.modules["s3ac_jax.train.run"] = types.ModuleType("stub")
sys.modules["s3ac_jax.train.run"].run = run
runpy.run_path({APP!r}, run_name="__main__")
"""


def launch(cwd, *arguments, code=None):
    """Returns the finished app, started in `cwd`; code: Python to run in its place."""
    start = [APP] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, "-W", "error", *start, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def told(done, code):
    """Returns the one line on stderr of an app that ended with exit code `code`."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("error: ").rstrip("\n")


def test_a_run_gets_the_config_and_the_workdir_from_another_folder(tmp_path):
    done = launch(
        tmp_path, TINY, "--config.critic.lr=0.5", "--workdir=here", "--config.seed=3",
        "--dump_trajectories=5", "--profile", code=STUBBED,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == ["tiny", 3, 0.5, "here", 5, True]


def test_an_unknown_override_is_a_usage_error(tmp_path):
    done = launch(tmp_path, TINY, "--workdir=x", "--config.critic.lrr=1")
    assert told(done, 2) == (
        "--config.critic.lrr: config.critic has no key 'lrr'; did you mean lr?"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_cannot_run(tmp_path):
    done = launch(tmp_path, TINY, "--workdir=x", "--config.mesh.data=3")
    assert told(done, 1) == (
        "train.micro_rows (8) must be a multiple of mesh.data x mesh.fsdp x mesh.expert (3)"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_missing_flagfile(tmp_path):
    # ml_collections reads it while the flags are being defined.
    done = launch(tmp_path, TINY, "--workdir=x", "--flagfile=nowhere")
    assert told(done, 2) == (
        "Unable to open flagfile: [Errno 2] No such file or directory: 'nowhere'"
    )


def test_a_flagfile_holds_flags_and_overrides(tmp_path):
    (tmp_path / "flags").write_text(f"{TINY}\n--config.seeed=1\n")
    done = launch(tmp_path, "--workdir=x", "--flagfile=flags")
    assert told(done, 2) == "--config.seeed: config has no key 'seeed'; did you mean seed?"


@pytest.mark.parametrize("where", ["config", "command line"])
def test_traceback_shows_where_and_the_line_stays_last(tmp_path, where):
    override = "--config.seed=-1" if where == "config" else "--config.sed=1"
    done = launch(tmp_path, TINY, "--workdir=x", override, "--traceback")
    assert done.returncode == (1 if where == "config" else 2)
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_errors_of_the_run_are_one_line_and_a_bug_keeps_its_traceback(tmp_path):
    # One process for all: the app is run again and again, and its codes are gathered.
    code = f"""
import runpy, sys, types
from s3ac_jax.io import checkpoint, weights, workdir

kinds = checkpoint.CheckpointError, weights.WeightsError, workdir.WorkdirError, ValueError

def fail(error):
    raise error

errors = [kind("what\\nwhere") for kind in kinds]
stub = types.ModuleType("s3ac_jax.train.run")
stub.run = lambda config, workdir, profile: fail(errors.pop(0))
sys.modules["s3ac_jax.train.run"] = stub
for _ in range(3):
    try:
        runpy.run_path({APP!r}, run_name="__main__")
    except SystemExit as stop:
        print(stop.code)
runpy.run_path({APP!r}, run_name="__main__")
"""
    done = launch(tmp_path, TINY, "--workdir=x", code=code)
    assert done.stdout == "1\n1\n1\n"
    lines = done.stderr.splitlines()
    assert lines[:3] == ["error: what where"] * 3
    assert lines[3].startswith("Traceback")
    assert "ValueError: what" in lines
    assert done.returncode == 1


def test_help_needs_no_config_and_names_the_flags(tmp_path):
    done = launch(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("--config=configs/tiny.py", "--config:", "--workdir:", "--[no]traceback:"):
        assert text in done.stdout
