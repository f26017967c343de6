"""Three ticks of every recipe, and one of every value of every column, on the smallest run."""

import dataclasses
import math
import typing

import jax
import numpy as np
import pytest

from s3ac_jax.algos import guards, recipe
from s3ac_jax.algos.credit import LengthAdaptiveGae
from s3ac_jax.algos.critic import CriticSpec
from s3ac_jax.algos.filtering import SoftOverlong, VariedGroups
from s3ac_jax.algos.recipe import RECIPES, Gepo
from s3ac_jax.algos.selection import Uniform
from s3ac_jax.algos.surrogates import PpoClip
from s3ac_jax.config.run import ReferenceConfig
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
    "overlong": ({"shaping": SoftOverlong(buffer_share=1.0)}, "reward"),
    **{f"guard-{name}": ({"guard": guard}, "actor_grad_norm") for name, guard in GUARDS.items()},
}
GROUP = 4
RATE = np.linspace(0, 1, 32).astype(np.float32)

_COMPILED = {}


def with_compiled(config):
    """The parts, with jitted functions of earlier runs where they are the same: a faster test."""
    group = config.recipe.responses_per_prompt
    parts = build(config, like=_COMPILED.get(group))
    _COMPILED[group] = parts
    reads = {
        "score": (config.recipe.reads_values,), "score_actor": (), "prompt_values": (),
        "actor_step": (config.recipe.surrogate,), "critic_step": (config.recipe.critic,),
        "rollout": (),
    }  # fmt: skip
    found = {
        name: _COMPILED.setdefault((name, group, *columns), getattr(parts, name))
        for name, columns in reads.items()
    }
    return dataclasses.replace(parts, **found, reference=RATE)


def short(recipe):
    """The recipe with a warm-up of one tick, if it has any."""
    if recipe.critic is None or not recipe.critic.warmup_ticks:
        return recipe
    return dataclasses.replace(recipe, critic=dataclasses.replace(recipe.critic, warmup_ticks=1))


class Run:
    """A run of a few ticks from random weights, and all that its ticks reported."""

    def __init__(self, recipe, monkeypatch, *, right=None, valid=True):
        config = run_config(recipe=short(recipe), minibatches=2)
        samples = 8 if recipe.select.tracks_drift else 0
        config = dataclasses.replace(config, reference=ReferenceConfig(samples=samples))
        self.parts, self.right, self.valid = with_compiled(config), right, valid
        roles = ("actor", "critic") if recipe.critic else ("actor",)
        self.start = {
            role: random_params(getattr(self.parts, role).network, seed)
            for seed, role in enumerate(roles)
        }
        self.rollouts, self.success = [], []
        monkeypatch.setattr(ArithmeticVerifier, "grade", lambda *args: self.grade(*args))
        with self.parts.on_mesh():
            self.state = fresh_state(self.parts, self.start["actor"], self.start.get("critic"))
        self.stats = self.state.stats

    def grade(self, verifier, rollout):
        """Some responses are right and the sampler is off: a random policy's are neither.

        In groups, nobody answers every fourth prompt. What comes out follows from the rollout
        alone, as it has to for an exact resume.
        """
        rows, index = len(rollout.num_tokens), rollout.prompt.index
        rng = np.random.default_rng([rows, int(rollout.tokens.sum())])
        off = np.where(np.arange(rows) % 2, 0.02, 0.7)[:, None]
        noise = (off * rng.normal(size=rollout.logp.shape)).astype(np.float32)
        scored = GRADE(verifier, dataclasses.replace(rollout, logp=rollout.logp + noise))
        success = np.arange(rows) % 3 == 0
        if self.parts.config.recipe.responses_per_prompt > 1:
            success &= index % 4 != 0
        success = success if self.right is None else np.full(rows, self.right)
        self.rollouts.append(rollout)
        self.success.append(success)
        reward = np.where(success, 1.0, -1.0).astype(np.float32)
        valid = np.full(rows, self.valid)
        return dataclasses.replace(scored, success=success, reward=reward, valid=valid)

    def tick(self):
        """Metrics of one more tick."""
        with self.parts.on_mesh():
            self.state, report, host = run_tick(self.parts, self.state, jax.random.key(0))
        return finalize(report) | host

    def weights(self, role):
        return jax.device_get(named_leaves(params_of(getattr(self.state, role))))

    def moved(self, role):
        """Names of the weights that are not what they were; keys' biases have no say in a softmax,
        and move by rounding or not at all."""
        before = named_leaves(self.start[role])
        return {
            name
            for name, leaf in self.weights(role).items()
            if not np.array_equal(leaf, before[name]) and not name.endswith("k_bias")
        }


def names_of(run, role):
    return {name for name in named_leaves(run.start[role]) if not name.endswith("k_bias")}


