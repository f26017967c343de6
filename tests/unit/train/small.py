"""What the tests of score, prepare and the steps share: two small networks and nine responses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from s3ac_jax.data.packing import pack
from s3ac_jax.models.network import actor_network, critic_network
from s3ac_jax.train import score
from tests.helpers import make_scored, random_params, run_config, tiny_spec

SPEC = tiny_spec(num_layers=2)
ACTOR, CRITIC = actor_network(SPEC), critic_network(SPEC)
RECIPE = run_config().recipe
TEMPERATURE = 0.8
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PROMPTS = (3, 1, 5, 2, 4, 3, 2, 6, 1)
# Uneven on purpose: a row of one token, others of twelve.
RESPONSES = (9, 1, 12, 4, 7, 2, 11, 3, 5)
NAN_BAND = np.full(2, np.nan, np.float32)


@functools.cache
def nine():
    return make_scored(0, PROMPTS, RESPONSES)


@functools.cache
def packed_nine():
    # 5 rows of 18 are used, 8 are there.
    made = pack(nine(), np.arange(9)[::-1], pack_tokens=18, max_rows=8)
    assert made.rows == 5
    return made


def params_of_both():
    return {"actor": random_params(ACTOR, 1, std=0.3), "critic": random_params(CRITIC, 2, std=0.3)}


@functools.cache
def score_of(micro_rows=4, critic=CRITIC):
    return score.make_score(ACTOR, critic, temperature=TEMPERATURE, micro_rows=micro_rows)


def cells(packed, number):
    """Row and columns of the trainable tokens of one response."""
    row, columns = np.nonzero((packed.response == number) & packed.mask)
    return row, columns


def copy(tree):
    return jax.tree.map(jnp.array, tree)  # steps donate what they get


def random_scores(packed, seed=4):
    """log-probs near the sampler's, and values; NaN wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=packed.mask.shape)
    logp = np.where(packed.mask, packed.logp_rollout + 0.6 * noise, np.nan)
    values = np.where(packed.mask, rng.normal(size=packed.mask.shape), np.nan)
    return logp.astype(np.float32), values.astype(np.float32)


def values_of(report):
    return {name: metric.value() for name, metric in report.items()}
