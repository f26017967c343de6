"""Nothing compiles after the first two ticks, whatever the lengths, limits and gradings."""

import contextlib
import dataclasses
import io

import jax.monitoring
import numpy as np
import pytest

from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.report import log
from s3ac_jax.report.live import PlainProgress
from s3ac_jax.report.log import MetricLog
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.train import gather, online, tick
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
    make_sampling, grade = gather.make_sampling, ArithmeticVerifier.grade

    def sampling(key, rows, *, temperature, max_tokens, stop_ids):
        made = make_sampling(
            key, rows, temperature=temperature, max_tokens=max_tokens, stop_ids=stop_ids
        )
        most = rng.integers(1, max_tokens + 1)
        return made._replace(
            temperature=(made.temperature * rng.uniform(0.5, 2, rows)).astype(np.float32),
            max_tokens=rng.integers(1, most + 1, rows).astype(np.int32),
            top_p=rng.choice([1.0, 1.0, 0.9], rows).astype(np.float32),
        )

    def graded(verifier, rollout):
        scored = grade(verifier, rollout)
        valid.append(rng.random(len(scored.valid)) < rng.choice([0.0, 0.2, 0.8, 1.0, 1.0]))
        lengths.append(tuple(rollout.num_tokens.tolist()))
        return dataclasses.replace(scored, valid=valid[-1])

    monkeypatch.setattr(gather, "make_sampling", sampling)
    monkeypatch.setattr(tick, "make_sampling", sampling)  # that of the evaluations
    monkeypatch.setattr(ArithmeticVerifier, "grade", graded)
    return lengths, valid


def ticked(parts, folder, monkeypatch):
    """(the compilations, lengths and valid gradings of each batch) of an unruly run."""
    lengths, valid = make_unruly(monkeypatch)
    compilations = Compilations(monkeypatch)
    lines, checkpoints = MetricLog(folder), Checkpoints(folder / "checkpoints")
    loop = online.OnlineLoop(parts, lines, checkpoints, PlainProgress([], io.StringIO()))
    critic = random_params(parts.critic.network, 1) if parts.config.recipe.critic else None
    with contextlib.closing(lines), contextlib.closing(checkpoints), parts.on_mesh():
        loop.run(runs.late_policy(parts), critic, StopRequest(), "")
    return compilations, lengths, valid


def test_nothing_compiles_after_two_ticks(tmp_path, monkeypatch):
    changes = {
        "train.num_ticks": TICKS,
        "cadence.save_every": 9,
        "cadence.evaluate_every": 7,
        "task.num_held_out": 8,
    }
    parts = build(runs.small_config(changes))
    compilations, lengths, valid = ticked(parts, tmp_path, monkeypatch)
    assert compilations.ticks == TICKS
    assert len(set(lengths)) > TICKS
    assert {0, 8} < {int(one.sum()) for one in valid}  # nothing to learn from, and all of it
    assert len(compilations.heard) > 10
    assert [done for done in compilations.heard if done >= 2] == []


# How many ticks until everything was met once: no refill, a refill, drift of known responses.
@pytest.mark.parametrize(("preset", "settled"), [("grpo_x", 2), ("spo", 2), ("pcl", 2)])
def test_refills_and_ranks_compile_nothing_either(preset, settled, tmp_path, monkeypatch):
    ticks = 24
    changes = {"train.num_ticks": ticks, "task.num_held_out": 8, "train.batch_prompts": 4}
    if preset != "spo":
        changes["recipe.responses_per_prompt"] = 4
    parts = build(runs.small_config(changes, preset))
    if preset == "spo":
        rate = np.linspace(0, 1, len(parts.train.prompts)).astype(np.float32)
        parts = dataclasses.replace(parts, reference=rate)
    compilations, lengths, _ = ticked(parts, tmp_path, monkeypatch)
    assert compilations.ticks == ticks
    lines = [line for line in log.read(tmp_path / "metrics.jsonl") if "generated" in line]
    generated = {line["generated"] for line in lines}
    assert (len(generated) > 3) == (preset == "grpo_x")  # all kinds of refills
    assert len({len(one) for one in lengths}) > 3 or preset != "grpo_x"
    assert [done for done in compilations.heard if done >= settled] == []
