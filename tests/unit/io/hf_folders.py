"""What tests of Hugging Face folders share: golden models, folders written by the library."""

import functools
import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.hf_weights import load_params, read_spec

GOLDEN = Path(__file__).parents[2] / "golden"
quiet = {"note": lambda line: None}
FAMILIES = ("qwen2_tied", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_vl")


@functools.cache
def golden(family):
    return tensors_of(GOLDEN / family)


@functools.cache
def loaded(family):
    """The golden weights by our names, as `load_params` reads them."""
    spec = read_spec(GOLDEN / family)
    return named_leaves(load_params(GOLDEN / family, spec, **quiet))


def golden_config(family):
    return json.loads((GOLDEN / family / "config.json").read_text())


def tensors_of(folder):
    """Every tensor of a folder, as the safetensors library reads it."""
    found = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        found |= safetensors.numpy.load_file(file)
    return found


def write_folder(folder, config, tensors, *, shards=1):
    """A folder as other people's tools write it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    index = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::shards]}
        safetensors.numpy.save_file(part, folder / name, {"format": "pt"})
        index |= dict.fromkeys(part, name)
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def same_tensors(left, right):
    """Names, dtypes, shapes and every bit."""
    assert left.keys() == right.keys()
    for name in left:
        assert (left[name].dtype, left[name].shape) == (right[name].dtype, right[name].shape), name
        assert left[name].tobytes() == right[name].tobytes(), name


def fused(tensors, experts):
    """Three tensors for each expert -> two for all of them, as the hub has Qwen3.5."""
    found = dict(tensors)
    for name in [n for n in tensors if n.endswith(".experts.0.gate_proj.weight")]:
        stem = name.removesuffix(".0.gate_proj.weight")
        one = {
            which: np.stack([found.pop(f"{stem}.{e}.{which}_proj.weight") for e in range(experts)])
            for which in ("gate", "up", "down")
        }
        found[f"{stem}.gate_up_proj"] = np.concatenate([one["gate"], one["up"]], axis=1)
        found[f"{stem}.down_proj"] = one["down"]
    return found


def apart(tensors):
    """Two tensors for all experts -> three for each."""
    found = dict(tensors)
    for name in [n for n in tensors if n.endswith(".experts.gate_up_proj")]:
        stem = name.removesuffix(".gate_up_proj")
        both, down = found.pop(name), found.pop(f"{stem}.down_proj")
        half = both.shape[1] // 2
        for e in range(len(both)):
            found[f"{stem}.{e}.gate_proj.weight"] = np.ascontiguousarray(both[e, :half])
            found[f"{stem}.{e}.up_proj.weight"] = np.ascontiguousarray(both[e, half:])
            found[f"{stem}.{e}.down_proj.weight"] = np.ascontiguousarray(down[e])
    return found
