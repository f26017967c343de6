"""Rounds of select, rollout and reward, with a sampler and a verifier that do as they are told."""

import dataclasses

import jax
import numpy as np
import pytest

from s3ac_jax.algos.filtering import KeepAll, SoftOverlong, VariedGroups
from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.run import ReferenceConfig
from s3ac_jax.core.types import Rollout, RunState, Scored
from s3ac_jax.scheduler.select import start_cursor
from s3ac_jax.train import gather as gathering
from s3ac_jax.train.build import build
from s3ac_jax.train.online import start_stats
from s3ac_jax.train.phases import PhaseTimes
from s3ac_jax.train.tasks import Split
from tests.helpers import run_config

GROUP, BATCH = 3, 4


class Sampler:
    """Any tokens; each response is as long as its number in the rollout says."""

    def __init__(self):
        self.rollouts, self.seeds, self.versions = [], [], []

    def update_weights(self, params, version):
        self.versions.append((params, version))

    def generate(self, prompt, sampling):
        rows = len(prompt.index)
        assert {len(field) for field in sampling} == {rows}
        rng = np.random.default_rng(len(self.rollouts))
        number = 1 + np.arange(rows) % 11
        rollout = Rollout(
            prompt, rng.integers(1, 17, size=(rows, 11)).astype(np.int32),
            number.astype(np.int32), -rng.random((rows, 11)).astype(np.float32),
            np.ones(rows, bool), np.zeros((rows, 11), np.int32),
        )  # fmt: skip
        self.rollouts.append(rollout)
        self.seeds.append(sampling.seed)
        return rollout


class Verifier:
    """right(prompt index, number within its group) -> whether; valid likewise."""

    def __init__(self, right, valid):
        self.right, self.valid = right, valid

    def grade(self, rollout):
        index = rollout.prompt.index
        place = np.arange(len(index)) % GROUP
        success, valid = (
            np.array([f(int(i), int(k)) for i, k in zip(index, place, strict=True)], bool)
            for f in (self.right, self.valid)
        )
        return Scored(rollout, np.where(success, 1, -1).astype(np.float32), success, valid)


@pytest.fixture(scope="module")
def built():
    recipe = dataclasses.replace(RECIPES["dapo"], responses_per_prompt=GROUP, shaping=None)
    return build(run_config(recipe=recipe, batch_prompts=BATCH))


def gathered(built, right, valid=lambda index, place: True, *, tick=0, stats=None, **columns):
    """(Gathered, the sampler) of one tick."""
    recipe = dataclasses.replace(built.config.recipe, **columns)
    parts = build(dataclasses.replace(built.config, recipe=recipe), like=built)
    sampler = Sampler()
    train = Split(parts.train.prompts, Verifier(right, valid))
    parts = dataclasses.replace(
        parts, rollout=sampler, task=dataclasses.replace(parts.task, train=train)
    )
    stats = start_stats(parts) if stats is None else stats
    state = RunState(None, None, stats, start_cursor(), np.zeros(2), np.int32(tick))
    keys = tuple(jax.random.split(jax.random.key(0)))
    times = PhaseTimes()
    batch = gathering.gather(parts, state, "weights", None, keys, times)
    # By the weights that the sampler has: whoever gathers has handed them over.
    assert sampler.versions == []
    assert {"time/select", "time/rollout", "time/reward"} == times.seconds.keys()
    return batch, sampler


def mixed(index, place):
    return place == 0


def test_one_round_is_enough_when_every_group_varies(built):
    batch, sampler = gathered(built, mixed)
    assert len(sampler.rollouts) == len(batch.draws) == 1
    assert batch.missing == 0
    index = batch.trained.rollout.prompt.index
    np.testing.assert_array_equal(index, np.repeat(batch.draws[0].index, GROUP))
    assert len(index) == BATCH * GROUP
    assert jax.tree.all(jax.tree.map(np.array_equal, batch.trained, batch.made))


