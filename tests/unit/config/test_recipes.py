"""Recipes through the boundary: every column there and back, columns of another class."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
from ml_collections.config_dict import ConfigDict

from s3ac_jax.algos.averaging import ConstantLength
from s3ac_jax.algos.credit import LengthAdaptiveGae
from s3ac_jax.algos.critic import CriticSpec
from s3ac_jax.algos.guards import GeometricMeanMask, NoGuard, TruncatedImportance
from s3ac_jax.algos.recipe import RECIPES, Gepo
from s3ac_jax.algos.selection import Daps, Pcl, Spo
from s3ac_jax.algos.surrogates import PpoClip
from s3ac_jax.config.boundary import ConfigError, from_config_dict, recipe_dict, to_dict

ROOT = Path(__file__).resolve().parents[3]
get_config = runpy.run_path(str(ROOT / "configs" / "tiny.py"))["get_config"]


def read(name, **columns):
    """The recipe of tiny.py with these columns as a config file could have them."""
    tree = get_config("s3ac_single").to_dict()
    tree["recipe"] = {"name": name, **columns}
    return from_config_dict(ConfigDict(tree)).recipe


def refused(name, **columns):
    with pytest.raises(ConfigError) as caught:
        read(name, **columns)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", RECIPES)
def test_there_and_back(name):
    """What config.json keeps, with the recipe's name, is the same run again."""
    config = from_config_dict(get_config(name))
    kept = json.loads(json.dumps(to_dict(config)))
    kept["recipe"]["name"] = name
    assert from_config_dict(ConfigDict(kept)) == config


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_alone_is_the_recipe(name):
    assert read(name) == RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_every_column_says_its_class(name):
    columns, recipe = recipe_dict(RECIPES[name]), RECIPES[name]
    assert columns.keys() == {field.name for field in dataclasses.fields(recipe)}
    for column, node in columns.items():
        value = getattr(recipe, column)
        if dataclasses.is_dataclass(value):
            assert node.pop("kind") == type(value).__name__
            assert node == dataclasses.asdict(value)
        else:
            assert node == value


def test_fields_of_the_class_that_was_are_refused():
    daps = {"n_c": 4.0, "a_min": 0.1, "decay": 0.99}
    message = refused("s3ac_single", select={"kind": "Uniform", **daps})
    assert message.startswith("unknown key recipe.select.")
    assert message.endswith("; known: none")


def test_a_column_of_another_class_has_its_own_defaults():
    got = read("s3ac_single", surrogate={"kind": "PpoClip"}, guard={"kind": "NoGuard"})
    assert got.surrogate == PpoClip()
    assert got.guard == NoGuard()
    got = read("s3ac_single", surrogate={"kind": "PpoClip", "eps_low": 0.1, "imitation": 0.2})
    assert got.surrogate == PpoClip(eps_low=0.1, imitation=0.2)
    got = read("s3ac_single", guard={"kind": "TruncatedImportance", "cap": 3})
    assert got.guard == TruncatedImportance(cap=3.0)
    got = read("grpo", average={"kind": "ConstantLength", "length": 9})
    assert got.average == ConstantLength(9)
    got = read("s3ac_single", guard={"kind": "GeometricMeanMask", "low": 0.8, "high": 1.25})
    assert got.guard == GeometricMeanMask(0.8, 1.25)


def test_what_is_said_counts_though_the_class_that_was_had_it_too():
    got = read("s3ac_single", guard={"kind": "GeometricMeanMask", "low": 0.5, "high": 5.0})
    assert got.guard == GeometricMeanMask(0.5, 5.0)
    got = read("ppo", advantage={"kind": "LengthAdaptiveGae", "whiten": True})
    assert got.advantage == LengthAdaptiveGae(whiten=True)
    got = read("s3ac_single", surrogate={"kind": "PpoClip", "eps_low": 1.0, "eps_high": 4.0})
    assert got.surrogate == PpoClip(eps_low=1.0, eps_high=4.0)


def test_columns_that_the_recipe_has_not():
    assert read("s3ac_single", entropy={"rate": 0.1}).entropy == Gepo(rate=0.1)
    assert read("grpo", entropy={"kind": "Gepo"}).entropy == Gepo()
    assert read("grpo", critic={"clip": None}).critic == CriticSpec(clip=None)
    assert read("dapo", shaping=None).shaping is None
    assert read("sao", critic={"warmup_ticks": 3}).critic.warmup_ticks == 3


