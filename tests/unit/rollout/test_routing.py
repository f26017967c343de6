"""Which experts the sampler says it used, against a float64 loop."""

import jax
import numpy as np
import pytest

from s3ac_jax.core.types import Prompt
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import MoeSpec
from s3ac_jax.rollout.backend import seeded_sampling
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout
from tests.helpers import decoder_oracle, logp_oracle, random_params, tiny_spec

# A plain layer between two with experts: layers are counted among those that route.
SPEC = tiny_spec(num_layers=3, moe=MoeSpec(num_experts=6, per_token=2, width=7, dense_layers=(1,)))
NETWORK = actor_network(SPEC)
PROMPT, RESPONSE, STOPS = 5, 7, (1, 5)
ROWS = 9


def make_room(*, slots=4, insert_batch=2, steps=3, record=True, network=NETWORK):
    engine = Engine(
        network, slots=slots, cache_tokens=PROMPT + RESPONSE, steps_per_dispatch=steps,
        stop_ids=STOPS, record_routing=record,
    )  # fmt: skip
    room = LocalRollout(
        engine, insert_batch=insert_batch, max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE
    )
    room.update_weights(random_params(network, 0, std=0.3), 1)
    return room


def prompts():
    """Of one token, of all there is room for; and some twice, which share a prefill."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(SPEC.vocab_size, size=(ROWS, PROMPT)).astype(np.int32)
    lengths = np.array([5, 1, 3, 3, 2, 4, 4, 4, 1], np.int32)
    index = np.array([0, 1, 2, 2, 4, 5, 5, 5, 8], np.int32)
    return Prompt(index, tokens[index], lengths)


def settings():
    limits = [7, 7, 1, 7, 7, 3, 7, 7, 7]
    return seeded_sampling(
        np.arange(50, 50 + ROWS), temperature=1.0, max_tokens=limits, stop_ids=STOPS
    )


def sequence_of(rollout, n):
    start, made = rollout.prompt.num_tokens[n], rollout.num_tokens[n]
    return np.concatenate([rollout.prompt.tokens[n, :start], rollout.tokens[n, :made]])


@pytest.fixture(scope="module")
def room():
    return make_room()


@pytest.fixture(scope="module")
def rollout(room):
    return room.generate(prompts(), settings())


def test_the_experts_are_those_of_the_whole_sequence(rollout):
    assert rollout.routing.shape == (ROWS, PROMPT + RESPONSE, 2, 2)
    assert rollout.routing.dtype == np.int16
    params = random_params(NETWORK, 0, std=0.3)
    used = set()
    for n in range(ROWS):
        sequence, live = sequence_of(rollout, n), []
        start, read = rollout.prompt.num_tokens[n], len(sequence) - 1
        want = logp_oracle(params, SPEC, sequence, routing=live)
        np.testing.assert_allclose(
            rollout.logp[n, : len(sequence) - start], want[start - 1 :], rtol=1e-5, atol=1e-5
        )
        assert len(live) == 2
        np.testing.assert_array_equal(rollout.routing[n, :read], np.stack(live, axis=1)[:read])
        # The last token was made but never read, and behind it is nothing.
        np.testing.assert_array_equal(rollout.routing[n, read:], -1)
        used |= {(layer, int(e)) for layer in range(2) for e in live[layer].flat}
    assert len(used) > 8  # both layers have favourites of their own
    assert len(set(rollout.num_tokens.tolist())) > 2


def test_sizes_of_the_engine_do_not_matter(rollout):
    other = make_room(slots=3, insert_batch=4, steps=16)
    got = other.generate(prompts(), settings())
    np.testing.assert_array_equal(got.tokens, rollout.tokens)
    np.testing.assert_array_equal(got.routing, rollout.routing)
    rows = np.array([6, 2, 0])
    got = other.generate(*jax.tree.map(lambda x: x[rows], (prompts(), settings())))
    np.testing.assert_array_equal(got.routing, rollout.routing[rows])


def test_nothing_is_recorded_unasked():
    assert make_room(record=False).engine.routing_shape is None


def test_a_model_without_experts_has_nothing_to_record():
    room = make_room(record=True, network=actor_network(tiny_spec(num_layers=1)))
    assert room.engine.routing_shape is None


def test_replayed_experts_are_those_of_the_layer_and_the_token():
    """Between layers that do not route; and the loop that this is held against can tell."""
    params, live = random_params(NETWORK, 2, std=0.3), []
    tokens = np.array([3, 8, 1, 0, 5])
    places, ids = np.arange(5)[None], np.ones((1, 5), int)

    @jax.jit
    def replayed(routing):
        model = NETWORK.bind(params)
        hidden, kept = model(tokens[None], places, ids, routing=routing[None], keep=("routing",))
        return hidden[0], kept.routing[0]

    _, want = decoder_oracle(params, SPEC, tokens, live)
    told = np.stack(live, axis=1).astype(np.int16)
    gaps = told.copy()
    gaps[1], gaps[3, 1, 0] = -1, -1
    other = (told + 1 + np.arange(2)[:, None]) % 6
    for routing in (told, gaps, other):
        _, oracle = decoder_oracle(params, SPEC, tokens, routing)
        hidden, used = replayed(routing)
        np.testing.assert_allclose(hidden, oracle, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(used, told if routing is gaps else routing)
        assert (np.abs(oracle - want).max() > 0.01) == (routing is other)
