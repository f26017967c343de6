"""Recipes are values: their literals, what they refuse, and one of them under jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos import recipe as recipes
from s3ac_jax.algos.averaging import ConstantLength, ResponseMean, TokenMean
from s3ac_jax.algos.credit import Gae, GroupRelative, LengthAdaptiveGae, Reinforce, Tracked
from s3ac_jax.algos.critic import CriticSpec
from s3ac_jax.algos.filtering import KeepAll, SoftOverlong, VariedGroups
from s3ac_jax.algos.guards import BinaryKlMask, MismatchGuard, NoGuard
from s3ac_jax.algos.recipe import RECIPES, Gepo
from s3ac_jax.algos.selection import Daps, Pcl, Spo, Uniform
from s3ac_jax.algos.surrogates import Band, Cispo, PolicyGradient, PpoClip
from s3ac_jax.core import masked
from s3ac_jax.core.types import Episodes

S3AC_GUARD = MismatchGuard(low=0.5, high=5.0, veto=20.0, denominator="kept")
# Every column that differs from GRPO, as the papers have it.
GRPO = {
    "select": Uniform(), "keep": KeepAll(), "shaping": None,
    "advantage": GroupRelative(divide_by_std=True), "surrogate": PpoClip(0.0, 0.2, 0.2),
    "average": ResponseMean(), "guard": NoGuard(), "critic": None, "entropy": None,
    "responses_per_prompt": 16, "updates": None, "replay_routing": False,
}  # fmt: skip
HIGHER = PpoClip(eps_low=0.2, eps_high=0.28)
S3AC = {
    "select": Daps(4.0, 0.1, 0.99), "advantage": LengthAdaptiveGae(1.5, False),
    "surrogate": Cispo(0.0, 1.0, 4.0), "average": TokenMean(), "guard": S3AC_GUARD,
    "critic": CriticSpec(2, 1.0, 0.5, "tokens", "coverage", True, 0), "replay_routing": True,
}  # fmt: skip
PPO = {
    "advantage": Gae(0.95, True), "average": TokenMean(), "responses_per_prompt": 1,
    "critic": CriticSpec(1, 0.95, 0.5, "tokens", "none", False, 0),
}  # fmt: skip
ON_POLICY = CriticSpec(1, 1.0, 0.5, "tokens", "on_policy", False, 0)
DAPO = {
    "keep": VariedGroups(8), "shaping": SoftOverlong(0.2), "surrogate": HIGHER,
    "average": TokenMean(),
}  # fmt: skip
LITERALS = {
    "s3ac_single": S3AC | {"responses_per_prompt": 1},
    "s3ac_group": S3AC,
    "grpo": {},
    "dr_grpo": {"advantage": GroupRelative(False), "average": ConstantLength(3000)},
    "dapo": DAPO,
    "grpo_x": DAPO
    | {
        "shaping": None, "guard": S3AC_GUARD, "entropy": Gepo(0.5, 0.2, 0.2, 0.3, 0.01),
        "replay_routing": True,
    },
    "reinforce_pp": {
        "advantage": Reinforce("none", True), "average": TokenMean(), "responses_per_prompt": 1,
    },
    "reinforce_pp_baseline": {"advantage": Reinforce("group", True), "average": TokenMean()},
    "flash_reinforce": {
        "advantage": Reinforce("batch", False), "surrogate": PolicyGradient(),
        "guard": BinaryKlMask(3e-3, denominator="all"), "responses_per_prompt": 1, "updates": 1,
    },
    "spo": {
        "select": Spo(8.0, 0.06, 0.875, 0.96, 0.05), "advantage": Tracked(), "surrogate": HIGHER,
        "average": TokenMean(), "responses_per_prompt": 1,
    },
    "pcl": {
        "select": Pcl(4, 0.5), "advantage": GroupRelative(False), "average": TokenMean(),
        "critic": CriticSpec(1, 1.0, None, "prompt", "none", False, 0),
    },
    "ppo": PPO,
    "vc_ppo": PPO | {"critic": ON_POLICY},
    "vapo": PPO
    | {
        "advantage": LengthAdaptiveGae(0.05, True), "critic": ON_POLICY,
        "surrogate": PpoClip(0.1, 0.2, 0.28), "responses_per_prompt": 16,
    },
    "sao": S3AC
    | {
        "select": Uniform(), "surrogate": Band(0.0, 0.7, 6.0), "guard": NoGuard(),
        "critic": CriticSpec(2, 1.0, 0.5, "tokens", "none", True, 10), "responses_per_prompt": 1,
        "replay_routing": False,
    },
}  # fmt: skip


def test_there_is_a_literal_for_each():
    assert list(RECIPES) == list(LITERALS)


@pytest.mark.parametrize("name", LITERALS)
def test_literals(name):
    assert RECIPES[name] == getattr(recipes, name) == recipes.Recipe(**(GRPO | LITERALS[name]))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_are_frozen_hashable_values(name):
    recipe = RECIPES[name]
    assert hash(recipe) == hash(dataclasses.replace(recipe))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.critic = None
    with pytest.raises(TypeError):
        RECIPES[name] = recipe


# Which methods look at V for every token, and which at a prompt's alone.
READING = {"s3ac_single", "s3ac_group", "ppo", "vc_ppo", "vapo", "sao"}


def test_who_reads_values():
    assert {name for name, one in RECIPES.items() if one.reads_values} == READING
    assert {name for name, one in RECIPES.items() if one.critic} == READING | {"pcl"}
    # The first critic step may read V itself where its targets don't: not at a lambda below 1.
    assert {n for n, one in RECIPES.items() if one.first_step_reads} == READING - {"ppo"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("s3ac_single", {"critic": None}, "select Daps reads values: it needs a critic"),
        ("sao", {"critic": None}, "advantage LengthAdaptiveGae reads values"),
        ("ppo", {"critic": None}, "advantage Gae reads values"),
        ("grpo", {"select": Pcl()}, "select Pcl reads values"),
        ("grpo", {"responses_per_prompt": 1}, "advantage GroupRelative compares the responses"),
        ("spo", {"keep": VariedGroups()}, "keep VariedGroups compares the responses of a prompt"),
        ("reinforce_pp_baseline", {"responses_per_prompt": 1}, "must be above 1"),
        ("sao", {"guard": S3AC_GUARD}, "surrogate Band has the sampler in its ratio: .*NoGuard"),
        ("s3ac_single", {"surrogate": Band()}, "the mismatch would count twice"),
        ("grpo", {"responses_per_prompt": 0}, "responses_per_prompt must be at least 1, got 0"),
        ("grpo", {"updates": 0}, "updates must be None or at least 1, got 0"),
    ],
)
def test_columns_that_contradict_each_other(name, changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(RECIPES[name], **changes)


def test_columns_that_go_together_after_all():
    # Groups of one have a batch baseline and a critic; a critic may be there for selection alone.
    dataclasses.replace(RECIPES["reinforce_pp_baseline"], advantage=Reinforce("batch"),
                        responses_per_prompt=1)  # fmt: skip
    daps = dataclasses.replace(
        RECIPES["grpo"], select=Daps(), critic=CriticSpec(clip=None, at="prompt")
    )
    assert not daps.reads_values
    assert dataclasses.replace(daps, critic=CriticSpec(clip=0.5, at="prompt")).reads_values
    below = dataclasses.replace(daps, critic=CriticSpec(clip=None, lam=0.9, at="prompt"))
    assert below.reads_values
    assert not below.first_step_reads


def test_gepo():
    gepo = Gepo()
    nan = jnp.float32(jnp.nan)
    low, high = gepo.update(nan, nan, np.array([0.0, 1.0]))
    np.testing.assert_allclose([low, high], [0.4, 0.65], rtol=1e-6)
    got = gepo.scale(np.array([1.0, -1.0, 1.0]), np.array([0.3, 0.7, 0.5]), low, high)
    np.testing.assert_allclose(got, [0.5, -0.2, 1.0], rtol=1e-6)
    low, high = gepo.update(low, high, np.array([1.0, 1.0]))
    np.testing.assert_allclose([low, high], [0.99 * 0.4 + 0.01, 0.99 * 0.65 + 0.01], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_a_static_argument(name):
    rng = np.random.default_rng(5)
    values, logp, noise = rng.normal(size=(3, 4, 6)).astype(np.float32) - [[[0]], [[3]], [[0]]]
    mask, reward = np.ones((4, 6), bool), np.zeros((4, 6), np.float32)
    reward[:, 5] = 1, -1, -1, 1
    response = np.repeat(np.arange(4), 6).reshape(4, 6)
    count = np.full((4, 6), 6)

    def loss(recipe, values, logp):
        episodes = Episodes(
            values, reward, mask, count, np.ones((4, 6), int), response, np.full(4, 0.4)
        )
        group = 2 if recipe.responses_per_prompt > 1 else 1
        raw = recipe.advantage.advantages(episodes, responses_per_prompt=group)
        weights, keep = recipe.guard.weigh(logp, logp - 0.01, mask)
        scaled = recipe.advantage.scaled(raw, mask)
        per_token = recipe.surrogate.token_loss(logp, logp - 0.1 * noise, scaled, mask)
        per_token *= weights * recipe.average.token_scale(count)
        share = recipe.average.token_share(count)
        return masked.total(per_token, keep) / masked.total(share, recipe.guard.counted(keep, mask))

    want = loss(RECIPES[name], values, logp)
    assert abs(want) > 1e-6
    got = jax.jit(loss, static_argnums=0)(RECIPES[name], values, logp)
    np.testing.assert_allclose(got, want, rtol=1e-4)
