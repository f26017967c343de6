"""A small sampler and requests that the tests of rollouts share."""

import jax
import numpy as np

from s3ac_jax.core.types import Prompt
from s3ac_jax.models.network import actor_network
from s3ac_jax.rollout.backend import seeded_sampling
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout
from tests.helpers import random_params, tiny_spec

SPEC = tiny_spec(num_layers=2)
NETWORK = actor_network(SPEC)
PROMPT_TOKENS, RESPONSE_TOKENS = 6, 10
STOPS = (1, 5)


def make_rollout(params, *, slots=4, steps=3, insert_batch=2, longest=RESPONSE_TOKENS, **changes):
    engine = Engine(
        NETWORK, slots=slots, cache_tokens=PROMPT_TOKENS + longest, steps_per_dispatch=steps,
        stop_ids=STOPS, **changes,
    )  # fmt: skip
    room = LocalRollout(
        engine, insert_batch=insert_batch, max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=longest,
    )  # fmt: skip
    room.update_weights(params, 7)
    return room


def make_prompts(seed, rows):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, PROMPT_TOKENS + 1, size=rows).astype(np.int32)
    tokens = rng.integers(SPEC.vocab_size, size=(rows, PROMPT_TOKENS)).astype(np.int32)
    # The padding holds tokens too: lengths alone say what is real.
    return Prompt(np.arange(rows, dtype=np.int32), tokens, lengths)


def settings(rows, *, seed=100, temperature=1.0, max_tokens=RESPONSE_TOKENS, stops=STOPS, **cuts):
    return seeded_sampling(
        np.arange(seed, seed + rows), temperature=temperature, max_tokens=max_tokens,
        stop_ids=stops, **cuts,
    )  # fmt: skip


def take(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


def responses(rollout):
    return [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.num_tokens, strict=True)]


def full(rollout, n):
    prompt = rollout.prompt
    head = prompt.tokens[n, : prompt.num_tokens[n]]
    return np.concatenate([head, rollout.tokens[n, : rollout.num_tokens[n]]])


PROMPTS = make_prompts(1, 11)
TEMPERATURES = np.tile([0.7, 1.0, 0.0], 4)[:11]


def trained():
    return random_params(NETWORK, 0, std=0.3)


def same_rollout(got, want):
    assert responses(got) == responses(want)
    np.testing.assert_array_equal(got.stopped, want.stopped)
    np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=2e-6)
