"""The order of prompts: the one that runs had before, and none more or less often than another."""

import collections

import numpy as np
import pytest

from s3ac_jax.data.stream import Epochs, share

# Of numpy 2.4.6: the runs that README's numbers come from had this order.
GOLDEN = [5, 6, 2, 1, 4, 3, 0, 2, 1, 4, 0, 5, 6, 3]


def test_each_epoch_is_numpys_permutation():
    stream = Epochs(7, 3)
    want = [np.random.default_rng([3, epoch]).permutation(7) for epoch in range(5)]
    assert stream.epoch_length == 7
    np.testing.assert_array_equal(stream.at(np.arange(35)), np.concatenate(want))
    assert stream.at(np.arange(14)).tolist() == GOLDEN


def test_any_places_in_any_order():
    stream = Epochs(11, 0)
    line = stream.at(np.arange(100))
    places = np.random.default_rng(0).integers(100, size=(6, 5))
    np.testing.assert_array_equal(stream.at(places), line[places])
    assert stream.at(np.empty(0, np.int64)).shape == (0,)
    assert 0 <= stream.at(np.array([2**40]))[0] < 11
    assert not np.array_equal(line, Epochs(11, 1).at(np.arange(100)))


def test_an_empty_set_has_no_stream():
    with pytest.raises(ValueError, match="at least one prompt, got 0"):
        Epochs(0, 0)


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("start", "count"), [(0, 12), (5, 12), (1000, 3), (7, 0)])
def test_shares_are_disjoint_and_whole(hosts, start, count):
    parts = [share(start, count, host, hosts) for host in range(hosts)]
    together = np.sort(np.concatenate(parts))
    np.testing.assert_array_equal(together, np.arange(start, start + count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_host_beyond_the_last():
    for host in (2, -1):
        with pytest.raises(ValueError, match=r"host must be in 0\.\.1"):
            share(0, 4, host, 2)


def consumed(stream, batch, stops, hosts_after):
    """How often each prompt was trained on: a run that stops at each of `stops` batches.

    Of all it knew, the run that goes on gets one integer. hosts_after: hosts of each part.
    """
    counts, place = collections.Counter(), 0
    for until, hosts in zip(stops, hosts_after, strict=True):
        while place < until * batch:
            for host in range(hosts):
                counts.update(stream.at(share(place, batch, host, hosts)).tolist())
            place += batch
        place = int(str(place))  # what a checkpoint holds
    return counts


def test_stopping_anywhere_and_other_numbers_of_hosts_change_nothing():
    batch, batches, size = 8, 30, 37
    whole = collections.Counter(Epochs(size, 5).at(np.arange(batch * batches)).tolist())
    assert sum(whole.values()) == batch * batches
    for stop in range(batches + 1):
        for hosts in [(1, 1), (4, 4), (4, 2), (2, 4), (3, 1)]:
            assert consumed(Epochs(size, 5), batch, (stop, batches), hosts) == whole
    assert consumed(Epochs(size, 5), batch, (3, 9, 17, 30), (4, 2, 1, 8)) == whole
    # 240 places are six epochs of 37 and 18 more.
    assert set(whole.values()) == {6, 7}
    assert list(whole.values()).count(7) == 18
