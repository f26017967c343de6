"""The critic column: which tokens it learns at, its targets, its loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.advantages import gae, monte_carlo_returns
from s3ac_jax.algos.critic import CriticSpec
from s3ac_jax.core import masked


def random_case(seed, rows=3, tokens=10):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, tokens)).astype(np.float32)
    rewards = np.zeros((rows, tokens), np.float32)
    mask = rng.random((rows, tokens)) < 0.8
    mask[:, 7], mask[:, 8:] = True, False
    rewards[:, 7] = np.where(rng.random(rows) < 0.5, 1.0, -1.0)
    return values, rewards, mask


def test_targets():
    values, rewards, mask = random_case(3)
    poisoned = np.where(mask, values, np.nan)
    at_one = CriticSpec(lam=1.0).returns(poisoned, rewards, mask)
    np.testing.assert_array_equal(at_one, monte_carlo_returns(rewards, mask))
    assert set(np.asarray(at_one)[mask].tolist()) <= {1.0, -1.0}
    np.testing.assert_array_equal(CriticSpec(lam=1.0).returns(None, rewards, mask), at_one)
    near_one = CriticSpec(lam=0.999999).returns(poisoned, rewards, mask)
    np.testing.assert_allclose(near_one, at_one, atol=1e-4)
    below = CriticSpec(lam=0.5).returns(poisoned, rewards, mask)
    raw = gae(values, rewards, mask, lam=0.5)
    np.testing.assert_allclose(below, np.where(mask, raw + values, 0), rtol=1e-6)


def test_targets_below_one_are_lambda_returns():
    """G = r + (1 - lambda) V' + lambda G', over trainable tokens, as a loop."""
    values, rewards, mask = random_case(5)
    got = CriticSpec(lam=0.7).returns(values, rewards, mask)
    for b in range(3):
        after, value = 0.0, 0.0
        for t in reversed(range(10)):
            if mask[b, t]:
                after = float(rewards[b, t]) + 0.3 * value + 0.7 * after
                value = float(values[b, t])
                assert float(got[b, t]) == pytest.approx(after, rel=1e-5, abs=1e-6)
            else:
                assert got[b, t] == 0


def half_clipped(v, old, target, clip):
    near = v if clip is None else old + min(max(v - old, -clip), clip)
    return 0.5 * max((v - target) ** 2, (near - target) ** 2)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_loss_is_half_the_clipped_error_squared_and_ignores_padding(clip):
    values, returns, mask = random_case(4)
    old = (values + np.linspace(-1, 1, 10)).astype(np.float32)
    want = np.zeros(values.shape)
    for b, t in np.argwhere(mask):
        want[b, t] = half_clipped(*(float(x[b, t]) for x in (values, old, returns)), clip)
    bad = [np.where(mask, x, np.nan) for x in (values, old, returns)]
    got = CriticSpec(clip=clip).token_loss(*bad, mask)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_the_slope_is_the_error_itself():
    values, returns, mask = random_case(4)
    spec, old = CriticSpec(clip=None), np.full_like(values, np.nan)

    def total(v, old):
        return masked.total(spec.token_loss(v, old, returns, mask), mask)

    bad = jnp.asarray(np.where(mask, values, np.nan))
    want = np.where(mask, values - returns, 0)
    np.testing.assert_allclose(jax.grad(total)(bad, old), want, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(total)(bad, None), want, rtol=1e-6)


def packed_rows():
    """(mask, segment ids): several responses to a row, tool tokens among them, two poor ones."""
    rows = [
        # prompt 2, response 3 | prompt 1, response with tool tokens | padding
        ("00111" "011001" "...", "11111" "222222" "..."),
        # begins with a trainable token | none at all | the last token alone | one token | padding
        ("11" "000" "001" "1" ".....", "11" "222" "333" "4" "....."),
        ("." * 14, "." * 14),
        # tool tokens in the middle, and no padding at all
        ("0001011" "0101011", "1111111" "2222222"),
    ]  # fmt: skip
    rows = [[[int(x) for x in text.replace(".", "0")] for text in row] for row in rows]
    mask, ids = (np.array([row[k] for row in rows]) for k in range(2))
    return mask.astype(bool), ids


def test_learns_at_the_prompt_alone():
    mask, ids = packed_rows()
    want = np.zeros(mask.shape, bool)
    for b in range(len(mask)):
        met = set()
        for t in range(mask.shape[1]):
            if mask[b, t] and ids[b, t] not in met:
                met.add(ids[b, t])
                want[b, t] = True
    assert want.sum() == 7
    got = CriticSpec(at="prompt").learns(mask, ids)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == bool
    np.testing.assert_array_equal(jax.jit(CriticSpec(at="prompt").learns)(mask, ids), want)
    np.testing.assert_array_equal(CriticSpec(at="tokens").learns(mask, ids), mask)


def test_learns_random_rows():
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = np.sort(rng.integers(0, 6, size=(3, 30)), axis=1)[:, ::-1]
        ids = np.where(ids > 0, 6 - ids, 0)  # ascending, padding last
        mask = (rng.random((3, 30)) < 0.4) & (ids > 0)
        want = np.zeros(mask.shape, bool)
        for b in range(3):
            for segment in range(1, 6):
                live = np.flatnonzero(mask[b] & (ids[b] == segment))
                want[b, live[:1]] = True
        np.testing.assert_array_equal(CriticSpec(at="prompt").learns(mask, ids), want)


def test_who_needs_v_old():
    assert CriticSpec(clip=0.5, lam=1.0).reads_values
    assert CriticSpec(clip=None, lam=0.9).reads_values
    assert not CriticSpec(clip=None, lam=1.0).reads_values


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"warmup_ticks": -1}, "warmup_ticks must not be negative, got -1"),
        ({"lam": 1.1}, "lam must be in 0..1, got 1.1"),
        ({"lam": float("nan")}, "lam must be in 0..1"),
        ({"clip": 0.0}, "clip must be positive or None, got 0.0"),
    ],
)
def test_messages(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CriticSpec(), **changes)
