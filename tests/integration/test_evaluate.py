"""launch/evaluate.py as a program: on a run, killed and gone on with, by servers, and refused."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from s3ac_jax.report.records import read
from tests.integration import runs
from tests.integration.servers import TINY, overrides, served

APP = str(runs.ROOT / "launch" / "evaluate.py")
CONFIG = str(runs.ROOT / "configs" / "evaluate.py")
SMALL = ["--config.sampler.slots=16", "--config.sampler.insert_batch=8"]


def start(*arguments, preset="held_out"):
    return subprocess.Popen(
        [sys.executable, "-W", "error", APP, f"--config={CONFIG}:{preset}", *SMALL, *arguments],
        env={**os.environ, "PYTHONPATH": str(runs.ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def evaluate(*arguments, preset="held_out"):
    """(exit code, stdout, stderr)"""
    return runs.finish(start(*arguments, preset=preset))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two ticks."""
    with runs.only_once(tmp_path_factory, "evaluated") as (folder, new):
        if new:
            changes = {"train.num_ticks": 2, "value_pretraining.epochs": 1}
            folder.mkdir()
            code, _, error = runs.launch(folder / "run", changes)
            assert code == 0, error
    return folder / "run"


@pytest.fixture(scope="module")
def whole(run):
    """Its evaluation, uninterrupted."""
    workdir = run.parent / "whole"
    code, out, error = evaluate(f"--checkpoint={run}", f"--workdir={workdir}")
    assert (code, error) == (0, "")
    return workdir, out


def test_a_run_is_evaluated_on_its_own_held_out_problems(run, whole):
    workdir, out = whole
    header, records = read(workdir / "held_out.jsonl")
    assert (header["version"], header["problems"], len(records)) == (2, 32, 128)
    found = json.loads((workdir / "results.json").read_text())
    right = sum(record["correct"] for record in records) / len(records)
    assert found["suites"]["held_out"]["avg"]["value"] == pytest.approx(right)
    assert found["weights"] == header["weights"]
    assert f"{100 * right:.1f}" in out.splitlines()[-2]
    assert (workdir / "table.txt").read_text().splitlines()[2].split()[3] == f"{100 * right:.1f}"
    assert (workdir / "evaluation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_ended_early_the_same_command_gives_the_same(run, whole, tmp_path, how):
    arguments = f"--checkpoint={run}", f"--workdir={tmp_path}", "--config.chunk_rows=4"
    path, process = tmp_path / "held_out.jsonl", start(*arguments)
    end = time.monotonic() + 120
    while not path.exists() or len(path.read_bytes().splitlines()) < 20:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(how)
    code, _, error = runs.finish(process)
    if how is signal.SIGTERM:
        assert code == 130
        assert "responses of held_out are recorded, go on with: " in error
    there = len(read(path)[1])
    assert there < 128
    code, out, error = evaluate(*arguments)
    assert (code, error) == (0, "")
    assert f"[held_out {there}/128]" in out
    for name in ("held_out.jsonl", "results.json", "table.txt"):
        assert (tmp_path / name).read_bytes() == (whole[0] / name).read_bytes()


def test_servers_give_what_the_run_gives(run, whole, tmp_path):
    pytest.importorskip("grpc")
    pytest.importorskip("aiohttp")
    with served(f"--config={runs.TINY}", f"--checkpoint={run}", *overrides(TINY)) as server:
        for name, address in (
            ("grpc", f"127.0.0.1:{server.port}"),
            ("http", f"http://127.0.0.1:{server.http_port}/v1"),
        ):
            code, _, error = evaluate(
                f"--checkpoint={run}", f"--address={address}", f"--workdir={tmp_path / name}"
            )
            assert (code, error) == (0, "")
            found, there = (read(one / "held_out.jsonl") for one in (tmp_path / name, whole[0]))
            # The weights' fingerprint and version too.
            assert found == there


def test_without_a_workdir_it_lies_in_the_run(run, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "a", "prompt": "1+1=", "answer": "2"}\n')
    mine = [f"--config.suites.mine.source.path={path}", "--config.suites.mine.instruction="]
    code, _, error = evaluate(
        f"--checkpoint={run}", *mine, "--config.suites.mine.max_response_tokens=8", preset="mine"
    )
    # The alphabet of the run has no line break, and says so.
    assert code == 1
    assert error.startswith("error: mine, a: cannot encode '\\n' at place 4")
    code, _, error = evaluate(f"--checkpoint={run}", "--config.suites.held_out.samples=1")
    assert (code, error) == (0, "")
    assert (run / "evaluated" / "tick_000002" / "table.txt").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ([], 2, "error: give one of --checkpoint=RUN and --hf=FOLDER"),
        (["--hf=a", "--checkpoint=b"], 2, "error: give one of --checkpoint=RUN and --hf=FOLDER"),
        (["--hf=a"], 2, "error: --workdir is required with --hf and --address"),
        (["--checkpoint=nowhere"], 1, "error: nowhere/config.json can't be read"),
        (["--hf=nowhere", "--workdir=w"], 1, "error: "),
        (["--config.suites.held_out.sample=3"], 2, "error: --config.suites.held_out.sample: con"),
        (["--config.suites.held_out.samples=0"], 1, "error: suites.held_out"),
        (["--config.graders=0", "--hf=a"], 1, "error: config.graders must be at least 1"),
    ],
)
def test_what_can_not_be_evaluated_is_one_line(arguments, code, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, _, error = evaluate(*arguments)
    assert found == code
    assert error.startswith(line)
    assert error.count("\n") == 1


def test_another_policy_is_refused_in_the_same_folder(run, whole, tmp_path):
    path = whole[0] / "held_out.jsonl"
    header, rest = path.read_bytes().split(b"\n", 1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "held_out.jsonl").write_bytes(
        json.dumps(json.loads(header) | {"weights": "0badcafe"}).encode() + b"\n" + rest
    )
    code, _, error = evaluate(f"--checkpoint={run}", f"--workdir={other}")
    assert code == 1
    assert "held_out.jsonl holds answers of weights 0badcafe, these are" in error
    code, _, error = evaluate(
        f"--checkpoint={run}", f"--workdir={whole[0]}", "--config.seed=1"
    )  # fmt: skip
    assert code == 1
    assert "was made with another config: seed was 0, now 1" in error


def test_rounded_weights_are_another_policy(run, whole):
    changes = "--config.suites.held_out.samples=5", "--config.sampler.weights=int8"
    code, _, error = evaluate(f"--checkpoint={run}", f"--workdir={whole[0]}", *changes)
    assert code == 1
    assert 'another config: sampler.weights was "model", now "int8"' in error


def test_a_cache_that_no_memory_holds_is_one_line(run, tmp_path):
    code, _, error = evaluate(
        f"--checkpoint={run}", f"--workdir={tmp_path}",
        "--config.suites.held_out.max_response_tokens=100000000",
    )  # fmt: skip
    assert code == 1
    assert "error: there is no memory for sampler.slots (16) x 1000000" in error
    assert "Traceback" not in error
