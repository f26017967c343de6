"""avg@k, pass@k, maj@k against every subset there is, and intervals against known spreads."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from s3ac_jax.report.estimators import (
    maj_at,
    over_problems,
    over_samples,
    pass_at,
    std_over_samples,
)


def test_pass_at_k_is_one_minus_a_ratio_of_binomials():
    for n in range(1, 40):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                exact = 1 - Fraction(math.comb(n - correct, k), math.comb(n, k))
                assert pass_at(n, correct, k) == pytest.approx(float(exact), rel=1e-12, abs=1e-15)


def test_pass_at_k_of_the_notes():
    assert pass_at(64, 3, 8) == pytest.approx(0.334677, abs=5e-7)
    assert pass_at(10, 0, 10) == 0.0
    assert pass_at(10, 4, 7) == 1.0
    assert pass_at(7, 3, 1) == pytest.approx(3 / 7)


@pytest.mark.parametrize(
    ("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)]
)
def test_pass_at_k_of_what_was_not_drawn(n, correct, k):
    with pytest.raises(ValueError, match=r"can't be right|k must be in"):
        pass_at(n, correct, k)


def majority_by_subsets(answers, right, k):
    """Every k-subset of the responses, in turn. answers: None for no answer."""
    total, subsets = Fraction(0), 0
    for chosen in itertools.combinations(answers, k):
        subsets += 1
        voted = [answer for answer in chosen if answer is not None]
        if not voted:
            continue
        most = max(voted.count(answer) for answer in voted)
        tied = [answer for answer in dict.fromkeys(voted) if voted.count(answer) == most]
        total += sum(Fraction(right[answer]) for answer in tied) / len(tied)
    return float(total / subsets)


def test_majority_is_the_mean_over_every_subset():
    rng = np.random.default_rng(0)
    for _ in range(60):
        n = int(rng.integers(1, 9))
        answers = [None if one == 4 else int(one) for one in rng.integers(5, size=n)]
        right = {answer: Fraction(int(rng.integers(3)), 2) for answer in range(4)}
        groups = [
            (answers.count(answer), float(right[answer]))
            for answer in dict.fromkeys(answers)
            if answer is not None
        ]
        for k in range(1, n + 1):
            found = maj_at(groups, answers.count(None), k)
            assert found == pytest.approx(majority_by_subsets(answers, right, k), abs=1e-12)


def test_ties_share_the_vote():
    assert maj_at([(2, 1.0), (2, 0.0)], 0, 4) == 0.5
    assert maj_at([(2, 0.0), (2, 0.0), (2, 1.0)], 3, 9) == pytest.approx(1 / 3)
    assert maj_at([(3, 0.0), (2, 1.0)], 0, 5) == 0.0


def test_no_box_has_no_vote_and_nothing_is_wrong():
    # One right answer against nine responses without any.
    assert maj_at([(1, 1.0)], 9, 10) == 1.0
    assert maj_at([], 10, 10) == 0.0
    # Of one response drawn it is right in one case of ten.
    assert maj_at([(1, 1.0)], 9, 1) == pytest.approx(0.1)


def test_majority_of_one_is_the_average():
    assert maj_at([(5, 1.0), (3, 0.0)], 2, 1) == pytest.approx(0.5)


def test_majority_of_many_samples_is_exact_and_quick():
    # Two answers: the larger half of k draws without replacement, a hypergeometric tail.
    n, right, k = 64, 36, 31
    tail = sum(math.comb(right, t) * math.comb(n - right, k - t) for t in range(16, k + 1))
    found = maj_at([(right, 1.0), (n - right, 0.0)], 0, k)
    assert found == pytest.approx(tail / math.comb(n, k), rel=1e-12)


def test_majority_of_thousands_of_samples():
    """Its binomials are beyond any float. Of equally many, by symmetry, half."""
    assert maj_at([(550, 1.0), (550, 0.0)], 0, 550) == pytest.approx(0.5)
    assert maj_at([(2048, 1.0), (2, 0.0)], 0, 1024) == 1.0


def test_majority_of_what_was_not_drawn():
    with pytest.raises(ValueError, match=r"k must be in 1\.\.3"):
        maj_at([(2, 1.0)], 1, 4)


def test_interval_over_problems_is_as_wide_as_theory_says():
    values = np.random.default_rng(1).random(400)
    found = over_problems(values, resamples=4000)
    half = 1.959964 * values.std() / math.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert over_problems(values, resamples=4000) == found


def test_interval_does_not_depend_on_how_it_is_computed(monkeypatch):
    values = np.random.default_rng(2).random(50)
    found = over_problems(values, resamples=100)
    monkeypatch.setattr("s3ac_jax.report.estimators._BLOCK", 50 * 7)
    assert over_problems(values, resamples=100) == pytest.approx(found)


def test_interval_over_samples_is_the_noise_of_sampling_alone():
    rng = np.random.default_rng(3)
    chance = rng.random(300)
    correct = [list(rng.random(8) < p) for p in chance]
    share = np.array([np.mean(row) for row in correct])
    found = over_samples(correct, resamples=4000)
    half = 1.959964 * math.sqrt(sum(share * (1 - share) / 8)) / len(share)
    assert found.value == pytest.approx(share.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    # Problems that are always or never solved have no noise of sampling, but differ.
    sure = [[True] * 4] * 10 + [[False] * 4] * 10
    assert over_samples(sure, resamples=100)[1:] == (0.5, 0.5)
    assert over_problems([np.mean(row) for row in sure], resamples=100).low < 0.4


def test_std_over_samples_is_that_of_whole_evaluations():
    correct = [[True, False, True], [True, True, False], [False, False, True], [True, True, True]]
    assert std_over_samples(correct) == pytest.approx(np.std([0.75, 0.5, 0.75], ddof=1))


def test_one_problem_or_one_sample_has_no_interval():
    assert over_problems([0.5], resamples=10).value == 0.5
    assert math.isnan(over_problems([0.5], resamples=10).low)
    assert math.isnan(over_problems([], resamples=10).value)
    assert math.isnan(over_samples([[True], [False]], resamples=10).high)
    assert math.isnan(over_samples([], resamples=10).value)
    assert math.isnan(std_over_samples([[True], [False]]))


def test_a_majority_is_never_likelier_than_certain():
    """Rounding gave 1.0000000000000002 for these."""
    for counts, k in (((7, 5, 8, 6), 23), ((8, 6, 4, 12, 6), 9), ((8, 2, 2), 6)):
        assert maj_at([(count, 1.0) for count in counts], 0, k) == 1.0
