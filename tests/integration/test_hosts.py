"""Several processes are one run: same decisions, one set of files, and they end together."""

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.report import log
from tests.integration import hosts_worker as worker
from tests.integration import runs

ROOT = Path(__file__).resolve().parents[2]
WORKER = str(Path(worker.__file__))
# Seconds in which a lost process ends the others here; two minutes is what is promised.
HEARTBEAT, PROMISED = 10, 120


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def start(commands, devices, tmp_path, told=()):
    """Processes with so many devices each, their output in files. told: to each, by environment."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        # Of repeated flags the last one counts.
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }
    tmp_path.mkdir(exist_ok=True)
    processes = []
    for number, command in enumerate(commands):
        with (
            (tmp_path / f"out_{number}").open("w") as out,
            (tmp_path / f"err_{number}").open("w") as err,
        ):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "error", *command],
                    env=env | (told[number] if told else {}),
                    stdout=out,
                    stderr=err,
                    cwd=tmp_path,
                )
            )
    return processes


def finish(processes, tmp_path, seconds=280):
    """(exit codes, what each said on stderr) when all have ended."""
    end = time.monotonic() + seconds
    try:
        codes = [process.wait(max(1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return codes, [(tmp_path / f"err_{n}").read_text() for n in range(len(processes))]


def workers(number, kind, workdir, **to_one):
    """Command lines of the worker, as processes of one run. to_one: what only that one is given."""
    port = free_port()
    commands = []
    for process in range(number):
        wanted = {
            "coordinator": f"localhost:{port}", "num_processes": number, "process_id": process,
            "heartbeat_s": HEARTBEAT, "join_s": 60,
        }  # fmt: skip
        extra = {name: True for name, of in to_one.items() if of == process}
        asked = {"kind": kind, "workdir": str(workdir), "wanted": wanted, "extra": extra}
        commands.append([WORKER, json.dumps(asked)])
    return commands


def through(number, kind, workdir, tmp_path):
    """A run of this many processes and four devices that goes through."""
    commands = workers(number, kind, workdir)
    codes, said = finish(start(commands, 4 // number, tmp_path), tmp_path)
    assert (codes, said) == ([0] * number, [""] * number)
    return workdir


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """kind -> the workdir of its run in this process, with four devices."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def made(kind):
        worker.train(kind, folder / kind)
        return folder / kind

    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """kind -> the workdir of its run as two processes of two devices."""
    folder = tmp_path_factory.mktemp("pair")

    @functools.cache
    def made(kind):
        return through(2, kind, folder / kind, folder / f"{kind}_said")

    return made


def drawn(workdir, process=0):
    return json.loads((workdir / f"drawn_{process}.json").read_text())


def saved(workdir, step=worker.TICKS):
    arrays, note = Checkpoints(workdir / "checkpoints").restore_part(step, "")
    assert note == {"tick": step}
    return arrays


def numbers(workdir):
    """Lines of the metrics without what depends on the clock and the process."""
    left_out = ("stage", "time/", "tokens_per_second", "memory/")
    return [
        {name: value for name, value in line.items() if not name.startswith(left_out)}
        for line in log.read(workdir / "metrics.jsonl")
    ]


def assert_same(got, want, since=0):
    """Same decisions; same losses, metrics, weights and moments within rounding."""
    decided = [draw for draw in drawn(want)["draws"] if draw[0] >= since]
    assert drawn(got)["draws"] == decided
    lines = numbers(want)
    assert [line["tick"] for line in lines] == [*range(worker.TICKS), worker.TICKS]
    for line, wanted in zip(numbers(got), lines, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5, abs=1e-5, nan_ok=True)
    arrays = saved(want)
    for name, array in saved(got).items():
        if name.startswith("stats") or array.dtype.kind != "f":
            np.testing.assert_array_equal(array, arrays[name], err_msg=name)
        else:
            np.testing.assert_allclose(array, arrays[name], rtol=1e-4, atol=1e-5, err_msg=name)