ALWAYS = (
    "policy_loss", "entropy", "actor_grad_norm", "actor_ratio_clipped", "actor_clipped_steps",
    "actor_nonfinite", "advantage_std", "mismatch_abs_log", "mismatch_kept", "mismatch_ess",
    "mismatch_vetoed", "reward", "success", "response_tokens", "candidates", "forced",
    "nan_values", "generated", "dropped", "missing_prompts", "reference_mid", "time/select",
    "time/rollout", "time/reward", "time/score", "time/prepare", "time/actor", "time/tick",
)  # fmt: skip
OF_A_CRITIC = (
    "value_loss", "critic_grad_norm", "critic_head_grad_norm", "critic_backbone_grad_norm",
    "critic_head_share", "critic_nonfinite", "time/critic",
)  # fmt: skip
OF_VALUES = ("explained_variance", "value_mean_error", "actor_target_ev")


def assert_metrics(recipe, report):
    assert {name: x for name, x in report.items() if not math.isfinite(x)} == {}
    wanted = {
        **dict.fromkeys(ALWAYS, True),
        **dict.fromkeys(OF_A_CRITIC, recipe.critic is not None),
        **dict.fromkeys(OF_VALUES, recipe.reads_values),
        "equal_outcome": recipe.responses_per_prompt > 1,
        "actor_imitation_loss": recipe.surrogate.imitation > 0,
    }
    assert {name: name in report for name in wanted} == wanted
    assert report["actor_nonfinite"] == 0
    assert report["actor_grad_norm"] > 0
    if recipe.critic:
        assert report["critic_nonfinite"] == 0
        assert report["critic_grad_norm"] > 0


def assert_sound(run, reports):
    recipe = run.parts.config.recipe
    for report in reports:
        assert_metrics(recipe, report)
    assert run.moved("actor") == names_of(run, "actor")
    assert (run.state.critic is None) == (recipe.critic is None)
    if recipe.critic:
        frozen = recipe.critic.freeze_attention
        want = {n for n in names_of(run, "critic") if not frozen or "/attn/" not in n}
        assert run.moved("critic") == want
    index = np.concatenate([rollout.prompt.index for rollout in run.rollouts])
    answered = np.bincount(index, minlength=32) > 0
    right = np.bincount(index, np.concatenate(run.success), 32) > 0
    stats = run.state.stats
    np.testing.assert_array_equal(stats.attempts != run.stats.attempts, answered)
    # Where nothing was right, what there was of success can only have faded.
    np.testing.assert_array_equal(stats.successes > run.stats.successes, right)


@pytest.mark.parametrize("name", RECIPES)
def test_three_ticks(name, monkeypatch):
    one = RECIPES[name]
    group = GROUP if one.responses_per_prompt > 1 else 1
    one = dataclasses.replace(one, responses_per_prompt=group)
    warmup = one.critic.warmup_ticks if one.critic else 0
    run = Run(one, monkeypatch)
    reports = [run.tick()]
    if warmup:
        # The critic learns and the actor does not, moments and step included.
        assert run.moved("actor") == set()
        assert int(run.state.actor.step) == 0
        assert run.moved("critic")
        assert "policy_loss" not in reports.pop()
    assert len(run.rollouts) == 1 or one.keep.max_rounds > 1
    reports += [run.tick() for _ in range(2)]
    assert_sound(run, reports)
    assert int(run.state.tick) == 3
    steps = 3 * run.parts.config.minibatches
    assert int(run.state.actor.step) == steps - run.parts.config.minibatches * (warmup > 0)
    if one.critic:
        assert int(run.state.critic.step) == steps * one.critic.epochs
    drawn = [rollout.prompt.index.reshape(-1, group) for rollout in run.rollouts]
    for index in drawn:
        assert (index == index[:, :1]).all()
        assert len(np.unique(index)) == len(index) <= 4
    assert len({index.tobytes() for index in drawn}) == len(drawn)  # the stream moves on
    if group > 1:
        groups = run.rollouts[0].tokens.reshape(4, group, -1)
        assert all(len(np.unique(tokens, axis=0)) > 1 for tokens in groups)
    generated = sum(report["generated"] for report in reports)
    if one.keep == VariedGroups(max_rounds=8):
        assert len(drawn) > 3  # nobody answers every fourth prompt: others came for it
        assert sum(report["dropped"] for report in reports) > 0
        assert all(report["missing_prompts"] == 0 for report in reports)
        assert generated == 48 + sum(report["dropped"] for report in reports)
        assert sum(report["equal_outcome"] for report in reports) > 0
    else:
        assert len(drawn) == 3
        assert generated == 4 * group * len(reports)
        assert sum(report["dropped"] for report in reports) == 0


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


