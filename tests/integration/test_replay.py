"""Routing replay from end to end: the trainer's policy is the sampler's, whatever its router says.

On a tiny model whose experts matter: their outputs are as large as what they are added to.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.core.metrics import finalize
from s3ac_jax.core.trees import named_leaves, nest
from s3ac_jax.core.types import ActorBatch, Prompt, Rollout
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import MoeSpec
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.rollout.backend import make_sampling
from s3ac_jax.train.build import build
from s3ac_jax.train.gather import pack_batches
from s3ac_jax.train.learner import make_learner
from s3ac_jax.train.online import abstract_state, fresh_state
from s3ac_jax.train.steps import make_actor_step
from s3ac_jax.train.tick import run_tick
from s3ac_jax.train.tick_metrics import routing_metrics
from tests.helpers import (
    gradient_recorder,
    logp_oracle,
    make_scored,
    random_params,
    run_config,
    sequence_of,
    tiny_spec,
)

SPEC = tiny_spec(  # dense: the shortest to compile
    num_layers=2, moe=MoeSpec(num_experts=6, per_token=2, width=9, matmul="dense")
)
GROUP, ROWS = 4, 8
RECIPE = dataclasses.replace(RECIPES["s3ac_group"], responses_per_prompt=GROUP)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@functools.cache
def parts():
    return build(run_config(model=SPEC, recipe=RECIPE, batch_prompts=2))


@functools.cache
def params():
    return random_params(actor_network(SPEC), 0, std=0.4)


@functools.cache
def scored():
    """Eight responses of the sampler, and its word on each token's experts."""
    prompt = parts().train.prompts.take(np.repeat([0, 5], GROUP))
    parts().rollout.update_weights(params(), 0)
    sampling = make_sampling(
        jax.random.key(1),
        ROWS,
        temperature=1.0,
        max_tokens=11,
        stop_ids=parts().rollout.engine.stop_ids,
    )
    rollout = parts().rollout.generate(prompt, sampling)
    return parts().train.verifier.grade(rollout)


def with_routing(routing):
    return dataclasses.replace(
        scored(), rollout=dataclasses.replace(scored().rollout, routing=routing)
    )


def packed(one):
    (batch,) = pack_batches(parts(), one, np.arange(ROWS), 1)
    return batch


def trainers(weights, one):
    """What the trainer reads for each response's tokens, one after the other."""
    with parts().on_mesh():
        batch = packed(one)
        logp, _ = parts().score_actor(weights, None, batch)
    found = []
    for n in range(ROWS):
        row, columns = np.nonzero((np.asarray(batch.response) == n) & np.asarray(batch.mask))
        found.append(np.asarray(logp)[row, columns])
    return np.concatenate(found)


def samplers():
    rollout = scored().rollout
    return np.concatenate([
        row[:n] for row, n in zip(rollout.logp, rollout.num_tokens, strict=True)
    ])  # fmt: skip


def oracles(one, weights=None):
    """The same in float64, with the experts that the rollout tells."""
    found = []
    for n in range(ROWS):
        sequence, start = sequence_of(one, n), one.rollout.prompt.num_tokens[n]
        told = one.rollout.routing
        told = None if told is None else told[n, : len(sequence)]
        logp = logp_oracle(weights or params(), SPEC, sequence, routing=told)
        found.append(logp[start - 1 :])
    return np.concatenate(found)


def test_the_trainer_reads_what_the_sampler_said():
    assert scored().rollout.routing is not None
    np.testing.assert_allclose(samplers(), oracles(with_routing(None)), **CLOSE)
    np.testing.assert_allclose(trainers(params(), scored()), samplers(), **CLOSE)


def test_told_other_experts_the_trainer_uses_those():
    """Any two of six in every layer of every token: against the loop that is told the same."""
    rng = np.random.default_rng(2)
    routing = scored().rollout.routing
    other = rng.permuted(np.broadcast_to(np.arange(6), (*routing.shape[:-1], 6)), axis=-1)[..., :2]
    told = with_routing(np.where(routing < 0, -1, other).astype(np.int16))
    got, want = trainers(params(), told), oracles(told)
    np.testing.assert_allclose(got, want, **CLOSE)
    assert np.mean(np.abs(got - samplers()) > 1e-3) > 0.9
    # Half of it not recorded: those tokens are routed by the live router.
    gaps = told.rollout.routing.copy()
    gaps[:, ::2] = -1
    gaps[0, :, 1] = -1
    gaps = with_routing(gaps)
    got = trainers(params(), gaps)
    np.testing.assert_allclose(got, oracles(gaps), **CLOSE)
    assert np.abs(got - want).max() > 0.01


