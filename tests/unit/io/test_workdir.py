"""The run's folder: claims, locks between processes, stage markers."""

import json
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from s3ac_jax.io import workdir as workdir_module
from s3ac_jax.io.workdir import Workdir, WorkdirError

ROOT = pathlib.Path(__file__).parents[3]
CONFIG = {"actor": {"lr": 0.0003, "betas": (0.9, 0.95)}, "ticks": 10, "eval": {"every": 5}}


@pytest.fixture
def folder(tmp_path):
    workdir = Workdir(tmp_path / "runs" / "x")
    workdir.claim(CONFIG, set())
    workdir.close()
    return tmp_path / "runs" / "x"


def test_claim_writes_config_and_versions(folder):
    assert json.loads((folder / "config.json").read_text())["actor"]["betas"] == [0.9, 0.95]
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["jax"] == jax.__version__
    assert versions["platform"] == "cpu"
    assert set(versions["git"]) == {"commit", "dirty"}


def test_the_same_config_and_free_keys_may_claim_again(folder):
    before = (folder / "config.json").read_bytes()
    workdir = Workdir(folder)
    workdir.claim(CONFIG, set())
    workdir.claim({**CONFIG, "ticks": 20, "eval": {"every": 2}}, {"ticks", "eval"})
    assert (folder / "config.json").read_bytes() == before
    workdir.close()


def test_another_config_names_the_first_difference(folder):
    workdir = Workdir(folder)
    other = {"actor": {"lr": 0.001, "betas": (0.9, 0.95), "new": 1}, "eval": {"every": 5}}
    with pytest.raises(WorkdirError) as caught:
        workdir.claim(other, set())
    assert str(caught.value) == (
        f"{folder} was made with another config: actor.lr was 0.0003, now 0.001 (and 2 more); "
        "use another --workdir or the same config"
    )
    with pytest.raises(WorkdirError, match="ticks was 10, now absent; use"):
        workdir.claim({k: v for k, v in CONFIG.items() if k != "ticks"}, set())
    workdir.close()


@pytest.mark.parametrize("content", [b'{"actor": ', b"\xff\xfe", b"[1]"])
def test_a_config_that_is_no_json_object(folder, content):
    (folder / "config.json").write_bytes(content)
    workdir = Workdir(folder)
    with pytest.raises(WorkdirError, match=r"config\.json .*use another --workdir") as caught:
        workdir.claim(CONFIG, set())
    assert "\n" not in str(caught.value)
    workdir.close()


HOLD = """
import sys, time
from s3ac_jax.io.workdir import Workdir
workdir = Workdir(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_one_process_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with child.stdout:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(WorkdirError, match="is in use by another run"):
            Workdir(tmp_path)
        child.send_signal(signal.SIGKILL)
        child.wait()
    Workdir(tmp_path).close()


def test_a_folder_that_is_a_file_or_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(WorkdirError, match="is or lies below a file"):
            Workdir(path)
    with pytest.raises(WorkdirError, match="can't write to --workdir /proc"):
        Workdir("/proc/s3ac")


def test_stages_are_marked_whole_or_not_at_all(folder, monkeypatch):
    workdir = Workdir(folder)
    assert not workdir.stage_done("diagnose")
    with pytest.raises(WorkdirError, match="stage diagnose isn't done"):
        workdir.stage_facts("diagnose")
    with monkeypatch.context() as patched:
        patched.setattr(workdir_module.os, "fsync", _fail)
        with pytest.raises(WorkdirError, match="can't write"):
            workdir.mark_stage("diagnose", {"accuracy": 0.25})
    assert not workdir.stage_done("diagnose")
    workdir.mark_stage("diagnose", {"accuracy": 0.25})
    workdir.close()
    again = Workdir(folder)
    assert again.stage_facts("diagnose") == {"accuracy": 0.25}
    again.close()


def _fail(_):
    raise OSError(28, "No space left on device")


def test_outside_a_checkout_the_commit_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(workdir_module, "__file__", str(tmp_path / "workdir.py"))
    assert workdir_module.versions()["git"] == {"commit": "unknown", "dirty": None}


def test_in_a_checkout_a_changed_file_makes_it_dirty(monkeypatch, tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "workdir.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "x")
    monkeypatch.setattr(workdir_module, "__file__", str(tmp_path / "workdir.py"))
    facts = workdir_module.versions()["git"]
    assert len(facts["commit"]) == 40
    assert facts["dirty"] is False
    (tmp_path / "workdir.py").write_text("2")
    assert workdir_module.versions()["git"]["dirty"] is True


def test_a_folder_that_lost_its_config_is_refused(folder):
    workdir = Workdir(folder)
    workdir.mark_stage("online", {"ticks": 10})
    (folder / "config.json").unlink()
    with pytest.raises(WorkdirError, match=r"no config.json but holds stage_online.json"):
        workdir.claim(CONFIG, set())
    workdir.close()
    assert not (folder / "config.json").exists()


def test_a_damaged_marker_says_that_deleting_it_helps(folder):
    workdir = Workdir(folder)
    for text, what in (("{}", "lacks 'rates'"), ("{", "can't be read")):
        (folder / "stage_x.json").write_text(text)
        with pytest.raises(WorkdirError, match=f"{what}; delete it to run that stage again"):
            workdir.stage_facts("x", "rates")
    workdir.close()


def test_where_nothing_was_made_another_config_may_begin(folder):
    other = {**CONFIG, "ticks": 20}
    workdir = Workdir(folder)
    workdir.claim(other, set(), anew=True)
    assert json.loads((folder / "config.json").read_text())["ticks"] == 20
    # The folder of something else, or of a run with a stage behind it, is not.
    for claimed in ({"ticks": 20}, {**CONFIG, "more": 1}):
        with pytest.raises(WorkdirError, match="made with another config"):
            workdir.claim(claimed, set(), anew=True)
    workdir.mark_stage("task", {})
    with pytest.raises(WorkdirError, match="ticks was 20, now 10"):
        workdir.claim(CONFIG, set(), anew=True)
    workdir.close()


def test_a_folder_that_the_hosts_do_not_share(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_module.hosts, "count", lambda: 2)
    monkeypatch.setattr(workdir_module.hosts, "index", lambda: 1)
    monkeypatch.setattr(
        workdir_module.hosts, "from_first", lambda channel, make: "what process 0 signs"
    )
    monkeypatch.setattr(workdir_module, "_SHOWN_WITHIN_SECONDS", 0.2)
    with pytest.raises(WorkdirError, match="of process 1 is not the folder that process 0 writes"):
        Workdir(tmp_path)
    (tmp_path / ".lock").write_text("what process 0 signs")
    Workdir(tmp_path).close()
