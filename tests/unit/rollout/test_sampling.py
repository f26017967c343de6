"""Settings of single requests: cuts of the distribution, stop ids, and what they must not touch."""

import jax
import numpy as np
import pytest

from s3ac_jax.rollout.backend import make_sampling, seeded_sampling
from s3ac_jax.rollout.engine import nucleus, sample
from tests.helpers import log_softmax_oracle

VOCAB = 9


def left_by_hand(logits, top_p, top_k):
    """The set of tokens, written from the definition: likeliest first until top_p is reached."""
    share = np.exp(log_softmax_oracle(logits))
    order, taken, reached = np.argsort(-logits), [], 0.0
    for token in order:
        if taken and (reached >= top_p or (top_k and len(taken) >= top_k)):
            break
        taken.append(token)
        reached += share[token]
    return set(map(int, taken))


@pytest.mark.parametrize("seed", range(3))
def test_nucleus_is_the_smallest_set(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(40, VOCAB)) * rng.uniform(0.2, 4, size=(40, 1))
    top_p = rng.choice([1e-6, 0.3, 0.6, 0.9, 0.999], 40)
    top_k = rng.choice([0, 1, 2, 5, VOCAB, 50], 40)
    got = jax.jit(nucleus)(
        logits.astype(np.float32), top_p.astype(np.float32), top_k.astype(np.int32)
    )
    for row in range(40):
        want = left_by_hand(logits[row], top_p[row], top_k[row])
        assert set(np.flatnonzero(got[row]).tolist()) == want


def test_ties_stay_together():
    logits = np.array([[2.0, 1.0, 1.0, 0.0]], np.float32)
    got = nucleus(logits, np.array([1.0], np.float32), np.array([2], np.int32))
    assert np.asarray(got).tolist() == [[True, True, True, False]]


def test_cut_rows_draw_from_what_is_left_and_others_as_ever():
    rng = np.random.default_rng(4)
    logits = np.tile(rng.normal(size=(1, VOCAB)).astype(np.float32) * 1.5, (6000, 1))
    noise = jax.random.gumbel(jax.random.key(5), logits.shape)
    plain = seeded_sampling(np.arange(6000), temperature=0.8, max_tokens=1, stop_ids=())
    top_p = np.where(np.arange(6000) < 4000, 0.9, 1.0)
    cut = plain._replace(top_p=top_p.astype(np.float32))
    draw = jax.jit(sample)
    free, free_logp = draw(logits, noise, plain)
    tokens, logp = draw(logits, noise, cut)
    np.testing.assert_array_equal(tokens[4000:], free[4000:])
    np.testing.assert_array_equal(logp[4000:], free_logp[4000:])
    # The log-prob is that of the whole distribution, which is what a trainer reads.
    whole = log_softmax_oracle(logits[0].astype(float) / 0.8)
    np.testing.assert_allclose(logp, whole[tokens], rtol=1e-5, atol=1e-5)
    left = sorted(left_by_hand(logits[0] / 0.8, 0.9, 0))
    assert 1 < len(left) < VOCAB
    counts = np.bincount(tokens[:4000], minlength=VOCAB)
    want = np.zeros(VOCAB)
    want[left] = np.exp(whole[left]) / np.exp(whole[left]).sum()
    assert counts[want == 0].sum() == 0
    chi2 = ((counts - 4000 * want)[left] ** 2 / (4000 * want[left])).sum()
    assert chi2 < 24.3  # at most 7 degrees of freedom: passed by 999 in 1000 right samplers


def test_a_greedy_row_ignores_cuts():
    logits = np.array([[0.0, 3.0, 1.0]], np.float32)
    asked = seeded_sampling([1], temperature=0.0, max_tokens=1, stop_ids=(), top_p=0.1, top_k=1)
    tokens, logp = jax.jit(sample)(logits, np.float32([[9, 0, 0]]), asked)
    assert tokens.tolist() == [1]
    np.testing.assert_allclose(logp, log_softmax_oracle(logits[0])[1], rtol=1e-6)


def test_too_many_stop_ids():
    with pytest.raises(ValueError, match="at most 8 stop ids, got 9"):
        make_sampling(jax.random.key(0), 2, temperature=1.0, max_tokens=3, stop_ids=range(9))
