"""Options under letters: the right letter, an order by id and sample alone, no letter favoured."""

import collections
import re
import subprocess
import sys

import pytest

from s3ac_jax.data.choices import Lettered, permuted
from s3ac_jax.data.problems import Problem, ProblemList

COLOURS = ("red", "green", "blue", "a\ncolour")


def problem(name="q1"):
    return Problem(name, "Which one?", "blue", "choice", "set", COLOURS)


def test_the_letter_stands_before_the_right_option():
    for sample in range(20):
        found = permuted(problem(), seed=0, sample=sample)
        one = found.problem
        question, listed = one.question.split("\n\n")
        assert question == "Which one?"
        under = dict(re.findall(r"^([A-D])\. (.*(?:\ncolour)?)$", listed, re.MULTILINE))
        assert sorted(under.values()) == sorted(COLOURS)
        assert list(under) == ["A", "B", "C", "D"]
        assert under[one.answer] == "blue"
        assert [COLOURS[place] for place in found.order] == list(under.values())
        assert (one.id, one.kind, one.source, one.options) == ("q1", "choice", "set", ())


def test_orders_differ_by_sample_id_and_seed_and_favour_no_letter():
    letters = collections.Counter(
        permuted(problem(f"q{n}"), seed=0, sample=sample).problem.answer
        for n in range(100)
        for sample in range(10)
    )
    # 1,000 draws of 1/4 each: 250 +- 14, so 5 deviations.
    assert set(letters) == set("ABCD")
    assert all(abs(n - 250) < 70 for n in letters.values())
    orders = {
        permuted(problem(name), seed=seed, sample=sample).order
        for name in ("a", "b", "c")
        for seed in range(3)
        for sample in range(3)
    }
    assert len(orders) > 10


def test_another_process_draws_the_same_order():
    code = (
        "from s3ac_jax.data.choices import permuted\nfrom s3ac_jax.data.problems import Problem\n"
        "one = Problem('é', '?', 'a', 'choice', '', tuple('abcdefgh'))\n"
        "print(permuted(one, seed=3, sample=5).order)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    one = Problem("é", "?", "a", "choice", "", tuple("abcdefgh"))
    assert done.stdout.strip() == str(permuted(one, seed=3, sample=5).order)


def test_without_options_nothing_changes():
    plain = Problem("p", "1 + 1?", "2")
    found = permuted(plain, seed=0, sample=3)
    assert found.problem is plain
    assert found.order == ()


def test_a_lettered_set():
    problems = ProblemList("set", [problem("a"), Problem("p", "1 + 1?", "2"), problem("b")])
    lettered = Lettered(problems, seed=1, sample=2)
    assert (lettered.name, len(lettered)) == ("set", 3)
    for place in range(3):
        assert lettered[place] == permuted(problems[place], seed=1, sample=2).problem
    with pytest.raises(IndexError):
        lettered[3]
