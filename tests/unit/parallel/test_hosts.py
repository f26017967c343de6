"""What processes tell each other; test_hosts.py of the integration tests has real ones."""

import threading

import jax
import numpy as np
import pytest

from s3ac_jax.parallel import hosts
from s3ac_jax.parallel.hosts import HostError


class Service:
    """jax's coordination client for threads that play processes."""

    def __init__(self, number):
        self.kept, self._barriers, self._number = {}, {}, number
        self._lock = threading.Lock()

    def key_value_set_bytes(self, key, value):
        assert key not in self.kept
        self.kept[key] = value

    def key_value_dir_get_bytes(self, place):
        return [(key, value) for key, value in list(self.kept.items()) if key.startswith(place)]

    def key_value_delete(self, place):
        for key in [key for key in self.kept if key.startswith(place)]:
            del self.kept[key]

    def wait_at_barrier(self, name, milliseconds):
        with self._lock:
            barrier = self._barriers.setdefault(name, threading.Barrier(self._number))
        try:
            barrier.wait(milliseconds / 1000)
        except threading.BrokenBarrierError:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out") from None


@pytest.fixture
def several(monkeypatch):
    """run(number, work): work(process) in a thread for each, their results or errors."""
    process = threading.local()
    monkeypatch.setattr(hosts, "index", lambda: process.index)

    def run(number, work):
        service = Service(number)
        monkeypatch.setattr(hosts, "service", lambda: service)
        monkeypatch.setattr(hosts, "count", lambda: number)
        # Processes count their meetings themselves.
        monkeypatch.setattr(hosts, "_meetings", Counts(process))
        found = [None] * number

        def one(index):
            process.index, process.counts = index, {}
            try:
                found[index] = work(index)
            except HostError as error:
                found[index] = str(error)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found, service

    return run


class Counts:
    def __init__(self, process):
        self._process = process

    def __getitem__(self, name):
        return self._process.counts.get(name, 0)

    def __setitem__(self, name, value):
        self._process.counts[name] = value


def test_everyone_hears_everyone_and_nothing_piles_up(several):
    def work(process):
        return [hosts.exchange("a", f"{process} says {n}".encode()) for n in range(50)]

    found, service = several(3, work)
    assert found[0][7] == [b"0 says 7", b"1 says 7", b"2 says 7"]
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert len(service.kept) == 3  # the last meeting


def test_channels_do_not_disturb_each_other(several):
    def work(process):
        order = ("a", "b") if process else ("b", "a")
        threads, heard = [], {}
        counts = hosts._meetings._process.counts
        for name in order:

            def meet(name=name):
                hosts._meetings._process.counts = counts
                hosts._meetings._process.index = process
                heard[name] = hosts.exchange(name, f"{name}{process}".encode())

            threads.append(threading.Thread(target=meet))
            threads[-1].start()
        for thread in threads:
            thread.join(30)
        return heard

    found, _ = several(2, work)
    assert found[0] == found[1] == {"a": [b"a0", b"a1"], "b": [b"b0", b"b1"]}


def test_only_the_first_is_asked(several):
    asked = []

    def work(process):
        return hosts.from_first("a", lambda: asked.append(process) or {"tick": 3, "rate": [0.1]})

    found, _ = several(3, work)
    assert found == [{"tick": 3, "rate": [0.1]}] * 3
    assert asked == [0]


@pytest.mark.parametrize("wishes", [(False, False), (False, True), (True, True)])
def test_one_wish_is_enough(several, wishes):
    found, _ = several(2, lambda process: hosts.agreed("stop", wishes[process]))
    assert found == [any(wishes)] * 2


def test_what_differs_is_named_with_both_values(several):
    facts = [{"lr": 1e-3, "name": "a"}, {"lr": 1e-3, "name": "a"}, {"lr": 2e-3, "name": "b"}]
    found, _ = several(3, lambda one: hosts.check_same("c", "the config", facts[one], "mend it"))
    line = "the config of process 2 differs from process 0's: lr is 0.002, there 0.001; mend it"
    assert found == [line] * 3
    found, _ = several(3, lambda one: hosts.check_same("c", "the config", facts[0], "mend it"))
    assert found == [None] * 3
    more = [{}, {"lr": 1}]
    found, _ = several(2, lambda one: hosts.check_same("c", "it", more[one], "so"))
    assert found == ['it of process 1 differs from process 0\'s: lr is 1, there "absent"; so'] * 2


def test_waiting_has_an_end(several, monkeypatch):
    monkeypatch.setattr(hosts, "PATIENCE_SECONDS", 0.2)
    found, _ = several(2, lambda process: process or hosts.exchange("late", b""))
    assert found == [
        "process 0 waited 0.2 s for the others (late); look at what they print", 1,
    ]  # fmt: skip


def test_alone_there_is_nobody_to_ask():
    assert hosts.exchange("a", b"x") == [b"x"]
    assert hosts.from_first("a", lambda: (1, {2})) == (1, {2})  # not even as JSON
    assert (hosts.agreed("a", True), hosts.agreed("a", False)) == (True, False)
    assert (hosts.count(), hosts.index(), hosts.is_first()) == (1, 0, True)


def test_arrays_to_the_devices_and_back():
    mesh = jax.make_mesh((4,), ("data",))
    x = np.arange(24.0).reshape(8, 3)
    for spec in (jax.P("data"), jax.P(None, None)):
        placed = hosts.from_host(x, jax.NamedSharding(mesh, spec))
        assert placed.sharding.spec == spec
        back = hosts.to_host({"x": placed, "y": np.int32(3)})
        assert type(back["x"]) is np.ndarray
        np.testing.assert_array_equal(back["x"], x)
        assert back["y"] == 3