def twins(weights, first, second, *, swap):
    """Two experts that the router can't tell apart; swap: the one is the other's."""
    moe = dict(weights["layers"]["moe"])
    moe["router"] = moe["router"].at[:, :, second].set(moe["router"][:, :, first])
    if swap:
        order = np.arange(6)
        order[[first, second]] = second, first
        for name in ("gate", "up", "down"):
            moe[name] = moe[name][:, order]
    return weights | {"layers": weights["layers"] | {"moe": moe}}


def test_where_router_and_sampler_part_replay_holds_on_to_the_sampler():
    """A tie that sampler and trainer break differently, with equal gates on both sides.

    The trainer's experts 4 and 5 have changed places under a router that finds them equal. It
    would go on taking 4 before 5, and that is another expert now.
    """
    mine, theirs = (twins(params(), 4, 5, swap=swap) for swap in (False, True))
    parts().rollout.update_weights(mine, 0)
    sampling = make_sampling(
        jax.random.key(3),
        ROWS,
        temperature=1.0,
        max_tokens=11,
        stop_ids=parts().rollout.engine.stop_ids,
    )
    rollout = parts().rollout.generate(scored().rollout.prompt, sampling)
    said = np.concatenate([
        row[:n] for row, n in zip(rollout.logp, rollout.num_tokens, strict=True)
    ])  # fmt: skip
    routing = rollout.routing
    tied = (routing == 4).any(axis=-1) != (routing == 5).any(axis=-1)
    assert tied[routing[..., 0] >= 0].mean() > 0.3
    renamed = np.select([routing == 4, routing == 5], [5, 4], routing).astype(np.int16)
    one = dataclasses.replace(scored(), rollout=dataclasses.replace(rollout, routing=renamed))
    np.testing.assert_allclose(trainers(theirs, one), said, **CLOSE)
    live = dataclasses.replace(one, rollout=dataclasses.replace(rollout, routing=None))
    assert np.mean(np.abs(trainers(theirs, live) - said) > 0.01) > 0.3


def gradients(spec, one, coefficients):
    """d sum(c log pi) by the actor step, every weight trained; one coefficient per token."""
    tx = gradient_recorder()
    step = make_actor_step(
        actor_network(spec), RECIPE.surrogate, tx, clip=1e9, temperature=1.0, micro_rows=2
    )
    with parts().on_mesh():
        batch = packed(one)
        old, _ = parts().score_actor(params(), None, batch)
        laid, spent = np.zeros(batch.mask.shape, np.float32), 0
        for n, length in enumerate(one.rollout.num_tokens):
            own = (np.asarray(batch.response) == n) & np.asarray(batch.mask)
            laid[own] = coefficients[spent : spent + length]
            spent += length
        actor_batch = ActorBatch(
            packed=batch, logp_old=old, advantages=jnp.asarray(laid),
            weights=jnp.asarray(batch.mask, jnp.float32), imitation=None,
            denominator=jnp.float32(1.0),
        )  # fmt: skip
        learner, report = step(make_learner(jax.tree.map(jnp.copy, params()), tx), actor_batch)
    assert report["ratio_clipped"].value() == 0  # pi is pi_old, so the loss is -sum(c log pi)
    return jax.tree.map(lambda leaf: -np.asarray(leaf), learner.opt_state)


