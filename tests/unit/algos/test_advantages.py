"""Advantages against the golden vectors, plain float64 loops, and the traps of others."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.advantages import (
    centred,
    gae,
    group_relative,
    length_adaptive_lambda,
    monte_carlo_returns,
)
from s3ac_jax.core import masked

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "objectives.json").read_text())
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CASES = [
    (1, 1, 0, "scalar", False),
    (3, 7, 1, "row", True),
    (4, 8, 2, "token", True),
    (2, 33, 3, "scalar", True),
    (5, 20, 4, "row", False),
    (2, 9, 5, "token", False),
]


def oracle_gae(values, rewards, mask, lam, gamma, segment_ids=None):
    """Compacts each segment, runs the textbook recursion on it, scatters back."""
    rows, tokens = mask.shape
    lam = np.broadcast_to(np.reshape(lam, (-1, 1)) if np.ndim(lam) == 1 else lam, mask.shape)
    segment_ids = np.ones(mask.shape, int) if segment_ids is None else segment_ids
    out = np.zeros(mask.shape)
    for b in range(rows):
        for segment in set(segment_ids[b]) - {0}:
            where = [t for t in range(tokens) if mask[b, t] and segment_ids[b, t] == segment]
            next_value = next_advantage = 0.0
            for t in reversed(where):
                delta = float(rewards[b, t]) + gamma * next_value - float(values[b, t])
                next_advantage = delta + gamma * float(lam[b, t]) * next_advantage
                next_value = float(values[b, t])
                out[b, t] = next_advantage
    return out


def random_case(rows, tokens, seed):
    rng = np.random.default_rng(seed)
    values, rewards = rng.normal(size=(2, rows, tokens)).astype(np.float32)
    mask = rng.random((rows, tokens)) < 0.7
    # Ids rise from 1 in steps of 0 or 1; the tail of the row is padding.
    segment_ids = 1 + np.cumsum(rng.random((rows, tokens)) < 0.2, axis=1)
    segment_ids = np.where(np.arange(tokens) < rng.integers(1, tokens + 1), segment_ids, 0)
    return values, rewards, mask, segment_ids


@pytest.mark.parametrize("case", GOLDEN["gae"])
def test_gae_golden(case):
    ids = None if case["segment_ids"] is None else np.array(case["segment_ids"])
    values, rewards = np.array(case["values"]), np.array(case["rewards"])
    mask, lam = np.array(case["mask"]), case["lam"]
    lam = np.array(lam) if isinstance(lam, list) else lam
    got = gae(values, rewards, mask, lam=lam, gamma=case["gamma"], segment_ids=ids)
    np.testing.assert_allclose(got, case["want"], rtol=2e-6, atol=2e-6)
    got = monte_carlo_returns(rewards, mask, gamma=case["gamma"], segment_ids=ids)
    np.testing.assert_allclose(got, case["want_returns"], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("rows", "tokens", "seed", "kind", "packed"), CASES)
def test_gae_oracle(rows, tokens, seed, kind, packed):
    values, rewards, mask, ids = random_case(rows, tokens, seed)
    shape = {"scalar": (), "row": (rows,), "token": (rows, tokens)}[kind]
    lam = np.random.default_rng(seed + 100).random(shape)
    ids = ids if packed else None
    got = gae(values, rewards, mask, lam=lam, gamma=0.97, segment_ids=ids)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle_gae(values, rewards, mask, lam, 0.97, ids), **CLOSE)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_trap_1_padding_never_leaks(poison):
    values, rewards, mask, ids = random_case(4, 19, 7)
    live = mask & (ids > 0)
    lam = np.full(mask.shape, 0.9, np.float32)
    want = gae(values, rewards, live, lam=lam, segment_ids=ids)
    bad = [np.where(live, x, poison).astype(np.float32) for x in (values, rewards, lam)]

    def total(values, rewards, lam):
        return jnp.sum(jnp.square(gae(values, rewards, live, lam=lam, segment_ids=ids)))

    np.testing.assert_array_equal(gae(bad[0], bad[1], live, lam=bad[2], segment_ids=ids), want)
    got = jax.grad(total, argnums=(0, 1, 2))(*bad)
    clean = jax.grad(total, argnums=(0, 1, 2))(values, rewards, lam)
    for a, b in zip(got, clean, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.any(np.asarray(a)[~live])
    np.testing.assert_array_equal(
        monte_carlo_returns(bad[1], live, segment_ids=ids),
        monte_carlo_returns(rewards, live, segment_ids=ids),
    )


def test_gae_permuted_rows():
    values, rewards, mask, ids = random_case(5, 13, 8)
    order = np.array([3, 0, 4, 1, 2])
    lam = np.linspace(0.1, 0.9, 5, dtype=np.float32)
    want = gae(values, rewards, mask, lam=lam, segment_ids=ids)[order]
    got = gae(values[order], rewards[order], mask[order], lam=lam[order], segment_ids=ids[order])
    np.testing.assert_array_equal(got, want)


def test_gae_pack_equals_pad():
    rng = np.random.default_rng(9)
    lengths, lams = [5, 1, 8, 3], [0.2, 0.5, 0.8, 0.95]
    values, rewards = rng.normal(size=(2, 4, 8)).astype(np.float32)
    live = np.arange(8) < np.array(lengths)[:, None]
    mask = live & (rng.random((4, 8)) < 0.8)
    padded = np.asarray(gae(values, rewards, mask, lam=np.array(lams)))

    def pack(x, fill):
        laid = np.concatenate([x[i, :n] for i, n in enumerate(lengths)])
        return np.concatenate([laid, np.full(3, fill, x.dtype)])[None]

    ids = pack(np.arange(1, 5)[:, None] * np.ones((1, 8), int), 0)
    lam = pack(np.array(lams)[:, None] * np.ones((1, 8)), np.nan)
    packed = gae(
        pack(values, np.nan), pack(rewards, np.nan), pack(mask, True), lam=lam, segment_ids=ids
    )
    np.testing.assert_allclose(packed, pack(padded, 0.0), rtol=1e-6, atol=1e-6)


def test_gae_lambda_one_is_monte_carlo_and_lambda_zero_is_td():
    values, rewards, mask, ids = random_case(3, 24, 10)
    mask &= ids > 0
    one = gae(values, rewards, mask, lam=1.0, gamma=0.9, segment_ids=ids)
    returns = monte_carlo_returns(rewards, mask, gamma=0.9, segment_ids=ids)
    np.testing.assert_allclose(one + np.where(mask, values, 0), returns, **CLOSE)
    zero = gae(values, rewards, mask, lam=0.0, gamma=0.9, segment_ids=ids)
    want = oracle_gae(values, rewards, mask, 0.0, 0.9, ids)
    np.testing.assert_allclose(zero, want, **CLOSE)


def test_returns_are_the_reward_bit_for_bit():
    rewards = np.zeros((2, 4096), np.float32)
    rewards[0, 4000], rewards[1, -1] = 0.37, -1.0
    mask = np.ones_like(rewards, bool)
    mask[0, 4001:] = False
    mask[0, 100:900] = False
    got = np.asarray(monte_carlo_returns(rewards, mask))
    assert np.all(got[0][mask[0]] == np.float32(0.37))
    assert np.all(got[1] == -1.0)
    assert not np.any(got[~mask])


def test_trap_2_tool_tokens_are_passed_over_without_decay():
    # think, tool, tool, think, tool: the reward stands on the last trainable token.
    mask = np.array([[1, 0, 0, 1, 0]], bool)
    values = np.array([[0.2, 9.0, 9.0, 0.5, 9.0]])
    rewards = np.array([[0.0, 0.0, 0.0, 1.0, 0.0]])
    got = gae(values, rewards, mask, lam=0.5, gamma=0.9)
    first = 0.9 * 0.5 - 0.2 + 0.9 * 0.5 * 0.5
    np.testing.assert_allclose(got, [[first, 0, 0, 0.5, 0]], atol=1e-6)
    # On a masked token it is not read: records put it on a trainable one.
    assert not np.any(monte_carlo_returns(np.array([[0, 1.0, 0, 0, 5.0]]), mask))


def test_gae_keeps_float_rewards_beside_integers():
    got = monte_carlo_returns(np.array([[0, 0, 1]]), np.ones((1, 3), bool))
    assert got.dtype == jnp.float32
    got = gae(np.zeros((1, 2), int), np.array([[0.0, 0.37]]), np.ones((1, 2), bool), lam=1.0)
    np.testing.assert_allclose(got, [[0.37, 0.37]], rtol=1e-6)


def test_gae_runs_in_fp32_and_under_jit():
    values, rewards, mask, _ = random_case(2, 9, 11)
    half = jnp.asarray(values, jnp.bfloat16)
    got = jax.jit(gae, static_argnames="gamma")(half, rewards, mask, lam=0.9)
    assert got.dtype == jnp.float32
    want = oracle_gae(np.asarray(half, np.float64), rewards, mask, 0.9, 1.0)
    np.testing.assert_allclose(got, want, **CLOSE)


def test_gae_refuses_shapes_that_would_broadcast():
    with pytest.raises(ValueError, match="shape"):
        gae(np.zeros((2, 3)), np.zeros((2, 1)), np.ones((2, 3), bool), lam=1.0)


def test_trap_9_whitening_before_returns_corrupts_the_targets():
    values, _, mask, _ = random_case(3, 12, 12)
    mask[:, -1] = True
    rewards = np.zeros_like(values)
    rewards[:, -1] = [1.0, -1.0, 1.0]
    raw = gae(values, rewards, mask, lam=1.0)
    np.testing.assert_allclose(
        np.asarray(raw + values)[mask], (np.ones_like(values) * rewards[:, -1:])[mask], **CLOSE
    )
    whitened = masked.whiten(raw, mask) + values
    assert np.max(np.abs(np.asarray(whitened - rewards[:, -1:])[mask])) > 0.1


@pytest.mark.parametrize("case", GOLDEN["length_adaptive_lambda"])
def test_length_adaptive_lambda_golden(case):
    got = length_adaptive_lambda(np.array(case["lengths"]), alpha=case["alpha"])
    np.testing.assert_allclose(got, case["want"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("alpha", [0.05, 0.4, 1.5])
def test_length_adaptive_lambda_oracle(alpha):
    lengths = np.random.default_rng(0).integers(0, 40_000, (7, 5))
    want = [[0.0 if n == 0 else max(0.0, 1 - 1 / (alpha * n)) for n in row] for row in lengths]
    got = length_adaptive_lambda(lengths, alpha=alpha)
    assert got.shape == lengths.shape
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_length_adaptive_lambda_limits():
    assert length_adaptive_lambda(0, alpha=1.5) == 0.0
    assert length_adaptive_lambda(np.array([10**9]), alpha=1.5)[0] == 1.0
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(3, alpha=0.0)


@pytest.mark.parametrize("case", GOLDEN["group_relative"])
def test_group_relative_golden(case):
    rewards, ids = np.array(case["rewards"]), np.array(case["group_ids"])
    for divide, want in ((False, case["want_centered"]), (True, case["want_std"])):
        got = group_relative(rewards, ids, num_groups=case["num_groups"], divide_by_std=divide)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "groups", "seed"), [(1, 1, 0), (12, 3, 1), (40, 7, 2), (16, 16, 3)]
)
@pytest.mark.parametrize("divide", [False, True])
def test_group_relative_oracle_and_permutation(size, groups, seed, divide):
    rng = np.random.default_rng(seed)
    rewards, ids = rng.normal(size=size).astype(np.float32), rng.integers(0, groups, size)
    want = np.zeros(size)
    for g in range(groups):
        members = [i for i in range(size) if ids[i] == g]
        if len(members) < 2:
            continue
        mean = sum(float(rewards[i]) for i in members) / len(members)
        square = sum((float(rewards[i]) - mean) ** 2 for i in members)
        for i in members:
            std = (square / (len(members) - 1)) ** 0.5
            want[i] = (float(rewards[i]) - mean) / (std if divide else 1.0)
    got = group_relative(rewards, ids, num_groups=groups, divide_by_std=divide)
    np.testing.assert_allclose(got, want, **CLOSE)
    order = rng.permutation(size)
    moved = group_relative(rewards[order], ids[order], num_groups=groups, divide_by_std=divide)
    np.testing.assert_allclose(moved, got[order], **CLOSE)


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("reward", [1.0, -1.0, 0.1, 0.37, 1e-3, 1e4])
def test_trap_7_singletons_and_equal_rewards_are_exactly_zero(divide, reward):
    # 0.1 seven times has an fp32 mean that is not 0.1.
    rewards, ids = np.full(8, reward), np.array([0, 0, 0, 0, 0, 0, 0, 2])
    got = np.asarray(group_relative(rewards, ids, num_groups=3, divide_by_std=divide))
    assert np.all(got == 0.0)


@pytest.mark.parametrize(("size", "seed"), [(1, 0), (12, 1), (129, 2)])
def test_centred_oracle_permutation_and_absence(size, seed):
    rng = np.random.default_rng(seed)
    rewards, present = rng.normal(size=size).astype(np.float32), rng.random(size) < 0.7
    live = [float(r) for r, here in zip(rewards, present, strict=True) if here]
    mean = sum(live) / max(len(live), 1)
    want = [float(r) - mean if here else 0.0 for r, here in zip(rewards, present, strict=True)]
    got = np.asarray(centred(rewards, present))
    np.testing.assert_allclose(got, want, **CLOSE)
    order = rng.permutation(size)
    np.testing.assert_allclose(centred(rewards[order], present[order]), got[order], **CLOSE)
    for poison in (np.nan, np.inf, -np.inf):
        bad = np.where(present, rewards, poison)
        np.testing.assert_array_equal(centred(bad, present), got)
    # Absent responses appended or left out: the same.
    np.testing.assert_allclose(
        centred(rewards[present], np.ones(len(live), bool)), got[present], **CLOSE
    )


@pytest.mark.parametrize("reward", [1.0, -1.0, 0.1, 0.37, 1e-3, 1e4])
def test_centred_is_exactly_zero_for_one_or_equal_rewards(reward):
    # 0.1 seven times has an fp32 mean that is not 0.1.
    present = np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    rewards = np.where(present, reward, -5.0)
    assert not np.any(np.asarray(centred(rewards, present)))
    assert not np.any(np.asarray(centred(np.array([reward, 7.0]), np.array([True, False]))))
    assert not np.any(np.asarray(centred(rewards, np.zeros(8, bool))))


def test_centred_keeps_its_fraction_beside_integers():
    got = centred(np.array([1, -1, -1]), np.ones(3, bool))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [4 / 3, -2 / 3, -2 / 3], rtol=1e-6)
