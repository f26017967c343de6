"""Killed, interrupted and resumed runs end as the run that nobody disturbed, bit for bit."""

import random
import shutil
import signal
import sys
import time

import numpy as np
import pytest

from s3ac_jax.config.boundary import ConfigError
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.checkpoint import CheckpointError, Checkpoints
from s3ac_jax.report import log
from s3ac_jax.train.build import build
from s3ac_jax.train.online import abstract_state
from s3ac_jax.train.run import run
from tests.integration import runs

TICKS = runs.SMALL["train.num_ticks"]
LINES = {"value_pretraining": 24, "online": TICKS + 1}  # one after the last tick


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The workdir of the run that went through at once. Not to be written to."""
    with runs.only_once(tmp_path_factory, "undisturbed") as (folder, mine):
        if mine:
            folder.mkdir()
            code, _, err = runs.launch(folder / "run")
            assert (code, err) == (0, "")
    return folder / "run"


@pytest.fixture
def copy(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    return tmp_path / "run"


def arrays(workdir, step=TICKS):
    """Every array of a checkpoint by name."""
    parts = build(runs.small_config())
    state, note = Checkpoints(workdir / "checkpoints").restore(step, abstract_state(parts))
    assert note == {"tick": step}
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}


def saved(workdir, step=TICKS):
    """The same as shape, dtype and bytes (a NaN equals itself)."""
    leaves = arrays(workdir, step)
    return {name: (leaf.shape, leaf.dtype, leaf.tobytes()) for name, leaf in leaves.items()}


def unclocked(path):
    """The text of a JSON file without the one line that a clock writes."""
    lines = path.read_text().splitlines()
    return [line for line in lines if not line.strip().startswith('"seconds": ')]


def assert_same_run(workdir, undisturbed):
    want, got = saved(undisturbed), saved(workdir)
    # Weights, both moments and the step of the schedule, history, cursor: nothing is left out.
    for piece in ("trainable", "/mu/", "/nu/", "/count", "stats/attempts", "cursor/offset", "tick"):
        assert any(piece in name for name in want), piece
    assert want.keys() == got.keys()
    assert [name for name in want if want[name] != got[name]] == []
    for stage, number in LINES.items():
        lines = runs.metric_lines(workdir, stage)
        assert lines == runs.metric_lines(undisturbed, stage)
        assert len(lines) == number
    for name in ("responses.jsonl", "trajectories.jsonl"):
        assert (workdir / name).read_text() == (undisturbed / name).read_text()
    for name in ("results.json", "config.json", "stage_value_pretraining.json"):
        got, want = (unclocked(folder / name) for folder in (workdir, undisturbed))
        assert got == want


def wait_until(reached, process):
    """Looks every millisecond, so that the moment is near what was waited for."""
    end = time.monotonic() + 240
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never came so far"
        time.sleep(0.001)


def lines(workdir, stage):
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(f'"stage": "{stage}"'.encode()) if path.exists() else 0


def saving(workdir, step):
    """Whether the checkpoint of `step` is being written: begun, and not yet checked in."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return (
        any(name.split(".")[0] == str(step) for name in names)
        and not (folder / str(step) / "files.json").exists()
    )


def test_killed_again_and_again(undisturbed, tmp_path):
    workdir, rng = tmp_path / "run", random.Random(0)
    moments = (
        (lambda: lines(workdir, "value_pretraining") >= 3, 0.02),
        (lambda: saving(workdir, 0), 0.05),  # the first checkpoint: there is no other
        (lambda: saving(workdir, 4), 0.05),
        (lambda: lines(workdir, "online") >= 5, 0.2),
    )
    for reached, most in moments:
        process = runs.start(workdir)
        wait_until(reached, process)
        time.sleep(rng.uniform(0, most))
        process.kill()
        code, _, err = runs.finish(process)
        assert (code, err) == (-signal.SIGKILL, "")
    code, out, err = runs.launch(workdir)
    assert (code, err) == (0, "")
    assert "resumed at tick" in out
    assert_same_run(workdir, undisturbed)


