"""NaN and infinity stop a run before the optimiser, in one line that says whose and where."""

import contextlib
import dataclasses
import io
import itertools

import jax
import numpy as np
import pytest

from s3ac_jax.algos.guards import TruncatedImportance
from s3ac_jax.core.metrics import finalize
from s3ac_jax.core.trees import all_finite
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.io.weights import WeightsError
from s3ac_jax.report.live import PlainProgress
from s3ac_jax.report.log import MetricLog
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.train import online
from s3ac_jax.train.build import build
from s3ac_jax.train.health import NonfiniteError
from s3ac_jax.train.interrupt import StopRequest
from s3ac_jax.train.run import run
from s3ac_jax.train.tick import run_tick
from tests.helpers import random_params
from tests.integration import runs

ROLES = ("critic", "actor")


@pytest.fixture(scope="module")
def parts():
    return build(runs.small_config())


@pytest.fixture(scope="module")
def sound():
    """Parts that no bad weights have sampled with: NaN stays in the sampler's cache."""
    return build(runs.small_config())


def start(parts):
    critic = random_params(parts.critic.network, 1, std=0.1)
    return online.fresh_state(parts, runs.late_policy(parts), critic)


def spoiled(state, role, name, value, where=...):
    """The state with `value` in one weight of one role."""
    learner = getattr(state, role)
    node = trainable = jax.tree.map(lambda leaf: leaf, learner.trainable)
    *folders, last = name.split("/")
    for folder in folders:
        node = node[folder]
    node[last] = node[last].at[where].set(value)
    return dataclasses.replace(state, **{role: dataclasses.replace(learner, trainable=trainable)})


def spied(parts):
    """The parts, and a list of (role, learner before, learner after) of each optimiser step."""
    seen = []

    def spy(role, step):
        def watched(learner, batch):
            before = jax.device_get(learner)
            learner, *rest = step(learner, batch)
            seen.append((role, before, jax.device_get(learner)))
            return learner, *rest

        return watched

    steps = {f"{role}_step": spy(role, getattr(parts, f"{role}_step")) for role in ROLES}
    return dataclasses.replace(parts, **steps), seen


def stopped(parts, state):
    """The message that a tick ends with; the step on the bad batch must have changed nothing."""
    parts, seen = spied(parts)
    with parts.on_mesh(), pytest.raises(NonfiniteError) as caught:
        run_tick(parts, state, jax.random.key(0))
    message = str(caught.value)
    assert "\n" not in message
    role = message.split()[0]
    assert seen[-1][0] == role
    assert ("actor" in {one for one, _, _ in seen}) == (role == "actor")
    pairs = [map(jax.tree.leaves, one) for name, *one in seen if name == role]
    same = [all(map(np.array_equal, *pair, itertools.repeat(True))) for pair in pairs]
    # The critic's first step, which reads V_old too, is looked at before the others begin.
    assert len(same) in ((1, 4) if role == "critic" else (2,))
    assert any(same)
    return message


@pytest.mark.parametrize(
    ("role", "name", "value", "where", "said"),
    [
        ("actor", "layers/mlp/gate", np.nan, (1, 3, 5),
         "weight layers/mlp/gate of layer 1 of 2 holds NaN or infinity"),
        ("actor", "layers/mlp/down", 1e38, (1,), "activations become NaN or infinite in layer 1 "),
        ("actor", "embed", np.inf, (0, 0), "weight embed holds NaN or infinity"),
        ("critic", "backbone/layers/mlp_norm", np.nan, (0, 0),
         "weight backbone/layers/mlp_norm of layer 0 of 2 holds NaN or infinity"),
        ("critic", "value_head", np.nan, (0,), "weight value_head holds NaN or infinity"),
    ],
)  # fmt: skip
def test_bad_weights(parts, role, name, value, where, said):
    message = stopped(parts, spoiled(start(parts), role, name, value, where))
    assert message.startswith(f"{role} loss or gradient is not finite at tick 0: {said}")
    assert f"--config.{role}.lr" in message


def poison(monkeypatch, field, value):
    """One token or reward of the first response in each batch; the lengths of these responses."""
    grade, lengths = ArithmeticVerifier.grade, []

    def graded(verifier, rollout):
        scored = grade(verifier, rollout)
        lengths.append(int(rollout.num_tokens[0]))
        if field == "reward":
            scored.reward[0] = value
        else:
            scored.rollout.logp[0, 0] = value
        return scored

    monkeypatch.setattr(ArithmeticVerifier, "grade", graded)
    return lengths


