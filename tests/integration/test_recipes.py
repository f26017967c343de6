"""Three ticks of every recipe, and one of every value of every column, on the smallest run."""

import dataclasses
import math
import typing

import jax
import numpy as np
import pytest

from s3ac_jax.algos import guards, recipe
from s3ac_jax.algos.recipe import RECIPES, CriticSpec, Gepo, LengthAdaptiveGae, PpoClip, Uniform
from s3ac_jax.core.metrics import finalize
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.train.build import build
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.online import abstract_state, fresh_state
from s3ac_jax.train.tick import run_tick
from tests.helpers import random_params, run_config

GRADE = ArithmeticVerifier.grade
GUARDS = {
    "truncated": guards.TruncatedImportance(cap=2.0),
    "masked": guards.MaskedImportance(low=0.8, high=1.25),
    "geometric": guards.GeometricMeanMask(low=0.5, high=2.0),
    "product": guards.ProductMask(low=0.1, high=10.0),
    "over-all-tokens": guards.MismatchGuard(denominator="all"),
}
# What replaces columns of s3ac_single, and the metrics (by prefix) that tell the
# difference.
COLUMNS = {
    "uniform": ({"select": Uniform()}, "accept/"),
    "ppo-clip": ({"surrogate": PpoClip()}, "policy_loss"),
    "whiten": ({"advantage": LengthAdaptiveGae(whiten=True)}, "advantage_std"),
    "gepo": ({"entropy": Gepo()}, "advantage_std"),
    "critic": ({"critic": CriticSpec(epochs=1, lam=0.5, clip=None)}, "value_loss"),
    **{f"guard-{name}": ({"guard": guard}, "actor_grad_norm") for name, guard in GUARDS.items()},
}


_COMPILED = {}


def with_compiled(parts):
    """The parts, with jitted functions of earlier runs where they are the same: a faster test."""
    config = parts.config
    reads = {
        "rollout": (), "score": (), "prompt_values": (),
        "actor_step": (config.recipe.surrogate,), "critic_step": (config.recipe.critic,),
    }  # fmt: skip
    group = config.recipe.responses_per_prompt
    found = {
        name: _COMPILED.setdefault((name, group, *columns), getattr(parts, name))
        for name, columns in reads.items()
    }
    return dataclasses.replace(parts, **found)


class Run:
    """A run of a few ticks from random weights, and all that its ticks reported."""

    def __init__(self, recipe, monkeypatch):
        self.parts = with_compiled(build(run_config(recipe=recipe, minibatches=2)))
        networks = self.parts.actor.network, self.parts.critic.network
        self.start = [random_params(network, seed) for seed, network in enumerate(networks)]
        self.rollouts, self.success, self.rng = [], [], np.random.default_rng(0)
        monkeypatch.setattr(ArithmeticVerifier, "grade", lambda *args: self.grade(*args))
        with self.parts.on_mesh():
            self.state = fresh_state(self.parts, *self.start)

    def grade(self, verifier, rollout):
        """Every third response is right and the sampler is off: a random policy's are neither."""
        noise = self.rng.normal(size=rollout.logp.shape, scale=0.7).astype(np.float32)
        scored = GRADE(verifier, dataclasses.replace(rollout, logp=rollout.logp + noise))
        success = np.arange(len(scored.success)) % 3 == 0
        self.rollouts.append(rollout)
        self.success.append(success)
        reward = np.where(success, 1.0, -1.0).astype(np.float32)
        return dataclasses.replace(scored, success=success, reward=reward)

    def tick(self):
        """Metrics of one more tick."""
        with self.parts.on_mesh():
            self.state, report, host = run_tick(self.parts, self.state, jax.random.key(0))
        return finalize(report) | host

    def weights(self, role):
        return jax.device_get(named_leaves(params_of(getattr(self.state, role))))


