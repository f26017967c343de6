"""Which groups are trained on, and what the reward becomes: loops over responses."""

import math

import numpy as np
import pytest

from s3ac_jax.algos.filtering import KeepAll, SoftOverlong, VariedGroups


def random_groups(seed, groups=40, size=4):
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(groups), size)
    order = rng.permutation(len(ids))
    # Some groups all right, some all wrong, some not graded at all.
    rate = rng.choice([0.0, 0.5, 1.0], size=groups)[ids]
    success, valid = rng.random(len(ids)) < rate, rng.random(len(ids)) < 0.7
    valid[ids == 3], valid[ids == 4] = False, True
    return success[order], valid[order], ids[order]


def test_keep_all():
    success, valid, ids = random_groups(0)
    np.testing.assert_array_equal(KeepAll().groups(success, valid, ids, num_groups=40), [True] * 40)
    assert KeepAll().max_rounds == 1
    assert not KeepAll().needs_group


@pytest.mark.parametrize("seed", range(4))
def test_varied_groups_oracle(seed):
    success, valid, ids = random_groups(seed)
    want = []
    for group in range(40):
        outcomes = {
            bool(s) for s, v, g in zip(success, valid, ids, strict=True) if v and g == group
        }
        want.append(len(outcomes) == 2)
    got = VariedGroups().groups(success, valid, ids, num_groups=40)
    np.testing.assert_array_equal(got, want)
    assert 0 < sum(want) < 40


def test_varied_groups_corners():
    def keeps(success, valid):
        got = VariedGroups().groups(
            np.array(success, bool), np.array(valid, bool), np.zeros(len(success), int),
            num_groups=1,
        )  # fmt: skip
        return got.tolist()

    assert keeps([1, 0], [1, 1]) == [True]
    assert keeps([1, 1], [1, 1]) == keeps([0, 0], [1, 1]) == [False]
    # What failed to be graded says nothing: the rest is all right.
    assert keeps([1, 0, 1], [1, 0, 1]) == [False]
    assert keeps([1, 0], [0, 0]) == keeps([1, 0], [1, 0]) == [False]
    # A group that nobody answered.
    got = VariedGroups().groups(np.array([True]), np.array([True]), np.array([1]), num_groups=3)
    assert got.tolist() == [False] * 3


@pytest.mark.parametrize(("share", "limit"), [(0.2, 40), (0.1, 40), (0.25, 11), (1.0, 7)])
def test_soft_overlong_oracle(share, limit):
    shaping = SoftOverlong(buffer_share=share)
    buffer = math.ceil(share * limit)
    assert shaping.buffer_tokens(limit) == buffer
    lengths = np.arange(1, limit + 1)
    reward = np.where(lengths % 2, 1, -1)  # integers: trap 5
    want = []
    for number, plain in zip(lengths, reward, strict=True):
        start = limit - buffer
        want.append(plain - (0.0 if number <= start else (number - start) / buffer))
    got = shaping.shaped(reward, lengths, max_tokens=limit)
    assert (type(got), got.dtype) == (np.ndarray, np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    assert got[-1] == reward[-1] - 1


def test_the_buffer_has_at_least_one_token():
    assert SoftOverlong(buffer_share=0.01).buffer_tokens(5) == 1


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, math.nan])
def test_soft_overlong_refuses(share):
    with pytest.raises(ValueError, match="buffer_share must be above 0 and at most 1"):
        SoftOverlong(buffer_share=share)


def test_varied_groups_refuses():
    with pytest.raises(ValueError, match="max_rounds must be at least 1, got 0"):
        VariedGroups(max_rounds=0)
