"""Drawing prompts: frequencies against the formula, the walk against a plain list."""

import collections

import jax
import numpy as np
import pytest

from s3ac_jax.algos.selection import Daps, Uniform
from s3ac_jax.core.types import DataCursor, PromptStats
from s3ac_jax.data.mixing import Mixture
from s3ac_jax.data.stream import Epochs, share
from s3ac_jax.scheduler.select import Scheduler, empty_stats, start_cursor
from tests.unit.scheduler.rooms import draw as drawn_from
from tests.unit.scheduler.rooms import position, record, scheduler


def acceptance_oracle(value, successes, attempts, *, n_c=4.0, a_min=0.1):
    prior = 0.5 if np.isnan(value) else min(max((float(value) + 1) / 2, 0.0), 1.0)
    p = (float(successes) + n_c * prior) / (float(attempts) + n_c)
    return a_min + (1 - a_min) * 4 * p * (1 - p)


def no_values(index):
    raise AssertionError("a uniform recipe has no use for the critic")


@pytest.mark.parametrize("batch", [1, 6, 7, 20])
def test_uniform_covers_each_epoch_exactly_once(batch):
    room = scheduler(Uniform(), batch_prompts=batch)
    stats, cursor, drawn = empty_stats(20), start_cursor(), []
    while len(drawn) < 100:
        draw = drawn_from(room, jax.random.key(0), stats, cursor, 0, no_values)
        assert len(draw.index) == batch
        assert (draw.forced, draw.nan_values) == (0, 0)
        np.testing.assert_array_equal(draw.acceptance, 1.0)
        drawn += draw.index.tolist()
        cursor = draw.cursor
        assert position(cursor) == len(drawn)
        assert 0 <= cursor.offset < 20
    epochs = [drawn[start : start + 20] for start in range(0, 100, 20)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(20))
    assert len(set(map(tuple, epochs))) == 5  # each epoch in an order of its own
    other = scheduler(Uniform(), batch_prompts=20, seed=4)
    assert (
        drawn_from(other, jax.random.key(0), stats, start_cursor(), 0, no_values).index.tolist()
        != epochs[0]
    )


