"""Training whose rollouts are made by servers: the run of one process, whatever becomes of them."""

import contextlib
import json
import time

import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("grpc")

from s3ac_jax.report import log
from tests.integration import runs, servers

CHANGES = {"train.num_ticks": 6, "cadence.evaluate_every": 3, "value_pretraining.epochs": 2}


def ticks(workdir):
    path = workdir / "metrics.jsonl"
    lines = log.read(path) if path.exists() else []
    return [line for line in lines if line["stage"] == "online" and "reward" in line]


def untimed(line):
    clocked = ("time/", "tokens_per_second", "memory/")
    return {name: value for name, value in line.items() if not name.startswith(clocked)}


def same_metrics(got, want):
    """Counts and shares are equal; what went through float32 in another order is close."""
    assert len(got) == len(want) > 0
    for one, other in zip(map(untimed, got), map(untimed, want), strict=True):
        assert one.keys() == other.keys()
        numbers = [k for k, v in other.items() if isinstance(v, float | int)]
        assert {k: one[k] for k in other if k not in numbers} == {
            k: v for k, v in other.items() if k not in numbers
        }
        for key in numbers:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("local") / "run"
    code, _, err = runs.launch(workdir, CHANGES)
    assert code == 0, err
    return workdir


def remote(addresses):
    return CHANGES | {
        "rollout.backend": "remote", "rollout.addresses": ",".join(addresses),
        "rollout.server_patience_s": 20.0,
    }  # fmt: skip


def test_two_servers_of_which_one_dies(local, tmp_path):
    arguments = (f"--config={runs.TINY}", *servers.overrides(servers.TINY))
    workdir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(servers.served(*arguments)) for _ in range(2))
        addresses = [f"127.0.0.1:{server.port}" for server in (first, second)]
        process = runs.start(workdir, remote(addresses))
        end = time.monotonic() + 200
        while len(ticks(workdir)) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        first.process.kill()
        code, _, err = runs.finish(process)
        assert code == 0, err
    same_metrics(ticks(workdir), ticks(local))
    results = [json.loads((run / "results.json").read_bytes()) for run in (workdir, local)]
    for kind in ("sampled", "greedy"):
        got, want = (one["trained"][kind]["held_out/accuracy"] for one in results)
        assert got == want


def test_no_server_is_one_line(tmp_path):
    workdir = tmp_path / "run"
    address = f"127.0.0.1:{servers.free_port()}"
    changes = remote([address]) | {"rollout.server_patience_s": 1.0}
    code, _, err = runs.launch(workdir, changes)
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert address in line
    assert "Traceback" not in err
