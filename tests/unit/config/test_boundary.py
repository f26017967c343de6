"""ConfigDict to RunConfig and back to JSON: what is wrong is said in one line."""

import dataclasses
import importlib.util
import json
import math
import re
import typing
from pathlib import Path
from typing import Literal

import pytest
from ml_collections.config_dict import ConfigDict, placeholder, required_placeholder

from s3ac_jax.algos.averaging import ConstantLength
from s3ac_jax.algos.filtering import SoftOverlong
from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config import boundary
from s3ac_jax.config.boundary import FREE_KEYS, ConfigError, free_keys, from_config_dict, to_dict
from s3ac_jax.io.workdir import Workdir, WorkdirError
from s3ac_jax.parallel.mesh import MeshSpec

ROOT = Path(__file__).resolve().parents[3]


NAMES = " or ".join(map(repr, RECIPES))


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY, GSM8K = load("tiny"), load("gsm8k_tiny")


def flat(node, prefix=""):
    """Returns {dotted name: value} of nested dicts."""
    found = {}
    for key, value in node.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        found |= {prefix + key: value} if inner is None else inner
    return found


def refused(cd):
    with pytest.raises(ConfigError) as caught:
        from_config_dict(cd)
    message = str(caught.value)
    assert "\n" not in message
    return message


def changed(dotted, value, preset="s3ac_single"):
    """Returns the tiny config, as a config file could have made it, with one value changed."""
    # Through a dict: an assignment to a ConfigDict would turn True into 1.0 beside a float.
    tree = TINY.get_config(preset).to_dict()
    *path, last = dotted.split(".")
    node = tree
    for key in path:
        node = node[key]
    node[last] = value
    return ConfigDict(tree)


# What goes by the limit of a response.
SCALED_DOWN = {
    "dr_grpo": {"average": ConstantLength(40)},
    "dapo": {"shaping": SoftOverlong(0.1)},
}


@pytest.mark.parametrize("preset", sorted(RECIPES))
def test_presets_are_the_recipes(preset):
    config = from_config_dict(TINY.get_config(preset))
    want = dataclasses.replace(RECIPES[preset], **SCALED_DOWN.get(preset, {}))
    assert config.recipe == want
    assert config.batch_responses == 256
    assert config.critic.lr == pytest.approx(5 * config.actor.lr)


def test_the_default_preset():
    assert TINY.get_config() == TINY.get_config("s3ac_single")


@pytest.mark.parametrize("preset", sorted(RECIPES))
def test_every_number_is_spelled_out(preset):
    cd = TINY.get_config(preset)
    resolved = flat(to_dict(from_config_dict(cd)))
    spelled = flat(json.loads(json.dumps(cd.to_dict())))
    assert spelled.pop("recipe.name") == preset
    assert resolved == spelled


def test_resolved_config_is_json_and_names_the_classes():
    resolved = to_dict(from_config_dict(TINY.get_config()))
    assert json.loads(json.dumps(resolved)) == resolved
    recipe = resolved["recipe"]
    assert {k: v["kind"] for k, v in recipe.items() if isinstance(v, dict)} == {
        "select": "Daps",
        "keep": "KeepAll",
        "advantage": "LengthAdaptiveGae",
        "surrogate": "Cispo",
        "average": "TokenMean",
        "guard": "MismatchGuard",
        "critic": "CriticSpec",
    }
    assert recipe["guard"]["denominator"] == "kept"
    assert recipe["entropy"] is None


# What takes more than its own number to be another.
OTHER = {
    "mesh": {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 3},
    "model.attention": {"model.attention": "chunked"},
    "model.remat_policy": {"model.remat": True, "model.remat_policy": "matmuls"},
    "rollout.apart": {
        "rollout.backend": "local", "rollout.addresses": "", "rollout.apart": True,
        "rollout.mesh": dataclasses.asdict(MeshSpec(data=2)),
    },
    "rollout.mesh": {"rollout.mesh": dataclasses.asdict(MeshSpec())},
    "train.offload": {"train.offload": "idle"},
    "watch": {"watch.trajectories": 3, "watch.tripwires.window": 5},
}  # fmt: skip


