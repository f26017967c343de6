"""Sums on demand: right answers, item i from seed and i, splits that share no sum."""

import itertools
import re

import numpy as np
import pytest

from s3ac_jax.data import sums
from s3ac_jax.data.generated import SumsProblems
from s3ac_jax.data.problems import ProblemsError


def read(question):
    a, operator, b = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", question).groups()
    return int(a), operator, int(b)


def test_questions_and_answers():
    problems = SumsProblems(500, seed=1, digits=(1, 3), operators="+-*")
    assert (len(problems), problems.name) == (500, "sums")
    seen = set()
    for place in range(500):
        one = problems[place]
        a, operator, b = read(one.question)
        want = {"+": a + b, "-": a - b, "*": a * b}[operator]
        assert one.answer == str(want)
        assert want >= 0
        assert len(str(a)) == len(str(b))
        seen.add((len(str(a)), operator))
        assert (one.id, one.kind, one.source) == (f"sums-1-{place}", "math", "sums")
    assert seen == set(itertools.product((1, 3), "+-*"))


def test_an_item_depends_on_seed_and_place_alone():
    long, short = SumsProblems(10_000, seed=5), SumsProblems(100, seed=5)
    assert [long[n] for n in range(100)] == [short[n] for n in range(100)]
    assert short[-1] == short[99] == SumsProblems(100, seed=5)[99]
    for place in (100, -101):
        with pytest.raises(IndexError):
            short[place]
    other = SumsProblems(100, seed=6)
    assert sum(short[n].question == other[n].question for n in range(100)) < 10
    # Not shifted either: neighbouring seeds must not ask the same in the next place.
    assert sum(short[n + 1].question == other[n].question for n in range(99)) < 10


@pytest.mark.parametrize("digits", [(1, 2), (9,)])
def test_splits_share_no_sum(digits):
    def keys(held_out):
        problems = SumsProblems(1000, seed=0, digits=digits, held_out=held_out)
        return {read(problems[n].question) for n in range(1000)}

    train, held_out = keys(False), keys(True)
    assert train
    assert held_out
    assert not train & held_out


def test_the_split_is_that_of_the_sums_task():
    problems = SumsProblems(300, operators="+-*", held_out=True)
    rows = [read(problems[n].question) for n in range(300)]
    a, operator, b = zip(*rows, strict=True)
    numbers = [np.array(x) for x in (a, b)]
    which = np.array(["+-*".index(one) for one in operator])
    same = sums.Sums(which, which, *numbers, which)
    assert same.held_out().all()


def test_wordings_are_used_alike():
    problems = SumsProblems(300, wordings=("What is {a} {op} {b}?", "{b} {a} {op}"))
    count = sum(problems[n].question.startswith("What") for n in range(300))
    assert 100 < count < 200  # 150 +- 9


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": 0}, "at least one problem"),
        ({"digits": ()}, "digits must be some of 1..9, got ()"),
        ({"digits": (0,)}, "got (0,)"),
        ({"digits": (1, 10)}, "got (1, 10)"),
        ({"operators": "/"}, "operators must be some of '+-*', got '/'"),
        ({"operators": ""}, "operators must"),
        ({"wordings": ()}, "at least one wording"),
        ({"wordings": ("{a} + {b}",)}, "must have {a}, {op} and {b}"),
        ({"wordings": ("{a} {op}",)}, "must have {a}"),
        ({"wordings": ("{a} {op} {b} {a}",)}, "each once"),
        ({"wordings": ("{a} {op} {b} {c}",)}, "no other braces"),
        ({"wordings": ("{a} {op} {b} {",)}, "no other braces"),
    ],
)
def test_settings_that_make_no_sense(given, said):
    with pytest.raises(ProblemsError, match=re.escape(said)):
        SumsProblems(**{"count": 3} | given)
