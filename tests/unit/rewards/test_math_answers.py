"""Verdicts on whole responses: the table of pairs, the shapes of answers, and what is never said.

answer_pairs.jsonl is our own: 328 ways to be right, 464 to be wrong, of the kinds that real answers
have. A wrong one that is accepted is a hole that a policy will find.
"""

import json
import random
import time
from pathlib import Path

import pytest

from s3ac_jax.rewards.math_answers import decide, judge
from s3ac_jax.rewards.verdict import REASONS

GOLDEN = Path(__file__).parents[2] / "golden"
PAIRS = [json.loads(line) for line in (GOLDEN / "verifier_pairs.jsonl").read_text().splitlines()]
ANSWERS = [json.loads(line) for line in (GOLDEN / "answer_pairs.jsonl").read_text().splitlines()]
# What algebra decides, in test_algebra.py.
SLOW = {
    "nested_text", "sqrt_simplify", "fact_big", "tiny_fact", "poly", "eq_line_noenv",
    "issue14_pow_plus1",
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["id"])
def test_pairs_of_the_table(pair):
    verdict = decide(pair["response"], pair["gold"], kind=pair["kind"])
    if pair["id"] in SLOW:
        assert verdict is None
    else:
        assert verdict is not None
        assert verdict.correct is pair["expected"]


def test_our_own_pairs():
    """No verdict is the other one; those without a verdict are for algebra."""
    found = [judge(pair["answer"], pair["gold"])[0] for pair in ANSWERS]
    off = [
        (pair["gold"], pair["answer"])
        for pair, correct in zip(ANSWERS, found, strict=True)
        if correct not in (None, pair["expected"])
    ]
    assert off == []
    assert found.count(None) < len(ANSWERS) / 5


@pytest.mark.parametrize(
    ("response", "gold", "reason"),
    [
        (r"\boxed{42}", "42", "string"),
        (r"\boxed{42.0}", "42", "number"),
        (r"\boxed{41}", "42", "number"),
        (r"\boxed{28\%}", "28", "percent"),
        (r"\boxed{37 \cdot 48}", "1776", "unevaluated"),
        (r"\boxed{2^{10}}", "1024", "unevaluated"),
        (r"\boxed{odd}", "even", "text"),
        (r"\boxed{2,1}", "1,2", "structure"),
        (r"\boxed{10^{10^{10}}}", r"\sqrt{2}", "guard_power"),
        ("\\boxed{4\0}", "4", "guard_characters"),
        (r"\boxed{" + "(" * 5000 + "}", "4", "guard_length"),
        (r"\boxed{$}", "4", "empty_box"),
        ("4", "4", "no_box"),
        (r"\boxed{()}", "", "text"),
    ],
)
def test_reasons(response, gold, reason):
    verdict = decide(response, gold)
    assert verdict is not None
    assert verdict.reason == reason


def test_a_users_grader_is_asked_elsewhere():
    assert decide(r"\boxed{4}", "4", kind="module:function") is None


FRAGMENTS = r"""
\boxed{ } { \frac \sqrt {1} 2 x ^ _ ! ( ) [ ] | \left \text{ or and , ... \pm \cup = < \le \{ \}
\\ & \begin{pmatrix} \end{pmatrix} $ \[ % \% " * / - + . \overline e \pi \lfloor \rfloor
\mathbb{R} \setminus \approx \ne \in \forall f(x) : x= \$ \begin{array}{c} \end{array} n!
² ½ ９ ٣ <think> </think> \log_ \binom cm apples \in 10^ 99999 ~ ` ** : ^\circ \infty ;
"""
SIGNS = [*FRAGMENTS.split(), "\ud800", "\0", "\u202e", "\n", " "]
GOLDS = [
    "5", "1/3", "x+1", "[0,1)", "\\{1,3\\}", "n is prime", "(1,3)", "x=5", "\\pm 3", "", "\ud800",
    "\\frac{", "0<c<1", "28\\%", "5 \\text{ cm}", "\\mathbb{R}\\setminus\\{5\\}",
    "f(x)=5x", "\\begin{pmatrix}1&2\\end{pmatrix}", "B",
]  # fmt: skip


def test_no_heap_of_signs_raises_or_is_right():
    """Random fragments: a known verdict every time, quickly; right only for what says the gold."""
    rng = random.Random(0)
    started = time.process_time()
    for _ in range(20_000):
        text = "".join(rng.choice(SIGNS) for _ in range(rng.randrange(12)))
        gold = rng.choice(GOLDS)
        for kind in ("math", "choice"):
            verdict = decide("\\boxed{" + text + "}", gold, kind=kind)
            assert verdict is None or verdict.reason in REASONS
            assert verdict is None or verdict.reason != "error", (text, gold)
            # No fragment has a 3, a 5 or a B, so no gold but x = 10^... can be met.
            assert verdict is None or not verdict.correct, (text, gold, verdict)
    assert time.process_time() - started < 30


def test_ten_thousand_answers_take_a_second():
    """0.1 ms each is the limit for sums and contest answers; benchmarks/grading.py measures."""
    rng = random.Random(0)
    golds = [str(rng.randrange(100_000)) for _ in range(10_000)]
    spelled = ["\\boxed{{{}}}", "so \\boxed{{{}.0}}", "**\\boxed{{{}}}**", "\\boxed{{\\${}}}"]
    items = [(spelled[place % 4].format(gold), gold) for place, gold in enumerate(golds)]
    started = time.process_time()
    assert all(decide(*item).correct for item in items)
    assert time.process_time() - started < 3.0