def test_a_class_of_the_same_name_keeps_the_fields_of_the_recipe():
    got = read("s3ac_single", select={"kind": "Daps", "n_c": 9})
    assert got.select == Daps(n_c=9.0)
    assert read("spo", select={"floor": 0.2}).select == Spo(floor=0.2)
    assert read("pcl", select={"kind": "Pcl", "tau": 0.3}).select == Pcl(tau=0.3)


@pytest.mark.parametrize(
    ("name", "column", "value", "message"),
    [
        ("s3ac_single", "select", {"kind": "Dapps"},
         "recipe.select.kind must be 'Uniform' or 'Daps' or 'Pcl' or 'Spo', got 'Dapps' (str)"),
        ("s3ac_single", "select", {"kind": 3}, "recipe.select.kind must be a str, got 3 (int)"),
        ("grpo", "entropy", {"kind": "Gpo"},
         "recipe.entropy.kind must be 'Gepo', got 'Gpo' (str)"),
        ("s3ac_single", "select", {"kind": "Uniform", "nc": 4.0},
         "unknown key recipe.select.nc; known: none"),
        ("s3ac_single", "surrogate", {"kind": "Band", "lo": 0.2},
         "unknown key recipe.surrogate.lo; did you mean low?"),
        ("s3ac_single", "surrogate", {"kind": "Band"},
         "recipe: surrogate Band has the sampler in its ratio: with a guard the mismatch would "
         "count twice; use NoGuard"),
        ("s3ac_single", "guard", {"kind": "GeometricMeanMask"},
         "missing from the config file: recipe.guard.low, recipe.guard.high"),
        ("grpo", "select", {"kind": "Pcl"},
         "recipe: select Pcl reads values: it needs a critic"),
        ("reinforce_pp", "keep", {"kind": "VariedGroups"},
         "recipe: keep VariedGroups compares the responses of a prompt: responses_per_prompt must "
         "be above 1"),
        ("grpo", "average", {"kind": "ConstantLength", "length": 0},
         "recipe.average: length must be a positive integer, got 0"),
        ("reinforce_pp", "advantage", {"baseline": "some"},
         "recipe.advantage.baseline must be 'none' or 'batch' or 'group', got 'some' (str)"),
        ("pcl", "critic", {"at": "some"},
         "recipe.critic.at must be 'tokens' or 'prompt', got 'some' (str)"),
        ("dapo", "shaping", {"buffer_share": 2.0},
         "recipe.shaping: buffer_share must be above 0 and at most 1, got 2.0"),
        ("grpo", "guard", 3, "recipe.guard must be a section with keys, got 3 (int)"),
        ("grpo", "select", None, "recipe.select must be a section with keys, got None"),
    ],
)  # fmt: skip
def test_one_line_per_mistake(name, column, value, message):
    assert refused(name, **{column: value}) == message


@pytest.mark.parametrize("name", ["grpo", "spo", "reinforce_pp"])
def test_judges_are_for_selection_that_reads_values(name):
    for key, value in (("judge", "stale"), ("value_noise", 0.3)):
        tree = get_config(name).to_dict()
        tree["scheduler"][key] = value
        with pytest.raises(ConfigError, match=r"scheduler.judge and scheduler.value_noise are for"):
            from_config_dict(ConfigDict(tree))


@pytest.mark.parametrize("name", ["s3ac_single", "s3ac_group", "pcl"])
def test_judges_where_selection_reads_values(name):
    tree = get_config(name).to_dict()
    tree["scheduler"] |= {"judge": "untrained", "value_noise": 0.3}
    config = from_config_dict(ConfigDict(tree))
    assert (config.scheduler.judge, config.scheduler.value_noise) == ("untrained", 0.3)


def test_optimiser_batches_are_the_recipes_or_the_runs():
    assert {name for name, one in RECIPES.items() if one.updates} == {"flash_reinforce"}
    for name in RECIPES:
        config = from_config_dict(get_config(name))
        assert config.minibatches == (1 if name == "flash_reinforce" else config.train.minibatches)
        assert config.reference.samples == (8 if name == "spo" else 0)