def test_gradients_of_the_actor_step_are_those_of_the_recorded_experts():
    rng = np.random.default_rng(4)
    routing = scored().rollout.routing
    other = rng.permuted(np.broadcast_to(np.arange(6), (*routing.shape[:-1], 6)), axis=-1)[..., :2]
    other = np.where((other == 5).any(axis=-1, keepdims=True), [0, 3], other)
    told = with_routing(np.where(routing < 0, -1, other).astype(np.int16))
    tokens = int(told.rollout.num_tokens.sum())
    coefficients = rng.normal(size=tokens).astype(np.float32)
    grads = gradients(SPEC, told, coefficients)
    leaves = named_leaves(params())
    slopes = {}
    for name, grad in named_leaves(grads).items():
        direction = rng.normal(size=grad.shape)
        ends = []
        for sign in (1, -1):
            moved = {
                key: np.asarray(leaf, np.float64) + (sign * 1e-5 * direction if key == name else 0)
                for key, leaf in leaves.items()
            }
            ends.append(coefficients @ oracles(told, nest(moved)))
        slopes[name] = np.vdot(grad, direction), (ends[0] - ends[1]) / 2e-5
    for name, (got, want) in slopes.items():
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-3, err_msg=name)
    assert abs(slopes["layers/moe/router"][1]) > 0.01
    for name in ("gate", "up", "down"):
        np.testing.assert_array_equal(grads["layers"]["moe"][name][:, 5], 0.0)  # nobody asked it
    remat = gradients(dataclasses.replace(SPEC, remat=True), told, coefficients)
    for (name, a), b in zip(named_leaves(remat).items(), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


def test_without_replay_nothing_is_recorded():
    other = dataclasses.replace(RECIPE, replay_routing=False)
    changed = dataclasses.replace(parts().config, recipe=other)
    plain = build(changed, like=parts())
    assert plain.rollout is not parts().rollout
    assert plain.score_actor is parts().score_actor
    assert plain.rollout.engine.routing_shape is None
    plain.rollout.update_weights(params(), 0)
    sampling = make_sampling(
        jax.random.key(1),
        ROWS,
        temperature=1.0,
        max_tokens=11,
        stop_ids=parts().rollout.engine.stop_ids,
    )
    rollout = plain.rollout.generate(scored().rollout.prompt, sampling)
    assert rollout.routing is None
    np.testing.assert_array_equal(rollout.tokens, scored().rollout.tokens)
    assert packed(dataclasses.replace(scored(), rollout=rollout)).routing is None
    assert routing_metrics(rollout) == {}


def test_routing_unrecorded_by_hand():
    """Of 4 + 2 tokens that are read, one has no experts in one layer, one in none."""
    prompt = Prompt(np.arange(2), np.zeros((2, 3), int), np.array([3, 1]))
    routing = np.full((2, 7, 2, 2), -1, np.int16)
    routing[0, :4] = routing[1, :2] = 1
    made = np.array([2, 2])
    rollout = Rollout(prompt, np.zeros((2, 4), int), made, None, None, None, routing)
    assert routing_metrics(rollout) == {"routing_unrecorded": 0.0}
    routing[0, 1, 1, 0] = -1
    routing[1, 0] = -1
    assert routing_metrics(rollout) == {"routing_unrecorded": pytest.approx(2 / 6)}
    routing[:] = -1
    assert routing_metrics(rollout) == {"routing_unrecorded": 1.0}
    assert routing_metrics(make_scored(0, [2], [3]).rollout) == {}


GRADE = ArithmeticVerifier.grade


def grade(verifier, rollout):
    """A random policy is never right: every third response is said to be."""
    success = np.arange(len(rollout.num_tokens)) % 3 == 0
    reward = np.where(success, 1.0, -1.0).astype(np.float32)
    return dataclasses.replace(GRADE(verifier, rollout), success=success, reward=reward)


class Run:
    def __init__(self, recipe):
        # Eight responses in one batch, so that much of what compiles is there already.
        prompts = ROWS // recipe.responses_per_prompt
        config = run_config(model=SPEC, recipe=recipe, batch_prompts=prompts)
        self.parts = build(config, like=parts())
        critic = random_params(self.parts.critic.network, 1) if recipe.critic else None
        with self.parts.on_mesh():
            self.state = fresh_state(self.parts, params(), critic)

    def tick(self):
        with self.parts.on_mesh():
            self.state, report, host = run_tick(self.parts, self.state, jax.random.key(0))
        return finalize(report) | host


@pytest.mark.parametrize("name", ["s3ac_single", "grpo_x"])
def test_ticks_and_an_exact_resume(name, monkeypatch, tmp_path):
    group = GROUP if RECIPES[name].responses_per_prompt > 1 else 1
    recipe = dataclasses.replace(RECIPES[name], responses_per_prompt=group)
    monkeypatch.setattr(ArithmeticVerifier, "grade", grade)
    run = Run(recipe)
    report = run.tick()
    assert {key for key, value in report.items() if not np.isfinite(value)} == set()
    assert report["routing_unrecorded"] == 0
    assert report["mismatch_abs_log"] < 1e-5  # the trainer's pi_old is the sampler's
    assert report["actor_grad_norm"] > 1e-4
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, run.state, {})
    before = jax.device_get(named_leaves(run.state.actor))
    run.tick()
    want = jax.device_get(named_leaves(run.state))
    moved = {
        key.removeprefix("trainable/") for key, leaf in named_leaves(run.state.actor).items()
        if key.startswith("trainable/") and not np.array_equal(leaf, before[key])
    }  # fmt: skip
    assert {"layers/moe/gate", "layers/moe/up", "layers/moe/down", "layers/attn/q"} <= moved
    np.testing.assert_array_equal(
        run.state.actor.frozen["layers"]["moe"]["router"], params()["layers"]["moe"]["router"]
    )
    run.state, _ = checkpoints.restore(1, abstract_state(run.parts))
    checkpoints.close()
    run.tick()
    got = jax.device_get(named_leaves(run.state))
    assert got.keys() == want.keys()
    for key, leaf in want.items():
        np.testing.assert_array_equal(got[key], leaf, err_msg=key)
