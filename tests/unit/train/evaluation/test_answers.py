"""Which responses say the same: by the verifier, whatever the chunks; letters by their options."""

import itertools

import numpy as np
import pytest

from s3ac_jax.core.types import Prompt, Rollout
from s3ac_jax.data.tokenizer import ByteTokenizer
from s3ac_jax.train.evaluation.answers import answers_of, mark_same, texts_of


def record(problem, sample, answer, correct=False, letters=None):
    return {
        "problem": problem, "sample": sample, "answer": answer, "correct": correct,
        "letters": letters, "same_as": None,
    }  # fmt: skip


class ByValue:
    """Two answers are one where they are one number; asked: every pair that came."""

    def __init__(self):
        self.asked = []

    def __call__(self, pairs, kind="math"):
        self.asked += pairs
        return [float(a) == float(b) for a, b in pairs]


def marked(records, *, chunk, kind="math", same=None):
    done = []
    for start in range(0, len(records), chunk):
        part = [dict(one) for one in records[start : start + chunk]]
        mark_same(part, done, [kind] * len(part), same or ByValue())
        done += part
    return [one["same_as"] for one in done]


P = [
    record("p", 0, "7"), record("p", 1, "5", True), record("p", 2, "7.0"), record("p", 3, None),
    record("p", 4, "8"), record("p", 5, "5.0", True), record("p", 6, "08"), record("p", 7, "7"),
]  # fmt: skip
Q = [record("q", 0, "7"), record("q", 1, "7.00"), record("q", 2, "1")]


@pytest.mark.parametrize("chunk", range(1, 12))
def test_classes_do_not_depend_on_chunks(chunk):
    assert marked(P + Q, chunk=chunk) == [0, 1, 0, None, 4, 1, 4, 0, 0, 0, 2]


def test_right_answers_and_equal_texts_are_not_asked_about():
    same = ByValue()
    marked(P, chunk=len(P), same=same)
    assert not [pair for pair in same.asked if "5" in pair or pair[0] == pair[1]]


def test_many_wrong_answers_cost_a_pair_for_each_class():
    same = ByValue()
    answers = [f"{n % 3}." + "0" * (n // 3) for n in range(12)]
    records = [record("p", n, answer) for n, answer in enumerate(answers)]
    assert marked(records, chunk=12, same=same) == [n % 3 for n in range(12)]
    assert len(same.asked) < 12 * 3


def test_letters_vote_for_the_options_they_stood_for():
    orders = ["ABCD", "BCDA", "DABC"]
    # The option that was C before the draw: shown as C, B and D.
    records = [
        record("p", n, answer, letters=order)
        for n, (answer, order) in enumerate(zip("CBD", orders, strict=True))
    ]
    assert marked(records, chunk=1, kind="choice") == [0, 0, 0]
    spelled = record("p", 3, "(c)", letters="ABCD")
    strange = [record("p", 4, "E", letters="ABCD"), record("p", 5, "42", letters="ABCD")]

    def never(pairs, kind):
        return [False] * len(pairs)

    found = marked([*records, spelled, *strange], chunk=2, kind="choice", same=never)
    assert found == [0, 0, 0, 0, 4, 5]


def test_a_task_with_its_own_verifier_is_compared_as_text():
    def never(pairs, kind):
        raise AssertionError

    records = [record("p", n, answer) for n, answer in enumerate(["a", "b", "a"])]
    assert marked(records, chunk=3, kind="", same=never) == [0, 1, 0]


def test_answers_to_a_users_grader_are_compared_as_mathematics():
    records = [record("p", n, answer) for n, answer in enumerate(["7", "7.0", "8"])]
    assert marked(records, chunk=3, kind="module:function") == [0, 0, 2]


class Third:
    """A task's own verifier: the third token is the answer."""

    def answers(self, rollout):
        return [str(row[2]) for row in rollout.tokens]


def test_what_counts_as_an_answer():
    rollout = Rollout(
        Prompt(np.zeros(4, np.int32), np.zeros((4, 1), np.int32), np.ones(4, np.int32)),
        np.arange(12).reshape(4, 3), np.full(4, 3), np.zeros((4, 3)),
        np.array([True, False, True, True]), np.zeros((4, 3)),
    )  # fmt: skip
    texts = ["so \\boxed{5}", "so \\boxed{5}", "so 5", "  "]
    for kind in ("math", "choice", "my:grader"):
        assert answers_of(rollout, texts, [kind] * 4, Third()) == ["5", None, None, None]
    assert answers_of(rollout, texts, [""] * 4, Third()) == ["2", "5", "8", "11"]
    # A verifier that knows of no answers: a whole text is none.
    assert answers_of(rollout, texts, [""] * 4, object()) == [None] * 4


def test_texts_are_without_what_ended_them_and_beyond_the_vocabulary():
    tokenizer = ByteTokenizer()
    rows = [[*tokenizer.encode("ab"), 1, 0], [*tokenizer.encode("abcd")], [300, 99, 0, 0]]
    lengths, stopped = [3, 4, 2], [True, False, False]
    rollout = Rollout(
        Prompt(np.zeros(3, np.int32), np.zeros((3, 1), np.int32), np.ones(3, np.int32)),
        np.array(rows, np.int32), np.array(lengths, np.int32), np.zeros((3, 4), np.float32),
        np.array(stopped), np.zeros((3, 4), np.int32),
    )  # fmt: skip
    assert texts_of(rollout, tokenizer) == ["ab", "abcd", "a"]


def test_any_order_of_answers_gives_the_same_partition():
    for order in itertools.permutations(["1", "2", "1.0", "2.0"]):
        found = marked([record("p", n, one) for n, one in enumerate(order)], chunk=4)
        values = [float(one) for one in order]
        assert found == [values.index(value) for value in values]
