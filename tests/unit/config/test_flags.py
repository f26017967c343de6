"""The command line: overrides reach the config, and each mistake is one line."""

import dataclasses
import sys
from pathlib import Path

import pytest
from absl import flags

from s3ac_jax.algos.averaging import ConstantLength
from s3ac_jax.algos.guards import GeometricMeanMask
from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.algos.selection import Uniform
from s3ac_jax.algos.surrogates import PpoClip
from s3ac_jax.config.boundary import ConfigError, from_config_dict
from s3ac_jax.config.flags import CommandLineError, define_flags, parse_flags

ROOT = Path(__file__).resolve().parents[3]
TINY = str(ROOT / "configs" / "tiny.py")


@pytest.fixture
def parse(monkeypatch):
    """Returns a function from arguments to parsed flags, apart from the process's own flags."""

    def parse(*arguments):
        argv = ["train.py", *arguments]
        monkeypatch.setattr(sys, "argv", argv)  # where ml_collections looks for overrides
        values = flags.FlagValues()
        define_flags(values)
        assert parse_flags(argv, values) == ["train.py"]
        return values

    return parse


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "config.py"
        path.write_text(text)
        return str(path)

    return write


def refused(parse, *arguments, kind=CommandLineError):
    with pytest.raises(kind) as caught:
        parse(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_overrides_reach_the_run(parse):
    values = parse(
        f"--config={TINY}:s3ac_group",
        "--config.critic.lr=0.25",
        "--config.actor.clip",
        "2",
        "-config.seed=7",
        "--config.model.remat",
        "--noconfig.sft.embedded",
        "--config.model.dtype=bfloat16",
        "--config.critic.head_std=0.5",
        "--config.recipe.critic.clip=none",
        "--config.recipe.guard.veto=9",
        "--workdir=runs/x",
    )
    assert values.workdir == "runs/x"
    assert values.config.is_locked
    config = from_config_dict(values.config)
    assert (config.critic.lr, config.actor.clip, config.seed) == (0.25, 2.0, 7)
    assert (config.model.remat, config.sft.embedded) == (True, False)
    assert (config.model.dtype, config.critic.head_std) == ("bfloat16", 0.5)
    assert (config.recipe.critic.clip, config.recipe.guard.veto) == (None, 9.0)
    assert config.recipe.responses_per_prompt == 16


def test_a_column_of_another_class(parse):
    """It comes with fields of its own, and these can be set too."""
    values = parse(
        f"--config={TINY}", "--workdir=x", "--config.recipe.select.kind=Uniform",
        "--config.recipe.surrogate.kind=PpoClip", "--config.recipe.surrogate.eps_high=0.28",
        "--config.recipe.guard.kind=GeometricMeanMask", "--config.recipe.guard.low=0.5",
        "--config.recipe.guard.high=2", "--config.recipe.average.kind=ConstantLength",
        "--config.recipe.average.length=9",
    )  # fmt: skip
    recipe = from_config_dict(values.config).recipe
    assert recipe == dataclasses.replace(
        RECIPES["s3ac_single"], select=Uniform(), surrogate=PpoClip(eps_high=0.28),
        guard=GeometricMeanMask(0.5, 2.0), average=ConstantLength(9),
    )  # fmt: skip


def test_a_column_of_no_class(parse):
    arguments = f"--config={TINY}", "--workdir=x", "--config.recipe.select.kind=Dapps"
    assert refused(parse, *arguments, kind=ConfigError) == (
        "--config.recipe.select.kind must be 'Uniform' or 'Daps' or 'Pcl' or 'Spo', "
        "got 'Dapps' (str)"
    )


def test_a_field_of_the_class_that_was(parse):
    message = refused(
        parse, f"--config={TINY}", "--workdir=x", "--config.recipe.select.kind=Uniform",
        "--config.recipe.select.n_c=2",
    )  # fmt: skip
    assert message.startswith("--config.recipe.select.n_c: config.recipe.select has no key 'n_c'")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("critic.lrr=1", "--config.critic.lrr: config.critic has no key 'lrr'; did you mean lr?"),
        ("cadence.q=1", "--config.cadence.q: config.cadence has no key 'q'; known: "
         "evaluate_every, keep_checkpoints, save_every"),
        ("seed.x=1", "--config.seed.x: config.seed is a value and has no keys"),
        ("scheduler=1", "--config.scheduler: config.scheduler is a section; set its keys: "
         "candidates, judge, max_rounds, value_noise"),
        ("recipe.entropy=1", "--config.recipe.entropy: config.recipe.entropy is None and of no "
         "type; set it in the file"),
        ("recipe.name=s3ac_group", "--config.recipe.name: a recipe is chosen by preset: "
         "--config=FILE.py:RECIPE"),
        ("critic.lr=abc", "--config.critic.lr=abc: must be a float or none"),
        ("seed=1.5", "--config.seed=1.5: must be an int"),
        ("model.remat=maybe", "--config.model.remat=maybe: must be true or false"),
        ("seed", "Missing value for flag --config.seed"),
        ("=3", "--config.: config has no key ''; known: actor, cadence, critic, evaluation, mesh, "
         "model, name, recipe, reference, rollout, scheduler, seed, sft, start, task, train, "
         "value_pretraining, watch"),
    ],
)  # fmt: skip
def test_bad_overrides(parse, override, message):
    assert refused(parse, f"--config={TINY}", "--workdir=x", f"--config.{override}") == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir=x"], "--config is required: the config file, say --config=configs/tiny.py"),
        (["--config=", "--workdir=x"],
         "--config is required: the config file, say --config=configs/tiny.py"),
        ([f"--config={TINY}"],
         "--workdir is required: the folder of the run, say --workdir=runs/tiny"),
        ([f"--config={TINY}", "--workdir="],
         "--workdir is required: the folder of the run, say --workdir=runs/tiny"),
        ([f"--config={TINY}", "--workdri=x"], "no flag --workdri; did you mean --workdir?"),
        ([f"--config={TINY}", "--zzz"],
         "no flag --zzz; known: --config, --workdir, --traceback"),
        ([f"--config={TINY}", "x", "--workdir=x"],
         "unexpected argument 'x'; flags are --name=value"),
        (["--workdir=x", "--config.seed=1"], "--config=FILE.py must stand before --config.seed"),
        (["--config.seed=1", f"--config={TINY}"],
         "--config=FILE.py must stand before its overrides, --config.a.b=c"),
        ([f"--config={TINY}", "--workdir=x", "--notraceback=1"],
         "--notraceback=1 does not take an argument"),
    ],
)  # fmt: skip
def test_bad_command_lines(parse, arguments, message):
    assert refused(parse, *arguments) == message


