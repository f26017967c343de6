"""The advantage column: one loop per method over single responses, packed in shuffled rows."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from s3ac_jax.algos.credit import (
    Advantage,
    Gae,
    GroupRelative,
    LengthAdaptiveGae,
    Reinforce,
    Tracked,
)
from s3ac_jax.core.types import Episodes

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
COLUMNS = [
    LengthAdaptiveGae(), LengthAdaptiveGae(alpha=0.3, whiten=True), Gae(),
    Gae(lam=0.4, whiten=True), GroupRelative(), GroupRelative(divide_by_std=False),
    Reinforce(), Reinforce(whiten=True), Reinforce("batch"), Reinforce("group", whiten=True),
    Tracked(),
]  # fmt: skip
EACH = pytest.mark.parametrize("column", COLUMNS, ids=repr)
NUM, GROUP = 14, 3  # the last group is not whole
ABSENT = (4, 9, 10, 11)  # one of a group, and a whole group


class Batch:
    """NUM responses, some absent: lists by response, and the packed rows that hold them."""

    def __init__(self, seed, *, poison=np.nan, width=24, absent=ABSENT, order=None):
        rng = np.random.default_rng(seed)
        self.flags, self.values = [], []
        for _ in range(NUM):
            flags = rng.random(rng.integers(1, 8)) < 0.7  # tool tokens in the middle
            flags[-1] = True
            self.flags.append(flags)
            self.values.append(rng.normal(size=len(flags)))
        # Shaped rewards: not only +1 and -1.
        self.reward = np.where(rng.random(NUM) < 0.5, 1.0, -1.0) - 0.3 * rng.random(NUM)
        self.reward[6:9] = 0.7  # a group of equal rewards
        self.baseline = rng.random(NUM).astype(np.float32)
        self.present = [i for i in range(NUM) if i not in absent]
        order = rng.permutation(self.present) if order is None else order
        rows, used = [[]], 0
        for i in order:
            length = 2 + len(self.flags[i])  # a prompt of two tokens comes before
            if used + length > width:
                rows.append([])
                used = 0
            rows[-1].append(int(i))
            used += length
        shape = len(rows) + 1, width
        self.where = {}
        values, reward = np.full((2, *shape), poison, np.float32)
        mask, segments, count = (np.zeros(shape, kind) for kind in (bool, int, int))
        response = np.full(shape, -1)
        for b, members in enumerate(rows):
            start = 0
            for segment, i in enumerate(members, start=1):
                end = start + 2 + len(self.flags[i])
                at = (b, start + 2 + np.flatnonzero(self.flags[i]))
                self.where[i] = at
                segments[b, start:end], response[b, start:end] = segment, i
                count[b, start:end] = self.flags[i].sum()
                mask[at], values[at] = True, self.values[i][self.flags[i]]
                reward[at] = 0.0
                reward[b, end - 1] = self.reward[i]
                start = end
        self.mask = mask
        self.episodes = Episodes(values, reward, mask, count, segments, response, self.baseline)

    def live(self, i):
        return self.values[i][self.flags[i]].tolist()


def oracle(column, batch):
    """{response: raw advantage of each trainable token}."""
    if isinstance(column, LengthAdaptiveGae | Gae):
        found = {}
        for i in batch.present:
            v, out, carry = batch.live(i), [], 0.0
            lam = column.lam if isinstance(column, Gae) else max(0, 1 - 1 / (column.alpha * len(v)))
            for t in reversed(range(len(v))):
                last = t == len(v) - 1
                carry = (batch.reward[i] if last else v[t + 1]) - v[t] + lam * carry
                out.append(carry)
            found[i] = out[::-1]
        return found
    per_response = {}
    for i in batch.present:
        group = [j for j in batch.present if j // GROUP == i // GROUP]
        rewards = [batch.reward[j] for j in group]
        mean = sum(rewards) / len(group)
        if isinstance(column, GroupRelative):
            a = batch.reward[i] - mean
            if max(rewards) == min(rewards):
                a = 0.0
            elif column.divide_by_std:
                a /= math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(group) - 1))
        elif isinstance(column, Reinforce):
            every = [batch.reward[j] for j in batch.present]
            base = {"none": 0.0, "batch": sum(every) / len(every), "group": mean}[column.baseline]
            a = batch.reward[i] - base
        else:
            surprise = [(batch.reward[j] + 1) / 2 - batch.baseline[j] for j in batch.present]
            centre = sum(surprise) / len(surprise)
            std = math.sqrt(sum((x - centre) ** 2 for x in surprise) / len(surprise))
            a = ((batch.reward[i] + 1) / 2 - batch.baseline[i] - centre) / std
        per_response[i] = a
    return {i: [a] * len(batch.live(i)) for i, a in per_response.items()}


def scaled_oracle(column, raw):
    if not getattr(column, "whiten", False):
        return raw
    every = [a for one in raw.values() for a in one]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every))
    return {i: [(a - mean) / std for a in one] for i, one in raw.items()}


@EACH
@pytest.mark.parametrize("seed", [0, 1])
def test_oracle_with_absent_responses_and_poison_where_nothing_is_read(column, seed):
    for poison in (np.nan, np.inf, -np.inf):
        batch = Batch(seed, poison=poison)
        raw = column.advantages(batch.episodes, responses_per_prompt=GROUP)
        want = oracle(column, batch)
        scaled = column.scaled(raw, batch.mask)
        for i, at in batch.where.items():
            np.testing.assert_allclose(raw[at], want[i], err_msg=str(i), **CLOSE)
            np.testing.assert_allclose(scaled[at], scaled_oracle(column, want)[i], **CLOSE)
        for x in (raw, scaled):
            np.testing.assert_array_equal(np.asarray(x)[~batch.mask], 0.0)


@EACH
def test_packing_and_order_have_no_say(column):
    wide, narrow = Batch(3), Batch(3, width=10, order=[i for i in range(NUM) if i not in ABSENT])
    a, b = (
        np.asarray(column.advantages(x.episodes, responses_per_prompt=GROUP))
        for x in (wide, narrow)
    )
    for i in wide.present:
        np.testing.assert_allclose(a[wide.where[i]], b[narrow.where[i]], **CLOSE)


@EACH
def test_under_jit_and_without_values(column):
    batch = Batch(4)
    episodes = batch.episodes
    if not column.reads_values:
        episodes = dataclasses.replace(episodes, values=None)
    fixed = jax.jit(lambda e: column.advantages(e, responses_per_prompt=GROUP))
    want = column.advantages(batch.episodes, responses_per_prompt=GROUP)
    np.testing.assert_allclose(fixed(episodes), want, **CLOSE)


@pytest.mark.parametrize("column", [GroupRelative(), GroupRelative(False), Reinforce("group")])
def test_a_group_of_one_and_equal_rewards_are_exactly_zero(column):
    batch = Batch(5, absent=(0, 1, 12))
    got = np.asarray(column.advantages(batch.episodes, responses_per_prompt=GROUP))
    for i in (2, 6, 7, 8, 13):  # left alone, left alone, and a group of equal rewards
        np.testing.assert_array_equal(got[batch.where[i]], 0.0)
    assert np.abs(got[batch.where[3]]).min() > 0


@pytest.mark.parametrize("column", [Reinforce("batch"), Tracked(), Reinforce(whiten=True)])
def test_a_single_present_response_is_exactly_zero(column):
    batch = Batch(6, absent=range(1, NUM))
    raw = column.advantages(batch.episodes, responses_per_prompt=1)
    scaled = column.scaled(raw, batch.mask)
    np.testing.assert_array_equal(scaled, 0.0)


@EACH
def test_nobody_is_there(column):
    batch = Batch(7, absent=range(NUM))
    raw = column.advantages(batch.episodes, responses_per_prompt=GROUP)
    np.testing.assert_array_equal(raw, 0.0)
    np.testing.assert_array_equal(column.scaled(raw, batch.mask), 0.0)


@EACH
def test_values_of_the_union(column):
    assert isinstance(column, Advantage)
    assert hash(column) == hash(dataclasses.replace(column))


def test_who_needs_what():
    reads = {type(one).__name__ for one in COLUMNS if one.reads_values}
    assert reads == {"LengthAdaptiveGae", "Gae"}
    needs = [one for one in COLUMNS if one.needs_group]
    assert needs == [GroupRelative(), GroupRelative(False), Reinforce("group", whiten=True)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LengthAdaptiveGae(alpha=0.0), "alpha must be positive, got 0.0"),
        (lambda: Gae(lam=1.1), "lam must be in 0..1, got 1.1"),
        (lambda: Reinforce("some"), "baseline is 'none', 'batch' or 'group', got 'some'"),
    ],
)
def test_messages(make, words):
    with pytest.raises(ValueError, match=words):
        make()
