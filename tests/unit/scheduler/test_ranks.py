"""Columns that take the best of a pool, refills, and the history that SPO keeps."""

import jax
import jax.monitoring
import numpy as np
import pytest

from s3ac_jax.algos.selection import Daps, Pcl, Spo, Uniform
from s3ac_jax.core.types import PromptStats
from s3ac_jax.scheduler.select import empty_stats, start_cursor
from tests.unit.scheduler.rooms import draw, outcomes, position, scheduler


def no_values(index):
    raise AssertionError("this column has no use for the critic")


def stats_of(successes, attempts):
    successes, attempts = np.float32(successes), np.float32(attempts)
    return PromptStats(successes, attempts, np.zeros(len(attempts), np.int32), None)


@pytest.mark.parametrize("tau", [0.5, 0.2])
@pytest.mark.parametrize("batch", [1, 4, 5])
def test_pcl_takes_the_nearest_out_of_its_pool(batch, tau):
    value = np.random.default_rng(0).permutation(np.linspace(-0.93, 0.99, 20))
    value[7] = np.nan  # as good as one half
    room = scheduler(Pcl(pool_factor=4, tau=tau), batch_prompts=batch)
    cursor, asked = start_cursor(), []

    def values(index):
        asked.append(index)
        return value[index]

    for number in range(6):
        got = draw(room, jax.random.key(number), empty_stats(20), cursor, number, values)
        pool = asked[-1]
        np.testing.assert_array_equal(got.seen, pool)
        assert len(pool) == 4 * batch
        success = [0.5 if np.isnan(v) else min(max((v + 1) / 2, 0), 1) for v in value[pool]]
        distance = [abs(p - tau) for p in success]
        # A pool across two epochs may hold a prompt twice; it is taken once.
        places = [k for k in range(len(pool)) if pool[k] not in pool[:k]]
        want = sorted(places, key=lambda k, d=distance: d[k])[:batch]
        assert len(set(got.index.tolist())) == batch
        assert sorted(got.index.tolist()) == sorted(pool[want].tolist())
        np.testing.assert_array_equal(got.acceptance, np.isin(range(len(pool)), want))
        assert (got.forced, got.nan_values) == (0, int((pool == 7).sum()))
        # What was looked at is passed over until the next epoch.
        assert position(got.cursor) == position(cursor) + len(pool)
        cursor = got.cursor
    assert len(asked) == 6
    walked = np.concatenate(asked)[: 20 * (len(np.concatenate(asked)) // 20)]
    for epoch in walked.reshape(-1, 20):
        assert sorted(epoch.tolist()) == list(range(20))


def test_pcl_does_not_read_history_nor_key():
    room, value = scheduler(Pcl()), np.linspace(-1, 1, 20)
    none, full = empty_stats(20), stats_of(np.arange(20), np.full(20, 19.0))
    draws = [
        draw(room, jax.random.key(n), stats, start_cursor(), 5, lambda index: value[index])
        for n, stats in enumerate((none, full))
    ]
    np.testing.assert_array_equal(draws[0].index, draws[1].index)


def test_spo_draws_from_the_whole_set_by_its_weights():
    successes, attempts = np.repeat([0.0, 1.0, 4.0, 8.0], 5), np.full(20, 8.0)
    stats, room = stats_of(successes, attempts), scheduler(Spo(), batch_prompts=1)
    v = successes / attempts
    weight = np.sqrt(v * (1 - v)) + 0.05
    seen, cursor = np.zeros(20), start_cursor()
    for n in range(1500):
        got = draw(room, jax.random.fold_in(jax.random.key(0), n), stats, cursor, n, no_values)
        assert sorted(got.seen.tolist()) == list(range(20))
        seen[got.index] += 1
        cursor = got.cursor
        assert position(cursor) == 20 * (n + 1)
    want = 1500 * weight / weight.sum()
    assert ((seen - want) ** 2 / want).sum() < 43.8  # 19 degrees of freedom: 0.1 % are above


def test_spo_without_replacement_and_by_key():
    room, stats = scheduler(Spo(), batch_prompts=12), stats_of(np.zeros(20), np.full(20, 8.0))
    drawn = [
        draw(room, jax.random.key(n), stats, start_cursor(), 0, no_values).index for n in (0, 1, 0)
    ]
    assert all(len(np.unique(index)) == 12 for index in drawn)
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert set(drawn[0].tolist()) != set(drawn[1].tolist())


@pytest.mark.parametrize("column", [Uniform(), Daps(), Pcl(), Spo()], ids=lambda c: str(c)[:4])
def test_a_refill_draws_what_is_missing_and_compiles_nothing(column):
    room = scheduler(column, num_prompts=40, candidates=16)
    stats, cursor = empty_stats(40), start_cursor()
    value = np.linspace(-0.9, 0.9, 40).astype(np.float32)
    compiled = []

    def hear(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    asked = set()

    def values(index):
        asked.add(len(index))
        return jax.numpy.asarray(value[index])

    for number, count in enumerate((6, 6, 5, 1, 3, 2, 4)):
        before = len(compiled)
        got = draw(room, jax.random.key(number), stats, cursor, number, values, count)
        assert len(got.index) == count
        assert position(got.cursor, 40) > position(cursor, 40)
        cursor = got.cursor
        if number > 1:
            assert len(compiled) == before
    assert compiled or number  # the listener hears of every compilation, those of a cache too
    assert len(asked) == (1 if column.reads_values else 0)


# ------------------------------------------------------------------------------- history


def test_success_rate():
    room = scheduler(Spo())
    stats = stats_of(np.arange(20) / 2, np.r_[0.0, np.full(19, 10.0)])
    got = room.success_rate(stats, np.array([0, 4, 19, 4]))
    np.testing.assert_allclose(got, [0.5, 0.2, 0.95, 0.2])
    assert got.dtype == np.float32


def test_spo_forgets_as_a_loop_does():
    rng, room = np.random.default_rng(1), scheduler(Spo(), batch_prompts=5)
    start = room.select.start(np.arange(20) % 9, np.full(20, 8))
    a, n = (np.asarray(x, float).tolist() for x in start)
    assert a[2] == pytest.approx(8 * 2.5 / 9)
    stats = empty_stats(20, last_tokens=3)
    stats = PromptStats(*map(np.asarray, start), stats.updated, stats.last)
    for tick in range(15):
        index = rng.permutation(20)[:5]
        success, valid = rng.random(5) < 0.5, rng.random(5) < 0.8
        drift = rng.choice([0.0, 0.004, 0.009, 0.3, np.nan], size=5).astype(np.float32)
        copies = jax.tree.map(np.copy, stats)
        before = room.success_rate(stats, index)
        for i, rate in zip(index, before, strict=True):
            assert rate == pytest.approx(a[i] / n[i], rel=1e-5)
        after = room.record(stats, outcomes(index, success, valid, seed=tick), tick, drift)
        for x, y in zip(jax.tree.leaves(stats), jax.tree.leaves(copies), strict=True):
            np.testing.assert_array_equal(x, y)  # the old history is left alone
        stats = after
        for i, won, counts, moved in zip(index, success, valid, drift, strict=True):
            if counts:
                factor = 1.0 if np.isnan(moved) else min(max(2 ** (-moved / 0.06), 0.875), 0.96)
                a[i], n[i] = factor * a[i] + won, factor * n[i] + 1
        np.testing.assert_allclose(stats.successes, a, rtol=1e-5)
        np.testing.assert_allclose(stats.attempts, n, rtol=1e-5)


def test_groups_forget_once():
    # Two prompts, three responses each: drift is of the prompt, and the counts fade once.
    room = scheduler(Spo())
    stats = PromptStats(np.full(20, 4, np.float32), np.full(20, 8, np.float32),
                        np.zeros(20, np.int32), empty_stats(20, last_tokens=3).last)  # fmt: skip
    index = np.repeat([7, 2], 3)
    scored = outcomes(index, [1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1])
    got = room.record(stats, scored, 3, np.array([0.3, np.nan], np.float32))
    np.testing.assert_allclose(got.successes[[7, 2, 0]], [0.875 * 4 + 1, 4 + 3, 4])
    np.testing.assert_allclose(got.attempts[[7, 2, 0]], [0.875 * 8 + 2, 8 + 3, 8])
    np.testing.assert_array_equal(got.updated[[7, 2, 0]], [3, 3, 0])


def test_the_last_valid_response_is_remembered():
    room = scheduler(Spo())
    stats = empty_stats(20, last_tokens=3)
    assert (stats.last.num_tokens == 0).all()
    first = outcomes([3, 4, 5], [1, 0, 1], [1, 1, 1], seed=1)
    second = outcomes([4, 5, 6], [1, 0, 1], [1, 0, 1], seed=2)
    nan = np.full(3, np.nan, np.float32)
    stats = room.record(room.record(stats, first, 0, nan), second, 1, nan).last
    for prompt, (scored, row) in {
        3: (first, 0), 4: (second, 0), 5: (first, 2), 6: (second, 2),
    }.items():  # fmt: skip
        number = scored.rollout.num_tokens[row]
        assert stats.num_tokens[prompt] == number
        np.testing.assert_array_equal(stats.tokens[prompt], scored.rollout.tokens[row])
        np.testing.assert_array_equal(stats.logp[prompt], scored.rollout.logp[row])
    assert set(np.flatnonzero(stats.num_tokens).tolist()) == {3, 4, 5, 6}


def test_nothing_is_remembered_where_nobody_asks():
    assert empty_stats(20).last is None
    got = scheduler(Daps()).record(
        empty_stats(20), outcomes([1], [1], [1]), 0, np.full(1, np.nan, np.float32)
    )
    assert got.last is None


def test_what_counts_is_success_and_not_the_reward():
    scored = outcomes([1, 1, 2], [1, 0, 1], [1, 1, 1])
    assert (scored.reward == -0.25).all()
    got = scheduler(Uniform()).record(empty_stats(20), scored, 0, np.full(3, np.nan, np.float32))
    np.testing.assert_array_equal(got.successes[[1, 2]], [1, 1])
    np.testing.assert_array_equal(got.attempts[[1, 2]], [2, 1])
