"""launch/study.py as its user sees it: a grid, killed and continued, told in one tidy file."""

import csv
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from s3ac_jax.report import study_data
from tests.integration import runs

ROOT = pathlib.Path(__file__).resolve().parents[2]
APP = ROOT / "launch" / "study.py"

# A study of three arms over two seeds, each run as small as those of `runs`.
CONFIG = """
import runpy
from ml_collections import config_dict
from tests.integration import runs

def run(preset, changes=None):
    config = runs.tiny(preset)
    known = {name: value for name, value in runs.SMALL.items() if name != "train.num_ticks"}
    config.update_from_flattened_dict(known | (changes or {}))
    return {"run": config}

def get_config():
    group = {"recipe.responses_per_prompt": 4}
    return config_dict.ConfigDict({
        "name": "small", "workers": 2, "seeds": 2, "first_seed": 3,
        "common": {"train": {"num_ticks": 3}, "reference": {"samples": 2},
                   "cadence": {"evaluate_every": 2, "save_every": 1}},
        "arms": {"a": run("s3ac_single"), "b": run("grpo", group),
                 "c": run("reinforce_pp") | {"seeds": 1}},
        "questions": (("a", "b", "held_out_accuracy", 0, 3, "is a critic better"),),
        "figures": (("both", ("a", "b")), ("cheap", ("c",))),
        "cost_baseline": "b",
    })
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "study.py"
    path.write_text(CONFIG)
    return path


def start(config, workdir, *flags):
    return subprocess.Popen(
        [
            sys.executable, "-W", "error", str(APP), f"--config={config}", f"--workdir={workdir}",
            *flags,
        ],
        cwd=workdir.parent, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def outcome(workdir, name="results.csv"):
    """results.csv without what depends on the clock."""
    with (workdir / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    timed = ("seconds", "offline_seconds")
    return [
        {k: v for k, v in row.items() if k not in timed and not k.startswith("time_")}
        for row in rows
    ]


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The study in one process, never interrupted."""
    workdir = tmp_path_factory.mktemp("whole") / "study"
    done = start(config, workdir, "--config.workers=1")
    out, err = done.communicate(timeout=400)
    assert done.returncode == 0, err
    # Tests that run fewer seeds in this folder write results.csv anew.
    shutil.copyfile(workdir / "results.csv", workdir / "first.csv")
    return workdir, out


def test_one_row_per_arm_seed_and_tick(whole):
    workdir, out = whole
    rows = outcome(workdir, "first.csv")
    cells = [(row["arm"], row["seed"], row["tick"]) for row in rows]
    want = [(arm, seed) for arm in "ab" for seed in "34"] + [("c", "3")]
    assert cells == [(arm, seed, tick) for arm, seed in want for tick in "0123"]
    assert {row["family"] for row in rows if row["arm"] == "b"} == {"group"}
    results = study_data.load(workdir / "results.csv")
    ticks, accuracy = results.curve("a", 3, "held_out_accuracy")
    assert list(ticks) == [0, 2, 3]
    assert ((accuracy >= 0) & (accuracy <= 1)).all()
    # The value pretraining of a seed is work before the first tick; REINFORCE++ has none.
    assert results.offline_seconds("a")[3] > 0
    assert results.offline_seconds("c") == {3: 0.0}
    assert "5/5" in out
    for name in ("study.md", "both.png", "both_time.png", "cheap.png"):
        assert (workdir / name).stat().st_size > 100
    assert "is a critic better" in (workdir / "study.md").read_text()


def test_a_cell_is_what_train_makes(whole, config):
    workdir, _ = whole
    alone = workdir.parent / "alone"
    changes = {
        "seed": 3, "train.num_ticks": 3, "reference.samples": 2, "cadence.evaluate_every": 2,
        "cadence.save_every": 1,
    }  # fmt: skip
    code, _, err = runs.launch(alone, changes)
    assert code == 0, err
    cell = workdir / "cells" / "a" / "seed_3"
    assert runs.metric_lines(cell, "online") == runs.metric_lines(alone, "online")


