"""The losses of every recipe on one fixed batch against the float64 loops of `recipe_oracles`.

Log-probs and values come from the network; all else is the oracle's own.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.data.packing import pack
from s3ac_jax.models.network import actor_network, critic_network
from s3ac_jax.train import score, steps
from s3ac_jax.train.learner import make_learner
from s3ac_jax.train.prepare import make_prepare
from tests.helpers import gradient_recorder, make_scored, random_params, tiny_spec
from tests.unit.train.recipe_oracles import (
    BASELINE,
    GROUP,
    LENGTHS,
    LIMIT,
    ORACLES,
    SUCCESS,
    Case,
    binary_kl,
    mismatch,
    rho,
)

SPEC = tiny_spec(num_layers=2)
ACTOR, CRITIC = actor_network(SPEC), critic_network(SPEC)
TEMPERATURE, MICRO_ROWS = 0.8, 2
PROMPTS = (3, 3, 3, 3, 5, 5, 5, 5)
# Shuffled and uneven; some methods make one optimiser batch of it.
HALVES = ((6, 1, 3, 4), (0, 7, 2, 5))
PARTS = {2: HALVES, 1: ((*HALVES[1], *HALVES[0]),)}
# How far the sampler is from pi_old, response by response, in nats.
MISMATCH = (0.004, 0.002, 0.6, 0.8, 0.004, 1.2, 0.4, 0.002)


def cells(packed, number):
    return np.nonzero((packed.response == number) & packed.mask)


@functools.cache
def actor_vjp():
    """(params, packed, cotangent) -> gradient of sum(cotangent * logp): the network's part."""

    def gradient(params, packed, slopes):
        def total(params):
            logp, _ = score.read_logp(ACTOR, params, packed, temperature=TEMPERATURE)
            return jnp.sum(jnp.where(packed.mask, slopes * logp, 0.0))

        return jax.grad(total)(params)

    return jax.jit(gradient)


@functools.cache
def critic_vjp():
    def gradient(params, packed, slopes):
        def total(params):
            values = score.read_values(CRITIC, params, packed)
            return jnp.sum(jnp.where(packed.mask, slopes * values, 0.0))

        return jax.grad(total)(params)

    return jax.jit(gradient)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Weights before the update and now; the batch in halves or whole; what the oracle reads."""

    now: dict
    case: Case
    scored: object
    packed: dict
    scores: dict


def cut(scored, number):
    return [pack(scored, np.array(rows), pack_tokens=18, max_rows=6) for rows in PARTS[number]]


@pytest.fixture(scope="module")
def fixed():
    rng = np.random.default_rng(2)
    scored = make_scored(5, PROMPTS, LENGTHS)
    success = np.array(SUCCESS)
    scored = dataclasses.replace(
        scored, success=success, reward=np.where(success, 1.0, -1.0).astype(np.float32)
    )
    old = {"actor": random_params(ACTOR, 1, std=0.3), "critic": random_params(CRITIC, 2, std=0.3)}
    far = {"actor": (ACTOR, 36), "critic": (CRITIC, 36)}
    now = {
        role: jax.tree.map(lambda a, b: 0.5 * (a + b), old[role], random_params(*other, std=1.0))
        for role, other in far.items()
    }
    read = score.make_score(ACTOR, CRITIC, temperature=TEMPERATURE, micro_rows=MICRO_ROWS)
    (whole,) = cut(scored, 1)
    before, after = (
        [np.asarray(x) for x in read(tree["actor"], tree["critic"], whole)] for tree in (old, now)
    )
    mu = np.zeros((8, LIMIT), np.float32)
    for i in range(8):
        noise = MISMATCH[i] * rng.normal(size=LENGTHS[i])
        mu[i, : LENGTHS[i]] = before[0][cells(whole, i)] + noise
    mu[6, 3] -= 4.0  # rho 55 and more: the whole response goes
    scored = dataclasses.replace(scored, rollout=dataclasses.replace(scored.rollout, logp=mu))
    packed = {number: cut(scored, number) for number in PARTS}

    def lists(grid):
        return [grid[cells(whole, i)].astype(np.float64).tolist() for i in range(8)]

    case = Case(
        lists(after[0]), lists(before[0]),
        [mu[i, : LENGTHS[i]].astype(np.float64).tolist() for i in range(8)],
        lists(after[1]), lists(before[1]), scored.reward.astype(float).tolist(),
    )  # fmt: skip
    # Read in the packing of each; where nothing may be read stands NaN.
    scores = {
        number: [
            tuple(np.where(part.mask, x, np.nan) for x in read(old["actor"], old["critic"], part))
            for part in parts
        ]
        for number, parts in packed.items()
    }
    return Fixed(now, case, scored, packed, scores)


@functools.cache
def actor_step(surrogate):
    return steps.make_actor_step(
        ACTOR, surrogate, gradient_recorder(), clip=1e9, temperature=TEMPERATURE,
        micro_rows=MICRO_ROWS,
    )  # fmt: skip


@functools.cache
def critic_step(spec):
    return steps.make_critic_step(
        CRITIC, spec, gradient_recorder(), clip=1e9, micro_rows=MICRO_ROWS
    )


def step(made, params, batch):
    learner = make_learner(jax.tree.map(jnp.array, params), gradient_recorder())
    learner, report, *_ = made(learner, batch)
    return learner.opt_state, {name: metric.value() for name, metric in report.items()}


def laid(packed, slopes):
    grid = np.zeros(packed.mask.shape, np.float32)
    for i, one in slopes.items():
        grid[cells(packed, i)] = one
    return grid


def assert_same_gradient(got, want):
    """1e-5 of the gradient's own norm, over all weights and for the largest."""
    got, want = (jax.device_get(named_leaves(tree)) for tree in (got, want))
    norm = math.sqrt(sum(float(np.sum(np.square(leaf, dtype=float))) for leaf in want.values()))
    assert norm > 1e-4
    off = math.sqrt(
        sum(float(np.sum(np.square(got[n].astype(float) - leaf))) for n, leaf in want.items())
    )
    assert off < 1e-5 * norm


