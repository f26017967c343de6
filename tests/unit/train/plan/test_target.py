"""Machines by name: what there is, and one line for what there is not."""

import dataclasses
import importlib.util

import pytest

from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.train.plan import target as targets
from s3ac_jax.train.plan.app import make_machine
from s3ac_jax.train.plan.gpu_targets import target_config
from s3ac_jax.train.plan.target import PlanError, make_target
from tests.helpers import run_config

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="XLA's compiler for TPUs is not installed"
)


def line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


UNKNOWN = [
    "v9:2x2", "v5e", "", "v5e:4x", "cpu:4x4", "2*cpu:4", "3*h100:8", "cpu:0", "cpu:99999999999",
    "h100:8x0", "h100:0x8", "0*v5e:4x4", "v5e:0x4", "v4:2x2x1",
]  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_machine_is_one_line(name):
    with pytest.raises(PlanError) as error:
        make_target(name)
    assert f"--topology={name}: " in line(error)


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError) as error:
        make_target("v5e:2x2")
    assert "pip install 's3ac-jax[plan]'" in line(error)


def test_without_cuda_it_says_what_to_install():
    if importlib.util.find_spec("jax_plugins") is not None:
        pytest.skip("a plugin of JAX is installed")
    with pytest.raises(PlanError) as error:
        make_target("h100:1x8")
    assert "pip install --no-deps jax-cuda12-plugin==" in line(error)


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        (MeshSpec(fsdp=2), "--config.mesh.data=1 --config.mesh.fsdp=4 (tensor 1,"),
        (MeshSpec(fsdp=4, tensor=2), "--config.mesh.fsdp=2 (tensor 2,"),
        (MeshSpec(fsdp=2, tensor=3), "set mesh.data x fsdp x tensor"),
    ],
)
def test_another_mesh_is_one_line_with_one_that_fits(mesh, told):
    with pytest.raises(PlanError) as error:
        make_machine(run_config(mesh=mesh, micro_rows=4), make_target("cpu:4"))
    assert told in line(error)


def apart_config(**mesh):
    config = run_config(mesh=MeshSpec(**mesh), micro_rows=4)
    rollout = dataclasses.replace(config.rollout, apart=True, mesh=MeshSpec(data=2))
    return dataclasses.replace(config, rollout=rollout)


def test_devices_that_only_sample_count_too():
    machine = make_machine(apart_config(fsdp=2), make_target("cpu:4"))
    assert [len(set(mesh.devices.flat)) for mesh in (machine.mesh, machine.decode_mesh)] == [2, 2]
    assert not set(machine.mesh.devices.flat) & set(machine.decode_mesh.devices.flat)
    with pytest.raises(PlanError) as error:
        make_machine(apart_config(fsdp=4), make_target("cpu:4"))
    text = line(error)
    assert "mesh 4 and its rollout.mesh, apart from it, 2" in text
    assert "--config.mesh.fsdp=2 " in text


@needs_libtpu
def test_devices_apart_that_are_no_block_are_one_line():
    config = apart_config(fsdp=2)
    rollout = dataclasses.replace(config.rollout, mesh=MeshSpec(data=4))
    train = dataclasses.replace(config.train, micro_rows=12)
    config = dataclasses.replace(config, mesh=MeshSpec(fsdp=12), rollout=rollout, train=train)
    with pytest.raises(PlanError) as error:
        make_machine(config, make_target("v5e:4x4"))
    assert "no whole block of it; take all of it, or halves" in line(error)


def test_an_attention_of_other_devices_is_one_line():
    config = run_config(mesh=MeshSpec(fsdp=4), micro_rows=4)
    sizes = {"attention": "cudnn", "dtype": "bfloat16", "head_dim": 8}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))
    with pytest.raises(PlanError) as error:
        make_machine(config, make_target("cpu:4"))
    assert "model.attention=cudnn" in line(error)


def test_more_virtual_devices_than_there_are():
    with pytest.raises(PlanError, match="xla_force_host_platform_device_count=4096"):
        make_target("cpu:4096")


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "devices", "chips", "islands"),
    [("v5e:4x4", 16, 16, 1), ("2*v5e:2x2", 8, 8, 2), ("v5p:2x2x1", 4, 4, 1),
     ("tpu7x:2x2x1", 8, 4, 1), ("v5e:1x1", 1, 1, 1), ("v6e:1x1", 1, 1, 1)],
)  # fmt: skip
def test_tpus_are_known_without_one(name, devices, chips, islands):
    target = make_target(name)
    assert (len(target.devices), target.chips) == (devices, chips)
    assert len(set(target.island)) == islands


@needs_libtpu
def test_devices_of_a_host():
    assert make_target("v5e:4x4").per_host == 4
    assert make_target("v5e:1x1").per_host == 1
    assert make_target("cpu:4").per_host == 4


@needs_libtpu
def test_a_shape_that_no_tpu_has():
    with pytest.raises(PlanError) as error:
        make_target("v5e:3x7")
    assert "--topology=v5e:3x7" in line(error)


def test_gpus_are_described_in_full():
    text = target_config("h100")
    assert text.count("{") == text.count("}")
    assert "core_count: 132" in text
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text
