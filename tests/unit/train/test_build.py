"""What a build takes over from another: all that compiles, where it is the same."""

import dataclasses

import numpy as np
import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.data.packing import pack
from s3ac_jax.data.stream import Epochs
from s3ac_jax.parallel.dispatch import InOrder
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.report.tripwires import Tripwires
from s3ac_jax.train.build import build
from s3ac_jax.train.programs import make_pretraining
from tests.helpers import make_scored, run_config

# What is made anew whatever the other run was like.
OWN = {"config", "scheduler", "reference"}


def names(a, b):
    """Parts of a that are not the very same objects in b."""
    fields = [field.name for field in dataclasses.fields(a) if field.name not in OWN]
    return {name for name in fields if getattr(a, name) is not getattr(b, name)}


@pytest.fixture(scope="module")
def single():
    return build(run_config(recipe=RECIPES["s3ac_single"]))


def changed(parts, recipe=None, **changes):
    config = dataclasses.replace(parts.config, **changes)
    if recipe is not None:
        config = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, **recipe))
    return config


def test_another_seed_compiles_nothing(single):
    config = changed(single, seed=7)
    other = build(config, like=single)
    assert names(other, single) == set()
    assert other.config == config
    assert other.scheduler.stream == Epochs(len(single.train.prompts), seed=7)
    assert other.reference is None


def test_nothing_is_shared_unasked(single):
    assert len(names(build(single.config), single)) > 10


@pytest.mark.parametrize(
    ("recipe", "differ"),
    [
        ({"advantage": RECIPES["vapo"].advantage}, {"prepare"}),
        ({"surrogate": RECIPES["ppo"].surrogate}, {"prepare", "actor_step"}),
        ({"guard": RECIPES["grpo"].guard}, {"prepare"}),
        ({"critic": RECIPES["vc_ppo"].critic},
         {"prepare", "critic", "critic_step", "pretraining", "first_targets"}),
        ({"responses_per_prompt": 4}, {"prepare"}),
    ],
)  # fmt: skip
def test_a_column_changes_what_it_makes(single, recipe, differ):
    other = build(changed(single, recipe), like=single)
    assert names(other, single) == differ


def test_only_programs_that_measure_ask_whether_anybody_looks(single):
    for change, differ in (
        ({"health": False}, {"prepare", "actor_step", "critic_step"}),
        ({"responses": 1, "trajectories": 2, "tripwires": Tripwires(window=3)}, set()),
    ):
        watch = dataclasses.replace(single.config.watch, **change)
        other = build(dataclasses.replace(single.config, watch=watch), like=single)
        assert names(other, single) == differ


@pytest.mark.parametrize(("ahead", "data"), [(1, 2), (0, 2), (1, 1)])
def test_programs_of_two_threads_take_turns(ahead, data):
    pytest.importorskip("grpc")
    config = run_config(recipe=RECIPES["s3ac_single"], mesh=MeshSpec(data=data))
    servers = {"backend": "remote", "addresses": "127.0.0.1:9", "ahead": ahead}
    parts = build(
        dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **servers))
    )
    parts.close()
    called = ("prompt_values", "score", "first_targets", "prepare", "actor_step", "critic_step")
    wanted = ahead == 1 and data == 2
    assert [isinstance(getattr(parts, name), InOrder) for name in called] == [wanted] * 6


def test_no_critic_is_no_critic(single):
    other = build(dataclasses.replace(single.config, recipe=RECIPES["spo"]), like=single)
    assert other.pretraining is None
    assert other.critic_step is None
    assert other.rollout is single.rollout
    assert other.score is not single.score  # it reads values no more
    with pytest.raises(ValueError, match="no critic to pretrain"):
        make_pretraining(other.config)


def test_rates_make_their_optimisers_anew(single):
    actor = dataclasses.replace(single.config.actor, lr=0.5)
    assert names(build(changed(single, actor=actor), like=single), single) == {
        "actor", "actor_step",
    }  # fmt: skip
    critic = dataclasses.replace(single.config.critic, lr=0.5)
    got = names(build(changed(single, critic=critic), like=single), single)
    assert got == {"critic", "critic_step", "pretraining"}


def test_pretraining_is_at_lambda_one_and_without_clip(single):
    recipe = {"critic": dataclasses.replace(single.config.recipe.critic, lam=0.4, clip=0.5)}
    parts = build(changed(single, recipe), like=single)
    assert parts.pretraining.role.clip == single.config.critic.clip
    packed = pack(make_scored(0, (3, 2), (4, 5)), np.arange(2), pack_tokens=20, max_rows=4)
    batch = parts.pretraining.targets(packed)
    assert batch.values_old is None
    assert set(np.asarray(batch.returns)[packed.mask].tolist()) == {1.0, -1.0}
    assert float(batch.tokens) == 9


def test_freezing_is_the_recipes(single):
    name = "backbone/layers/attn/q"
    assert single.critic.frozen(name)
    assert single.pretraining.role.frozen(name)
    free = dataclasses.replace(single.config.recipe.critic, freeze_attention=False)
    other = build(changed(single, {"critic": free}), like=single)
    assert not other.critic.frozen(name)
    assert not other.pretraining.role.frozen(name)