@pytest.mark.parametrize("file", [TINY, GSM8K], ids=["tiny", "gsm8k_tiny"])
def test_a_resumed_run_may_change_the_free_keys(tmp_path, file):
    def claim(changes):
        cd = file.get_config()
        cd.update_from_flattened_dict(
            {"rollout.backend": "remote", "rollout.addresses": "a:1", **changes}
        )
        config = to_dict(from_config_dict(cd))
        workdir = Workdir(tmp_path)
        try:
            # Devices apart are for another backend, which is not free.
            workdir.claim(config, FREE_KEYS | {"rollout.backend"})
        finally:
            workdir.close()
        return config

    found = flat(claim({}))
    there = FREE_KEYS & (found.keys() | {"mesh", "watch"})
    for key in sorted(there):
        # Without suites there is nothing to evaluate.
        if key != "evaluation.every" or file is GSM8K:
            other = not found.get(key) if isinstance(found.get(key), bool) else 7
            claim(OTHER.get(key, {key: "b:2" if isinstance(found.get(key), str) else other}))
    # Each of them is a field of one of the two configs.
    assert there == FREE_KEYS - ({"task.graders"} if file is TINY else set())


@pytest.mark.parametrize("key", ["cadence.save_every", "evaluation.every"])
def test_what_is_saved_decides_what_is_made_ahead(tmp_path, key):
    def claim(changes):
        cd = GSM8K.get_config()
        served = {"rollout.backend": "remote", "rollout.addresses": "a:1", "rollout.ahead": 1}
        cd.update_from_flattened_dict(served | changes)
        config, workdir = from_config_dict(cd), Workdir(tmp_path)
        try:
            workdir.claim(to_dict(config), free_keys(config))
        finally:
            workdir.close()

    claim({})
    claim({"cadence.evaluate_every": 7})
    with pytest.raises(WorkdirError, match=re.escape(f"{key} was ")):
        claim({key: 7})


def test_a_resumed_run_may_change_nothing_else(tmp_path):
    def claim(cd):
        workdir = Workdir(tmp_path)
        try:
            workdir.claim(to_dict(from_config_dict(cd)), FREE_KEYS)
        finally:
            workdir.close()

    def remote():
        cd = TINY.get_config()
        cd.update_from_flattened_dict({"rollout.backend": "remote", "rollout.addresses": "a:1"})
        return cd

    claim(remote())
    with pytest.raises(WorkdirError, match=r'rollout\.backend was "remote", now "local"'):
        claim(TINY.get_config())
    claim(remote())
    (tmp_path / "config.json").unlink()
    claim(TINY.get_config())
    was = re.escape(f"actor.lr was {TINY.get_config().actor.lr}, now 0.5")
    with pytest.raises(WorkdirError, match=was):
        claim(changed("actor.lr", 0.5))
    with pytest.raises(WorkdirError, match=r"recipe\.responses_per_prompt was 1, now 16"):
        claim(changed("recipe", {"name": "s3ac_group"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"addresses": "a:1"}, r"rollout.addresses \(a:1\) are for .*local has no server"),
        ({"backend": "remote"}, "backend=remote needs rollout.addresses, say host:9000"),
        ({"backend": "vllm", "addresses": " , "}, "needs rollout.addresses, say http://host:8000"),
        ({"backend": "sglang", "addresses": "http://a:1"}, "sglang needs rollout.weights_folder"),
        ({"backend": "remote", "addresses": "http://a:1"}, "'http://a:1' must be like host:9000"),
        ({"backend": "remote", "addresses": "a"}, "'a' must be like host:9000"),
        ({"backend": "vllm", "addresses": "a:1"}, "'a:1' must be like http://host:8000"),
        ({"backend": "remote", "addresses": "a:1,a:1"}, "name a server twice"),
        ({"kv_dtype": "int4"}, "kv_dtype must be 'auto' or 'float32' or 'bfloat16' or 'int8'"),
        ({"weights": "bf16"}, "rollout.weights must be 'model' or 'int8'"),
        ({"prefill_chunk": -1}, "rollout.prefill_chunk must be at least 0"),
        ({"server_patience_s": 0.0}, "rollout.server_patience_s must be positive"),
    ],
)
def test_rollouts_that_cannot_be_had(changes, message):
    cd = TINY.get_config()
    cd.update_from_flattened_dict({f"rollout.{key}": value for key, value in changes.items()})
    with pytest.raises(ConfigError, match=message):
        from_config_dict(cd)


