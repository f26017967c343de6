"""The slot engine: what it samples, what it reports, and what must not matter."""

import dataclasses
import itertools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.models.token_logp import before, token_logp
from s3ac_jax.rollout.backend import MAX_STOP_IDS, RolloutError, make_sampling, seeded_sampling
from s3ac_jax.rollout.engine import Engine, sample
from s3ac_jax.rollout.local import LocalRollout
from tests.helpers import decoder_oracle, log_softmax_oracle, logp_oracle, random_params
from tests.unit.rollout.rollouts import (
    NETWORK,
    PROMPT_TOKENS,
    PROMPTS,
    RESPONSE_TOKENS,
    SPEC,
    STOPS,
    TEMPERATURES,
    full,
    make_prompts,
    make_rollout,
    responses,
    same_rollout,
    settings,
    take,
)


def test_logp_is_that_of_the_whole_sequence(mixed, params):
    for n in range(11):
        temperature = TEMPERATURES[n] or 1.0  # greedy reports the untempered one
        start, length = PROMPTS.num_tokens[n], mixed.num_tokens[n]
        want = logp_oracle(params, SPEC, full(mixed, n), temperature=temperature)[start - 1 :]
        np.testing.assert_allclose(mixed.logp[n, :length], want, rtol=1e-5, atol=1e-5)
    assert len(set(mixed.num_tokens.tolist())) > 2  # not all of one length


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logp_is_what_the_trainer_reads(room, params, temperature):
    rollout = room.generate(PROMPTS, settings(11, temperature=temperature))
    width = PROMPT_TOKENS + RESPONSE_TOKENS
    tokens, ids = np.zeros((2, 11, width), np.int32)
    for n in range(11):
        sequence = full(rollout, n)
        tokens[n, : len(sequence)], ids[n, : len(sequence)] = sequence, 1

    @jax.jit
    def teacher(params):
        model = NETWORK.bind(params)
        hidden, _ = model(tokens, np.broadcast_to(np.arange(width), ids.shape), ids)
        flat = before(hidden).reshape(-1, hidden.shape[-1])
        logp, _ = token_logp(flat, model.head(), tokens.reshape(-1), temperature=temperature)
        return logp.reshape(tokens.shape)

    logp = teacher(params)
    for n in range(11):
        start, length = PROMPTS.num_tokens[n], rollout.num_tokens[n]
        want = logp[n, start : start + length]
        np.testing.assert_allclose(rollout.logp[n, :length], want, rtol=1e-5, atol=1e-5)


def test_greedy_is_the_argmax_of_the_whole_sequence(mixed, params):
    head = np.asarray(params["embed"], np.float64).T

    def likeliest(sequence):
        return int(np.argmax(decoder_oracle(params, SPEC, sequence)[1][-1] @ head))

    for n in np.flatnonzero(TEMPERATURES == 0)[:2]:
        sequence, start = full(mixed, n), PROMPTS.num_tokens[n]
        for place in range(start, len(sequence)):
            assert sequence[place] == likeliest(sequence[:place])


@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 1, "steps": 1, "insert_batch": 1},
        {"slots": 3, "steps": 64, "insert_batch": 8},
        {"slots": 16, "steps": 4, "insert_batch": 3},
        {"prefill_chunk": 2},
        {"prefill_chunk": 4},
        {"scan_layers": True},
        {"scan_layers": True, "prefill_chunk": 2},
    ],
    ids=str,
)
def test_sizes_of_the_engine_do_not_matter(mixed, params, sizes):
    same_rollout(
        make_rollout(params, **sizes).generate(PROMPTS, settings(11, temperature=TEMPERATURES)),
        mixed,
    )