def test_every_recipe_has_its_oracle():
    assert ORACLES.keys() == RECIPES.keys()


def test_the_batch_puts_everything_to_the_test(fixed):
    case = fixed.case
    ratios = [
        math.exp(a - b) for i in range(8) for a, b in zip(case.now[i], case.old[i], strict=True)
    ]
    assert min(ratios) < 0.8
    assert any(1.2 < x < 1.28 for x in ratios)
    assert max(ratios) > 5  # the cap of CISPO
    to_sampler = [
        math.exp(a - b) for i in range(8) for a, b in zip(case.now[i], case.mu[i], strict=True)
    ]
    assert min(to_sampler) < 0.7
    assert max(to_sampler) > 6
    every = [x for i in range(8) for x in rho(case, i)]
    assert min(every) < 0.5
    assert max(every) > 20
    kept = [mismatch(case, i) for i in range(8)]
    assert sum(x is None for x in kept[6]) == len(kept[6])
    assert 0 < sum(x is None for i in (2, 3, 5) for x in kept[i]) < 18
    assert 0 < sum(binary_kl(case, i)[0] is None for i in range(8)) < 8
    moved = [
        abs(a - b)
        for i in range(8)
        for a, b in zip(case.values[i], case.values_old[i], strict=True)
    ]
    assert min(moved) < 0.5 < max(moved)


@pytest.mark.parametrize("name", RECIPES)
def test_losses_are_those_of_the_oracle(name, fixed):
    recipe = RECIPES[name]
    if recipe.responses_per_prompt > 1:
        recipe = dataclasses.replace(recipe, responses_per_prompt=GROUP)
    number, scored = recipe.updates or 2, fixed.scored
    packed, scores = fixed.packed[number], fixed.scores[number]
    if recipe.shaping is not None:
        reward = recipe.shaping.shaped(scored.reward, np.array(LENGTHS), max_tokens=LIMIT)
        packed = cut(dataclasses.replace(scored, reward=reward), number)
    if not recipe.reads_values:
        scores = [(logp, None) for logp, _ in scores]
    prepare = make_prepare(recipe, num_responses=8)
    made = prepare(
        packed, scores, np.array(SUCCESS), np.array(BASELINE, np.float32),
        np.full(2, np.nan, np.float32),
    )  # fmt: skip
    actor_batches, critic_batches = made.actor, made.critic
    assert len(actor_batches) == number
    assert (critic_batches is None) == (recipe.critic is None)
    for k, members in enumerate(PARTS[number]):
        (loss, slopes), critic = ORACLES[name](fixed.case, members)
        made = actor_step(recipe.surrogate)
        grads, report = step(made, fixed.now["actor"], actor_batches[k])
        assert report["policy_loss"] == pytest.approx(loss, rel=1e-5)
        want = actor_vjp()(fixed.now["actor"], packed[k], laid(packed[k], slopes))
        assert_same_gradient(grads, want)
        assert (critic is None) == (recipe.critic is None)
        if critic is None:
            continue
        mse, optimised, slopes = critic
        batch, made = critic_batches[k], critic_step(recipe.critic)
        grads, report = step(made, fixed.now["critic"], batch)
        assert report["value_loss"] == pytest.approx(mse, rel=1e-5)
        want = critic_vjp()(fixed.now["critic"], packed[k], laid(packed[k], slopes))
        assert_same_gradient(grads, want)
        values = laid(packed[k], {i: fixed.case.values[i] for i in members})
        per_token = recipe.critic.token_loss(values, batch.values_old, batch.returns, batch.learns)
        assert float(jnp.sum(per_token) / batch.tokens) == pytest.approx(optimised, rel=1e-5)