def test_addresses_are_separated_by_commas():
    cd = TINY.get_config()
    cd.update_from_flattened_dict({"rollout.backend": "remote", "rollout.addresses": "a:1, b:2,"})
    assert from_config_dict(cd).rollout.servers == ("a:1", "b:2")
    cd.rollout.addresses = "[::1]:9000"
    assert from_config_dict(cd).rollout.servers == ("[::1]:9000",)


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        ("critic.lrr", 1.0, "unknown key critic.lrr; did you mean lr?"),
        ("sede", 1, "unknown key sede; did you mean seed?"),
        ("recipe.guard.vetto", 1.0, "unknown key recipe.guard.vetto; did you mean veto?"),
        ("recipe.gard", {}, "unknown key recipe.gard; did you mean guard?"),
        ("cadence.q", 1, "unknown key cadence.q; known: evaluate_every, save_every, "
         "keep_checkpoints"),
        ("critic.lr", "abc", "critic.lr must be a float, got 'abc' (str)"),
        ("critic.lr", True, "critic.lr must be a float, got True (bool)"),
        ("critic.lr", None, "critic.lr must be a float, got None"),
        ("critic.lr", math.nan, "critic.lr must be a number, got nan"),
        ("critic.head_std", "wide", "critic.head_std must be a float or None, got 'wide' (str)"),
        ("seed", 1.0, "seed must be an int, got 1.0 (float)"),
        ("seed", False, "seed must be an int, got False (bool)"),
        ("seed", 2**32, "seed must be in 0..4294967295, got 4294967296"),
        ("model.remat", 1, "model.remat must be a bool, got 1 (int)"),
        ("name", 3, "name must be a str, got 3 (int)"),
        ("name", {}, "name must be a str, got a section (ConfigDict)"),
        ("name", "x" * 99, None),
        ("seed", "x" * 99, "seed must be an int, got '" + "x" * 59 + " (str)"),
        ("model.dtype", "float16",
         "model.dtype must be 'float32' or 'bfloat16', got 'float16' (str)"),
        ("train", 3, "train must be a section with keys, got 3 (int)"),
        ("recipe", "s3ac", "recipe must be a section with keys, got 's3ac' (str)"),
        ("recipe.name", "s3ac", f"recipe.name must be {NAMES}, got 's3ac' (str)"),
        ("recipe.name", 3, "recipe.name must be a str, got 3 (int)"),
        ("recipe.entropy", {"rate": 0.1}, None),
        ("recipe.entropy", {"rat": 0.1}, "unknown key recipe.entropy.rat; did you mean rate?"),
        ("recipe.entropy", 1, "recipe.entropy must be a section with keys, got 1 (int)"),
        ("recipe.guard", None, "recipe.guard must be a section with keys, got None"),
        ("recipe.guard.denominator", "some",
         "recipe.guard.denominator must be 'kept' or 'all', got 'some' (str)"),
        ("recipe.critic.clip", None, None),
        ("train.minibatches", 3, "train.minibatches or recipe.updates (3) must divide the 256 "
         "responses of a tick (train.batch_prompts x recipe.responses_per_prompt)"),
        ("train.pack_tokens", 32, "train.pack_tokens (32) must hold the longest prompt (18 "
         "tokens, from task.max_steps) plus rollout.max_response_tokens (40)"),
        ("train.batch_prompts", 8192,
         "train.batch_prompts (8192) must not exceed task.num_train (4096)"),
        ("scheduler.candidates", 8192,
         "scheduler.candidates (8192) must not exceed task.num_train (4096)"),
        ("scheduler.candidates", 8, "scheduler.candidates (8) x scheduler.max_rounds (8) can't "
         "fill train.batch_prompts (256); raise one of the two"),
        ("mesh.fsdp", 3, "train.micro_rows (8) must be a multiple of mesh.data x mesh.fsdp x "
         "mesh.expert (3)"),
        ("model.num_kv_heads", 3,
         "model.num_heads (4) must be a multiple of model.num_kv_heads (3)"),
        ("model.vocab_size", 16,
         "model.vocab_size must be at least 17, the tokens of the task, got 16"),
        ("critic.b2", 1.0, "critic.b2 must be below 1, got 1.0"),
        ("actor.lr", math.inf, "actor.lr must be positive and finite, got inf"),
        ("rollout.temperature", 0, "rollout.temperature must be positive and finite, got 0.0"),
        ("recipe.responses_per_prompt", 0,
         "recipe: responses_per_prompt must be at least 1, got 0"),
        ("recipe.guard.low", 9.0,
         "recipe.guard: the band must have 0 <= low <= high, got 9.0, 5.0"),
        ("recipe.guard.veto", -1.0, "recipe.guard: veto must be positive, got -1.0"),
        ("recipe.select.a_min", 5.0, "recipe.select: a_min must be in 0..1, got 5.0"),
        ("recipe.surrogate.eps_high", -3.0,
         "recipe.surrogate: eps_low and eps_high must not be negative, got 1.0, -3.0"),
        ("model.init_std", -1.0, "model.init_std must be positive and finite, got -1.0"),
        ("sft.quit_slope", math.inf, "sft.quit_slope must be in 0..1, got inf"),
        ("rollout.max_response_tokens", 5,
         "rollout.max_response_tokens (5) must hold the longest right answer (35 tokens, from "
         "task.max_steps)"),
        ("recipe.critic.lam", 1.5, "recipe.critic: lam must be in 0..1, got 1.5"),
        ("recipe.critic", None, "recipe: select Daps reads values: it needs a critic"),
        ("recipe.critic.pretraining", "some", "recipe.critic.pretraining must be 'coverage' or "
         "'on_policy' or 'none', got 'some' (str)"),
        ("recipe.updates", 3, "train.minibatches or recipe.updates (3) must divide the 256 "
         "responses of a tick (train.batch_prompts x recipe.responses_per_prompt)"),
        ("recipe.updates", 1, None),
        ("recipe.updates", 0, "recipe: updates must be None or at least 1, got 0"),
        ("scheduler.judge", "wise", "scheduler.judge must be 'learning' or 'stale' or 'untrained', "
         "got 'wise' (str)"),
        ("scheduler.value_noise", -1.0,
         "scheduler.value_noise must be at least 0 and below 2**31, got -1.0"),
        ("reference.samples", -1, "reference.samples must be at least 0 and below 2**31, got -1"),
        ("recipe.critic.clip", 0.0, "recipe.critic: clip must be positive or None, got 0.0"),
        ("watch.trajectories", -1, "watch.trajectories must be at least 0 and below 2**31, got -1"),
        ("watch.responses", 1.5, "watch.responses must be an int, got 1.5 (float)"),
        ("watch.health", 1, "watch.health must be a bool, got 1 (int)"),
        ("watch.tripwire", {}, "unknown key watch.tripwire; did you mean tripwires?"),
        ("watch.tripwires.action", "cry", "watch.tripwires.action must be 'tell' or 'stop' or "
         "'rollback', got 'cry' (str)"),
        ("watch.tripwires.windwo", 3, "unknown key watch.tripwires.windwo; did you mean window?"),
        ("watch.tripwires.window", 1, "watch.tripwires: window must be at least 2, got 1"),
        ("watch.tripwires.truncated", 50, "watch.tripwires: truncated must be in 0..1, got 50.0"),
        ("watch.tripwires.mismatch", 0, "watch.tripwires: mismatch must be positive, got 0.0"),
        ("watch.tripwires.mismatch", None, None),
        ("watch.tripwires.value_r2", None, None),
        ("watch.tripwires.action", "rollback", None),
    ],
)  # fmt: skip
def test_one_line_per_mistake(dotted, value, message):
    cd = changed(dotted, value)
    if message is None:
        from_config_dict(cd)
    else:
        assert refused(cd) == message


