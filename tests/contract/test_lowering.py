"""Configs of large models: their training steps and sampling lower for tpu, cuda and cpu.

On the config's own mesh, of devices that are not there, so that a wrong sharding or a kernel that a
platform does not have is found here; test_configs.py does the small ones.
"""

import dataclasses
import runpy
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.parallel.mesh import MESH_AXES
from s3ac_jax.train.plan.steps import machine_on, training_steps

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LARGE = ("qwen1_5b", "r1_distill_1_5b", "intern_s2_35b", "intern_s2_397b")
DEVICES = {
    "tpu": AbstractDevice(device_kind="TPU v5p", num_cores=1, platform="tpu"),
    "cuda": AbstractDevice(device_kind="NVIDIA H100", num_cores=1, platform="cuda"),
    "cpu": AbstractDevice(device_kind="cpu", num_cores=1, platform="cpu"),
}


def load(name):
    """The config with one period of its layers: what is scanned over costs nothing to lower."""
    config = from_config_dict(runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]())
    hybrid = config.model.linear_attention is not None
    few = {"num_layers": 4, "full_attention": (3,)} if hybrid else {"num_layers": 2}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **few))


def abstract(spec, platform):
    return AbstractMesh(
        dataclasses.astuple(spec), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES),
        abstract_device=DEVICES[platform],
    )  # fmt: skip


@pytest.mark.parametrize("platform", DEVICES)
@pytest.mark.parametrize("name", LARGE)
def test_steps_and_sampling_lower(name, platform):
    config = load(name)
    mesh, decode_mesh = abstract(config.mesh, platform), abstract(config.decode_mesh, platform)
    machine = machine_on(config, mesh)
    lowered = []
    for step in training_steps(machine):
        if step.trains:
            with jax.sharding.use_abstract_mesh(mesh):
                traced = step.program.trace(*step.arguments)
                text = traced.lower(lowering_platforms=(platform,)).as_text()
            lowered.append(step.name)
            assert f"mhlo.num_partitions = {config.mesh.num_devices}" in text
            # The kernel of the platform, and not that of another one.
            assert ("tpu_custom_call" in text) == (platform == "tpu")
    assert lowered == ["critic step", "actor step"]
    engine = machine.engine
    with jax.sharding.use_abstract_mesh(decode_mesh):
        weights = jax.eval_shape(engine.load_params, engine.network.abstract)
        state = jax.eval_shape(engine.init_decode_state, weights)
        traced = type(engine).generate.trace(engine, weights, state)
        assert "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()