def test_asked_to_stop(undisturbed, tmp_path):
    workdir = tmp_path / "run"
    again = " ".join(runs.command(workdir)[3:])

    process = runs.start(workdir)
    wait_until(lambda: lines(workdir, "value_pretraining") >= 1, process)
    process.send_signal(signal.SIGTERM)
    code, _, err = runs.finish(process)
    assert code == 130
    assert err.startswith("stopped during value_pretraining, which begins anew with: XLA_FLAGS=")
    assert err.endswith(f"{sys.executable} {again}\n")
    assert err.count("\n") == 1

    process = runs.start(workdir)
    wait_until(lambda: lines(workdir, "online") >= 1, process)
    process.send_signal(signal.SIGINT)
    code, _, err = runs.finish(process)
    tick = Checkpoints(workdir / "checkpoints").latest()
    assert code == 130
    assert 1 < tick < TICKS
    assert err.startswith(f"stopped; tick {tick} is saved, go on with: XLA_FLAGS=")
    assert err.endswith(f"{sys.executable} {again}\n")
    assert err.count("\n") == 1

    code, out, err = runs.launch(workdir)
    assert (code, err) == (0, "")
    assert f"resumed at tick {tick}" in out
    assert_same_run(workdir, undisturbed)


def test_other_devices_go_on_with_the_run(undisturbed, copy):
    shutil.rmtree(copy / "checkpoints" / str(TICKS))
    (copy / "results.json").unlink()
    changes = {
        "mesh.fsdp": 2, "train.offload": "idle", "train.micro_rows": 4, "rollout.slots": 32,
    }  # fmt: skip
    code, out, err = runs.launch(copy, changes)
    assert (code, err) == (0, "")
    assert f"resumed at tick {TICKS - 2}" in out
    want, got = arrays(undisturbed), arrays(copy)
    assert want.keys() == got.keys()
    for name, leaf in want.items():
        np.testing.assert_allclose(got[name], leaf, rtol=0, atol=1e-5, err_msg=name)
    # The same prompts and responses; the last line is the evaluation after the last tick.
    ticks, expected = (log.read(folder / "metrics.jsonl")[-3:-1] for folder in (copy, undisturbed))
    for one, other in zip(ticks, expected, strict=True):
        for name in ("tick", "reward", "response_tokens", "candidates", "value_loss", "entropy"):
            assert one[name] == pytest.approx(other[name], rel=0, abs=1e-5), name


def test_another_config_is_refused_and_nothing_touched(copy):
    before = runs.digests(copy)
    code, _, err = runs.launch(copy, {"critic.lr": 0.5, "train.num_ticks": TICKS + 1})
    assert code == 1
    assert err == (
        f"error: {copy} was made with another config: critic.lr was "
        f"{runs.small_config().critic.lr}, now 0.5; use another --workdir or the same config\n"
    )
    assert runs.digests(copy) == before


def test_half_written_is_passed_over_and_damage_is_told(copy):
    folder = copy / "checkpoints"
    shutil.copytree(folder / str(TICKS), folder / str(TICKS + 1))
    (folder / str(TICKS + 1) / "commit_success.txt").unlink()
    shutil.copytree(folder / str(TICKS), folder / f"{TICKS + 2}.orbax-checkpoint-tmp")
    data = max((folder / str(TICKS)).rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    code, _, err = runs.launch(copy)
    assert code == 1
    assert err.startswith(f"error: {folder / str(TICKS)} is damaged (")
    assert f"deleting that folder falls back to step {TICKS - 2}" in err
    assert err.count("\n") == 1
    # What it says works, and the run is the same in the end.
    shutil.rmtree(folder / str(TICKS))
    assert run(runs.small_config(), copy)["trained"]
    assert Checkpoints(folder).steps() == [TICKS - 2, TICKS]


def test_a_checkpoint_without_the_moments_is_refused(copy):
    checkpoints = Checkpoints(copy / "checkpoints")
    abstract = abstract_state(build(runs.small_config()))
    state, note = checkpoints.restore(TICKS, abstract)
    object.__setattr__(state.actor, "opt_state", ())
    checkpoints.save(TICKS + 2, state, note)
    checkpoints.close()
    with pytest.raises(CheckpointError, match=r"^actor/opt_state/\S*: missing in the checkpoint"):
        run(runs.small_config({"train.num_ticks": TICKS + 2}), copy)


def test_a_run_that_is_past_the_last_tick_is_refused(copy):
    with pytest.raises(ConfigError, match=f"num_ticks is 2, but .* already at tick {TICKS}"):
        run(runs.small_config({"train.num_ticks": 2}), copy)


# The app, whose run is ended by a second Ctrl-C (or by one before the first tick).
HASTY = f"""
import runpy, sys, types

def run(config, workdir, *, profile):
    raise KeyboardInterrupt

sys.modules["s3ac_jax.train.run"] = types.ModuleType("stub")
sys.modules["s3ac_jax.train.run"].run = run
runpy.run_path({runs.APP!r}, run_name="__main__")
"""


def test_a_second_ctrl_c_is_one_line_too(tmp_path):
    code, out, err = runs.launch(tmp_path / "run", code=HASTY)
    assert (code, out) == (130, "")
    assert err == "stopped at once; the same command goes on from what is saved\n"
