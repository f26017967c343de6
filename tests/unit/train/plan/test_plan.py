"""A whole plan of a tiny run, for four virtual devices and for a TPU that is not here."""

import dataclasses
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh
from s3ac_jax.train.plan import console, tables
from s3ac_jax.train.plan.app import make_plan
from s3ac_jax.train.plan.arguments import device_bytes
from s3ac_jax.train.plan.compiling import compile_program
from s3ac_jax.train.plan.fitting import fit
from s3ac_jax.train.plan.search import trains
from s3ac_jax.train.plan.state import present
from s3ac_jax.train.plan.steps import ROLES, Step
from s3ac_jax.train.plan.target import PlanError, make_target
from s3ac_jax.train.programs import fresh_learner, make_actor
from tests.helpers import run_config

STEPS = [
    "actor learner", "critic learner", "weight sync", "weights laid out", "empty slots", "prefill",
    "insert", "generate", "value pretraining step", "prompt values", "score",
    "score of the actor", "prepare", "critic step", "actor step",
]  # fmt: skip
CONFIG = run_config(mesh=MeshSpec(fsdp=4), recipe=RECIPES["s3ac_single"], batch_prompts=8)
CONFIG = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, minibatches=2))


@pytest.fixture(scope="module")
def plan():
    return make_plan(CONFIG, make_target("cpu:4"))


def test_every_program_of_the_run_is_there(plan):
    assert [one.step.name for one in plan.steps] == STEPS
    assert plan.fits
    assert all(one.made.memory.total > 0 for one in plan.steps)


def test_its_calls_are_those_of_a_tick(plan):
    calls = {one.step.name: one.step.times for one in plan.steps}
    # 8 responses of up to 11 tokens in 4 slots, 4 tokens a dispatch, 2 requests an insertion.
    assert (calls["generate"], calls["prefill"], calls["insert"]) == (6, 4, 4)
    # Two optimiser batches, the critic twice over them; it reads V of the first one itself.
    assert (calls["actor step"], calls["critic step"]) == (2, 4)
    assert (calls["score"], calls["score of the actor"]) == (1, 1)
    # 10240 responses in batches of 64, twice.
    assert calls["value pretraining step"] == 320


def test_its_memory_is_that_of_the_arrays_themselves(plan):
    """What the plan counts for a learner, and what a device really holds of one."""
    mesh, last = make_mesh(CONFIG.mesh, jax.devices()), plan.steps[-1].step
    arrays = jax.tree.leaves(fresh_learner(make_actor(CONFIG), mesh, jax.random.key(0)))
    there = sum(
        np.asarray(shard.data).nbytes
        for array in arrays for shard in array.addressable_shards
        if shard.device == jax.devices()[1]
    )  # fmt: skip
    assert device_bytes(last.arguments[0]) == there
    counted = sum(device_bytes(plan.pieces[f"actor {what}"]) for what in ("weights", "optimiser"))
    assert counted == there - 4  # the counter of steps


def test_what_lies_beside_a_step_is_what_it_does_not_take(plan):
    size = {name: device_bytes(tree) for name, tree in plan.pieces.items()}
    by_name = {one.step.name: one.fit for one in plan.steps}
    learners = sum(size[f"{role} {w}"] for role in ROLES for w in ("weights", "optimiser"))
    # Before an update, rollouts have given up what they held.
    actor = size["actor weights"] + size["actor optimiser"]
    batches = size["batches"] + size["prepared batches"]
    assert actor < by_name["critic step"].beside < actor + batches
    assert by_name["generate"].beside == learners
    sampled = size["rollout weights"] + size["slots"]
    assert by_name["prompt values"].beside == learners + sampled - size["critic weights"]
    assert by_name["actor learner"].beside == size["critic weights"]
    assert by_name["critic learner"].beside == actor


@pytest.mark.parametrize(
    ("offload", "beside_critic", "beside_generate"),
    [
        ("none", {"actor weights", "actor optimiser"}, {
            "actor weights", "actor optimiser", "critic weights", "critic optimiser"}),
        ("optimizer", {"actor weights"}, {"actor weights", "critic weights"}),
        ("idle", set(), {"actor weights", "critic weights"}),
    ],
)  # fmt: skip
def test_what_is_offloaded_lies_nowhere(plan, offload, beside_critic, beside_generate):
    train = dataclasses.replace(CONFIG.train, offload=offload)
    config = dataclasses.replace(CONFIG, train=train)
    steps = {one.step.name: one.step for one in plan.steps}
    for name, want in (("critic step", beside_critic), ("generate", beside_generate)):
        there = present(config, steps[name], plan.pieces)
        batches = {"batches", "prepared batches"}
        assert there.keys() - steps[name].holds - batches == want


