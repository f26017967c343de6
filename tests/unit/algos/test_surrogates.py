"""The surrogate column: bounds of the ratio, padding, what each forwards to."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from s3ac_jax.algos.surrogates import Band, Cispo, PolicyGradient, PpoClip, Surrogate
from s3ac_jax.core import masked

SURROGATES = [Cispo(), PpoClip(), PpoClip(eps_high=0.28, imitation=0.1), PolicyGradient(), Band()]
EACH = pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda s: type(s).__name__)


def test_effective_interval_of_the_ratio():
    assert Cispo().interval == (0.0, 5.0)
    np.testing.assert_allclose(PpoClip().interval, (0.8, 1.2))
    np.testing.assert_allclose(PpoClip(eps_low=0.2, eps_high=0.28).interval, (0.8, 1.28))
    assert PolicyGradient().interval == (0.0, math.inf)
    assert Band(low=0.2, high=4.0).interval == (0.2, 4.0)


def test_only_the_band_looks_at_the_sampler():
    assert [one.against_sampler for one in SURROGATES] == [False, False, False, False, True]


def random_case(seed):
    rng = np.random.default_rng(seed)
    logp, old, advantages = rng.normal(size=(3, 4, 12)).astype(np.float32) - [[[2]], [[2]], [[0]]]
    return logp, old, advantages, rng.random((4, 12)) < 0.6


def oracle(surrogate, logp, old, a):
    """(loss, slope in logp) of one token."""
    ratio = math.exp(logp - old)
    if isinstance(surrogate, PolicyGradient):
        return -a * logp, -a
    if isinstance(surrogate, Band):
        push = ratio * a if surrogate.low < ratio < surrogate.high else 0.0
        return -push * logp, -push
    bounded = min(max(ratio, 1 - surrogate.eps_low), 1 + surrogate.eps_high)
    if isinstance(surrogate, Cispo):
        return -bounded * a * logp, -bounded * a
    clipped = -bounded * a > -ratio * a
    return max(-ratio * a, -bounded * a), 0.0 if clipped else -ratio * a


@EACH
def test_oracle(surrogate):
    logp, old, advantages, mask = random_case(0)
    want, slope = np.zeros((2, 4, 12))
    for i in np.argwhere(mask):
        i = tuple(i)
        want[i], slope[i] = oracle(surrogate, *(float(x[i]) for x in (logp, old, advantages)))
    got = surrogate.token_loss(logp, old, advantages, mask)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    grad = jax.grad(lambda x: surrogate.token_loss(x, old, advantages, mask).sum())(logp)
    np.testing.assert_allclose(grad, slope, rtol=1e-4, atol=1e-6)


@EACH
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poisoned_padding_reaches_no_gradient(surrogate, poison):
    *clean, mask = random_case(2)

    def total(logp, old, advantages):
        loss = surrogate.token_loss(logp, old, advantages, mask)
        return masked.total(loss, mask), loss

    bad = [np.where(mask, x, np.float32(poison)) for x in clean]
    grad = jax.grad(total, has_aux=True)
    want, loss = grad(*clean)
    got, bad_loss = grad(*bad)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(bad_loss, loss)
    assert np.all(np.isfinite(got))
    assert not np.any(np.asarray(got)[~mask])


def test_policy_gradient_does_not_read_logp_old():
    logp, _, advantages, mask = random_case(3)
    got = PolicyGradient().token_loss(logp, np.full_like(logp, np.nan), advantages, mask)
    assert np.all(np.isfinite(got))


@EACH
def test_values_of_the_union(surrogate):
    assert isinstance(surrogate, Surrogate)
    assert hash(surrogate) == hash(dataclasses.replace(surrogate))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (Cispo, {"eps_low": -0.1}, "eps_low and eps_high must not be negative, got -0.1, 4.0"),
        (PpoClip, {"eps_high": math.nan}, "must not be negative"),
        (PolicyGradient, {"imitation": -1.0}, "imitation must be finite and not negative"),
        (PpoClip, {"imitation": math.inf}, "imitation must be finite and not negative"),
        (Band, {"imitation": math.nan}, "imitation must be finite and not negative"),
        (Band, {"low": 1.0}, "0 <= low < 1 < high, got 1.0, 6.0"),
        (Band, {"high": 1.0}, "0 <= low < 1 < high"),
        (Band, {"low": -0.1}, "0 <= low < 1 < high"),
    ],
)
def test_messages(kind, changes, words):
    with pytest.raises(ValueError, match=words):
        kind(**changes)