@pytest.mark.parametrize("seed", range(3))
def test_order_and_company_do_not_matter(room, mixed, seed):
    rng = np.random.default_rng(seed)
    rows = rng.permutation(11)[: rng.integers(1, 12)]
    sampling = settings(11, temperature=TEMPERATURES)
    got = room.generate(take(PROMPTS, rows), take(sampling, rows))
    same_rollout(got, take(mixed, rows))
    np.testing.assert_array_equal(got.prompt.index, rows)


def test_each_request_has_its_own_seed(room):
    prompts = take(PROMPTS, np.zeros(8, int))
    sampling = settings(8)
    sampling.seed[4:] = sampling.seed[:4]
    made = responses(room.generate(prompts, sampling))
    assert made[:4] == made[4:]
    assert len(set(map(tuple, made[:4]))) == 4
    assert responses(room.generate(prompts, settings(8, seed=900))) != made


def test_a_token_depends_on_its_place_in_the_response_not_in_the_row():
    # A model that finds all tokens equally likely: what is drawn is the noise of (seed, place).
    blank = make_rollout(jax.tree.map(jnp.zeros_like, random_params(NETWORK, 0)))
    rollout = blank.generate(
        PROMPTS, settings(11, stops=())._replace(seed=np.full(11, 42, np.uint32))
    )
    assert len(set(PROMPTS.num_tokens.tolist())) > 2
    keys = [jax.random.fold_in(jax.random.key(42), place) for place in range(RESPONSE_TOKENS)]
    want = [int(jnp.argmax(jax.random.gumbel(key, (SPEC.vocab_size,)))) for key in keys]
    assert responses(rollout) == [want] * 11
    np.testing.assert_allclose(rollout.logp, -np.log(SPEC.vocab_size), rtol=1e-5)


def test_seeds_of_make_sampling():

    def make(key):
        return make_sampling(
            jax.random.key(key), 500, temperature=0.9, max_tokens=3, stop_ids=(1, 5)
        )

    first, again, other = make(0), make(0), make(1)
    np.testing.assert_array_equal(first.seed, again.seed)
    assert len(set(first.seed.tolist()) | set(other.seed.tolist())) > 990
    assert first.seed.dtype == np.uint32
    assert set(first.temperature.tolist()) == {np.float32(0.9)}
    assert set(first.max_tokens.tolist()) == {3}
    assert first.stop_ids.tolist() == [[1, 5] + [-1] * (MAX_STOP_IDS - 2)] * 500
    assert set(first.top_p.tolist()) == {1.0}
    assert set(first.top_k.tolist()) == {0}


def test_finish_reasons(room):
    limits = np.tile([1, 2, 3, 5, 10], 8)
    rollout = room.generate(make_prompts(2, 40), settings(40, max_tokens=limits))
    stopped = rollout.stopped
    for tokens, length, limit, stop in zip(
        rollout.tokens, rollout.num_tokens, limits, stopped, strict=True
    ):
        assert 1 <= length <= limit
        # A stop token ends the response and is its last; nothing else ends it but the limit.
        assert not set(tokens[: length - 1].tolist()) & set(STOPS)
        assert (tokens[length - 1] in STOPS) == stop
        assert stop or length == limit
        assert (tokens[length:] == 0).all()
    assert (rollout.logp[np.arange(10) >= rollout.num_tokens[:, None]] == 0).all()
    # Both happen, a stop at the very limit too: truncation is not read off the length.
    at_limit = rollout.num_tokens == limits
    assert (stopped & at_limit).any()
    assert (~stopped).any()
    assert (stopped & ~at_limit).any()
    # Each token says which weights made it.
    exists = np.arange(10) < rollout.num_tokens[:, None]
    np.testing.assert_array_equal(rollout.version, np.where(exists, 7, -1))


def test_all_stop_tokens_are_heard(room):
    prompts, sampling = make_prompts(3, 40), settings(40)
    rollout = room.generate(prompts, sampling)
    assert set(STOPS) <= {row[-1] for row in responses(rollout)}
    deaf = room.generate(prompts, settings(40, stops=()))
    assert (deaf.num_tokens == RESPONSE_TOKENS).all()
    assert not deaf.stopped.any()
    # Up to the stop token the two are one response.
    for short, long in zip(responses(rollout), responses(deaf), strict=True):
        assert long[: len(short)] == short