def test_fsdp_gathers_weights_and_scatters_gradients(plan):
    step = next(one for one in plan.steps if one.step.name == "actor step")
    assert step.bound.sent["all-gather"] > 0
    assert step.bound.seconds == max(step.bound.compute, step.bound.memory, step.bound.wires)


def test_a_step_that_does_not_fit_says_what_is_most_and_the_knob(plan):
    generate = next(one for one in plan.steps if one.step.name == "generate")
    limit = generate.fit.total - 1
    got = fit(generate.step, generate.made, plan.pieces, limit)
    assert not got.fits
    large = {**got.classes, "slots": 1e12}
    assert (
        "most of it is slots; less by rollout.slots"
        in dataclasses.replace(got, classes=large).advice
    )


def test_advice_is_of_what_would_help(plan):
    steps = {one.step.name: one for one in plan.steps}
    learner = steps["actor learner"]
    assert "rollout" not in fit(learner.step, learner.made, {}, 1.0).advice
    critic = steps["critic step"]
    beside = fit(critic.step, critic.made, plan.pieces, 1.0)
    assert beside.parked == {"optimiser": "optimizer", "weights": "idle"}
    assert (
        "train.offload=idle, mesh.fsdp"
        in dataclasses.replace(beside, classes={"weights": 1.0}).advice
    )
    # Of its own weights and moments a step can do without none.
    own = {name: tree for name, tree in plan.pieces.items() if name in critic.step.holds}
    assert fit(critic.step, critic.made, own, 1.0).parked == {}


@pytest.mark.parametrize(
    ("flags", "told"),
    [({"ticks": -5}, "--ticks must be at least 1, got -5"), ({"ticks": 0}, "got 0"),
     ({"usd_per_chip_hour": math.nan}, "--usd_per_chip_hour must be a number from 0 on, got nan"),
     ({"usd_per_chip_hour": -1.0}, "got -1")],
)  # fmt: skip
def test_what_can_not_be_added_up_is_one_line(flags, told):
    with pytest.raises(PlanError, match=told):
        console.plan(CONFIG, "cpu:4", **flags)


def test_the_value_pretraining_is_told_in_the_unit_of_the_whole(plan):
    line = tables.tick_lines(plan, 2000, 3.0)[2]
    found = re.fullmatch(
        r"2000 ticks: at least ([\d.,]+) chip-hours, [\d,]+ USD, ([\d.,e-]+) chip-hours \(.*\) of "
        r"it for the value pretraining", line,
    )  # fmt: skip
    assert found is not None, line
    whole, first = (float(number.replace(",", "")) for number in found.groups())
    assert first <= whole


def test_what_is_not_counted_is_told():
    assert tables.counted_lines(run_config(recipe=RECIPES["grpo"])) == []
    dapo, daps = (tables.counted_lines(run_config(recipe=RECIPES[name]))
                  for name in ("dapo", "s3ac_single"))  # fmt: skip
    assert "one round is counted; a tick may take up to 8 rounds (recipe.keep)" in dapo[0]
    assert "up to 4 passes of the critic each (scheduler.max_rounds)" in daps[0]
    rollout = dataclasses.replace(CONFIG.rollout, backend="remote", addresses="host:9000")
    assert "rollouts are made by servers (rollout.backend=remote)" in tables.counted_lines(
        dataclasses.replace(CONFIG, rollout=rollout)
    )[-1]  # fmt: skip


def test_the_host_s_memory_is_told_where_it_is_used(plan):
    assert tables.host_line(plan) is None
    held = dataclasses.replace(plan.steps[-1].fit, host=3 * 2**30)
    steps = [*plan.steps[:-1], dataclasses.replace(plan.steps[-1], fit=held)]
    assert tables.host_line(dataclasses.replace(plan, steps=steps)) == (
        "in the hosts' memory at actor step, GiB: 3.00 for a device, 12.00 for the 4 of a host"
    )


def test_what_can_not_be_traced_there_is_one_line(plan):
    def program(x):
        raise ValueError("rows of 34 tokens\nwon't do")

    mesh = make_mesh(CONFIG.mesh, jax.devices())
    whole = jax.ShapeDtypeStruct((4,), jnp.float32)
    with pytest.raises(PlanError) as error:
        compile_program(jax.jit(program), (whole,), mesh, plan.target)
    assert str(error.value) == "this config has no program for cpu:4: rows of 34 tokens"