def test_killed_and_continued_is_the_same_study(whole, config, tmp_path):
    workdir = tmp_path / "study"
    process = start(config, workdir)
    wait_for(lambda: list(workdir.glob("cells/*/*/metrics.jsonl")), process)
    # The parent alone: its workers must not outlive it.
    group = os.getpgid(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not alive(group))
    again = start(config, workdir)
    _, err = again.communicate(timeout=400)
    assert again.returncode == 0, err
    assert outcome(workdir) == outcome(whole[0], "first.csv")


def test_ctrl_c_saves_and_says_how_to_go_on(config, tmp_path):
    workdir = tmp_path / "study"
    process = start(config, workdir, "--config.common.train.num_ticks=500")
    wait_for(lambda: list(workdir.glob("cells/*/*/checkpoints/*")), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.startswith("stopped; go on with: ")
    assert len(err.strip().splitlines()) == 1


def test_a_finished_cell_of_another_config_is_not_taken(whole, config):
    workdir, _ = whole
    done = start(config, workdir, "--config.arms.c.run.actor.lr=0.001")
    _, err = done.communicate(timeout=120)
    assert done.returncode == 1
    assert "was made with another config: actor.lr was" in err
    assert len(err.strip().splitlines()) == 1


def test_more_seeds_keep_what_is_done(whole, config):
    workdir, _ = whole
    before = {path: path.stat().st_mtime_ns for path in workdir.glob("cells/*/*/metrics.jsonl")}
    done = start(config, workdir, "--config.workers=1", "--config.seeds=1")
    out, err = done.communicate(timeout=400)
    assert done.returncode == 0, err
    assert "3 of 3 runs are done already" in out
    assert before == {
        path: path.stat().st_mtime_ns for path in workdir.glob("cells/*/*/metrics.jsonl")
    }


def test_damage_is_told_and_mended(whole, config, tmp_path):
    workdir = tmp_path / "study"
    shutil.copytree(whole[0], workdir)
    one = ("--config.workers=1",)
    # A finished cell without its metrics must not shorten everybody's table.
    metrics = workdir / "cells" / "b" / "seed_4" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    assert told(config, workdir, *one).startswith(f"error: {metrics} lacks ticks of a finished run")
    shutil.rmtree(metrics.parent)
    # A damaged file that all cells share names itself, not the cell that meets it.
    (reference,) = workdir.glob("shared/reference_*/reference.npy")
    reference.write_bytes(reference.read_bytes()[:-8])
    message = told(config, workdir, *one)
    assert f"{reference} can't be read; delete {reference.parent} and the same" in message
    shutil.rmtree(reference.parent)
    done = start(config, workdir, *one)
    _, err = done.communicate(timeout=400)
    assert done.returncode == 0, err
    assert outcome(workdir) == outcome(whole[0], "first.csv")


def told(config, workdir, *flags):
    """What a study that can't go on says: one line."""
    done = start(config, workdir, *flags)
    _, err = done.communicate(timeout=400)
    assert done.returncode == 1
    assert len(err.strip().splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--config.seeds=0", "seeds must be an int of at least 1, got 0"),
        ("--config.workers=0", "workers must be at least 1, got 0"),
        ("--config.questions=(('a','b','acuracy',0,3,'q'),)", "questions[0]: no metric 'acuracy'"),
        ("--config.questions=(('a','b','entropy',3,0,'q'),)", "0 <= first <= last, got (3, 0)"),
        ("--config.figures=(('a/b',('a',)),)", "'a/b': names of arms and figures have"),
        ("--config.cost_baseline=bb", "cost_baseline: no arm 'bb'"),
        ("--config.common.train.num_ticks=0", "arms.a.run: train.num_ticks must be"),
        ("--config.common.train.num_tick=1", "has no key 'num_tick'; did you mean num_ticks?"),
    ],
)
def test_bad_input_is_one_line(config, tmp_path, flag, says):
    done = start(config, tmp_path / "study", flag)
    _, err = done.communicate(timeout=60)
    assert done.returncode in (1, 2)
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "study").exists()


def wait_for(condition, process=None):
    for _ in range(2400):
        if condition():
            return
        assert process is None or process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise AssertionError("it did not come about within two minutes")


def alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
