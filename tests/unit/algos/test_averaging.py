"""Averaging: each paper's formula by loops over responses, packed and split in any way."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.averaging import Average, ConstantLength, ResponseMean, TokenMean
from s3ac_jax.core import masked

LIMIT = 16
RULES = [TokenMean(), ResponseMean(), ConstantLength(length=LIMIT)]
BY_NAME = {"ids": lambda rule: type(rule).__name__}
# Trainable flags of each response: tool tokens in the second, one token in the third.
RESPONSES = [[1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1], [1], [1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1]]
# Which responses lie in which row of 12 tokens; the rest of a row is padding.
PACKED = [[0, 1], [2, 4], [3], []]
UNPACKED = [[0], [1], [2], [3], [4]]


def losses(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=len(flags)) for flags in RESPONSES]


def lay(rows, per_response, width=12):
    """(mask, num_trainable, loss) [B T]; a response alone in its row follows a prompt of 2."""
    mask, count = np.zeros((len(rows), width), bool), np.zeros((len(rows), width), np.int32)
    loss = np.full((len(rows), width), np.nan, np.float32)
    for b, members in enumerate(rows):
        prompt = 2 if len(members) == 1 else 0
        start = 0
        for i in members:
            end = start + prompt + len(RESPONSES[i])
            count[b, start:end] = sum(RESPONSES[i])
            mask[b, start + prompt : end] = RESPONSES[i]
            loss[b, start + prompt : end] = per_response[i]
            start = end
    return mask, count, np.where(mask, loss, np.nan)


def oracle(rule, per_response):
    total, tokens = 0.0, 0
    for flags, values in zip(RESPONSES, per_response, strict=True):
        live = [float(x) for x, flag in zip(values, flags, strict=True) if flag]
        tokens += len(live)
        total += (
            sum(live) / {TokenMean: 1, ResponseMean: len(live), ConstantLength: LIMIT}[type(rule)]
        )
    return total / (tokens if isinstance(rule, TokenMean) else len(RESPONSES))


def numerator(rule, mask, count, loss):
    return masked.total(rule.token_scale(count) * loss, mask)


def denominator(rule, mask, count):
    return masked.total(rule.token_share(count), mask)


@pytest.mark.parametrize("rows", [PACKED, UNPACKED], ids=["packed", "unpacked"])
@pytest.mark.parametrize("rule", RULES, **BY_NAME)
def test_oracle_packed_and_unpacked(rule, rows):
    per_response = losses()
    mask, count, loss = lay(rows, per_response)
    assert mask.sum() == sum(map(sum, RESPONSES))
    got = numerator(rule, mask, count, loss) / denominator(rule, mask, count)
    np.testing.assert_allclose(got, oracle(rule, per_response), rtol=1e-5)


@pytest.mark.parametrize("rule", RULES, **BY_NAME)
def test_any_split_into_micro_batches_gives_the_same(rule):
    per_response = losses(1)
    for order in (PACKED, PACKED[::-1], UNPACKED):
        mask, count, loss = lay(order, per_response)
        whole = denominator(rule, mask, count)
        for cut in range(len(order) + 1):
            parts = [
                numerator(rule, mask[rows], count[rows], loss[rows]) / whole
                for rows in (slice(cut), slice(cut, None))
            ]
            np.testing.assert_allclose(sum(parts), oracle(rule, per_response), rtol=1e-5)


def test_trap_6_tokens_of_micro_batches_add_up():
    # Sums 10 over 10 tokens and 2 over 1 token: 12/11 for tokens, (1 + 2)/2 for responses.
    mask = np.array([[1] * 10, [1] + [0] * 9], bool)
    count = np.where([[1], [0]], 10, 1) * np.ones((2, 10), np.int32)
    loss = np.where([[1], [0]], 1.0, 2.0) * np.ones((2, 10), np.float32)
    for rule, want in zip(RULES, (12 / 11, 1.5, 12 / (2 * LIMIT)), strict=True):
        got = numerator(rule, mask, count, loss) / denominator(rule, mask, count)
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES, **BY_NAME)
def test_factors(rule):
    count = np.array([[3, 3, 3, 0], [1, 0, 8, 8]])
    scale, share = rule.token_scale(count), rule.token_share(count)
    for b, t in np.ndindex(2, 4):
        n = int(count[b, t])
        want_scale = {TokenMean: 1, ResponseMean: 1 / max(n, 1), ConstantLength: 1 / LIMIT}
        want_share = 1.0 if isinstance(rule, TokenMean) else 1 / max(n, 1)
        live = n > 0
        np.testing.assert_allclose(scale[b, t], want_scale[type(rule)] * live, rtol=1e-6)
        np.testing.assert_allclose(share[b, t], want_share * live, rtol=1e-6)
    for x in (scale, share):
        assert x.dtype == jnp.float32
        assert x.shape == count.shape
    np.testing.assert_array_equal(rule.token_scale(count[::-1]), scale[::-1])


@pytest.mark.parametrize("rule", RULES, **BY_NAME)
def test_nothing_trainable_and_one_response(rule):
    empty = np.zeros((2, 3), np.int32)
    assert not np.any(np.asarray(rule.token_scale(empty)))
    assert not np.any(np.asarray(rule.token_share(empty)))
    one = np.full((1, LIMIT), LIMIT)
    loss, every = np.linspace(-1, 2, LIMIT)[None], np.ones((1, LIMIT), bool)
    got = numerator(rule, every, one, loss) / denominator(rule, every, one)
    # A single response of full length: all three are its plain mean.
    np.testing.assert_allclose(got, 0.5, rtol=1e-6)


@pytest.mark.parametrize(("rule", "want"), [*zip(RULES, (1, 1 / 32768, 1 / LIMIT), strict=True)])
def test_long_responses_keep_their_denominator(rule, want):
    # 1/T added T times in fp32 is still 1 at the longest responses in use.
    count = np.array([[32768], [0]], np.int32) * np.ones((2, 32768), np.int32)
    count[1, :30001] = 30001
    tokens = float(denominator(rule, count > 0, count))
    wanted = 62769 if isinstance(rule, TokenMean) else 2
    np.testing.assert_allclose(tokens, wanted, rtol=1e-6)
    np.testing.assert_allclose(rule.token_scale(count)[0, 0], want, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES, **BY_NAME)
def test_gradient_of_padding_is_zero(rule):
    mask, count, loss = lay(PACKED, losses(2))

    def mean(loss):
        return numerator(rule, mask, count, loss) / denominator(rule, mask, count)

    got = np.asarray(jax.grad(mean)(jnp.asarray(loss)))
    want = rule.token_scale(count) / denominator(rule, mask, count)
    np.testing.assert_allclose(got, np.where(mask, want, 0.0), rtol=1e-6)


@pytest.mark.parametrize("length", [0, -1, 2.5, None, "9"])
def test_constant_length_refuses(length):
    with pytest.raises(ValueError, match="length"):
        ConstantLength(length=length)


@pytest.mark.parametrize("rule", RULES, **BY_NAME)
def test_rules_are_static_arguments(rule):
    assert isinstance(rule, Average)
    assert hash(rule) == hash(dataclasses.replace(rule))
    count = np.array([[2, 2, 0]])
    jitted = jax.jit(lambda rule, x: rule.token_scale(x), static_argnums=0)
    np.testing.assert_array_equal(jitted(rule, count), rule.token_scale(count))
