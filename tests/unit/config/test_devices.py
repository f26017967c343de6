"""Sizes that the devices can't share out, and kernels that don't take the rows, are one line."""

import dataclasses

import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.devices import check_platform
from s3ac_jax.parallel.mesh import MeshSpec
from tests.helpers import run_config, tiny_spec


def made(*, mesh=None, recipe=None, rollout=None, **model):
    """A config of rows of 256 tokens; prompts have 6."""
    config = run_config(mesh=mesh, pack_tokens=256, recipe=recipe)
    rollout = dataclasses.replace(config.rollout, **(rollout or {}))
    return dataclasses.replace(config, rollout=rollout, model=tiny_spec(num_layers=2, **model))


VALUES, NO_VALUES = RECIPES["s3ac_single"], RECIPES["grpo"]
LOW = {"dtype": "bfloat16", "head_dim": 8}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"mesh": MeshSpec(fsdp=4), "rollout": {"slots": 6}},
         r"rollout.slots \(6\) must be a multiple of the 4 devices that share them out"),
        ({"mesh": MeshSpec(tensor=2), "rollout": {"slots": 7, "mesh": MeshSpec(data=2)}},
         r"rollout.slots \(7\) must be a multiple of the 2 devices"),
        ({"recipe": VALUES, "attention": "splash"},
         r"attention=splash: task.max_prompt_tokens \(6\) must be a multiple of 128; change it"),
        ({"recipe": NO_VALUES, "attention": "splash", "mesh": MeshSpec(context=4)},
         r"splash: train.pack_tokens \(256\) must be a multiple of 128 x mesh.context \(4\)"),
        ({"recipe": NO_VALUES, "attention": "cudnn", "head_dim": 8},
         "attention=cudnn needs model.dtype=bfloat16, got float32"),
        ({"recipe": NO_VALUES, "attention": "cudnn", **LOW, "head_dim": 136},
         r"head_dim \(136\) must be a multiple of 8 up to 128"),
        ({"recipe": NO_VALUES, "attention": "cudnn", **LOW, "head_dim": 12},
         r"head_dim \(12\) must be a multiple of 8 up to 128"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(wanted, message):
    with pytest.raises(ValueError, match=message):
        made(**wanted)


def test_what_fits():
    made(mesh=MeshSpec(fsdp=4), rollout={"slots": 8, "insert_batch": 3})
    made(mesh=MeshSpec(tensor=4), rollout={"slots": 7})
    made(rollout={"slots": 7})
    made(mesh=MeshSpec(context=2), recipe=NO_VALUES, attention="splash")
    made(recipe=VALUES, attention="cudnn", **LOW)
    servers = {"backend": "remote", "addresses": "a:1"}
    made(mesh=MeshSpec(fsdp=4), rollout={"slots": 6, **servers})


def test_cudnn_is_for_one_platform():
    config = made(recipe=NO_VALUES, attention="cudnn", **LOW)
    check_platform(config, "cuda")
    for platform in ("cpu", "tpu"):
        with pytest.raises(ValueError, match=f"is for platform cuda, here: {platform}; take"):
            check_platform(config, platform)
    for kind in ("auto", "splash", "dense"):
        check_platform(made(recipe=NO_VALUES, attention=kind), "cpu")
