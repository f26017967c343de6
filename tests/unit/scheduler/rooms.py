"""What the tests of the scheduler share: a small one, draws of a whole batch, outcomes."""

import numpy as np

from s3ac_jax.core.types import Prompt, Rollout, Scored
from s3ac_jax.data.stream import Epochs
from s3ac_jax.scheduler.select import Scheduler


def scheduler(select, *, num_prompts=20, seed=3, **changes):
    sizes = {"batch_prompts": 6, "candidates": 10, "max_rounds": 5}
    return Scheduler(select, num_prompts, Epochs(num_prompts, seed), **(sizes | changes))


def position(cursor, num_prompts=20):
    return int(cursor.epoch) * num_prompts + int(cursor.offset)


def draw(room, key, stats, cursor, tick, values, count=None):
    """`count` prompts, or a whole batch."""
    return room.draw(key, stats, cursor, tick, values, count or room.batch_prompts)


def outcomes(index, success, valid, *, tokens=3, seed=0):
    """A graded rollout: responses to these prompts, with what else a record may look at."""
    rng, rows = np.random.default_rng(seed), len(index)
    prompt = Prompt(np.asarray(index, np.int32), np.zeros((rows, 2), np.int32), np.full(rows, 2))
    rollout = Rollout(
        prompt, rng.integers(1, 17, size=(rows, tokens)).astype(np.int32),
        rng.integers(1, tokens + 1, size=rows).astype(np.int32),
        -rng.random((rows, tokens)).astype(np.float32), np.ones(rows, bool),
        np.zeros((rows, tokens), np.int32),
    )  # fmt: skip
    success = np.asarray(success, bool)
    # A shaped reward, which history must not look at.
    return Scored(rollout, np.full(rows, -0.25, np.float32), success, np.asarray(valid, bool))


def record(room, stats, index, success, valid, tick, drift=None):
    """History after these outcomes, one response to a prompt."""
    drift = np.full(len(index), np.nan, np.float32) if drift is None else drift
    return room.record(stats, outcomes(index, success, valid), tick, drift)
