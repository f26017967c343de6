"""Sums: distinct, right, split by the sum itself; prompts as a chat template puts them."""

import re

import numpy as np
import pytest

from s3ac_jax.data import sums
from s3ac_jax.data.chat import ChatTemplate
from s3ac_jax.data.hf_tokenizer import HFTokenizer
from s3ac_jax.data.prompts import chat_tokens, sums_prompts
from s3ac_jax.data.splits import held_out_by_hash
from tests.unit.data.hf_folder import IM_END, IM_START, TOKENIZER

pytest.importorskip("jinja2", reason="needs the extra hf")
pytest.importorskip("tokenizers", reason="needs the extra hf")

WORDINGS = ("What is {a} {op} {b}?", "{a}{op}{b}=")
CHATML = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    {},
)


def made(number=200, *, seed=0, digits=(1, 2), operators="+-*", held_out=False):
    return sums.make_sums(
        seed, number, digits=digits, operators=operators, num_wordings=2, held_out=held_out
    )


def parsed(problems):
    """(wording, digits, a, operator, b) of each question, read from its text alone."""
    found = []
    for text in problems.questions(WORDINGS):
        a, operator, b = re.search(r"(\d+) ?([-+*]) ?(\d+)", text).groups()
        assert text in (f"What is {a} {operator} {b}?", f"{a}{operator}{b}=")
        assert len(a) == len(b)
        found.append((text.startswith("W"), len(a), int(a), operator, int(b)))
    return found


@pytest.mark.parametrize("held_out", [False, True])
def test_questions_and_answers(held_out):
    problems = made(held_out=held_out)
    rows = parsed(problems)
    assert len(set(rows)) == len(rows) == len(problems) == 200
    for (_, digits, a, operator, b), answer, level in zip(
        rows, problems.answers(), problems.levels(), strict=True
    ):
        want = {"+": a + b, "-": a - b, "*": a * b}[operator]
        assert answer == want >= 0
        assert level == 3 * (digits - 1) + "+-*".index(operator)


def test_levels_are_even_and_large_ones_make_up_for_small_ones():
    rows = parsed(made(1200))
    count = {
        key: sum((digits, op) == key for _, digits, _, op, _ in rows)
        for key in [(d, op) for d in (1, 2) for op in "+-*"]
    }
    # About three quarters of 55 and 100 sums, each in two wordings.
    assert 60 <= count[1, "-"] <= 100
    assert 120 <= count[1, "+"] <= 180
    assert 120 <= count[1, "*"] <= 180
    assert max(count[2, op] for op in "+-*") - min(count[2, op] for op in "+-*") <= 1


def test_no_sum_is_in_both_splits_whatever_the_seeds_and_the_wording():
    train = {row[1:] for seed in (0, 1) for row in parsed(made(1500, seed=seed))}
    held_out = {row[1:] for seed in (2, 3) for row in parsed(made(1500, seed=seed, held_out=True))}
    assert not train & held_out


def test_the_split_is_splitmix_of_the_sum():
    ranges = {1: range(10), 2: range(10, 100)}
    every = [
        (digits, a, op, b)
        for digits, numbers in ranges.items()
        for n, op in enumerate("+-*")
        for a in numbers
        for b in numbers
        if (op != "-" or a >= b) and splitmix((n * 100 + a) * 100 + b) % 1000 < 250
    ]
    got = {row[1:] for row in parsed(made(2 * len(every), held_out=True))}
    assert got == set(every)
    assert 0.24 < len(every) / (2 * 100 + 55 + 2 * 8100 + 4095) < 0.26
    with pytest.raises(ValueError, match=f"but this split has {2 * len(every)} to give"):
        made(2 * len(every) + 1, held_out=True)


def test_seeds_decide():
    a, b, c = made(seed=1), made(seed=1), made(seed=2)
    assert parsed(a) == parsed(b) != parsed(c)


@pytest.mark.parametrize(("digits", "operators"), [((1,), "+"), ((2,), "*"), ((2, 1), "-+")])
def test_only_what_was_asked_for(digits, operators):
    rows = parsed(made(40, digits=digits, operators=operators))
    assert {(row[1], row[3]) for row in rows} == {(d, op) for d in digits for op in operators}


def test_take():
    problems = made()
    rows = np.array([3, 0, 3])
    assert problems.take(rows).questions(WORDINGS) == [
        problems.questions(WORDINGS)[n] for n in rows
    ]


def splitmix(code):
    mask = (1 << 64) - 1
    x = (code + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_hash_in_python_integers():
    codes = np.array([0, 1, 2, 10_203, 2**64 - 1], np.uint64)
    # The first outputs of splitmix64 seeded with 0 and with 1.
    assert (splitmix(0), splitmix(1)) == (0xE220A8397B1DCDAF, 0x910A2DEC89025CC1)
    for share in (0.1, 0.25):
        want = [splitmix(int(code)) % 1000 < 1000 * share for code in codes]
        assert held_out_by_hash(codes, share).tolist() == want


@pytest.fixture(scope="module")
def tiny():
    return HFTokenizer(TOKENIZER)


def test_prompts_are_the_rendered_questions(tiny):
    problems = made(30)
    prompts = sums_prompts(
        problems, tiny, CHATML, wordings=WORDINGS, system="Be brief.", thinking=False, max_tokens=50
    )
    assert prompts.tokens.shape == (30, 50)
    for n, question in enumerate(problems.questions(WORDINGS)):
        ids = prompts.tokens[n, : prompts.num_tokens[n]]
        assert tiny.decode(ids, special=True) == (
            f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert (ids == IM_START).sum() == 3
        assert (prompts.tokens[n, prompts.num_tokens[n] :] == IM_END).all()  # the padding
    names = [prompts.called.names[level] for level in prompts.levels]
    words = {"+": "add", "-": "sub", "*": "mul"}
    assert names == [f"{words[op]}_{digits}" for _, digits, _, op, _ in parsed(problems)]
    labels = {prompts.called.labels[level] for level in prompts.levels}
    assert labels == {f"{d}-digit {op}" for d in (1, 2) for op in "+-*"}


def test_thinking_reaches_the_template(tiny):
    template = ChatTemplate("{{ enable_thinking }}", {})
    for thinking in (False, True):
        tokens, lengths = chat_tokens(
            ["x"], tiny, template, system="", thinking=thinking, max_tokens=8
        )
        assert tiny.decode(tokens[0, : lengths[0]]) == str(thinking)


def test_a_prompt_too_long_is_named(tiny):
    with pytest.raises(
        ValueError, match=r"prompt 1 \('12345678'\) has 25 tokens, task\.max_p.* 24"
    ):
        chat_tokens(["1", "12345678"], tiny, CHATML, system="", thinking=False, max_tokens=24)
    tokens, lengths = chat_tokens(
        ["1", "12345678"], tiny, CHATML, system="", thinking=False, max_tokens=25
    )
    assert (tokens.shape, lengths.tolist()) == ((2, 25), [18, 25])
