"""Sets in memory, joined and taken from; messages stay on one line."""

import numpy as np
import pytest

from s3ac_jax.core.errors import RunError
from s3ac_jax.data.problems import Joined, Problem, ProblemList, ProblemsError, Taken, shown


def some(name, *ids):
    return ProblemList(name, [Problem(one, f"question {one}", "1", source=name) for one in ids])


def ids(problems):
    return [problems[place].id for place in range(len(problems))]


def test_a_list_needs_problems_and_ids_of_their_own():
    assert ids(some("a", "x", "y")) == ["x", "y"]
    with pytest.raises(ProblemsError, match=r"^a holds no problems$"):
        some("a")
    with pytest.raises(ProblemsError, match=r"^a: problems 2 and 4 have the same id 'y'"):
        some("a", "x", "y", "z", "y")
    assert issubclass(ProblemsError, RunError)


def test_joined_sets_follow_each_other():
    both = Joined("both", [some("a", "x", "y"), some("b", "z"), some("c", "u", "v")])
    assert (both.name, len(both)) == ("both", 5)
    assert ids(both) == ["x", "y", "z", "u", "v"]
    assert [both[place].id for place in (-1, -5)] == ["v", "x"]
    assert [one.source for one in (both[1], both[2], both[3])] == ["a", "b", "c"]
    assert both.number(np.array([0, 4, 1, 2, 3])).tolist() == [0, 2, 0, 1, 2]
    for place in (5, -6):
        with pytest.raises(IndexError):
            both[place]


def test_taken_problems_keep_their_order():
    part = Taken(some("a", "x", "y", "z"), [2, 0])
    assert (part.name, len(part), ids(part), part[-1].id) == ("a", 2, ["z", "x"], "x")
    with pytest.raises(IndexError):
        part[2]


def test_values_are_shown_on_one_line():
    assert shown("a\nb") == "'a\\nb'"
    assert shown("x" * 500, 20) == "'" + 16 * "x" + "..."
