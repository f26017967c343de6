"""What needs algebra: numbers refute, math-verify confirms."""

import json
from pathlib import Path

import pytest

from s3ac_jax.rewards.extract import final_answer
from s3ac_jax.rewards.math_answers import judge

pytest.importorskip("math_verify", reason="needs the extra grade")

from s3ac_jax.rewards.algebra import leaf

GOLDEN = Path(__file__).parents[2] / "golden"
PAIRS = [json.loads(line) for line in (GOLDEN / "verifier_pairs.jsonl").read_text().splitlines()]
ANSWERS = [json.loads(line) for line in (GOLDEN / "answer_pairs.jsonl").read_text().splitlines()]


def test_the_table_has_no_wrong_verdict():
    wrong = []
    for pair in PAIRS:
        answer, _ = final_answer(pair["response"])
        correct = answer is not None and judge(answer, pair["gold"], pair["kind"], leaf)[0]
        if correct is not pair["expected"]:
            wrong.append(pair["id"])
    assert wrong == []


def test_our_own_pairs_have_none_either():
    wrong = [
        (pair["gold"], pair["answer"])
        for pair in ANSWERS
        if judge(pair["answer"], pair["gold"], "math", leaf)[0] is not pair["expected"]
    ]
    assert wrong == []


# how, gold, answer, one answer?
LEAVES = [
    ("same", "\\sqrt{384}", "8\\sqrt{6}", True),
    ("same", "\\frac{1}{1+\\sqrt{2}}", "\\sqrt{2}-1", True),
    ("same", "8\\sqrt{6}", "8\\sqrt{6}+\\frac{1}{10^{100}}", False),
    ("same", "\\frac{2^{2005}+1}{3*2^{2006}}", "\\frac{1}{3*2^{2006}}", False),
    ("same", "x", "\\sqrt{x^2}", False),
    ("same", "x", "|x|", False),
    ("same", "x^2-1", "(x-1)(x+1)", True),
    ("same", "x^2-1", "(x-1)(x+1)+\\frac{1}{10^{30}}", False),
    ("same", "x", "2x", False),
    ("same", "\\frac{1}{x-x}", "\\frac{2}{x-x}", False),
    ("equation", "2x+4y-3=0", "y=-\\frac12x+\\frac34", True),
    ("equation", "2x+4y-3=0", "y=\\frac12x+\\frac34", False),
    ("equation", "2x+4y-3=0", "0=0*x*y", False),
    ("same", "\\sqrt{2}", "2^{0.5}", True),
    ("same", "2^{0.1}", "2^{\\frac{1}{9}}", False),
    ("equation", "x^2+1=0", "e^{1000x}+x^{1000}=0", False),
    ("equation", "x=0", "x^2=0", False),
]


@pytest.mark.parametrize(("how", "gold", "answer", "equal"), LEAVES)
def test_leaves(how, gold, answer, equal):
    assert leaf(how, gold, answer) == (equal, "math_verify")
