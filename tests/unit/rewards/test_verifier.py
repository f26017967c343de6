"""Shares of a batch: sums over responses, overall and of some of them."""

import numpy as np

from s3ac_jax.rewards.verifier import Share


def test_share_is_a_ratio_of_sums():
    share = Share(np.array([1, 2, 0, 5]), np.array([2, 2, 4, 8]))
    assert share.of() == 8 / 16
    assert share.of(np.array([True, True, False, False])) == 3 / 4
    assert share.of(np.array([2])) == 0


def test_nothing_to_share_is_zero():
    assert Share(np.array([False]), np.array([False])).of() == 0.0
    assert Share(np.zeros(0), np.zeros(0)).of() == 0.0