def assert_sound(run, reports):
    for report in reports:
        assert {name: x for name, x in report.items() if not math.isfinite(x)} == {}
        for name in ("policy_loss", "value_loss", "entropy", "actor_grad_norm", "critic_grad_norm"):
            assert name in report
        assert report["actor_nonfinite"] == report["critic_nonfinite"] == 0
        assert report["actor_grad_norm"] > 0
        assert report["critic_grad_norm"] > 0
    for role, start in zip(("actor", "critic"), run.start, strict=True):
        before = named_leaves(start)
        for name, leaf in run.weights(role).items():
            moved = not np.array_equal(leaf, before[name])
            # Keys have no say in a softmax through their bias, but for rounding.
            assert moved == (role == "actor" or "/attn/" not in name), (role, name)
    index = np.concatenate([rollout.prompt.index for rollout in run.rollouts])
    attempts = np.bincount(index, minlength=len(run.parts.train.prompts))
    right = np.bincount(index, np.concatenate(run.success), len(attempts))
    stats = run.state.stats
    assert ((stats.attempts > 0) == (attempts > 0)).all()
    assert ((stats.successes > 0) == (right > 0)).all()


@pytest.mark.parametrize("name", RECIPES)
def test_three_ticks(name, monkeypatch):
    group = 4 if RECIPES[name].responses_per_prompt > 1 else 1
    run = Run(dataclasses.replace(RECIPES[name], responses_per_prompt=group), monkeypatch)
    reports = [run.tick() for _ in range(3)]
    assert_sound(run, reports)
    assert int(run.state.tick) == 3
    drawn = [rollout.prompt.index.reshape(-1, group) for rollout in run.rollouts]
    for index in drawn:
        assert (index == index[:, :1]).all()
        assert len(np.unique(index)) == 4
    assert len({index.tobytes() for index in drawn}) == 3  # the stream moves on
    # A prompt counts once for each of its responses.
    once = np.setdiff1d(drawn[2], drawn[:2])
    assert once.size
    np.testing.assert_array_equal(run.state.stats.attempts[once], group)
    if group > 1:
        groups = run.rollouts[0].tokens.reshape(4, group, -1)
        assert all(len(np.unique(tokens, axis=0)) > 1 for tokens in groups)


@pytest.fixture(scope="module")
def plain():
    """Metrics of one tick of s3ac_single, to differ from."""
    with pytest.MonkeyPatch.context() as patch:
        return Run(RECIPES["s3ac_single"], patch).tick()


@pytest.mark.parametrize("name", COLUMNS)
def test_one_tick_of_every_column_value(name, plain, monkeypatch):
    changes, differing = COLUMNS[name]
    run = Run(dataclasses.replace(RECIPES["s3ac_single"], **changes), monkeypatch)
    report = run.tick()
    assert_sound(run, [report])
    got, other = (
        np.mean([value for metric, value in one.items() if metric.startswith(differing)])
        for one in (report, plain)
    )
    assert got != pytest.approx(other, rel=1e-3)


def test_the_entropy_band_moves_and_is_resumed(tmp_path, monkeypatch):
    gepo = dataclasses.replace(RECIPES["s3ac_group"], entropy=Gepo(), responses_per_prompt=4)
    run = Run(gepo, monkeypatch)
    bands = []
    checkpoints = Checkpoints(tmp_path)
    for number in range(3):
        run.tick()
        bands.append(np.asarray(run.state.entropy_band))
        if number == 1:
            checkpoints.save(2, run.state, {})
    assert np.isfinite(bands).all()
    assert all(low < high for low, high in bands)
    assert (np.diff(bands, axis=0) != 0).all()
    weights = run.weights("actor")
    again = Run(gepo, monkeypatch)
    again.rng = np.random.default_rng(0)
    for _ in range(2):
        again.rng.normal(size=run.rollouts[0].logp.shape)
    again.state, _ = checkpoints.restore(2, abstract_state(again.parts))
    checkpoints.close()
    again.tick()
    np.testing.assert_array_equal(again.state.entropy_band, bands[2])
    for name, leaf in again.weights("actor").items():
        np.testing.assert_array_equal(leaf, weights[name], err_msg=name)


def test_every_class_of_every_column_is_tried():
    tried = {type(getattr(one, column)) for one in RECIPES.values() for column in vars(one)}
    tried |= {type(value) for columns, _ in COLUMNS.values() for value in columns.values()}
    hints = typing.get_type_hints(recipe.Recipe)
    for hint in hints.values():
        assert set(typing.get_args(hint) or (hint,)) <= tried
