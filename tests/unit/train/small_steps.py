"""What the tests of the steps share: a batch for each role, steps compiled once for all."""

import functools

import numpy as np

from s3ac_jax.core.types import ActorBatch, CriticBatch
from s3ac_jax.train import steps
from s3ac_jax.train.learner import make_learner, make_optimizer
from tests.helpers import gradient_recorder, run_config
from tests.unit.train.small import (
    ACTOR,
    CRITIC,
    RECIPE,
    TEMPERATURE,
    cells,
    copy,
    packed_nine,
    values_of,
)


@functools.cache
def batches():
    """A batch for each role, of random targets, some tokens rejected; nothing depends on a split.

    Only some of the trainable tokens have a value to learn.
    """
    packed, rng = packed_nine(), np.random.default_rng(3)
    shape, mask = packed.mask.shape, packed.mask
    normal = rng.normal(size=(4, *shape)).astype(np.float32)
    keep = mask & (rng.random(shape) < 0.8)
    logp_old = np.where(mask, packed.logp_rollout + 0.3 * normal[0], 0)
    logp_old[tuple(x[3] for x in cells(packed, 2))] = -12.0  # a ratio beyond the cap
    learns = mask & (rng.random(shape) < 0.7)
    return {
        "actor": ActorBatch(
            packed=packed,
            logp_old=logp_old,
            advantages=np.where(mask, normal[2], 0),
            weights=np.where(keep, rng.uniform(0.5, 2, size=shape), 0).astype(np.float32),
            imitation=None,
            denominator=np.float32(0.7 * keep.sum()),  # whatever the average makes of it
        ),
        "critic": CriticBatch(
            packed=packed,
            learns=learns,
            values_old=np.where(mask, normal[1], 0),
            returns=np.where(mask, np.sign(normal[3]), 0).astype(np.float32),
            tokens=np.float32(learns.sum()),
            first=np.array(False),
        ),
    }


OPTIMIZERS = {"recorder": gradient_recorder(), "adam": make_optimizer(run_config().actor)}


@functools.cache
def step_of(role, optimizer, micro_rows=4):
    """Compiled once for all tests, whose batches share one shape. The recorder sees no clip."""
    tx, clip = OPTIMIZERS[optimizer], 1e9 if optimizer == "recorder" else 1.0
    if role == "critic":
        return steps.make_critic_step(CRITIC, RECIPE.critic, tx, clip=clip, micro_rows=micro_rows)
    return steps.make_actor_step(
        ACTOR, RECIPE.surrogate, tx, clip=clip, temperature=TEMPERATURE, micro_rows=micro_rows
    )


def stepped(role, optimizer, learner, batch, micro_rows=4):
    """(learner, metrics), whatever else a step hands back."""
    learner, report, *_ = step_of(role, optimizer, micro_rows)(learner, batch)
    return learner, values_of(report)


def fresh(role, params, optimizer):
    return make_learner(copy(params[role]), OPTIMIZERS[optimizer])


def gradients(role, params, batch, micro_rows=4):
    learner, report = stepped(role, "recorder", fresh(role, params, "recorder"), batch, micro_rows)
    return learner.opt_state, report
