"""A sampler that rounds is not the policy that is trained, and the mismatch metrics say so."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.core.metrics import finalize
from s3ac_jax.models.network import actor_network
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.train.build import build
from s3ac_jax.train.online import fresh_state
from s3ac_jax.train.tick import run_tick
from tests.helpers import random_params, run_config, tiny_spec

SPEC = tiny_spec(num_layers=2)
RECIPE = dataclasses.replace(RECIPES["grpo"], responses_per_prompt=4)
GRADE = ArithmeticVerifier.grade


def grade(verifier, rollout):
    """A random policy is never right: every third response is said to be."""
    success = np.arange(len(rollout.num_tokens)) % 3 == 0
    reward = np.where(success, 1.0, -1.0).astype(np.float32)
    return dataclasses.replace(GRADE(verifier, rollout), success=success, reward=reward)


@functools.cache
def parts(**changes):
    config = run_config(model=SPEC, recipe=RECIPE, batch_prompts=2)
    rollout = dataclasses.replace(config.rollout, **changes)
    return build(dataclasses.replace(config, rollout=rollout), like=parts() if changes else None)


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [({}, 0, 2e-6), ({"weights": "int8"}, 2e-4, 0.05), ({"kv_dtype": "int8"}, 2e-4, 0.05)],
    ids=str,
)
def test_the_mismatch_is_that_of_the_rounding(changes, least, most, monkeypatch):
    if "weights" in changes:
        pytest.importorskip("qwix", reason="needs the extra int8")
    monkeypatch.setattr(ArithmeticVerifier, "grade", grade)
    here = parts(**changes)
    assert here.score_actor is parts().score_actor  # training does not know of it
    with here.on_mesh():
        state = fresh_state(here, random_params(actor_network(SPEC), 0, std=0.4), None)
        _, report, _ = run_tick(here, state, jax.random.key(0))
    report = finalize(report)
    assert least <= report["mismatch_abs_log"] <= most
