"""Machines by name: what there is, and one line for what there is not."""

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


@pytest.mark.parametrize("name", ["v9:2x2", "v5e", "", "v5e:4x", "cpu:4x4", "2*cpu:4", "3*h100:8"])
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


def test_more_virtual_devices_than_there_are():
    with pytest.raises(PlanError, match="xla_force_host_platform_device_count=4096"):
        make_target("cpu:4096")


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "devices", "chips", "islands"),
    [("v5e:4x4", 16, 16, 1), ("2*v5e:2x2", 8, 8, 2), ("v5p:2x2x1", 4, 4, 1),
     ("tpu7x:2x2x1", 8, 4, 1)],
)  # fmt: skip
def test_tpus_are_known_without_one(name, devices, chips, islands):
    target = make_target(name)
    assert (len(target.devices), target.chips) == (devices, chips)
    assert len(set(target.island)) == islands


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
