"""What a trip wire tells people to turn is there: each flag, each field, each value."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from s3ac_jax.config.boundary import from_config_dict

ROOT = Path(__file__).resolve().parents[2]
SAYING = [f"s3ac_jax/{name}.py" for name in ("report/tripwires", "train/watch", "train/online")]
# `--config.a.b=value`, and the `.c` of "--config.a.b and .c".
KNOB = re.compile(
    r"--config\.(?P<whole>\w+(?:\.\w+)+)(?:=(?P<value>\w+))?|(?<![\w.)-])\.(?P<beside>\w+)"
)


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def sentences():
    """Every text of these files that tells of a flag."""
    for path in SAYING:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and "--" in text:
                yield text


def knobs():
    """(dotted name, value or None) of each."""
    for text in sentences():
        section = None
        for found in KNOB.finditer(text):
            if found["whole"]:
                section = found["whole"].rpartition(".")[0]
                yield found["whole"], found["value"]
            elif section:
                yield f"{section}.{found['beside']}", None


def test_there_are_knobs():
    found = {name for name, _ in knobs()}
    assert {"critic.clip", "value_pretraining.middle_prompts", "rollout.kv_dtype"} <= found
    assert "watch.tripwires.action" in found
    assert len(found) > 12


@pytest.mark.parametrize(("name", "value"), sorted(set(knobs()), key=str))
def test_a_knob_is_a_field_of_a_run(name, value):
    *path, last = name.split(".")
    places = []
    for file in ("tiny", "gsm8k_tiny"):
        node = config = load(file)
        for key in path:
            node = node[key]
        if last in node:
            places.append((config, node))
    assert places, f"--config.{name} is no field"
    for config, node in places if value else ():
        with node.unlocked():
            try:
                node[last] = ast.literal_eval(value)
            except ValueError:
                node[last] = value
        from_config_dict(config)


def test_flags_beside_the_config_are_those_of_the_launch_app():
    source = (ROOT / "launch" / "train.py").read_text()
    defined = set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', source)) | {"config", "workdir"}
    told = {name for text in sentences() for name in re.findall(r"--(\w+)", text)}
    assert told <= defined
    assert "dump_trajectories" in told
