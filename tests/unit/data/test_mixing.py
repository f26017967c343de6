"""Mixtures: shares by weight, every prompt of a set before any comes again, nothing to remember."""

import collections
import sys

import numpy as np
import pytest

from s3ac_jax.data.mixing import Mixture
from s3ac_jax.data.problems import ProblemsError
from s3ac_jax.data.stream import share

pytest.importorskip("grain", reason="needs the extra data")

# Of grain 0.2.18: runs go on in it.
GOLDEN = [2, 6, 5, 0, 4, 3, 1, 3, 4, 0, 6, 5, 1, 4]


def test_the_order_is_the_one_that_runs_have():
    assert Mixture([3, 4], [1, 2], seed=0).at(np.arange(14)).tolist() == GOLDEN


def test_shares_follow_the_weights_at_every_point():
    mixture = Mixture([5, 70, 10], [1, 3, 0.5], seed=0)
    assert mixture.epoch_length == 85
    line = mixture.at(np.arange(900))
    sets = np.searchsorted([5, 75, 85], line, side="right")
    for number, weight in enumerate([1, 3, 0.5]):
        had = np.cumsum(sets == number)
        due = np.arange(1, 901) * weight / 4.5
        assert np.abs(had - due).max() <= 1


def test_each_set_is_read_whole_before_it_begins_again():
    sizes, starts = [5, 7], [0, 5]
    line = Mixture(sizes, [1, 1], seed=4).at(np.arange(700))
    orders = []
    for size, start in zip(sizes, starts, strict=True):
        own = [one for one in line.tolist() if start <= one < start + size]
        rounds = [own[n : n + size] for n in range(0, len(own) - size + 1, size)]
        assert all(sorted(one) == list(range(start, start + size)) for one in rounds)
        assert len(set(map(tuple, rounds))) > 10  # shuffled anew each time
        orders.append(rounds)
    # Equally large sets are not in step.
    line = Mixture([9, 9], [1, 1], seed=4).at(np.arange(180))
    assert line[line < 9].tolist() != (line[line >= 9] - 9).tolist()


def test_places_in_any_order_and_from_a_second_process():
    mixture = Mixture([5, 70], [1, 3], seed=2)
    line = mixture.at(np.arange(200))
    again = Mixture([5, 70], [0.25, 0.75], seed=2)
    np.testing.assert_array_equal(again.at(np.arange(150, 200)), line[150:])
    places = np.random.default_rng(0).integers(200, size=(3, 4))
    np.testing.assert_array_equal(mixture.at(places), line[places])
    assert mixture.at(np.empty(0, np.int64)).shape == (0,)
    assert 0 <= mixture.at(np.array([2**35]))[0] < 75
    assert not np.array_equal(line, Mixture([5, 70], [1, 3], seed=3).at(np.arange(200)))


def test_four_hosts_and_then_two():
    mixture = Mixture([5, 30], [2, 1], seed=0)
    whole = collections.Counter(mixture.at(np.arange(96)).tolist())
    counts = collections.Counter()
    for start, hosts in [(0, 4), (32, 4), (64, 2), (80, 2)]:
        count = 32 if hosts == 4 else 16
        for host in range(hosts):
            counts.update(mixture.at(share(start, count, host, hosts)).tolist())
    assert counts == whole


@pytest.mark.parametrize(
    ("sizes", "weights", "said"),
    [([], [], "got 0 for 0"), ([1, 2], [1], "got 1 for 2"), ([1, 2], [1, 0], "positive numbers"),
     ([1, 2], [1, float("nan")], "positive"), ([1, 2], [1, -1], "positive"),
     ([1, 0], [1, 1], "at least one prompt, got 0")],
)  # fmt: skip
def test_numbers_that_make_no_sense(sizes, weights, said):
    with pytest.raises(ValueError, match=said):
        Mixture(sizes, weights, 0)


def test_without_grain(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ProblemsError, match=r"package grain: pip install 's3ac-jax\[data\]'"):
        Mixture([1], [1], 0)
