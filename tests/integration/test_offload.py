"""Learners that wait in the host's memory: the same run, and the devices have the room."""

import dataclasses

import jax
import numpy as np
import pytest

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.report.live import NoProgress
from s3ac_jax.report.log import MetricLog
from s3ac_jax.train import online
from s3ac_jax.train.build import build
from s3ac_jax.train.online import OnlineLoop, fresh_state
from s3ac_jax.train.tick import run_tick
from tests.helpers import random_params, run_config


def built(kind):
    config = run_config(mesh=MeshSpec(fsdp=2))
    return build(dataclasses.replace(config, train=dataclasses.replace(config.train, offload=kind)))


def starts(parts):
    return (random_params(role.network, n) for n, role in enumerate((parts.actor, parts.critic)))


def two_ticks(kind, seen):
    parts = built(kind)
    step = parts.critic_step

    def watched(learner, batch):
        seen.append(memories(learner))
        return step(learner, batch)

    parts = dataclasses.replace(parts, critic_step=watched)
    with parts.on_mesh():
        state = fresh_state(parts, *starts(parts))
        for _ in range(2):
            state, report, _ = run_tick(parts, state, jax.random.key(0))
    return state, {name: metric.value() for name, metric in report.items()}


def memories(learner):
    return {
        name: {leaf.sharding.memory_kind for leaf in jax.tree.leaves(getattr(learner, name))}
        for name in ("trainable", "opt_state")
    }


@pytest.fixture(scope="module")
def on_devices():
    return two_ticks("none", [])


@pytest.mark.parametrize("kind", ["optimizer", "idle"])
def test_a_run_with_learners_that_wait_on_the_host(on_devices, kind):
    want, want_report = on_devices
    in_updates = []
    got, report = two_ticks(kind, in_updates)
    assert report == pytest.approx(want_report, rel=0, abs=0, nan_ok=True)
    for name, leaf in named_leaves(want).items():
        np.testing.assert_array_equal(named_leaves(got)[name], leaf, err_msg=name)
    device, host = {"device"}, {"pinned_host"}
    assert in_updates == [{"trainable": device, "opt_state": device}] * len(in_updates)
    assert in_updates
    assert memories(want.actor) == memories(want.critic) == in_updates[0]
    assert memories(got.actor) == {"trainable": device, "opt_state": host}
    waiting = device if kind == "optimizer" else host
    assert memories(got.critic) == {"trainable": waiting, "opt_state": host}


class Looked(Exception):
    """Far enough."""


class Never:
    asked = False


def test_nothing_idle_is_on_the_devices_when_a_run_begins_or_goes_on(tmp_path, monkeypatch):
    parts, states = built("idle"), []
    log, checkpoints = MetricLog(tmp_path), Checkpoints(tmp_path / "checkpoints")
    begin = OnlineLoop.begin

    def begun(*args):
        states.append(begin(*args))
        return states[-1]

    def look(*args):
        raise Looked

    monkeypatch.setattr(OnlineLoop, "begin", begun)
    # The first that a tick asks the devices for.
    monkeypatch.setattr(online, "evaluate", look)
    loop = OnlineLoop(parts, log, checkpoints, NoProgress())
    with parts.on_mesh():
        for _ in range(2):
            with pytest.raises(Looked):
                loop.run(*starts(parts), Never(), "again")
    log.close()
    checkpoints.close()
    assert checkpoints.steps() == [0]  # which the second has read
    for state, _ in states:
        device, host = {"device"}, {"pinned_host"}
        assert memories(state.actor) == {"trainable": device, "opt_state": host}
        assert memories(state.critic) == {"trainable": host, "opt_state": host}
