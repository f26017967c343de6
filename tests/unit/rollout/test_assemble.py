"""Responses put together: what was filled in, and nothing where nothing was."""

import numpy as np

from s3ac_jax.core.types import Prompt
from s3ac_jax.rollout.assemble import Assembly, tally

PROMPT = Prompt(
    np.arange(3, dtype=np.int32), np.zeros((3, 4), np.int32), np.array([1, 4, 2], np.int32)
)


def test_nothing_is_made_at_first():
    made = Assembly(PROMPT, 5, (2, 3)).finish()
    assert made.prompt is PROMPT
    assert made.tokens.shape == made.logp.shape == made.version.shape == (3, 5)
    assert made.routing.shape == (3, 9, 2, 3)
    assert (made.routing == -1).all()
    assert (made.version == -1).all()
    assert made.num_tokens.tolist() == [0, 0, 0]
    assert made.aborted.tolist() == [True, True, True]
    assert not made.stopped.any()
    assert Assembly(PROMPT, 5, None).finish().routing is None
    assert tally(made) == {"requests": 3, "tokens": 0, "aborted": 3}


def test_responses_come_in_any_order():
    made = Assembly(PROMPT, 5, None)
    made.put(
        np.array([2, 0]), np.array([1, 3]), tokens=[9, 4, 5, 6], logp=[-1.0, -2.0, -3.0, -4.0],
        version=[7, 7, 8, 8], stopped=np.array([True, False]), aborted=np.array([False, False]),
    )  # fmt: skip
    made.put(
        np.array([1]), np.array([2]), tokens=[1, 2], logp=[-0.5, -0.5], version=3, stopped=False,
        aborted=True,
    )  # fmt: skip
    rollout = made.finish()
    assert rollout.tokens.tolist() == [[4, 5, 6, 0, 0], [1, 2, 0, 0, 0], [9, 0, 0, 0, 0]]
    assert rollout.logp[0].tolist() == [-2, -3, -4, 0, 0]
    assert rollout.version.tolist() == [[7, 8, 8, -1, -1], [3, 3, -1, -1, -1], [7] + [-1] * 4]
    assert rollout.num_tokens.tolist() == [3, 2, 1]
    assert rollout.stopped.tolist() == [False, False, True]
    assert rollout.aborted.tolist() == [False, True, False]
    assert tally(rollout) == {"requests": 3, "tokens": 6, "aborted": 1}


def test_one_version_for_all_tokens():
    made = Assembly(PROMPT, 5, None)
    made.num_tokens[:] = [1, 0, 5]
    made.aborted[:] = False
    rollout = made.finish(6)
    assert rollout.version.tolist() == [[6] + [-1] * 4, [-1] * 5, [6] * 5]
    assert rollout.version.dtype == np.int32
    assert rollout.aborted is None
    assert tally(rollout) == {"requests": 3, "tokens": 6, "aborted": 0}