@pytest.mark.parametrize("path", ["configs/tinny.py", "configs"])
def test_no_such_config_file(parse, path, monkeypatch):
    monkeypatch.chdir(ROOT)
    message = refused(parse, f"--config={path}:s3ac_group", "--workdir=x", "--config.seed=1")
    assert message == f"--config: no file {path!r} below {ROOT}"


def test_an_unknown_preset(parse):
    for preset in ("s3ac_grup", ""):
        message = refused(parse, f"--config={TINY}:{preset}", "--workdir=x", kind=ConfigError)
        assert message == (f"configs/tiny.py has no preset {preset!r}; known: {', '.join(RECIPES)}")


@pytest.mark.parametrize(
    ("text", "preset", "message"),
    [
        ("def get_config(\n", "", ":1: SyntaxError: '(' was never closed"),
        ("import nowhere_at_all\n", "", ":1: ModuleNotFoundError: No module named "
         "'nowhere_at_all'"),
        ("\ndef get_config():\n    return 1 / 0\n", "", ":3: ZeroDivisionError: division by zero"),
        ("def get_config():\n    open('/no/such/file')\n", "",
         ":2: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"),
        ("from ml_collections import ConfigDict\ndef get_config():\n"
         "    return ConfigDict({'a': 1}).b\n", "", ":3: AttributeError: \"'b'\""),
        ("def get_config():\n    raise ValueError('two\\n  lines')\n", "",
         ":2: ValueError: two lines"),
        ("x = 1\n", "", " defines no get_config()"),
        ("def get_config():\n    pass\n", "", ": get_config() must return a ConfigDict, got "
         "NoneType"),
        ("def get_config():\n    pass\n", ":big", " takes no preset, got :big"),
    ],
)  # fmt: skip
def test_a_config_file_that_fails(parse, config_file, text, preset, message):
    path = config_file(text)
    assert (
        refused(parse, f"--config={path}{preset}", "--workdir=x", kind=ConfigError)
        == path + message
    )


def test_a_config_file_that_needs_a_preset(parse, config_file):
    path = config_file("def get_config(arg):\n    pass\n")
    assert refused(parse, f"--config={path}", "--workdir=x", kind=ConfigError) == (
        f"{path} takes a preset, say --config={path}:PRESET"
    )


def test_an_app_with_flags_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["app.py"])
    values = flags.FlagValues()
    flags.DEFINE_string("out", None, "The folder.", values)
    values.register_key_flag_for_module("app.py", values["out"])
    with pytest.raises(CommandLineError, match="--out is required: the folder to write"):
        parse_flags(["app.py"], values, {"out": "the folder to write"})
    assert parse_flags(["app.py", "--out=x"], values, {"out": "-"}) == ["app.py"]
    assert values.out == "x"
    with pytest.raises(CommandLineError, match=r"no flag --outt; did you mean --out\?"):
        parse_flags(["app.py", "--outt=x"], values, {})