def test_refill_draws_what_is_missing_and_history_counts_everything(built):
    batch, sampler = gathered(built, lambda index, place: mixed(index, place) and index % 3 == 0)
    sizes = [len(rollout.prompt.index) // GROUP for rollout in sampler.rollouts]
    missing, walked = BATCH, []
    for draw, size in zip(batch.draws, sizes, strict=True):
        assert len(draw.index) == size == missing
        missing -= int((draw.index % 3 == 0).sum())
        walked += draw.index.tolist()
    assert missing == batch.missing == 0
    assert len(sizes) > 2
    assert len(set(walked)) == len(walked)  # the walk goes on, nothing is drawn again
    kept = [i for i in walked if i % 3 == 0]
    np.testing.assert_array_equal(batch.trained.rollout.prompt.index, np.repeat(kept, GROUP))
    np.testing.assert_array_equal(batch.made.rollout.prompt.index, np.repeat(walked, GROUP))
    assert int(batch.cursor.offset) == len(walked)
    attempts = np.zeros(32)
    attempts[walked] = GROUP
    np.testing.assert_array_equal(batch.stats.attempts, attempts)
    right = np.zeros(32)
    right[kept] = 1
    np.testing.assert_array_equal(batch.stats.successes, right)
    # Each response with what it came with.
    rows = np.concatenate([np.repeat(d.index % 3 == 0, GROUP) for d in batch.draws])
    for name in ("tokens", "logp", "num_tokens"):
        every = np.concatenate([getattr(rollout, name) for rollout in sampler.rollouts])
        np.testing.assert_array_equal(getattr(batch.trained.rollout, name), every[rows])
    # Rounds sample apart.
    assert len({int(seeds[0]) for seeds in sampler.seeds}) == len(sizes)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_refill_ends_after_its_rounds(built, rounds):
    def only(index, place):
        return mixed(index, place) and index % 16 == 5

    batch, sampler = gathered(built, only, keep=VariedGroups(max_rounds=rounds))
    assert len(sampler.rollouts) == rounds
    kept = np.unique(batch.trained.rollout.prompt.index)
    assert batch.missing == BATCH - len(kept)
    assert (kept % 16 == 5).all()


@pytest.mark.parametrize("right", [True, False])
def test_nothing_is_left_when_all_groups_are_equal(built, right):
    batch, sampler = gathered(built, lambda index, place: right, keep=VariedGroups(max_rounds=3))
    assert len(sampler.rollouts) == 3
    assert batch.missing == BATCH
    assert len(batch.trained.success) == len(batch.baseline) == 0
    assert batch.trained.rollout.tokens.shape == (0, 11)
    assert len(batch.made.success) == 3 * BATCH * GROUP
    assert batch.stats.attempts.sum() == 3 * BATCH * GROUP


def test_failed_gradings_make_no_variety_and_no_history(built):
    # Right ones are never graded in odd prompts: what is left of them is all wrong.
    batch, _ = gathered(built, mixed, lambda index, place: index % 2 == 0 or place > 0)
    index = batch.trained.rollout.prompt.index
    assert (index % 2 == 0).all()
    assert batch.trained.valid.all()
    made = np.unique(batch.made.rollout.prompt.index)
    np.testing.assert_array_equal(batch.stats.attempts[made], np.where(made % 2, GROUP - 1, GROUP))


def test_keep_all_trains_on_everything_and_draws_once(built):
    batch, sampler = gathered(built, lambda index, place: False, keep=KeepAll())
    assert len(sampler.rollouts) == 1
    assert batch.missing == 0
    assert len(batch.trained.success) == BATCH * GROUP


def test_the_reward_is_shaped_and_success_is_not(built):
    batch, _ = gathered(built, mixed, shaping=SoftOverlong(buffer_share=0.5))
    number = batch.made.rollout.num_tokens
    for k in range(BATCH * GROUP):
        over = max(0, int(number[k]) - 5) / 6  # limit 11, buffer 6
        want = (1.0 if k % GROUP == 0 else -1.0) - over
        assert float(batch.made.reward[k]) == pytest.approx(want, abs=1e-6)
    assert number.max() == 11
    np.testing.assert_array_equal(batch.made.success, np.arange(BATCH * GROUP) % GROUP == 0)
    assert batch.stats.successes.sum() == BATCH


def test_the_baseline_is_from_before_the_batch(built):
    stats = start_stats(built)
    stats = dataclasses.replace(
        stats, successes=np.arange(32, dtype=np.float32), attempts=np.full(32, 40, np.float32)
    )
    batch, _ = gathered(built, mixed, stats=stats)
    index = batch.trained.rollout.prompt.index
    np.testing.assert_allclose(batch.baseline, index / 40, rtol=1e-6)


# --------------------------------------------------------------------------- SPO's drift


def test_spo_looks_at_the_last_response_of_each_drawn_prompt(monkeypatch):
    config = dataclasses.replace(
        run_config(recipe=RECIPES["spo"], batch_prompts=6), reference=ReferenceConfig(samples=8)
    )
    rate = np.linspace(0, 1, 32).astype(np.float32)
    parts = dataclasses.replace(build(config), reference=rate)
    asked = []

    def drift(params, packed):
        """The tokens of each response there, as a number of nats; nothing is compiled."""
        out = np.full(6, np.nan, np.float32)
        for batch in packed:
            for row, column in np.argwhere(batch.mask):
                n = int(batch.response[row, column])
                out[n] = 0.0 if np.isnan(out[n]) else out[n]
                out[n] += 1e-3
                asked.append(
                    (n, int(batch.tokens[row, column]), float(batch.logp_rollout[row, column]))
                )
        return out

    train = Split(parts.train.prompts, Verifier(mixed, lambda index, place: True))
    task = dataclasses.replace(parts.task, train=train)
    parts = dataclasses.replace(parts, rollout=Sampler(), task=task, drift=drift)
    stats, cursor = start_stats(parts), start_cursor()
    a = 8 * (8 * rate + 0.5) / 9
    np.testing.assert_allclose(stats.successes, a, rtol=1e-5)
    np.testing.assert_allclose(stats.attempts, 8.0, rtol=1e-6)
    history, last = {i: (float(a[i]), 8.0) for i in range(32)}, {}
    for tick in range(8):
        asked.clear()
        state = RunState(None, None, stats, cursor, np.zeros(2), np.int32(tick))
        keys = tuple(jax.random.split(jax.random.key(tick)))
        with parts.on_mesh():
            batch = gathering.gather(parts, state, None, None, keys, PhaseTimes())
        (draw,), rollout = batch.draws, batch.made.rollout
        want = []
        for n, i in enumerate(draw.index.tolist()):
            s, count = history[i]
            assert batch.baseline[n] == pytest.approx(s / count, rel=1e-5)
            factor = 1.0
            if i in last:
                tokens, logp = last[i]
                want += [(n, int(t), float(x)) for t, x in zip(tokens, logp, strict=True)]
                factor = min(max(2 ** (-1e-3 * len(tokens) / 0.06), 0.875), 0.96)
            history[i] = factor * s + float(batch.made.success[n]), factor * count + 1
            number = int(rollout.num_tokens[n])
            last[i] = rollout.tokens[n, :number], rollout.logp[n, :number]
        assert sorted(asked) == sorted(want)
        stats, cursor = batch.stats, batch.cursor
        for i in range(32):
            got = float(stats.successes[i]), float(stats.attempts[i])
            assert got == pytest.approx(history[i], rel=1e-5)
    assert len(last) < 8 * 6  # some came again
