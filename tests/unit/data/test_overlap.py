"""What counts as the same question, and what a training set loses to evaluation sets."""

import time

import numpy as np
import pytest

from s3ac_jax.data.files import FileProblems
from s3ac_jax.data.overlap import parts, without_overlap
from s3ac_jax.data.problems import Problem, ProblemList

THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"


def asked(name, *questions, options=()):
    return ProblemList(
        name,
        [Problem(f"{name}{n}", text, "1", options=options) for n, text in enumerate(questions)],
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3 + 5?", " what   is 3+5 "),
        ("Janet’s ducks lay “16” eggs.", "Janet's ducks lay 16 eggs"),
        ("He pays $1,000, then $2.50.", "He pays 1000 then 2.50"),
        ("Find $\\dfrac{1}{2}\\, x$.", "Find \\frac{1}{2} x"),
        ("Find \\(x^{2}\\) and x_{10}", "find x^2 and $x_10$"),
        ("\\left( a \\right) \\quad b", "(a) b"),
        ("x² − 10² = 0", "x^2 - 10^2 = 0"),
        ("twenty-five", "twenty five"),
        ("ﬁnd the Ångström", "FIND THE A\u030angstro\u0308m"),
        ("1{,}000{,}000 people", "1,000,000 people"),
        ("Wow! How many?", "wow how many"),
        ("a\tb\u00a0c\nd", "a b c d"),
    ],
)  # fmt: skip
def test_the_same_question_in_another_form(one, other):
    assert parts(one) == parts(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3 + 5?", "What is 3 * 5?"), ("What is 3 - 5?", "What is 3 + 5?"),
        ("What is 8-5?", "What is 8 5?"), ("Find 5!.", "Find 5."), ("What is 10²?", "What is 102?"),
        ("Pay 3.5", "Pay 35"), ("Pay .5", "Pay 5"), ("Find f'(2)", "Find f(2)"),
        ("(a+b)c", "a+bc"), ("x < 3", "x > 3"), ("x ≤ 3", "x < 3"), ("x^{2y}", "x^{2}y"),
        ("2 5 3", "25 3"), ("x_1", "x1"), ("x-y", "xy"), ("50% of 3", "50 of 3"),
    ],
)  # fmt: skip
def test_other_questions(one, other):
    assert parts(one) != parts(other)


def test_parts_of_a_question():
    # By hand.
    text = "Tom’s 2,000 apples cost \\$3.50 -- 25% off!"
    assert parts(text) == ["tom's", "2000", "apples", "cost", "\\", "3.50", "-", "-", "25", "%",
                           "off"]  # fmt: skip


def test_the_first_of_equal_questions_stays():
    train = asked("t", "What is 1 + 1?", "Other?", "what is 1+1", "What is 1 - 1?", "OTHER")
    kept = without_overlap(train)
    assert kept.index.tolist() == [0, 1, 3]
    assert (kept.duplicates, dict(kept.leaked)) == (2, {})
    assert kept.lines() == [
        "left out 2 questions asked before, such as t2 (as t0: 'what is 1 + 1')"
    ]
    whole = without_overlap(train, duplicates=False)
    assert whole.index.tolist() == [0, 1, 2, 3, 4]
    assert whole.lines() == []
    assert whole.index.dtype == np.int64


def test_thirteen_words_in_a_row_are_the_same_question():
    train = asked(
        "t",
        f"Here: {THIRTEEN} and more.",  # the 13 words, in another form and surroundings
        THIRTEEN.replace("seven", "6"),  # two halves of 12 words
        THIRTEEN.removesuffix(" thirteen"),  # 12 words
        THIRTEEN.upper().replace(" ", ", "),
        "+ ".join(THIRTEEN.split()),  # words in a row, whatever signs are between
        "Nothing of it.",
    )
    held_out = asked("e", f"Before all of that, {THIRTEEN}! After it.", "short question")
    kept = without_overlap(train, [held_out])
    assert kept.index.tolist() == [1, 2, 5]
    assert (kept.duplicates, dict(kept.leaked)) == (0, {"e": 3})
    assert kept.examples["e"] == f"t0 (as e0: '{THIRTEEN}')"


def test_short_questions_are_compared_as_a_whole():
    train = asked("t", "A short question", "A short question with more", "short", "By two?")
    kept = without_overlap(
        train, [asked("e", "a SHORT question."), asked("f", "by two", "a short question")]
    )
    assert kept.index.tolist() == [1, 2]
    assert dict(kept.leaked) == {"e": 1, "f": 1}
    assert len(kept.lines()) == 2
    assert "also asked by f, such as t3 (as f0" in kept.lines()[1]


def test_a_question_with_other_options_is_another_one():
    train = ProblemList("t", [
        Problem("a", "Which is true?", "x", "choice", options=("x", "y")),
        Problem("b", "Which is true?", "x", "choice", options=("x", "z")),
        Problem("c", "Which is true?", "y", "choice", options=("Y", "X")),
    ])  # fmt: skip
    assert without_overlap(train).index.tolist() == [0, 1]
    held_out = asked("e", "Which is true?", options=("z", "x"))
    assert without_overlap(train, [held_out]).index.tolist() == [0]


def test_all_may_go():
    train = asked("t", "a", "b")
    kept = without_overlap(train, [asked("e", "b", "a")])
    assert kept.index.shape == (0,)
    assert kept.leaked == {"e": 2}


def test_gsm8k_against_its_own_test_set():
    train, held_out = FileProblems("gsm8k_train_2k"), FileProblems("gsm8k_test")
    kept = without_overlap(train, [held_out, FileProblems("imo_answerbench_v2")])
    # A search of its own for shared runs of 13 words found gsm8k-train-0020 (stamps with a
    # snowflake) and gsm8k-train-5162 (a train that goes on).
    ids = {train[place].id for place in set(range(2000)) - set(kept.index.tolist())}
    assert ids == {"gsm8k-train-0020", "gsm8k-train-5162"}
    assert kept.leaked == {"gsm8k_test": 2, "imo_answerbench_v2": 0}
    assert without_overlap(held_out, [held_out]).index.shape == (0,)


def test_twenty_thousand_against_two_thousand_in_seconds():
    rng = np.random.default_rng(0)
    words = [f"w{n}" for n in range(3000)]

    def texts(number):
        return [" ".join(rng.choice(words, 50)) for _ in range(number)]

    held = texts(2000)
    train = asked("t", *texts(19_990), *(f"so {one}" for one in held[:10]))
    start = time.process_time()
    kept = without_overlap(train, [asked("e", *held)])
    # 2 s where it was written; work that grows with the product would take hours.
    assert time.process_time() - start < 60
    assert kept.index.tolist() == list(range(19_990))
    assert kept.leaked == {"e": 10}