def test_each_request_has_its_own_stop_tokens(room):
    prompts, stops = make_prompts(3, 40), settings(40).stop_ids
    own = np.arange(40) % 3
    stops[own == 1, 1] = -1  # 1 alone
    stops[own == 2] = -1
    mixed = room.generate(prompts, settings(40)._replace(stop_ids=stops))
    wants = [room.generate(prompts, settings(40, stops=ids)) for ids in (STOPS, (1,), ())]
    for kind, want in enumerate(wants):
        same_rollout(take(mixed, own == kind), take(want, own == kind))


def test_samples_of_one_prompt_share_its_prefill(room, params, monkeypatch):
    sharing = make_rollout(params, slots=6, insert_batch=4)
    rows = np.array([2, 2, 2, 0, 0, 0, 2, 0])
    prompts, sampling = take(PROMPTS, rows), settings(8)
    alone = [room.generate(take(prompts, [n]), take(sampling, [n])) for n in range(8)]
    shown, placed = [], []
    prefill, insert = Engine.prefill, Engine.insert

    def spied_prefill(self, params, tokens, lengths):
        shown.append(tokens)
        return prefill(self, params, tokens, lengths)

    def spied_insert(self, prefix, state, rows, slots, sampling):
        placed.append(rows[slots < self.slots])
        return insert(self, prefix, state, rows, slots, sampling)

    monkeypatch.setattr(Engine, "prefill", spied_prefill)
    monkeypatch.setattr(Engine, "insert", spied_insert)
    rollout = sharing.generate(prompts, sampling)
    for n in range(8):
        same_rollout(take(rollout, [n]), alone[n])
    # The first call takes the four samples of the longer prompt and prefills it once.
    longer = 2 if PROMPTS.num_tokens[2] > PROMPTS.num_tokens[0] else 0
    assert placed[0].tolist() == [0, 0, 0, 0]
    np.testing.assert_array_equal(shown[0], np.tile(PROMPTS.tokens[longer], (4, 1)))


def test_the_longest_prompts_go_first(params, monkeypatch):
    room = make_rollout(params)
    calls, prefill = [], Engine.prefill

    def spied(self, params, tokens, lengths):
        calls.append(set(lengths.tolist()))
        return prefill(self, params, tokens, lengths)

    monkeypatch.setattr(Engine, "prefill", spied)
    room.generate(PROMPTS, settings(11))
    assert len(calls) > 5
    assert all(min(a) >= max(b) for a, b in itertools.pairwise(calls))
    assert set.union(*calls) == set(PROMPTS.num_tokens.tolist())


def test_sampled_frequencies_are_the_softmax():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(1, 9)).astype(np.float32) * 1.5
    count = 20000
    many = jnp.broadcast_to(logits, (count, 9))
    noise = jax.random.gumbel(jax.random.key(5), many.shape)
    for temperature in (0.7, 1.0, 1.8):
        asked = seeded_sampling(
            np.arange(count), temperature=temperature, max_tokens=1, stop_ids=()
        )
        tokens, logp = jax.jit(sample)(many, noise, asked)
        want = log_softmax_oracle(logits[0].astype(float) / temperature)
        np.testing.assert_allclose(logp, want[tokens], rtol=1e-5, atol=1e-5)
        counts = np.bincount(tokens, minlength=9)
        chi2 = ((counts - count * np.exp(want)) ** 2 / (count * np.exp(want))).sum()
        assert chi2 < 26.1  # 8 degrees of freedom: passed by 999 in 1000 right samplers


