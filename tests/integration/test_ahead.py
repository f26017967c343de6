"""One-step-off: rollouts on devices of their own, a tick ahead of the training."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.report.live import NoProgress
from s3ac_jax.report.log import MetricLog
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.train.build import build
from s3ac_jax.train.interrupt import Interrupted, StopRequest
from s3ac_jax.train.online import OnlineLoop
from tests.helpers import random_params, run_config

TICKS, SAVE_EVERY = 5, 3


def config_of(ahead, **changes):
    config = run_config(mesh=MeshSpec(fsdp=2))
    rollout = dataclasses.replace(config.rollout, mesh=MeshSpec(data=2), apart=True, ahead=ahead)
    cadence = dataclasses.replace(config.cadence, save_every=SAVE_EVERY, evaluate_every=2)
    train = dataclasses.replace(config.train, num_ticks=TICKS)
    return dataclasses.replace(config, rollout=rollout, cadence=cadence, train=train, **changes)


def run(parts, folder, stop=None):
    """The state at the end, and the metrics by tick."""
    log, checkpoints = MetricLog(folder), Checkpoints(folder / "checkpoints", 5)
    loop = OnlineLoop(parts, log, checkpoints, NoProgress())
    starts = (random_params(role.network, n) for n, role in enumerate((parts.actor, parts.critic)))
    try:
        with parts.on_mesh(), StopRequest() as asked:
            state = loop.run(*starts, stop or asked, "again")
    finally:
        log.close()
        checkpoints.close()
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return state, {line["tick"]: line for line in lines if "policy_loss" in line}


def same_state(got, want):
    for name, leaf in named_leaves(want).items():
        np.testing.assert_array_equal(named_leaves(got)[name], leaf, err_msg=name)


@pytest.fixture(scope="module")
def shared():
    """The same run with all on the training's devices, nothing ahead."""
    config = config_of(0)
    rollout = dataclasses.replace(config.rollout, apart=False)
    return build(dataclasses.replace(config, rollout=rollout))


@pytest.fixture(scope="module")
def ahead():
    return build(config_of(1))


@pytest.fixture(scope="module")
def overlapped(ahead, tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlapped")
    return *run(ahead, folder), folder


@pytest.fixture(scope="module")
def in_turns(shared, tmp_path_factory):
    return run(shared, tmp_path_factory.mktemp("shared"))


def test_devices_apart_change_nothing(in_turns, tmp_path):
    parts = build(config_of(0))
    assert not set(parts.rollout.mesh.devices.flat) & set(parts.mesh.devices.flat)
    state, by_tick = run(parts, tmp_path)
    same_state(state, in_turns[0])
    assert [by_tick[tick]["staleness"] for tick in range(TICKS)] == [0] * TICKS
    assert "overlap" not in by_tick[1]


def test_weights_are_a_tick_old_but_after_a_save(overlapped, in_turns):
    _, by_tick, _ = overlapped
    # Tick 3 is saved before: a run that goes on from there has nothing that was made ahead.
    assert [by_tick[tick]["staleness"] for tick in range(TICKS)] == [0, 1, 1, 0, 1]
    for tick in range(TICKS):
        assert ("overlap" in by_tick[tick]) == (tick in (1, 2, 4))
        assert 0 <= by_tick[tick].get("overlap", 0) <= 1
    # The first tick has the same prompts, responses and updates as without.
    timed = ("time/", "tokens_per_second")
    names = [name for name in in_turns[1][0] if not name.startswith(timed)]
    assert {name: by_tick[0][name] for name in names} == {
        name: in_turns[1][0][name] for name in names
    }
    # The mismatch of the first is rounding, that of the second an update.
    assert by_tick[0]["mismatch_abs_log"] < 1e-5 < by_tick[1]["mismatch_abs_log"]


def test_a_killed_run_goes_on_as_if_it_had_not_been(ahead, overlapped, tmp_path):
    state, _, folder = overlapped
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(TICKS))
    again, by_tick = run(ahead, tmp_path / "run")
    same_state(again, state)
    assert by_tick[3]["staleness"] == 0


def test_learners_that_wait_on_the_host_change_nothing(overlapped, tmp_path):
    config = config_of(1)
    train = dataclasses.replace(config.train, offload="idle")
    state, _ = run(build(dataclasses.replace(config, train=train)), tmp_path)
    same_state(state, overlapped[0])


class StopAt:
    def __init__(self, look):
        self.looks = look

    @property
    def asked(self):
        self.looks -= 1
        return self.looks < 0


def test_a_stop_gives_up_what_was_made_ahead_and_saves(ahead, tmp_path):
    with pytest.raises(Interrupted, match=r"tick 2 is saved"):
        run(ahead, tmp_path, StopAt(2))
    assert Checkpoints(tmp_path / "checkpoints").latest() == 2
    state, by_tick = run(ahead, tmp_path)
    assert int(state.tick) == TICKS
    assert by_tick[2]["staleness"] == 0


def test_a_fault_while_making_ahead_ends_the_run(ahead, tmp_path, monkeypatch):
    generate, calls = ahead.rollout.generate, []

    def broken(prompt, sampling, **how):
        calls.append(1)
        if len(calls) > 3:  # held-out problems, tick 0, tick 1
            raise RolloutError("no more")
        return generate(prompt, sampling, **how)

    monkeypatch.setattr(ahead.rollout, "generate", broken)
    with pytest.raises(RolloutError, match="no more"):
        run(ahead, tmp_path)


def test_configs_that_cannot_be():
    config = config_of(1)

    def made(**changes):
        return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **changes))

    with pytest.raises(ValueError, match=r"rollout.ahead=1 needs devices or servers of its own"):
        made(apart=False)
    with pytest.raises(ValueError, match=r"rollout.apart is for .* needs rollout.mesh"):
        made(mesh=None)
    with pytest.raises(ValueError, match=r"rollout.ahead must be 0 or 1, got 2"):
        made(ahead=2)
    with pytest.raises(ValueError, match=r"needs 3 devices beside the 2 of mesh, here are 2"):
        build(made(mesh=MeshSpec(data=3)))