def assert_shared(workdir, number):
    """Every process drew the same, and each response was graded by one of them."""
    every = [drawn(workdir, process) for process in range(number)]
    assert all(one["draws"] == every[0]["draws"] for one in every)
    shares = [sum(one["graded"].values()) for one in every]
    assert max(shares) - min(shares) <= worker.TICKS + 4  # rows that don't divide
    return sum(shares)


@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.slow)])
def test_two_processes_do_what_one_does(alone, pair, kind):
    one, two = alone(kind), pair(kind)
    assert_same(two, one)
    assert assert_shared(two, 2) == sum(drawn(one)["graded"].values())
    # Prompts are passed over, and which ones is decided alike.
    assert any(len(seen) > len(index) for _, index, seen in drawn(one)["draws"])
    losses = [line["value_loss"] for line in numbers(one) if "value_loss" in line]
    assert len(set(losses)) == worker.TICKS


@pytest.mark.slow
def test_four_processes_do_what_one_does(alone, tmp_path):
    four = through(4, "moe", tmp_path / "four", tmp_path / "said")
    assert_same(four, alone("moe"))
    assert_shared(four, 4)
    # What they saved, one process goes on with.
    again = part_way(four, tmp_path / "again")
    worker.train("moe", again)
    assert_same(again, alone("moe"), since=worker.SAVE_EVERY)


def test_suites_inside_training_have_one_record_of_each_response(alone, pair):
    names = [f"evaluations/tick_{tick:06d}/held_out.jsonl" for tick in (0, worker.TICKS)]
    for name in names:
        one, two = ((folder / name).read_text() for folder in (alone("dense"), pair("dense")))
        made, other = one.splitlines(), two.splitlines()
        assert len(made) == 1 + 2 * 8
        # Of weights that differ by rounding: all but the header's fingerprint.
        assert other[1:] == made[1:]