def test_first_tokens_of_the_engine_follow_the_model(params):
    # Through prefill, insert and decode: 600 requests of one prompt, one token each.
    room = make_rollout(params, slots=100, insert_batch=100, steps=1)
    rows = np.full(600, 4)
    sampling = make_sampling(jax.random.key(6), 600, temperature=1.3, max_tokens=1, stop_ids=())
    rollout = room.generate(take(PROMPTS, rows), sampling)
    assert (rollout.num_tokens == 1).all()
    sequence = PROMPTS.tokens[4, : PROMPTS.num_tokens[4]]
    ends = [np.append(sequence, token) for token in range(SPEC.vocab_size)]
    want = np.exp([logp_oracle(params, SPEC, end, temperature=1.3)[-1] for end in ends])
    np.testing.assert_allclose(want.sum(), 1.0, rtol=1e-6)
    counts = np.bincount(rollout.tokens[:, 0], minlength=SPEC.vocab_size)
    chi2 = ((counts - 600 * want) ** 2 / (600 * want)).sum()
    assert chi2 < 39.3  # 16 degrees of freedom


def test_new_weights_count_from_the_next_call(params):
    room = make_rollout(params)
    first = room.generate(PROMPTS, settings(11))
    other = random_params(NETWORK, 99, std=0.3)
    room.update_weights(other, 8)
    second = room.generate(PROMPTS, settings(11))
    assert set(second.version.ravel().tolist()) == {8, -1}
    same_rollout(second, make_rollout(other).generate(PROMPTS, settings(11)))
    assert responses(first) != responses(second)


def test_weights_that_gave_nan_leave_nothing_behind(params):
    """Their keys and values stay in the slots, and 0 times NaN is NaN."""
    room, prompt, sampling = make_rollout(params), make_prompts(3, 6), settings(6)
    want = room.generate(prompt, sampling)
    room.update_weights(jax.tree.map(lambda leaf: leaf * np.nan, params), 1)
    assert np.isnan(room.generate(prompt, sampling).logp).any()
    room.update_weights(params, 7)
    same_rollout(room.generate(prompt, sampling), want)


def test_nothing_compiles_after_the_first_call(params):
    room = make_rollout(params)
    room.generate(make_prompts(5, 2), settings(2, max_tokens=2))
    compiled = []

    def listen(event, seconds, **_):
        if "compile" in event and "cache" not in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + 1.25)(np.ones(3))  # the listener does hear compilations
    assert compiled
    compiled.clear()
    sizes = Engine.prefill._cache_size(), Engine.insert._cache_size(), Engine.generate._cache_size()
    for seed, rows in enumerate((1, 5, 2, 13, 4)):
        limits = np.random.default_rng(seed).integers(1, RESPONSE_TOKENS + 1, size=rows)
        temperature = seed % 2
        room.generate(
            make_prompts(seed, rows),
            settings(rows, max_tokens=limits, temperature=temperature),
        )
    assert compiled == []
    after = Engine.prefill._cache_size(), Engine.insert._cache_size(), Engine.generate._cache_size()
    assert after == sizes


def test_messages(params):
    room = make_rollout(params)
    empty = LocalRollout(room.engine, insert_batch=1, max_prompt_tokens=6, max_response_tokens=10)
    with pytest.raises(RolloutError, match="call update_weights"):
        empty.generate(PROMPTS, settings(11))
    wide = dataclasses.replace(PROMPTS, tokens=np.zeros((11, 7), np.int32))
    with pytest.raises(ValueError, match=r"padded to 7 tokens.*rollout.max_prompt_tokens = 6"):
        room.generate(wide, settings(11))
    for limit in (0, 11):
        with pytest.raises(ValueError, match=r"max_tokens must be in 1..10.*max_response_tokens"):
            room.generate(PROMPTS, settings(11, max_tokens=[limit] + [5] * 10))
    with pytest.raises(ValueError, match=r"holds 16 tokens a slot; prompt \(7\) plus response"):
        LocalRollout(room.engine, insert_batch=1, max_prompt_tokens=7, max_response_tokens=10)
