"""Scripts and commands for several hosts: bash reads them, and what they call exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
TOLD = [*SCRIPTS, LAUNCH / "gke_jobset.yaml", ROOT / "docs" / "hosts.md", ROOT / "BUILD.md"]


def test_there_are_scripts():
    assert [path.name for path in SCRIPTS] == ["gpu_node.sh", "slurm.sbatch", "tpu_pod.sh"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_them(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch"


@pytest.fixture(scope="module")
def flags():
    """Flags of launch/train.py, as its --help has them."""
    done = subprocess.run(
        [sys.executable, LAUNCH / "train.py", "--help"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return set(re.findall(r"^  --(?:\[no\])?(\w+)", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("path", TOLD, ids=lambda path: path.name)
def test_flags_and_files_that_they_name_exist(path, flags):
    text = path.read_text().replace("\\\n", " ")
    assert {"distributed", "coordinator", "num_processes", "process_id"} <= flags
    for line in text.splitlines():
        named = re.search(r"(?:train\.py|\$flags|join=|gpu_node\.sh|pod\.sh run|sbatch) .*", line)
        if named:
            told = set(re.findall(r"--(\w+)", named[0])) - {"config"}
            assert told <= flags | {"n"}, line
        for file in re.findall(r"(?<![\w/])(?:launch|docs|configs)/\w+\.\w+", line):
            assert (ROOT / file).exists(), line


def run_script(name, arguments, tmp_path, **told):
    """The script with stand-ins, which print how they are called, for what it calls."""
    for program in ("gcloud", "python"):
        stand_in = tmp_path / program
        stand_in.write_text(f'#!/bin/sh\nprintf "%s|" {program} "$@"\n')
        stand_in.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | told
    done = subprocess.run(
        ["bash", LAUNCH / name, *arguments], capture_output=True, text=True, env=env
    )
    return done.returncode, done.stdout, done.stderr


def test_a_gpu_node_joins_the_others(tmp_path):
    python = {"PYTHON": str(tmp_path / "python")}
    wanted = ["--config=c.py", "--workdir=a b"]
    told = run_script("gpu_node.sh", wanted, tmp_path, **python)
    assert told == (0, "python|launch/train.py|--config=c.py|--workdir=a b|", "")
    several = {"NODES": "2", "NODE": "1", "FIRST_NODE": "gpu-0:8476"}
    _, out, _ = run_script("gpu_node.sh", wanted, tmp_path, **python, **several)
    assert out == (
        "python|launch/train.py|--config=c.py|--workdir=a b|--coordinator=gpu-0:8476|"
        "--num_processes=2|--process_id=1|"
    )
    code, _, err = run_script("gpu_node.sh", wanted, tmp_path, **python, NODES="2")
    assert code
    assert "FIRST_NODE=HOST:PORT of node 0" in err


def test_a_tpu_slice_is_told_on_all_hosts(tmp_path):
    slice_of = {"TPU": "my-slice", "ZONE": "here"}
    _, out, err = run_script(
        "tpu_pod.sh", ["run", "--config=c.py", "--config.name=a b"], tmp_path, **slice_of
    )
    assert err == ""
    assert out.startswith("gcloud|compute|tpus|tpu-vm|ssh|my-slice|--zone=here|--worker=all|")
    assert r"launch/train.py --config=c.py --config.name=a\ b  --distributed" in out
    _, out, _ = run_script("tpu_pod.sh", ["stop"], tmp_path, **slice_of)
    assert "--worker=0|" in out
    assert "kill -TERM $(cat train.pid)" in out
    code, _, err = run_script("tpu_pod.sh", [], tmp_path, **slice_of)
    assert code == 2
    assert err.startswith("launch/tpu_pod.sh setup SHARE | run FLAGS")