def test_who_goes_back_makes_nothing_ahead():
    cd = GSM8K.get_config()
    served = {"rollout.backend": "remote", "rollout.addresses": "a:1", "rollout.ahead": 1}
    cd.update_from_flattened_dict(served)
    for action in ("tell", "stop"):
        cd.watch.tripwires.action = action
        assert from_config_dict(cd).watch.tripwires.action == action
    cd.watch.tripwires.action = "rollback"
    assert refused(cd) == (
        "watch.tripwires.action=rollback needs rollout.ahead=0: what was made ahead comes from the "
        "weights that it leaves"
    )
    cd.rollout.ahead = 0
    assert from_config_dict(cd).watch.tripwires.action == "rollback"


def test_a_config_without_a_watch_is_watched():
    cd = TINY.get_config()
    del cd["watch"]
    watch = from_config_dict(cd).watch
    assert (watch.health, watch.trajectories, watch.tripwires.action) == (True, 0, "tell")


def test_missing_keys_are_named_and_defaults_fill_in():
    cd = TINY.get_config()
    del cd.rollout["slots"], cd.rollout["max_response_tokens"], cd.rollout["insert_batch"]
    assert refused(cd) == (
        "missing from the config file: rollout.slots, rollout.max_response_tokens"
    )
    cd = TINY.get_config()
    del cd["mesh"], cd["seed"]
    assert refused(cd) == "missing from the config file: seed, mesh"
    cd = TINY.get_config()
    del cd.recipe["name"]
    assert refused(cd) == (f"missing from the config file: recipe.name, {NAMES}")


def test_a_placeholder_without_its_value():
    cd = changed("critic.head_std", placeholder(float))
    assert from_config_dict(cd).critic.head_std is None
    cd = changed("train.num_ticks", required_placeholder(int))
    assert refused(cd) == "train.num_ticks has no value; set it: --config.train.num_ticks=..."