def test_what_the_search_asks(plan):
    """Rows twice as long fit where there is room, beside all that lies there, and else not."""
    train = dataclasses.replace(CONFIG.train, pack_tokens=2 * CONFIG.train.pack_tokens)
    config = dataclasses.replace(CONFIG, train=train)
    assert trains(config, plan.target, plan.pieces)
    most = max(one.fit.total for one in plan.steps if one.step.phase == "critic")
    small = dataclasses.replace(plan.target.chip, memory=most)
    assert not trains(config, dataclasses.replace(plan.target, chip=small), plan.pieces)


def test_sampling_apart_and_ahead():
    """Sampling and what selection asks on the one half, training on the other."""
    rollout = dataclasses.replace(
        CONFIG.rollout, apart=True, ahead=1, mesh=MeshSpec(data=2), scan_layers=True
    )
    config = dataclasses.replace(CONFIG, mesh=MeshSpec(fsdp=2), rollout=rollout)
    plan = make_plan(config, make_target("cpu:4"))
    assert {one.step.name for one in plan.steps} == set(STEPS) - {"weight sync", "weights laid out"}
    samplers = {one.step.name for one in plan.steps if one.step.apart}
    assert samplers == {"empty slots", "prefill", "insert", "generate", "prompt values"}
    meshes = [{device for one in plan.steps if one.step.apart == apart
               for device in one.step.mesh.devices.flat} for apart in (True, False)]  # fmt: skip
    assert [len(devices) for devices in meshes] == [2, 2]
    assert not meshes[0] & meshes[1]
    size = {name: device_bytes(tree) for name, tree in plan.pieces.items()}
    by_name = {one.step.name: one.fit for one in plan.steps}
    assert by_name["generate"].beside == size["copied judge weights"]
    assert by_name["prompt values"].beside == size["rollout weights"] + size["slots"]
    # Whole weights there, a half of them on each device that trains.
    assert size["rollout weights"] > 1.9 * size["actor weights"]
    lines = tables.tick_lines(plan, 1, None)
    assert "selection and rollouts are the next tick's, beside the rest" in lines[0]
    assert "to the sampler's devices (rollout.apart) is not counted" in lines[-1]


def test_a_plan_that_does_not_fit_ends_with_its_steps(monkeypatch, plan, capsys):
    small = dataclasses.replace(plan.target.chip, memory=1.0)
    target = dataclasses.replace(plan.target, chip=small)
    steps = [
        dataclasses.replace(one, fit=dataclasses.replace(one.fit, limit=1.0)) for one in plan.steps
    ]
    bad = dataclasses.replace(plan, target=target, steps=steps)
    monkeypatch.setattr(console, "make_plan", lambda *_, **__: bad)
    with pytest.raises(
        console.DoesNotFit, match=r"does not fit cpu:4: actor learner, .*actor step"
    ):
        console.plan(CONFIG, "cpu:4", usd_per_chip_hour=2.0)
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown
    assert "does not fit: " in shown
    assert "USD" in shown


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="XLA's compiler for TPUs is not installed"
)


@needs_libtpu
def test_a_tpu_that_is_not_here():
    config = dataclasses.replace(CONFIG, mesh=MeshSpec(fsdp=2, tensor=2))
    names = []
    plan = make_plan(config, make_target("v5e:2x2"),
                     told=lambda step, made: names.append((step.name, made is None)))  # fmt: skip
    assert [name for name, begins in names if begins] == STEPS
    assert plan.fits
    # On a TPU keys and values have the model's dtype, and weights theirs.
    assert plan.steps[-1].bound.sent


@needs_libtpu
def test_too_much_for_a_tpu_is_known_in_seconds():
    target = make_target("v5e:2x2")
    mesh = make_mesh(MeshSpec(fsdp=4), target.devices)
    whole = NamedSharding(mesh, PartitionSpec())
    big = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32, sharding=whole)
    program = jax.jit(jnp.sin)
    made = compile_program(program, (big,), mesh, target)
    assert made.memory is None
    assert made.needed == 32 * 2**30
    step = Step("big", "actor", program, (big,), mesh, 1.0, frozenset())
    got = fit(step, made, {}, target.chip.memory)
    assert not got.fits
    assert got.classes["activations"] == 16 * 2**30