def test_a_bad_reward(parts, monkeypatch):
    poison(monkeypatch, "reward", np.inf)
    message = stopped(parts, start(parts))
    said = "critic loss or gradient is not finite at tick 0: weights and layers are fine, the "
    assert message.startswith(said + "batch's rewards are not")


def test_a_bad_log_prob_of_the_sampler_that_no_guard_rejects(monkeypatch):
    config = runs.small_config()
    recipe = dataclasses.replace(config.recipe, guard=TruncatedImportance())
    parts = build(dataclasses.replace(config, recipe=recipe))
    poison(monkeypatch, "logp", np.nan)
    message = stopped(parts, start(parts))
    said = "actor loss or gradient is not finite at tick 0: weights and layers are fine, the "
    assert message.startswith(said + "batch's sampler log-probs are not")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_the_guard_of_the_recipes_rejects_a_bad_log_prob(sound, monkeypatch, value):
    parts = sound
    lengths = poison(monkeypatch, "logp", value)
    with parts.on_mesh():
        state, report, _ = run_tick(parts, start(parts), jax.random.key(0))
    assert lengths[0] > 1  # the other tokens of that response may stay
    assert all_finite((state.actor, state.critic))
    found = finalize(report)
    assert found["mismatch_kept"] < 1
    assert found["mismatch_vetoed"] == (0 if value > 0 else 1 / 8)  # rho is 0, infinite, unknown


def test_the_run_stops_and_its_last_checkpoint_is_good(parts, tmp_path, monkeypatch):
    def go(ticks):
        log, checkpoints = MetricLog(tmp_path), Checkpoints(tmp_path / "checkpoints")
        progress = PlainProgress([], io.StringIO())
        config = parts.config
        train = dataclasses.replace(config.train, num_ticks=ticks)
        changed = dataclasses.replace(parts, config=dataclasses.replace(config, train=train))
        loop = online.OnlineLoop(changed, log, checkpoints, progress)
        with contextlib.closing(log), contextlib.closing(checkpoints), parts.on_mesh():
            policy, critic = runs.late_policy(parts), random_params(parts.critic.network, 1)
            return loop.run(policy, critic, StopRequest(), "")

    def bad_tick(parts, state, *rest):
        if state.tick == 3:
            state = spoiled(state, "critic", "value_head", np.nan)
        return run_tick(parts, state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(online, "run_tick", bad_tick)
        with pytest.raises(NonfiniteError, match="not finite at tick 3: weight value_head"):
            go(4)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [0, 2]
    state = go(4)
    assert int(state.tick) == 4
    assert all_finite((state.actor, state.critic))
    assert [line["tick"] for line in runs.log.read(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


# The app with a verifier whose rewards are NaN from the first tick on.
POISONED = f"""
import runpy
import numpy as np
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.train import online

grade, run_tick = ArithmeticVerifier.grade, online.run_tick

def graded(verifier, rollout):
    scored = grade(verifier, rollout)
    scored.reward[:] = np.nan
    return scored

def poisoned(*args):
    ArithmeticVerifier.grade = graded
    return run_tick(*args)

online.run_tick = poisoned
runpy.run_path({runs.APP!r}, run_name="__main__")
"""


def test_the_app_ends_with_one_line_and_exit_code_1(tmp_path):
    code, _, err = runs.launch(tmp_path / "run", code=POISONED)
    assert code == 1
    said = "error: critic loss or gradient is not finite at tick 0: weights and layers are fine, "
    assert err.startswith(said + "the batch's rewards are not; ")
    assert err.count("\n") == 1
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [0]


def test_value_pretraining_stops_too_and_is_not_done(tmp_path):
    with pytest.raises(
        NonfiniteError, match=r"critic .* value-pretraining step .*value_pretraining.lr"
    ):
        run(runs.small_config({"value_pretraining.lr": 1e30}), tmp_path)
    assert not (tmp_path / "stage_value_pretraining.json").exists()


def test_a_rejected_start_leaves_the_workdir_to_the_next(tmp_path):
    with pytest.raises(WeightsError, match=r"model\.rope_theta = 10000\.0, the config has 3\.0"):
        run(runs.small_config({"model.rope_theta": 3.0}), tmp_path)
    assert not (tmp_path / "config.json").exists()
