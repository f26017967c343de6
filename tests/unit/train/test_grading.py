"""Shared grading gives what one grader gives, and each response goes to one host."""

import dataclasses

import numpy as np
import pytest

from s3ac_jax.core.types import Scored
from s3ac_jax.parallel import hosts
from s3ac_jax.train.grading import graded
from tests.helpers import make_scored


class Grader:
    """Says of a response what its tokens say; knows which prompts it saw."""

    def __init__(self, reasons):
        self.seen, self._reasons = [], reasons

    def grade(self, rollout):
        index = rollout.prompt.index
        self.seen.append(index.tolist())
        success = index % 3 == 0
        reasons = np.array([f"r{one}" for one in index]) if self._reasons else None
        return Scored(rollout, success * 2.0 - 1.0, success, index != 4, reasons)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("reasons", [False, True])
def test_three_hosts(monkeypatch, rows, reasons):
    rollout = make_scored(0, [2] * rows, [3] * rows).rollout
    routing = np.zeros((rows, 5, 1, 1), np.int16)
    rollout = dataclasses.replace(rollout, routing=routing)
    want = Grader(reasons).grade(rollout)
    told, graders = [], [Grader(reasons) for _ in range(3)]
    monkeypatch.setattr(hosts, "count", lambda: 3)
    for turn in range(2):  # first they speak, then they hear
        for host, grader in enumerate(graders):
            monkeypatch.setattr(hosts, "index", lambda host=host: host)

            def exchange(channel, mine, turn=turn):
                if not turn:
                    told.append(mine)
                    raise StopIteration
                return told

            monkeypatch.setattr(hosts, "exchange", exchange)
            if not turn:
                with pytest.raises(StopIteration):
                    graded("here", grader, rollout)
                continue
            got = graded("here", grader, rollout)
            assert got.rollout is rollout
            for name in ("reward", "success", "valid", "reasons"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    seen = [grader.seen[0] if grader.seen else [] for grader in graders]
    assert sorted(row for rows_of in seen for row in rows_of) == list(range(rows))
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


def test_one_host_grades_all():
    grader, rollout = Grader(True), make_scored(0, [2] * 3, [3] * 3).rollout
    assert graded("here", grader, rollout).rollout is rollout
    assert grader.seen == [[0, 1, 2]]