def part_way(workdir, to, step=worker.SAVE_EVERY):
    """A copy of the run as it was when this step was saved."""
    shutil.copytree(workdir, to)
    for path in (to / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    for path in to.glob("drawn_*"):
        path.unlink()
    return to


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_lost_process_ends_the_others_and_the_run_goes_on(alone, pair, tmp_path, lost):
    # One process of four devices began it, two of two go on.
    workdir, said_in = part_way(alone("dense"), tmp_path / "run", 4), tmp_path / "said"
    processes = start(workers(2, "dense", workdir, dies=lost), 2, said_in)
    processes[lost].wait(100)
    begun = time.monotonic()
    codes, said = finish(processes, said_in, PROMISED)
    assert time.monotonic() - begun < HEARTBEAT + 10
    assert codes == [1, 1]
    assert [text.count("\n") for text in said] == [1, 1], said
    assert said[lost].startswith(f"error: process {lost} of 2 of this run was ended by SIGKILL")
    name = "process 1" if lost else "process 0, the coordinator,"
    assert said[1 - lost].startswith(f"error: {name} of this run was lost")
    for text in said:
        assert "tick 4 is saved; go on with, on every host (each has a --process_id of" in text
        assert "of its own): XLA_FLAGS=" in text
    if lost:
        through(2, "dense", workdir, tmp_path / "again")
        assert_same(workdir, pair("dense"), since=4)


@pytest.mark.slow
def test_a_stop_of_one_stops_all_at_the_same_tick(alone, tmp_path):
    workdir = part_way(alone("dense"), tmp_path / "run")
    processes = start(workers(2, "dense", workdir, told_to_stop=1), 2, tmp_path / "said")
    codes, said = finish(processes, tmp_path / "said")
    assert codes == [130, 130]
    assert said == ["stopped; tick 2 is saved, go on with: COMMAND\n"] * 2


@pytest.mark.slow
def test_no_process_outlives_its_supervisor(alone, tmp_path):
    workdir, said_in = part_way(alone("dense"), tmp_path / "run"), tmp_path / "said"
    # The second of two never comes: the first waits for it.
    (process,) = start(workers(2, "dense", workdir)[:1], 4, said_in)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + 60
    while not (child := children.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(3)  # it has to know its supervisor
    process.kill()
    process.wait()
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def refused(tmp_path, *flags_of_each, changes=({}, {}), told=({}, {})):
    """What processes of the app with these flags say on their way out; none of them works."""
    commands = [
        [*runs.command(tmp_path / "run", more)[3:], *flags]
        for flags, more in zip(flags_of_each, changes, strict=False)
    ]
    codes, said = finish(start(commands, 1, tmp_path, told), tmp_path)
    assert all(code not in (0, -signal.SIGSEGV) for code in codes)
    assert [text.count("\n") for text in said] == [1] * len(commands), said
    return codes, said


def joining(port, number, process, join=30):
    return [
        f"--coordinator=localhost:{port}", f"--num_processes={number}", f"--process_id={process}",
        f"--join_s={join}", "--heartbeat_s=10",
    ]  # fmt: skip


def test_other_configs_on_other_hosts(tmp_path):
    port = free_port()
    changes = ({"mesh.data": 2}, {"mesh.data": 2, "critic.lr": "0.5"})
    codes, said = refused(tmp_path, joining(port, 2, 0), joining(port, 2, 1), changes=changes)
    assert codes == [1, 1]
    assert said[0] == said[1]
    assert said[0].startswith(
        "error: the config of process 1 differs from process 0's: critic.lr is 0.5, there "
    )
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_a_cluster_that_is_found_and_a_mesh_of_other_devices(tmp_path):
    # What SLURM tells the processes of a job.
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost",
           "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}  # fmt: skip
    tasks = [job | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in range(2)]
    joined = ["--distributed", "--join_s=30"]
    _, said = refused(tmp_path, joined, joined, told=tasks)
    assert said[0] == said[1]
    assert "the mesh has 1 devices, the 2 processes have 2" in said[0]


@pytest.mark.slow
def test_nobody_at_the_coordinators_address_and_nobody_comes_to_it(tmp_path):
    ports = free_port(), free_port()
    codes, said = refused(
        tmp_path, joining(ports[0], 2, 0, join=5), joining(ports[1], 2, 1, join=5)
    )
    assert codes == [1, 1]
    assert said[0].startswith("error: not all processes joined within 5 s (--join_s)")
    assert f"process 0 was not reached at localhost:{ports[1]}" in said[1]


def test_numbers_that_do_not_fit(tmp_path):
    port = free_port()
    codes, said = refused(tmp_path, joining(port, 2, 0), joining(port, 3, 1))
    assert codes == [1, 1]
    assert "process 1 was started with --num_processes=3, process 0 with 2" in said[1]
    assert said[0] == said[1]


def test_a_port_that_is_taken(tmp_path):
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, said = refused(tmp_path, joining(port, 2, 0, join=5))
    assert f"this machine can't listen at port {port}" in said[0]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--num_processes=2"], "--coordinator=HOST:PORT, --num_processes and --process_id go"),
        (["--distributed", "--process_id=1"], "leave it out, or --process_id"),
        (joining(1, 2, 2), "--process_id must be in 0..1 (--num_processes=2), got 2"),
        (joining(1, 0, 0), "--num_processes must be at least 1, got 0"),
        (["--coordinator=host", "--num_processes=2", "--process_id=0"], "must be HOST:PORT"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, flags, line):
    codes, said = refused(tmp_path, flags)
    assert codes == [2]
    assert line in said[0]


def test_no_cluster_to_be_found(tmp_path):
    codes, said = refused(tmp_path, ["--distributed", "--join_s=5"])
    assert codes == [1]
    assert said[0].startswith("error: --distributed found no cluster that it knows")
