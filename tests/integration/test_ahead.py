"""One-step-off: rollouts on devices of their own, a tick ahead of the training."""

import dataclasses
import json
import shutil
import threading
import time
import types

import jax
import numpy as np
import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.evaluation import SuiteConfig, TrainingEvaluationConfig
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import Rollout, RunState
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.report.live import NoProgress
from s3ac_jax.report.log import MetricLog
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.scheduler.select import start_cursor
from s3ac_jax.train.ahead import Ahead
from s3ac_jax.train.build import build
from s3ac_jax.train.interrupt import Interrupted, StopRequest
from s3ac_jax.train.online import OnlineLoop, start_stats
from s3ac_jax.train.programs import fresh_learner
from tests.helpers import random_params, run_config

TICKS, SAVE_EVERY = 5, 3


def config_of(ahead, recipe=None, **changes):
    config = run_config(mesh=MeshSpec(fsdp=2), recipe=recipe)
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
        # A tick lasts from the end of the one before, waiting included.
        spent = [by_tick[tick][f"time/{name}"] for name in ("score", "prepare", "critic", "actor")]
        assert by_tick[tick]["time/tick"] > by_tick[tick].get("time/wait", 0) + sum(spent)
    # The first tick has the same prompts, responses and updates as without.
    timed = ("time/", "tokens_per_second", "memory/")
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


def test_suites_save_too_and_nothing_is_made_ahead_for_such_a_tick(tmp_path):
    config = config_of(1)
    suites = {"own": SuiteConfig(max_response_tokens=0)}
    parts = build(dataclasses.replace(
        config,
        evaluation=TrainingEvaluationConfig(suites=suites, every=2),
        cadence=dataclasses.replace(config.cadence, save_every=100, evaluate_every=100),
    ))  # fmt: skip
    _, by_tick = run(parts, tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [0, 2, 4, TICKS]
    assert [by_tick[tick]["staleness"] for tick in range(TICKS)] == [0, 1, 0, 1, 0]


class Slow:
    """A sampler whose responses take until they are cut; it forgets what comes between calls."""

    mesh = None

    def __init__(self, rollout):
        self.rollout, self.cut, self.calls = rollout, threading.Event(), 0

    def update_weights(self, params, version):
        pass

    def generate(self, prompt, sampling):
        self.calls += 1
        self.cut.clear()
        assert self.cut.wait(60)
        rows = len(prompt.index)
        return Rollout(
            prompt, np.zeros((rows, 11), np.int32), np.zeros(rows, np.int32),
            np.zeros((rows, 11), np.float32), np.zeros(rows, bool), -np.ones((rows, 11), np.int32),
            aborted=np.ones(rows, bool),
        )  # fmt: skip

    def abort(self):
        self.cut.set()


@pytest.fixture(scope="module")
def refilling():
    """Of a recipe that asks again and again for what is missing."""
    dapo = dataclasses.replace(RECIPES["dapo"], responses_per_prompt=2, shaping=None)
    assert dapo.keep.max_rounds > 1
    return build(config_of(0, dapo))


def begun(parts, slow):
    """Something that is being made ahead with this sampler."""
    made = Ahead(dataclasses.replace(parts, rollout=slow), jax.random.key(0))
    actor = fresh_learner(parts.actor, parts.mesh, jax.random.key(1))
    state = RunState(
        actor, None, start_stats(parts), start_cursor(), np.zeros(2), np.int32(1)
    )  # fmt: skip
    made.start(state, None)
    return made


def test_what_is_given_up_asks_for_no_more_responses(refilling):
    slow = Slow(refilling.rollout)
    made = begun(refilling, slow)
    while not slow.calls:
        time.sleep(0.01)
    made.close()
    assert slow.calls == 1


def test_what_is_given_up_before_it_asks_for_responses_asks_for_none(refilling, monkeypatch):
    slow, draw = Slow(refilling.rollout), refilling.scheduler.draw
    drawing, go_on = threading.Event(), threading.Event()

    def slowly(*args):
        drawing.set()
        assert go_on.wait(60)
        return draw(*args)

    scheduler = types.SimpleNamespace(
        draw=slowly, success_rate=refilling.scheduler.success_rate, record=None
    )
    made = begun(dataclasses.replace(refilling, scheduler=scheduler), slow)
    assert drawing.wait(60)
    closing = threading.Thread(target=made.close)
    closing.start()
    assert slow.cut.wait(60)  # told, before there was anything to cut
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert slow.calls == 0


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
        build(made(mesh=MeshSpec(data=3), slots=6))
