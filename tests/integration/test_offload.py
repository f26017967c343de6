"""Learners that wait in the host's memory: the same run, and the devices have the room."""

import dataclasses

import jax
import numpy as np
import pytest

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.train.build import build
from s3ac_jax.train.online import fresh_state
from s3ac_jax.train.tick import run_tick
from tests.helpers import random_params, run_config


def two_ticks(kind, seen):
    config = run_config(mesh=MeshSpec(fsdp=2))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, offload=kind))
    parts = build(config)
    step = parts.critic_step

    def watched(learner, batch):
        seen.append(memories(learner))
        return step(learner, batch)

    parts = dataclasses.replace(parts, critic_step=watched)
    with parts.on_mesh():
        starts = (
            random_params(role.network, n) for n, role in enumerate((parts.actor, parts.critic))
        )
        state = fresh_state(parts, *starts)
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
