"""What lies on a device beside each step, counted by hand; nothing is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.models.spec import MoeSpec
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.train.plan.app import make_machine, start_steps
from s3ac_jax.train.plan.arguments import device_bytes
from s3ac_jax.train.plan.compiling import Compiled
from s3ac_jax.train.plan.fitting import fit
from s3ac_jax.train.plan.rollouts import server_steps
from s3ac_jax.train.plan.state import before, parked, present, tick_pieces
from s3ac_jax.train.plan.steps import ROLLOUT_WEIGHTS, pretraining_step, training_steps
from s3ac_jax.train.plan.target import make_target
from s3ac_jax.train.programs import abstract_learner
from tests.helpers import run_config, tiny_spec


def changed(config, **sections):
    """The config with fields of its sections replaced."""
    return dataclasses.replace(
        config,
        **{name: dataclasses.replace(getattr(config, name), **fields)
           for name, fields in sections.items()},
    )  # fmt: skip


def machine_of(recipe="s3ac_single", model=None, fsdp=4, **sections):
    config = run_config(
        mesh=MeshSpec(fsdp=fsdp), recipe=RECIPES[recipe], batch_prompts=8, minibatches=2,
        model=model,
    )  # fmt: skip
    return make_machine(changed(config, **sections), make_target("cpu:4"))


def steps_of(machine):
    return {step.name: step for step in training_steps(machine)}


def count(machine, step, pieces):
    """Bytes beside a step in a tick; nothing is compiled, so its own needs are none."""
    there = present(machine.config, step, pieces)
    return fit(step, Compiled(None, (), 0.0, 0, needed=0.0), there, 1e9).beside


def size(*trees):
    return sum(device_bytes(tree) for tree in trees)


@pytest.mark.parametrize(
    "moe", [None, MoeSpec(num_experts=4, per_token=2, width=6, shared_width=4)]
)
def test_the_other_batches_lie_beside_an_update(moe):
    model = tiny_spec(num_layers=2) if moe is None else tiny_spec(num_layers=2, moe=moe)
    machine = machine_of(model=model)
    steps, pieces = steps_of(machine), tick_pieces(machine, {})
    # A quarter of the cells of a batch, the first of which holds at most one response a row.
    rows, width = steps["actor step"].arguments[1].packed.tokens.shape
    cells = rows * width / 4
    # Tokens, segments, positions, owner, trainable, reward and log-prob; mask; the rows used.
    routing = 0 if moe is None else 2 * 2 * 2
    packed = (7 * 4 + 1 + routing) * cells + 4
    read = 2 * 4 * cells
    actor = 3 * 4 * cells + 4
    # Which learn, returns; the sum of those that learn, and whether it is the first.
    clipped = 0 if machine.config.recipe.critic.clip is None else 4
    critic = (1 + 4 + clipped) * cells + 4 + 1
    learners = {role: size(pieces[f"{role} weights"], pieces[f"{role} optimiser"])
                for role in ("actor", "critic")}  # fmt: skip
    assert count(machine, steps["score"], pieces) == sum(
        size(pieces[f"{role} optimiser"]) for role in ("actor", "critic")
    ) + packed + 2 * read  # fmt: skip
    # Its own is an argument, and so is the learner's counter of steps.
    both = 2 * (packed + read + actor + critic) - packed - 4
    beside = {name: count(machine, steps[name], pieces) for name in ("critic step", "actor step")}
    assert beside["critic step"] == learners["actor"] + both - critic
    assert beside["actor step"] == learners["critic"] + both - actor
    # Selection comes before there is a batch.
    assert "batches" not in present(machine.config, steps["prompt values"], pieces)


def started(machine):
    pretraining = machine.programs.pretraining
    learner = abstract_learner(pretraining.role, machine.mesh)
    steps = [*start_steps(machine), pretraining_step(machine, learner)]
    found = {}
    for step in steps:
        there = before(machine, step, learner)
        assert step.holds - {"base policy weights"} <= there.keys()
        found[step.name] = fit(step, Compiled(None, (), 0.0, 0, needed=0.0), there, 1e9).beside
    return found


def test_learners_are_made_one_beside_the_other():
    machine = machine_of()
    learners = {"actor": machine.actor, "critic": machine.critic}
    weights = {role: size(one.trainable, one.frozen) for role, one in learners.items()}
    actor = weights["actor"] + size(machine.actor.opt_state)
    # The critic's own start is its argument; the diagnoses run beside it.
    assert started(machine) == {
        "actor learner": weights["critic"], "critic learner": actor,
        "value pretraining step": weights["critic"],
    }  # fmt: skip
    without = machine_of(value_pretraining={"diagnose_steps": 0})
    assert started(without)["value pretraining step"] == 0


def test_a_pretrained_model_lies_there_until_training_begins():
    plain = started(machine_of())
    given = {"early_prompts": 0, "middle_prompts": 0}
    machine = machine_of(start={"hf": "model"}, value_pretraining=given)
    base = size(machine.actor.trainable, machine.actor.frozen)
    found = started(machine)
    # The actor's learner is made of it.
    assert found["actor learner"] == plain["actor learner"]
    for name in ("critic learner", "value pretraining step"):
        assert found[name] == plain[name] + base
    assert "base policy weights" not in tick_pieces(machine, {})


@pytest.mark.parametrize(("offload", "left"), [("optimizer", "weights"), ("idle", None)])
def test_what_was_just_made_is_sent_away(offload, left):
    machine = machine_of(train={"offload": offload})
    actor = size(machine.actor.trainable, machine.actor.frozen)
    assert started(machine)["critic learner"] == (actor if left else 0)


@pytest.mark.parametrize("judge", ["stale", "untrained"])
def test_another_judge_is_one_more_critic(judge):
    machine = machine_of(scheduler={"judge": judge})
    steps, pieces = steps_of(machine), tick_pieces(machine, {})
    weights = size(machine.critic.trainable, machine.critic.frozen)
    assert size(pieces["judge weights"]) == weights
    assert steps["prompt values"].holds == {"judge weights"}
    for name in ("score", "actor step"):
        assert "judge weights" in present(machine.config, steps[name], pieces)
    found = started(machine)
    both = sum(size(one.trainable, one.frozen, one.opt_state)
               for one in (machine.actor, machine.critic))  # fmt: skip
    start = 0 if judge == "stale" else weights
    assert found["judge learner"] == both + start


def test_spo_asks_how_far_the_policy_has_moved():
    machine = machine_of("spo")
    steps = steps_of(machine)
    drift = steps["drift"]
    # The last responses of 8 prompts, in as many batches as the recipe has.
    assert len(drift.arguments[1]) == machine.config.minibatches
    assert (drift.phase, drift.times, drift.holds) == ("select", 1.0, {"actor weights"})
    with jax.set_mesh(machine.mesh):
        found = jax.eval_shape(drift.program, *drift.arguments)
    assert found.shape == (8,)
    reading = steps["score of the actor"]
    assert drift.flops.done == reading.flops.done * reading.times


APART = {"apart": True, "mesh": MeshSpec(tensor=2), "ahead": 1}


def test_each_half_has_its_own():
    machine = machine_of(fsdp=2, rollout=APART)
    steps = steps_of(machine)
    pieces = tick_pieces(machine, {"slots": (), ROLLOUT_WEIGHTS: ()})
    learners = {f"{role} {what}" for role in ("actor", "critic")
                for what in ("weights", "optimiser")}  # fmt: skip
    there = present(machine.config, steps["actor step"], pieces)
    assert there.keys() == learners | {"batches", "prepared batches"}
    asked = steps["prompt values"]
    assert set(asked.mesh.devices.flat) == set(machine.apart.devices.flat)
    assert asked.holds == {"copied judge weights"}
    theirs = {"slots", "rollout weights", "copied judge weights"}
    assert present(machine.config, asked, pieces).keys() == theirs
    # Whole along the model's width there, cut by the heads and the feed-forward's width.
    copied, own = size(pieces["copied judge weights"]), size(pieces["critic weights"])
    assert own < copied < 2 * own


@pytest.mark.parametrize(("dtype", "ahead"), [("bfloat16", 0), ("float32", 0), ("float32", 1)])
def test_what_servers_are_sent_is_kept(dtype, ahead):
    """A cast set of the policy's weights; of float32 a copy, and that for a tick ahead alone."""
    servers = {"backend": "remote", "addresses": "host:9000", "ahead": ahead}
    machine = machine_of(model=tiny_spec(num_layers=2, dtype=dtype), rollout=servers)
    steps = server_steps(machine)
    made = []
    try:
        step = next(steps)
        while True:
            made.append(step.name)
            with jax.set_mesh(step.mesh):
                places = step.program.lower(*step.arguments).compile()
            step = steps.send(
                Compiled(places.memory_analysis(), (), 0.0, 0, places.output_shardings)
            )
    except StopIteration as end:
        kept = end.value
    assert made == (["weight sync"] if dtype == "bfloat16" else [])
    assert kept.keys() == ({ROLLOUT_WEIGHTS} if dtype == "bfloat16" or ahead else set())
    if dtype == "bfloat16":
        assert kept[ROLLOUT_WEIGHTS]["embed"].dtype == jnp.bfloat16
    pieces = tick_pieces(machine, kept)
    for one in training_steps(machine):
        assert kept.keys() <= present(machine.config, one, pieces).keys()
        # Servers answer while the trainer updates: selection meets all that lies there then.
        if one.phase == "select":
            assert ("batches" in present(machine.config, one, pieces)) == bool(ahead)


def test_the_host_holds_what_is_sent_away():
    machine = machine_of(train={"offload": "idle"})
    steps, pieces = steps_of(machine), tick_pieces(machine, {})
    config = machine.config
    step = steps["critic step"]
    held = parked(config, step, pieces)
    assert held.keys() == {"actor weights", "actor optimiser"}
    got = fit(step, Compiled(None, (), 0.0, 0, needed=0.0), {}, 1e9, parked=held)
    assert got.host == size(machine.actor.trainable, machine.actor.frozen, machine.actor.opt_state)
    # The critic is awake before the batches are prepared.
    assert parked(config, steps["prepare"], pieces).keys() == held.keys()
