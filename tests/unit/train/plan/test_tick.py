"""Bounds of steps and what they add up to, against arithmetic by hand."""

import dataclasses
import types

import pytest

from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.train.plan.flops import Flops
from s3ac_jax.train.plan.hardware import CHIPS, Chip, chip_of
from s3ac_jax.train.plan.hlo import Collective
from s3ac_jax.train.plan.roofline import bound
from s3ac_jax.train.plan.steps import Step
from s3ac_jax.train.plan.tick import chip_hours, tick_of
from tests.helpers import run_config

CHIP = Chip("test", "tpu", 1, 1e9, flops=100.0, bandwidth=10.0, link=4.0, network=1.0)
MESH = types.SimpleNamespace(size=4)


def step(name="s", phase="actor", times=1.0, flops=0.0, moved=0.0, critic=0.0):
    done = Flops(flops, 2 * flops)
    return Step(name, phase, None, (), MESH, times, frozenset(), done, moved, critic=critic)


def gathered(payload, groups):
    return Collective("all-gather", payload, groups, 1.0, "")


def test_the_slowest_of_three_holds():
    # 800 operations on 4 devices at 100 a second; 10 bytes at 10; 8 x 3/4 bytes over a link of 4.
    got = bound(step(flops=400.0, moved=10.0), [gathered(8.0, ((0, 1, 2, 3),))], CHIP, (0,) * 4)
    assert (got.compute, got.memory, got.wires) == (2.0, 1.0, 1.5)
    assert (got.seconds, got.by, got.mfu) == (2.0, "compute", 0.5)
    assert got.sent == {"all-gather": 6.0}


def test_between_islands_the_network_holds():
    inside, across = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    islands = (0, 0, 1, 1)
    assert bound(step(), [gathered(8.0, inside)], CHIP, islands).wires == 1.0
    got = bound(step(), [gathered(8.0, across)], CHIP, islands)
    assert (got.wires, got.by) == (4.0, "wires")


def test_nothing_takes_no_time():
    got = bound(step(), [], CHIP, (0,) * 4)
    assert (got.seconds, got.mfu) == (0.0, 0.0)


def test_a_tick_adds_up():
    config = run_config()
    target = types.SimpleNamespace(chip=CHIP, chips=2, devices=range(4))
    named = [
        step("init", "start", 1, 4e6),
        step("generate", "rollout", 3, moved=20.0),
        step("critic step", "critic", 2, 200.0, critic=1.0),
        step("actor step", "actor", 1, 400.0),
    ]
    tick = tick_of(config, target, [(one, bound(one, [], CHIP, (0,) * 4)) for one in named])
    assert {name: time for name, time in tick.phases.items() if time} == {
        "rollout": 6.0, "critic": 2.0, "actor": 2.0,
    }  # fmt: skip
    assert tick.seconds == 10.0
    assert tick.critic == 0.2
    # Twice 200 and once 400 on 4 devices that could do 100 a second, in 10 seconds.
    assert tick.mfu == pytest.approx(0.2)
    assert tick.tokens == config.batch_responses * config.longest
    assert chip_hours(tick, target, 360) == pytest.approx(2.0)


def test_pretraining_is_paid_once_with_its_rollouts():
    config = run_config()
    kept = config.value_pretraining
    responses = kept.early_prompts + kept.middle_prompts + kept.late_prompts
    target = types.SimpleNamespace(chip=CHIP, chips=1, devices=range(4))
    named = [step("v", "pretraining", 5, moved=10.0), step("generate", "rollout", 1, moved=10.0)]
    tick = tick_of(config, target, [(one, bound(one, [], CHIP, (0,) * 4)) for one in named])
    assert tick.seconds == 1.0
    assert tick.pretraining == 5.0 + responses / config.batch_responses


def test_sampling_apart_runs_beside_the_updates():
    """A step off, the slower side alone counts; in turns, both do."""
    apart = {"apart": True, "mesh": MeshSpec(data=2)}
    target = types.SimpleNamespace(chip=CHIP, chips=1, devices=range(6))
    named = [
        step("prompt values", "select", 1, moved=10.0, critic=1.0),
        step("weight sync", "sync", 1, moved=10.0), step("generate", "rollout", 3, moved=20.0),
        step("critic step", "critic", 2, 200.0, critic=1.0), step("actor step", "actor", 1, 400.0),
    ]  # fmt: skip
    bounds = [(one, bound(one, [], CHIP, (0,) * 4)) for one in named]
    found = {}
    for ahead in (0, 1):
        config = run_config()
        rollout = dataclasses.replace(config.rollout, **apart, ahead=ahead)
        found[ahead] = tick_of(dataclasses.replace(config, rollout=rollout), target, bounds)
    assert (found[0].seconds, found[1].seconds) == (12.0, 7.0)
    # 800 operations on 6 devices that could do 100 a second.
    assert found[1].mfu == pytest.approx(800 / 600 / 7)
    assert found[1].critic == found[0].critic == pytest.approx(3 / 12)


def test_chips_are_what_their_makers_say():
    assert CHIPS["v5p"].flops == 459e12
    assert CHIPS["v5e"].memory == 15.75 * 2**30
    # Two devices share a chip.
    assert CHIPS["tpu7x"].flops == pytest.approx(2307e12 / 2)
    assert CHIPS["tpu7x"].per_chip == 2


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        # As libtpu names the devices of its topologies, and the CUDA plugin those of a host.
        ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"),
    ],
)  # fmt: skip
def test_a_device_is_known_by_its_kind(kind, name):
    assert chip_of(kind) is CHIPS[name]


def test_other_devices_are_not_known():
    assert chip_of("cpu") is chip_of("NVIDIA GeForce RTX 4090") is None
