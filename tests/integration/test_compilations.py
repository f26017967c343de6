"""Nothing compiles after the first two ticks, whatever the lengths, limits and gradings."""

import contextlib
import dataclasses
import io

import jax.monitoring
import numpy as np

from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.report.live import PlainProgress
from s3ac_jax.report.log import MetricLog
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.train import online, tick
from s3ac_jax.train.build import build
from s3ac_jax.train.interrupt import StopRequest
from tests.helpers import random_params
from tests.integration import runs

TICKS = 100


class Compilations:
    """How many ticks were done at each compilation (those found in the cache included)."""

    def __init__(self, monkeypatch):
        self.heard, self.ticks = [], 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        monkeypatch.setattr(online, "run_tick", self._run_tick)

    def _hear(self, event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            self.heard.append(self.ticks)

    def _run_tick(self, *args):
        after = tick.run_tick(*args)
        self.ticks += 1
        return after


def make_unruly(monkeypatch):
    """Every tick has other limits, other temperatures, and another number of failed gradings.

    Returns two lists that fill up: tokens of the responses and valid gradings of each batch.
    """
    rng, lengths, valid = np.random.default_rng(0), [], []
    make_sampling, grade = tick.make_sampling, ArithmeticVerifier.grade

    def sampling(key, rows, *, temperature, max_tokens):
        made = make_sampling(key, rows, temperature=temperature, max_tokens=max_tokens)
        most = rng.integers(1, max_tokens + 1)
        return made._replace(
            temperature=(made.temperature * rng.uniform(0.5, 2, rows)).astype(np.float32),
            max_tokens=rng.integers(1, most + 1, rows).astype(np.int32),
        )

    def graded(verifier, rollout):
        scored = grade(verifier, rollout)
        valid.append(rng.random(len(scored.valid)) < rng.choice([0.0, 0.2, 0.8, 1.0, 1.0]))
        lengths.append(tuple(rollout.num_tokens.tolist()))
        return dataclasses.replace(scored, valid=valid[-1])

    monkeypatch.setattr(tick, "make_sampling", sampling)
    monkeypatch.setattr(ArithmeticVerifier, "grade", graded)
    return lengths, valid


def test_nothing_compiles_after_two_ticks(tmp_path, monkeypatch):
    changes = {
        "train.num_ticks": TICKS,
        "cadence.save_every": 9,
        "cadence.evaluate_every": 7,
        "task.num_held_out": 8,
    }
    parts = build(runs.small_config(changes))
    lengths, valid = make_unruly(monkeypatch)
    compilations = Compilations(monkeypatch)
    log, checkpoints = MetricLog(tmp_path), Checkpoints(tmp_path / "checkpoints")
    loop = online.OnlineLoop(parts, log, checkpoints, PlainProgress([], io.StringIO()))
    with contextlib.closing(log), contextlib.closing(checkpoints), parts.on_mesh():
        loop.run(runs.late_policy(parts), random_params(parts.critic.network, 1), StopRequest(), "")
    assert compilations.ticks == TICKS
    assert len(set(lengths)) > TICKS
    assert {0, 8} < {int(one.sum()) for one in valid}  # nothing to learn from, and all of it
    assert len(compilations.heard) > 10
    assert [done for done in compilations.heard if done >= 2] == []