def test_a_recipe_keeps_what_the_config_leaves_out():
    cd = changed("recipe", {"name": "s3ac_group", "guard": {"veto": 9}, "critic": {"clip": None}})
    recipe = from_config_dict(cd).recipe
    base = RECIPES["s3ac_group"]
    assert recipe == dataclasses.replace(
        base,
        guard=dataclasses.replace(base.guard, veto=9.0),
        critic=dataclasses.replace(base.critic, clip=None),
    )
    assert type(recipe.guard.veto) is float


def test_ints_become_floats_where_floats_are_asked_for():
    value = from_config_dict(changed("actor.clip", 2)).actor.clip
    assert value == 2.0
    assert type(value) is float


def numbers():
    names = flat(TINY.get_config().to_dict())
    return sorted(k for k, v in names.items() if isinstance(v, int | float) or v is None)


@pytest.mark.parametrize("dotted", numbers())
def test_extreme_numbers_are_taken_or_refused_in_one_line(dotted):
    for value in (0, -1, 1, 10**9, 0.0, -1.0, 1e30, math.inf, -math.inf, math.nan, None, ""):
        try:
            from_config_dict(changed(dotted, value))
        except ConfigError as error:
            message = str(error)
            assert "\n" not in message
            # The line names the culprit.
            assert dotted.rsplit(".", 1)[-1] in message


@dataclasses.dataclass(frozen=True)
class Hints:
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[int, ...] = ()
    either: Literal[1, "one"] = 1
    list_or_none: tuple[str, ...] | None = None

    def __post_init__(self):
        if self.pair[0] < 0:
            raise ValueError("pair must not be negative")


def read(**values):
    return boundary.section(Hints, values, "hints")


def test_tuples_and_literals():
    assert read(pair=[3, 4], many=(5,), either="one", list_or_none=["a"]) == Hints(
        (3, 4.0), (5,), "one", ("a",)
    )
    assert read(list_or_none=None).list_or_none is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pair", (1,), "hints.pair must be tuple[int, float], got (1,) (tuple)"),
        ("pair", (1, "x"), "hints.pair[1] must be a float, got 'x' (str)"),
        ("pair", (-1, 0.0), "hints: pair must not be negative"),
        ("many", 3, "hints.many must be tuple[int, ...], got 3 (int)"),
        ("many", [1, 2.5], "hints.many[1] must be an int, got 2.5 (float)"),
        ("either", True, "hints.either must be 1 or 'one', got True (bool)"),
        ("list_or_none", "ab",
         "hints.list_or_none must be tuple[str, ...] or None, got 'ab' (str)"),
    ],
)  # fmt: skip
def test_tuples_and_literals_that_do_not_fit(name, value, message):
    with pytest.raises(ConfigError) as caught:
        read(**{name: value})
    assert str(caught.value) == message


def test_every_hint_of_a_run_is_understood():
    """A field of a type that the boundary can't read would refuse every value."""

    def kinds(cls):
        for hint in typing.get_type_hints(cls).values():
            yield from kinds(hint) if dataclasses.is_dataclass(hint) else [hint]

    from s3ac_jax.config.run import RunConfig

    known = (bool, int, float, str)
    for hint in kinds(RunConfig):
        parts = typing.get_args(hint) or (hint,)
        if typing.get_origin(hint) is not Literal:
            assert all(
                part in (*known, type(None), ...) or dataclasses.is_dataclass(part)
                for part in parts
            ), hint


def test_a_config_dict_inside_is_read_like_a_dict():
    cd = TINY.get_config()
    assert from_config_dict(ConfigDict(cd.to_dict())) == from_config_dict(cd.lock())


def test_what_is_a_sequence_can_be_set_on_the_command_line():
    """Of each config file: a list would be refused by ml_collections."""

    def lists(node, where=""):
        for name, value in node.items():
            if isinstance(value, ConfigDict):
                yield from lists(value, f"{where}{name}.")
            elif isinstance(value, list):
                yield where + name

    for name in ("tiny", "smollm2_135m", "gsm8k_tiny", "gsm8k_smollm2"):
        assert list(lists(load(name).get_config())) == [], name
    assert list(lists(load("evaluate").get_config("reasoning"))) == []
    assert load("smollm2_135m").get_config().task.digits == (1, 2)


def test_what_is_no_config_of_a_run_is_told():
    for kept in ([], 3, None, "x"):
        with pytest.raises(ConfigError, match=r"the config must be a section with keys"):
            boundary.kept_run(kept)
