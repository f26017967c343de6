"""Weights, moments and gradients of a step take a device 1/N of their bytes on N devices."""

import dataclasses

import jax
import pytest

from s3ac_jax.parallel.mesh import MeshSpec, make_mesh
from s3ac_jax.train.plan.steps import machine_on, training_steps
from s3ac_jax.train.programs import fresh_learner
from tests.helpers import run_config, tiny_spec

LAYERS, WIDTH, MLP, VOCABULARY = 6, 256, 1024, 32
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SPEC = tiny_spec(
    vocab_size=VOCABULARY, num_layers=LAYERS, hidden_size=WIDTH, intermediate_size=MLP,
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, qkv_bias=False,
    tie_embeddings=True, remat=True,
)  # fmt: skip
# Counted by hand. Every device has the scales of the norms whole: they are next to nothing.
ATTENTION = LAYERS * WIDTH * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
SPREAD = ATTENTION + LAYERS * 3 * WIDTH * MLP + VOCABULARY * WIDTH
WHOLE = (2 * LAYERS + 1) * WIDTH
FLOAT, ADAM = 4, 12  # bytes of a weight alone, and with two moments
# Of step counters, and of an array that XLA pads.
LITTLE = 1024


def machine_of(devices):
    config = dataclasses.replace(run_config(mesh=MeshSpec(fsdp=devices)), model=SPEC)
    return machine_on(config, make_mesh(config.mesh))


def held(learner):
    """Bytes on each device of the mesh."""
    sizes = {}
    for leaf in jax.tree.leaves(learner):
        for shard in leaf.addressable_shards:
            sizes[shard.device] = sizes.get(shard.device, 0) + shard.data.nbytes
    return list(sizes.values())


@pytest.fixture(scope="module")
def machines():
    return {devices: machine_of(devices) for devices in (1, 2, 4)}


def test_learners(machines):
    for devices, machine in machines.items():
        programs, key = machine.programs, jax.random.key(0)
        actor = held(fresh_learner(programs.actor, machine.mesh, key))
        assert actor == [pytest.approx(ADAM * (SPREAD / devices + WHOLE), abs=LITTLE)] * devices
        # Frozen attention has no moments; the critic's head is a vector and a bias.
        critic = held(fresh_learner(programs.critic, machine.mesh, key))
        trained = SPREAD - ATTENTION
        want = (FLOAT * ATTENTION + ADAM * trained) / devices + ADAM * (WHOLE + WIDTH)
        assert critic == [pytest.approx(want, abs=ADAM * WIDTH + LITTLE)] * devices


def test_a_step(machines):
    """By the compiler's own report; gradients and the new state are its temporaries."""
    temporaries = {}
    for devices, machine in machines.items():
        step = next(step for step in training_steps(machine) if step.name == "actor step")
        with jax.set_mesh(step.mesh):
            made = step.program.trace(*step.arguments).lower().compile()
        memory = made.memory_analysis()
        want = ADAM * (SPREAD / devices + WHOLE)
        batch = 8192  # at most, of all its rows
        assert memory.argument_size_in_bytes == pytest.approx(want, abs=batch)
        assert memory.alias_size_in_bytes == pytest.approx(want, abs=LITTLE)
        temporaries[devices] = memory.temp_size_in_bytes
    # One device gathers nothing; several hold one layer whole beside their share.
    layer = FLOAT * (SPREAD / LAYERS)
    for devices in (2, 4):
        assert temporaries[devices] < 1.1 * temporaries[1] / devices + 4 * layer