RESUMED = {
    "spo": RECIPES["spo"],
    "grpo_x": dataclasses.replace(RECIPES["grpo_x"], responses_per_prompt=GROUP),
    "pcl": dataclasses.replace(RECIPES["pcl"], responses_per_prompt=GROUP),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_tick_is_the_tick(name, tmp_path, monkeypatch):
    """No critic, the last responses, the entropy band: all of it is in the checkpoint."""
    run = Run(RESUMED[name], monkeypatch)
    checkpoints, bands = Checkpoints(tmp_path), []
    for number in range(3):
        run.tick()
        bands.append(np.asarray(run.state.entropy_band))
        if number == 1:
            checkpoints.save(2, run.state, {})
    want = jax.tree.map(np.asarray, named_leaves(run.state))
    again = Run(RESUMED[name], monkeypatch)
    again.state, _ = checkpoints.restore(2, abstract_state(again.parts))
    checkpoints.close()
    assert (again.state.critic is None) == (RESUMED[name].critic is None)
    assert (again.state.stats.last is not None) == (name == "spo")
    again.tick()
    got = named_leaves(again.state)
    assert got.keys() == want.keys()
    for key, leaf in want.items():
        np.testing.assert_array_equal(got[key], leaf, err_msg=key)
    if name == "spo":
        assert (run.state.stats.last.num_tokens > 0).sum() > 4
    if RESUMED[name].entropy:
        assert np.isfinite(bands).all()
        assert all(low < high for low, high in bands)
        assert (np.diff(bands, axis=0) != 0).all()


EMPTY = {
    # All groups are equal, so that dynamic sampling keeps none of them.
    "dapo-all-right": ("dapo", {"right": True}),
    "grpo_x-all-wrong": ("grpo_x", {"right": False}),
    # The verifier is down.
    "s3ac_single-ungraded": ("s3ac_single", {"valid": False}),
    "sao-ungraded": ("sao", {"valid": False}),
    "pcl-ungraded": ("pcl", {"valid": False}),
    "ppo-ungraded": ("ppo", {"valid": False}),
    "spo-ungraded": ("spo", {"valid": False}),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_batch_with_nothing_to_learn_from_moves_nothing(name, monkeypatch):
    which, how = EMPTY[name]
    one = RECIPES[which]
    group = GROUP if one.responses_per_prompt > 1 else 1
    run = Run(dataclasses.replace(one, responses_per_prompt=group), monkeypatch)
    run.tick()  # now there are moments, by which an optimiser would move on
    roles = ("actor", "critic") if one.critic else ("actor",)
    before = {role: jax.device_get(named_leaves(getattr(run.state, role))) for role in roles}
    band = np.asarray(run.state.entropy_band)
    for key, value in how.items():
        setattr(run, key, value)
    attempts = float(run.state.stats.attempts.sum())
    report = run.tick()
    for role in roles:
        for key, leaf in jax.device_get(named_leaves(getattr(run.state, role))).items():
            np.testing.assert_array_equal(leaf, before[role][key], err_msg=f"{role} {key}")
    np.testing.assert_array_equal(run.state.entropy_band, band)
    assert not {"policy_loss", "value_loss", "actor_grad_norm"} & report.keys()
    if "right" in how:
        assert report["generated"] == report["dropped"] == 8 * 4 * group
        assert report["missing_prompts"] == 4
        assert report["equal_outcome"] == 1
        assert run.state.stats.attempts.sum() == attempts + 8 * 4 * group
    else:
        assert run.state.stats.attempts.sum() == attempts
    assert int(run.state.tick) == 2


def test_dropped_and_ungraded_at_once(monkeypatch):
    """Half a batch: the other half of its optimiser batches may be empty."""
    one = dataclasses.replace(
        RECIPES["dapo"], responses_per_prompt=GROUP, keep=VariedGroups(max_rounds=1)
    )
    run = Run(one, monkeypatch)
    grade, calls = run.grade, []

    def nearly_all_equal(verifier, rollout):
        scored, group = grade(verifier, rollout), np.arange(16) // GROUP
        calls.append(rollout)
        success = (group == 1) & (np.arange(16) % GROUP < 2)
        valid = (group == 1) & (np.arange(16) % 2 == 0)
        valid[5] = True  # three graded responses of one group, two of them right
        return dataclasses.replace(scored, success=success, valid=valid)

    run.grade = nearly_all_equal
    report = run.tick()
    assert len(calls) == 1
    assert (report["generated"], report["dropped"], report["missing_prompts"]) == (16, 12, 3)
    assert int(run.state.actor.step) == 2  # two responses and one
    assert run.moved("actor")
    assert run.state.stats.attempts.sum() == 3
    assert math.isfinite(report["policy_loss"])


def test_every_class_of_every_column_is_tried():
    tried = {type(getattr(one, column)) for one in RECIPES.values() for column in vars(one)}
    tried |= {type(value) for columns, _ in COLUMNS.values() for value in columns.values()}
    hints = typing.get_type_hints(recipe.Recipe)
    for hint in hints.values():
        assert set(typing.get_args(hint) or (hint,)) <= tried