def test_a_cursor_resumes_the_walk_where_it_stood():
    room = scheduler(Uniform(), batch_prompts=7)
    stats, cursor = empty_stats(20), start_cursor()
    for _ in range(4):
        last, cursor = (
            cursor,
            drawn_from(room, jax.random.key(0), stats, cursor, 0, no_values).cursor,
        )
    again = scheduler(Uniform(), batch_prompts=7)
    saved = DataCursor(np.int32(int(last.epoch)), np.int32(int(last.offset)))
    assert position(
        drawn_from(again, jax.random.key(9), stats, saved, 3, no_values).cursor
    ) == position(cursor)
    first, second = (
        drawn_from(r, jax.random.key(0), stats, last, 0, no_values).index for r in (room, again)
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("stop", range(0, 9, 2))
def test_other_hosts_go_on_from_a_saved_cursor(stop):
    """Four hosts up to a checkpoint, two after it: each prompt as often as one host would."""
    streams = {"epochs": Epochs(20, 3), "mixture": Mixture([15, 5], [1, 1], 3)}
    for stream in streams.values():
        room = Scheduler(Uniform(), 20, stream, batch_prompts=8, candidates=8, max_rounds=1)

        def ticks(cursor, number, hosts, room=room, stream=stream):
            trained = []
            for _ in range(number):
                draw = drawn_from(room, jax.random.key(0), empty_stats(20), cursor, 0, no_values)
                start = position(cursor)
                parts = [stream.at(share(start, 8, host, hosts)) for host in range(hosts)]
                # What the hosts take is what every one of them decided on.
                assert sorted(np.concatenate(parts)) == sorted(draw.index)
                trained += np.concatenate(parts).tolist()
                saved = int(draw.cursor.epoch), int(draw.cursor.offset)
                cursor = DataCursor(*map(np.int32, saved))
            return trained, cursor

        whole, _ = ticks(start_cursor(), 10, 1)
        before, cursor = ticks(start_cursor(), stop, 4)
        after, _ = ticks(cursor, 10 - stop, 2)
        assert collections.Counter(before + after) == collections.Counter(whole)


def test_acceptance_frequencies_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    value = rng.uniform(-1.3, 1.3, size=20)
    value[:3] = np.nan, -1.0, 1.0
    attempts = rng.integers(0, 6, size=20).astype(np.float32)
    attempts[:3] = 0
    successes = np.minimum(rng.integers(0, 6, size=20), attempts).astype(np.float32)
    stats = PromptStats(successes, attempts, np.full(20, 7, np.int32), None)
    want = [acceptance_oracle(*x) for x in zip(value, successes, attempts, strict=True)]
    np.testing.assert_allclose(want[:3], [1.0, 0.1, 0.1])
    seen, taken = np.zeros(20), np.zeros(20)
    # One round over all prompts, the batch never full: every prompt is looked at each time.
    room = scheduler(Daps(), batch_prompts=20, candidates=20, max_rounds=1)
    for key in map(jax.random.key, range(200)):
        draw = drawn_from(room, key, stats, start_cursor(), 7, lambda index: value[index])
        by_prompt = np.argsort(draw.seen)
        np.testing.assert_allclose(draw.acceptance[by_prompt], want, rtol=1e-5)
        assert draw.nan_values == 1
        seen += 1
        # What was forced is known by its rank: the likeliest of those passed over, none here
        # is left out, so count what the key alone accepted.
        taken += draws_of(key, 20)[by_prompt] < draw.acceptance[by_prompt]
        assert draw.forced == 20 - int((draws_of(key, 20) < draw.acceptance).sum())
    # One standard deviation of a frequency: at most 0.035.
    np.testing.assert_allclose(taken / seen, want, atol=0.11)


def draws_of(key, count, round_number=0):
    return np.asarray(jax.random.uniform(jax.random.fold_in(key, round_number), (count,)))


def test_frequencies_of_what_is_really_drawn():
    # 4 prompts a batch out of 20 candidates in walking order, never forced: the share of drawn
    # prompts among those looked at is the acceptance itself, unforced and uncensored.
    value = np.linspace(-1, 1, 20)
    want = np.array([acceptance_oracle(v, 0, 0) for v in value])
    room = scheduler(Daps(), batch_prompts=4, candidates=20, max_rounds=3)
    seen, taken, cursor = np.zeros(20), np.zeros(20), start_cursor()
    for n in range(600):
        key = jax.random.fold_in(jax.random.key(1), n)
        draw = drawn_from(room, key, empty_stats(20), cursor, 0, lambda index: value[index])
        assert draw.forced == 0
        assert len(draw.index) == 4
        np.add.at(seen, draw.seen, 1)
        np.add.at(taken, draw.index, 1)
        cursor = draw.cursor
    assert seen.min() > 100  # one standard deviation: at most 0.05, for most 0.03
    np.testing.assert_allclose(taken / seen, want, atol=0.12)
    np.testing.assert_allclose((taken / seen).mean(), want.mean(), atol=0.02)


def test_two_examples_of_the_paper():
    value = np.where(np.arange(20) % 2, -0.8, 0.0)
    room = scheduler(Daps(), batch_prompts=10)
    draw = drawn_from(
        room, jax.random.key(0), empty_stats(20), start_cursor(), 0, lambda index: value[index]
    )
    np.testing.assert_allclose(draw.acceptance, np.where(draw.seen % 2, 0.424, 1.0), rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_candidates_beyond_the_one_that_fills_the_batch_are_not_consumed(seed):
    key = jax.random.key(seed)
    room = scheduler(Daps(), batch_prompts=3, candidates=10)
    asked = []

    def values(index):
        asked.append(index)
        return np.zeros(len(index))  # acceptance 1

    draw = drawn_from(room, key, empty_stats(20), start_cursor(), 0, values)
    assert [len(index) for index in asked] == [10]
    np.testing.assert_array_equal(draw.index, asked[0][:3])
    np.testing.assert_array_equal(draw.seen, asked[0][:3])
    assert position(draw.cursor) == 3
    after = drawn_from(room, key, empty_stats(20), draw.cursor, 1, values)
    np.testing.assert_array_equal(after.index, asked[0][3:6])


def test_rounds_go_on_until_the_batch_is_full():
    # Acceptance 0.1 everywhere: 6 prompts take several rounds, and each draws afresh.
    room = scheduler(Daps(), max_rounds=50, num_prompts=1000, candidates=20)
    stats = empty_stats(1000)
    rounds = []
    for key in map(jax.random.key, range(20)):
        draw = drawn_from(room, key, stats, start_cursor(), 0, lambda index: np.ones(len(index)))
        assert draw.forced == 0
        assert len(draw.index) == 6
        assert position(draw.cursor, 1000) == len(draw.seen)
        count = -(-len(draw.seen) // 20)
        took = np.concatenate([draws_of(key, 20, n) for n in range(count)]) < np.float32(0.1)
        np.testing.assert_array_equal(draw.index, draw.seen[took[: len(draw.seen)]])
        assert draw.index[-1] == draw.seen[-1]  # the walk ends with the prompt that fills it
        rounds.append(count)
    assert sum(rounds) > 2 * len(rounds)


def test_forced_fill_takes_the_likeliest_of_those_passed_over():
    value = np.linspace(0.8, 1.0, 20)  # hard to accept, the last the hardest
    room = scheduler(Daps(), batch_prompts=8, candidates=10, max_rounds=1)
    for key in map(jax.random.key, range(30)):
        draw = drawn_from(room, key, empty_stats(20), start_cursor(), 0, lambda index: value[index])
        accepted = draws_of(key, 10) < draw.acceptance
        assert len(draw.index) == len(set(draw.index.tolist())) == 8
        assert draw.forced == 8 - accepted.sum() > 0
        passed = sorted(draw.seen[~accepted])[: draw.forced]  # smallest value, likeliest
        want = set(draw.seen[accepted].tolist()) | set(passed)
        assert set(draw.index.tolist()) == want
        assert position(draw.cursor) == 10


def test_one_key_one_draw():
    room = scheduler(Daps(), candidates=7)
    value = np.linspace(-1, 1, 20)
    cursor = DataCursor(np.int32(2), np.int32(17))

    def drawn(key):
        draw = drawn_from(room, key, empty_stats(20), cursor, 0, lambda index: value[index])
        return draw.index.tolist(), position(draw.cursor)

    assert drawn(jax.random.key(0)) == drawn(jax.random.key(0))
    assert len({str(drawn(key)) for key in map(jax.random.key, range(8))}) > 1


def test_nan_values_are_counted_where_looked_at_and_select_uniformly():
    room = scheduler(Daps(), batch_prompts=4)
    draw = drawn_from(
        room,
        jax.random.key(0),
        empty_stats(20),
        start_cursor(),
        0,
        lambda index: np.full(len(index), np.nan),
    )
    np.testing.assert_allclose(draw.acceptance, 1.0)
    assert draw.nan_values == 4


def test_history_decays_as_a_loop_does():
    decay, rng = 0.9, np.random.default_rng(1)
    room = scheduler(Daps(decay=decay))
    stats = empty_stats(20)
    successes, attempts = [0.0] * 20, [0.0] * 20
    for tick in range(12):
        index = rng.integers(20, size=8)
        index[:2] = 5, 5  # a prompt may come several times
        success, valid = rng.random(8) < 0.5, rng.random(8) < 0.7
        before = stats
        copies = jax.tree.map(np.copy, before)
        stats = record(room, stats, index, success, valid, tick)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(copies), strict=True):
            np.testing.assert_array_equal(a, b)  # the old history is left alone
        # The loop is not lazy: everything fades by one tick before the outcomes are added.
        if tick:
            successes = [s * decay for s in successes]
            attempts = [n * decay for n in attempts]
        for prompt, won, counts in zip(index, success, valid, strict=True):
            successes[prompt] += float(won and counts)
            attempts[prompt] += float(counts)
        half = np.full(20, 0.5)
        now = drawn_from(room, jax.random.key(2), stats, start_cursor(), tick, half.__getitem__)
        want = [acceptance_oracle(0.5, successes[i], attempts[i]) for i in now.seen]
        np.testing.assert_allclose(now.acceptance, want, rtol=1e-4)
    age = 11 - stats.updated
    np.testing.assert_allclose(stats.successes * decay**age, successes, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats.attempts * decay**age, attempts, rtol=1e-4, atol=1e-6)
    dtypes = [str(x.dtype) for x in (stats.successes, stats.attempts, stats.updated)]
    assert dtypes == ["float32", "float32", "int32"]


def test_outcomes_that_do_not_count_leave_no_trace():
    room = scheduler(Daps())
    index, success, valid = np.array([3, 3, 4]), [True, True, False], [False, True, False]
    stats = record(room, empty_stats(20), index, success, valid, 9)
    assert (stats.successes[3], stats.attempts[3], stats.updated[3]) == (1, 1, 9)
    assert (stats.successes[4], stats.attempts[4], stats.updated[4]) == (0, 0, 0)


def test_uniform_keeps_its_history_undecayed():
    room, stats = scheduler(Uniform()), empty_stats(20)
    for tick in (0, 50):
        stats = record(room, stats, np.array([1]), np.array([True]), np.array([True]), tick)
    assert (stats.successes[1], stats.attempts[1]) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"candidates": 21}, r"candidates must be in 1..20 .*got 21"),
        ({"batch_prompts": 0}, r"batch_prompts must be in 1..20 .*got 0"),
        ({"candidates": 1}, r"5 rounds of 1 candidates .* 6 prompts; raise scheduler.candidates"),
    ],
)
def test_messages(changes, words):
    with pytest.raises(ValueError, match=words):
        scheduler(Daps(), **changes)
