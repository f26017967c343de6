"""Who selection asks: the learning critic, the one that training began with, or one of no use."""

import contextlib
import dataclasses
import io

import jax
import numpy as np
import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.report.live import PlainProgress
from s3ac_jax.report.log import MetricLog
from s3ac_jax.train import online, tick
from s3ac_jax.train.build import build
from s3ac_jax.train.interrupt import StopRequest
from s3ac_jax.train.learner import params_of
from tests.helpers import random_params, run_config


def config_of(**changes):
    config = run_config(recipe=RECIPES["s3ac_single"], num_ticks=3)
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **changes))


@pytest.fixture(scope="module")
def built():
    return build(config_of())


class Asked:
    """Every tick of a run: the weights that selection asked, and the critic's before it."""

    def __init__(self, monkeypatch):
        self.judges, self.critics, self.values = [], [], []
        monkeypatch.setattr(online, "run_tick", self.run_tick)
        monkeypatch.setattr(online, "evaluate", lambda *_: {})

    def run_tick(self, parts, state, *rest):
        self.critics.append(copied(params_of(state.critic)))

        def values(params, tokens, lengths):
            self.judges.append(copied(params))
            return parts.prompt_values(params, tokens, lengths)

        return tick.run_tick(dataclasses.replace(parts, prompt_values=values), state, *rest)


def copied(params):
    return {name: np.array(leaf) for name, leaf in named_leaves(params).items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def run(built, folder, monkeypatch, judge, ticks=3):
    """What selection asked; `critic` is what training begins with."""
    config = config_of(judge=judge)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, num_ticks=ticks))
    parts = build(config, like=built)
    policy, critic = (random_params(one.network, 1) for one in (parts.actor, parts.critic))
    with pytest.MonkeyPatch.context() as patch:
        asked = Asked(patch)
        log, checkpoints = MetricLog(folder), Checkpoints(folder / "checkpoints")
        loop = online.OnlineLoop(parts, log, checkpoints, PlainProgress([], io.StringIO()))
        with contextlib.closing(log), contextlib.closing(checkpoints), parts.on_mesh():
            loop.run(policy, critic, StopRequest(), "")
    return asked, copied(critic)


def of_ticks(asked):
    """One judge for each tick: rounds of a tick ask the same."""
    found = []
    for judge in asked.judges:
        if not found or not same(found[-1], judge):
            found.append(judge)
    return found


def test_the_learning_critic(built, tmp_path, monkeypatch):
    asked, critic = run(built, tmp_path, monkeypatch, "learning")
    judges = of_ticks(asked)
    assert len(asked.critics) == len(judges) == 3
    assert all(map(same, judges, asked.critics))
    assert same(judges[0], critic)


def test_a_stale_critic_is_the_one_that_training_began_with(built, tmp_path, monkeypatch):
    asked, critic = run(built, tmp_path, monkeypatch, "stale", ticks=2)
    assert not same(asked.critics[1], critic)  # the critic itself goes on learning
    assert len(of_ticks(asked)) == 1
    assert same(asked.judges[0], critic)
    again, _ = run(built, tmp_path, monkeypatch, "stale", ticks=3)  # resumed, with a learnt critic
    assert len(again.critics) == 1
    assert not same(again.critics[0], critic)
    assert same(again.judges[0], critic)


def test_an_untrained_critic_never_learnt(built, tmp_path, monkeypatch):
    asked, critic = run(built, tmp_path, monkeypatch, "untrained", ticks=2)
    judges = of_ticks(asked)
    assert len(judges) == 1
    assert same(asked.critics[0], critic)
    untouched = [n for n, leaf in critic.items() if np.array_equal(judges[0][n], leaf)]
    assert untouched == []
    assert not same(judges[0], asked.critics[1])
    again, _ = run(built, tmp_path, monkeypatch, "untrained", ticks=3)
    assert same(again.judges[0], judges[0])


def spied_values(built, noise, key, monkeypatch):
    """prompt -> value that selection was given in one tick, and what the critic says."""
    parts = build(config_of(value_noise=noise, candidates=16), like=built)
    given = {}
    room = parts.scheduler

    class Room:
        def draw(self, key, stats, cursor, tick, values, count):
            for rows in (np.arange(16), np.arange(31, 15, -1), np.arange(8, 24)):
                for row, value in zip(rows, np.asarray(values(rows)), strict=True):
                    # One number for a prompt, whatever the round and the order.
                    assert given.setdefault(int(row), value) == pytest.approx(value, abs=1e-6)
            return room.draw(key, stats, cursor, tick, values, count)

        success_rate, record = room.success_rate, room.record

    with parts.on_mesh():
        policy, critic = (random_params(one.network, 1) for one in (parts.actor, parts.critic))
        state = online.fresh_state(parts, policy, critic)
        prompts = parts.train.prompts
        plain = np.asarray(parts.prompt_values(critic, prompts.tokens, prompts.num_tokens))
        tick.run_tick(dataclasses.replace(parts, scheduler=Room()), state, key)
    return np.array([given[n] for n in range(32)]) - plain


def test_value_noise(built, monkeypatch):
    off = [
        spied_values(built, noise, jax.random.key(seed), monkeypatch)
        for noise, seed in ((0.0, 0), (0.5, 0), (0.5, 0), (0.5, 1), (1.0, 0))
    ]
    np.testing.assert_allclose(off[0], 0.0, atol=1e-6)
    np.testing.assert_array_equal(off[1], off[2])
    assert np.abs(off[1] - off[3]).min() > 1e-6  # other ticks, other noise
    np.testing.assert_allclose(off[4], 2 * off[1], rtol=1e-3, atol=1e-5)
    # 32 numbers: one standard deviation of their mean is 0.09, of their std 0.06.
    assert abs(off[1].mean()) < 0.3
    assert 0.3 < off[1].std() < 0.7
