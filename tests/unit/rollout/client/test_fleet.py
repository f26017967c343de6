"""The fleet against servers that fail by chance: nothing lost, and weights before work."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.client.fleet import Fleet
from s3ac_jax.rollout.client.fleet_server import State, Timing
from s3ac_jax.rollout.client.link import Verdict

QUICK = Timing(patience=2.0, retry=(0.001, 0.01), beat=0.05, tries=50)


class Failed(Exception):
    pass


class ChanceLink:
    """A server in memory that dies, comes back without weights, is busy or errs, by chance.

    Its answer to a piece is three times the piece. Answers come from threads, in any order.
    """

    def __init__(self, number, limit, chance):
        self.address = f"server {number}"
        self.rng = np.random.default_rng(number)
        self.limit, self.chance = limit, chance
        self.alive, self.current, self.life = True, False, 0
        self.load, self.answered, self.wrong = 0, [], []
        self.lock = threading.Lock()

    def later(self, act):
        future = Future()

        def run():
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)

        threading.Timer(float(self.rng.random()) * 0.004, run).start()
        return future

    def may(self, life, *faults):
        """Raises by chance; what was sent in an earlier life of the server is lost."""
        with self.lock:
            if life != self.life or not self.alive:
                raise Failed(Verdict.DOWN)
            if self.rng.random() < self.chance:
                fault = faults[self.rng.integers(len(faults))]
                if fault is Verdict.DOWN:
                    self.alive = False
                raise Failed(fault)

    def check(self):
        def act():
            with self.lock:
                if not self.alive and self.rng.random() < 0.5:
                    self.life, self.alive, self.current = self.life + 1, True, False
                life = self.life
            self.may(life, Verdict.DOWN, Verdict.BUSY)
            return self.current

        return self.later(act)

    def refresh(self):
        life = self.life

        def act():
            self.may(life, Verdict.DOWN, Verdict.BUSY, Verdict.RETRY)
            self.current = True

        return self.later(act)

    def refreshed(self, reply):
        pass

    def send(self, work):
        with self.lock:
            self.load += 1
            if self.load > self.limit:
                self.wrong.append(f"{self.load} pieces at a time")
            life = self.life

        def act():
            self.may(life, Verdict.DOWN, Verdict.BUSY, Verdict.RETRY)
            if not self.current:
                self.wrong.append(f"piece {work} without weights")
            self.answered.append(work)
            return 3 * work

        future = self.later(act)
        future.add_done_callback(self.ended)
        return future

    def ended(self, _):
        with self.lock:
            self.load -= 1

    def read(self, work, reply):
        return reply

    def abort(self, works):
        pass

    def verdict(self, error, call):
        return error.args[0], error.args[0].name


@pytest.mark.parametrize("seed", range(6))
def test_every_piece_is_done_once_whatever_happens(seed):
    links = [ChanceLink(10 * seed + number, 3, 0.12) for number in range(3)]
    fleet = Fleet(links, max_in_flight=3, timing=QUICK)
    fleet.sync()
    assert any(link.current for link in links)
    works = list(range(100, 300))
    assert fleet.run(works, [1] * len(works)) == [3 * work for work in works]
    assert [link.wrong for link in links] == [[], [], []]
    assert min(len(link.answered) for link in links) > 0
    assert fleet.counts["lost_servers"] >= 1
    assert fleet.counts["retries"] > 3
    # An answer may be lost on its way, but none comes from nowhere.
    assert sum(len(link.answered) for link in links) >= len(works)


def test_an_idle_fleet_has_nothing_to_do():
    fleet = Fleet([ChanceLink(0, 1, 0.0)], max_in_flight=1, timing=QUICK)
    assert fleet.run([], []) == []


def test_an_error_that_will_not_pass_ends_the_call_at_once():
    link = ChanceLink(0, 2, 0.0)
    link.send = lambda work: link.later(lambda: fail(Verdict.FATAL))
    fleet = Fleet([link], max_in_flight=2, timing=QUICK)
    with pytest.raises(RolloutError, match="server 0: FATAL"):
        fleet.run([1, 2, 3], [1, 1, 1])
    assert fleet.servers[0].load == 0


def fail(verdict):
    raise Failed(verdict)


def test_a_fleet_serves_one_call_at_a_time():
    link = ChanceLink(0, 4, 0.0)
    fleet = Fleet([link], max_in_flight=4, timing=QUICK)
    made = {}

    def call(start):
        works = list(range(start, start + 40))
        made[start] = fleet.run(works, [1] * 40)

    callers = [threading.Thread(target=call, args=(start,)) for start in (0, 1000)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for start in (0, 1000):
        assert made[start] == [3 * work for work in range(start, start + 40)]
    assert link.wrong == []


class ToldLink(ChanceLink):
    """A server that answers when it is told to."""

    def __init__(self, number):
        super().__init__(number, 100, 0.0)
        self.open, self.checks = {}, []

    def check(self):
        self.checks.append(Future())
        return self.checks[-1]

    def send(self, work):
        self.open[work] = Future()
        return self.open[work]


def wait(condition):
    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("nothing came of it")


def test_pieces_go_to_the_server_that_has_least_and_return_from_one_that_dies():
    one, two = links = [ToldLink(0), ToldLink(1)]
    fleet = Fleet(links, max_in_flight=4, timing=Timing(patience=2.0, retry=(0.01, 0.1), beat=9.0))
    made = []
    caller = threading.Thread(target=lambda: made.extend(fleet.run(list(range(6)), [1] * 6)))
    caller.start()
    wait(lambda: one.checks and two.checks)
    one.checks[0].set_result(True)
    wait(lambda: len(one.open) == 4)
    two.checks[0].set_result(True)
    wait(lambda: len(two.open) == 2)
    assert sorted(one.open) == [0, 1, 2, 3]
    late = two.open[4]
    two.open[5].set_exception(Failed(Verdict.DOWN))
    wait(lambda: late.cancelled())
    for work in range(4):
        one.open[work].set_result(3 * work)
    wait(lambda: {4, 5} <= set(one.open))
    wait(lambda: len(two.checks) == 2)
    one.open[4].set_result(12)
    one.open[5].set_result(15)
    caller.join()
    assert made == [0, 3, 6, 9, 12, 15]
    # What is still asked of the dead server is not waited for.
    assert two.checks[1].cancelled()


def test_pieces_are_spread():
    links = [ToldLink(0), ToldLink(1)]
    fleet = Fleet(links, max_in_flight=4, timing=QUICK)
    fleet.pause()
    made = []
    caller = threading.Thread(target=lambda: made.extend(fleet.run(list(range(4)), [1] * 4)))
    caller.start()
    wait(lambda: all(link.checks for link in links))
    for link in links:
        link.checks[0].set_result(True)
    wait(lambda: all(server.state is State.READY for server in fleet.servers))
    fleet.resume()
    wait(lambda: [len(link.open) for link in links] == [2, 2])
    for link in links:
        for work, future in link.open.items():
            future.set_result(work)
    caller.join()
    assert made == [0, 1, 2, 3]
