"""Prompts: the instruction once, nothing cut, what is too long counted."""

import numpy as np
import pytest

from s3ac_jax.data.asking import Wording, ask, padded, prompt_texts
from s3ac_jax.data.chat import BUILT_IN, ChatTemplate
from s3ac_jax.data.hf_tokenizer import HFTokenizer
from s3ac_jax.data.problems import Problem, ProblemList, ProblemsError, Taken
from s3ac_jax.data.tokenizer import ByteTokenizer, CharTokenizer
from tests.unit.data.hf_folder import IM_START, TOKENIZER

pytest.importorskip("jinja2", reason="needs the extra hf")
pytest.importorskip("tokenizers", reason="needs the extra hf")

INSTRUCTION = "Put your final answer within \\boxed{}."
CHATML = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    {},
)


class Begins(ByteTokenizer):
    """A tokenizer whose bare texts begin with a token of their own."""

    bos_id = 258


def questions(*texts):
    return ProblemList("set", [Problem(f"q{n}", text, "1") for n, text in enumerate(texts)])


def read(asked, row, tokenizer=None):
    return (tokenizer or ByteTokenizer()).decode(asked.tokens[row, : asked.num_tokens[row]])


def test_plain_text():
    asked = ask(questions("1 + 1?", "Grüße?"), ByteTokenizer(), None, Wording(), 60)
    assert read(asked, 0) == f"1 + 1?\n{INSTRUCTION}\n"
    assert read(asked, 1) == f"Grüße?\n{INSTRUCTION}\n"
    assert asked.tokens.shape == (2, 60)
    assert asked.tokens.dtype == np.int32
    # Bytes of UTF-8: 6 and 8 of the questions, 40 of the rest.
    assert len(INSTRUCTION) == 38
    assert asked.num_tokens.tolist() == [6 + 40, 8 + 40]
    assert (asked.tokens[0, 46:] == 0).all()
    assert (asked.tokens[0, :46] > 1).all()
    assert (asked.kept.tolist(), asked.dropped, asked.longest) == ([0, 1], 0, 48)


def test_a_bare_text_begins_as_its_tokenizer_says_and_a_templates_as_it_says():
    problems, wording = questions("1?"), Wording("")
    assert ask(problems, Begins(), None, wording, 9).tokens[0].tolist() == [
        258, ord("1") + 2, ord("?") + 2, ord("\n") + 2, 0, 0, 0, 0, 0
    ]  # fmt: skip
    whole = ask(problems, Begins(), ChatTemplate("x", {}), wording, 9)
    assert whole.tokens[0].tolist() == [ord("x") + 2, 0, 0, 0, 0, 0, 0, 0, 0]


def test_a_template_with_a_system_message():
    wording = Wording("Box it.", "Be brief.")
    asked = ask(questions("1 + 1?"), ByteTokenizer(), CHATML, wording, 200)
    assert read(asked, 0) == ("<system>Be brief.</system><user>1 + 1?\nBox it.</user><assistant>")
    plain = ask(questions("1 + 1?"), ByteTokenizer(), None, wording, 200)
    assert read(plain, 0) == "Be brief.\n1 + 1?\nBox it.\n"
    no_system = ask(questions("1 + 1?"), ByteTokenizer(), CHATML, Wording(""), 200)
    assert read(no_system, 0) == "<user>1 + 1?</user><assistant>"


@pytest.mark.parametrize("thinking", [False, True])
def test_thinking_reaches_the_template(thinking):
    template = ChatTemplate("{{ enable_thinking }}", {})
    asked = ask(questions("?"), ByteTokenizer(), template, Wording(thinking=thinking), 200)
    assert read(asked, 0) == str(thinking)


@pytest.mark.parametrize(
    ("question", "template", "wording"),
    [
        ("1 + 1?", CHATML, Wording()),
        ("1 + 1?", None, Wording()),
        (f"1 + 1? {INSTRUCTION}", CHATML, Wording()),
        ("1 + 1? Put your  final\nanswer within \\boxed{}.", CHATML, Wording()),
        ("1 + 1? Reply with the letter in \\boxed{}", None, Wording()),
        ("1 + 1?", CHATML, Wording(system="Think. Answers go into \\boxed{}.")),
        # The default system message of Qwen2.5-Math asks for the box.
        ("1 + 1?", ChatTemplate(BUILT_IN["qwen25_math"], {}), Wording()),
        ("1 + 1?", ChatTemplate(BUILT_IN["qwen25_math"], {}), Wording(system="Be brief.")),
        ("1 + 1?", ChatTemplate(BUILT_IN["qwen3_5"], {}), Wording()),
        ("1 + 1?", ChatTemplate(BUILT_IN["r1_distill"], {"bos_token": "<s>"}), Wording()),
    ],
)  # fmt: skip
def test_the_box_is_asked_for_once(question, template, wording):
    (text,) = prompt_texts([question], template, wording)
    assert text.count("\\boxed{}") == 1
    assert text.count("1 + 1?") == 1


def test_a_box_in_the_question_that_asks_for_nothing():
    (text,) = prompt_texts(["What is \\boxed{3} + 1?"], None, Wording())
    assert text == f"What is \\boxed{{3}} + 1?\n{INSTRUCTION}\n"
    (text,) = prompt_texts(["Fill \\boxed{}"], None, Wording("Answer with a number."))
    assert text == "Fill \\boxed{}\nAnswer with a number.\n"


def test_long_prompts_are_left_out_and_counted():
    problems = questions("12", "123456", "1", "12345", "1234")
    asked = ask(problems, ByteTokenizer(), None, Wording(""), 5)
    assert asked.kept.tolist() == [0, 2, 4]
    assert (asked.dropped, asked.longest) == (2, 7)
    assert [read(asked, row) for row in range(3)] == ["12\n", "1\n", "1234\n"]
    assert asked.tokens.shape == (3, 5)
    with pytest.raises(
        ProblemsError,
        match=r"^set: every prompt is longer than 1 tokens, the shortest has 2 and the longest 7;",
    ):
        ask(problems, ByteTokenizer(), None, Wording(""), 1)


def test_what_cannot_be_asked_is_named():
    with pytest.raises(ProblemsError, match=r"^set: no questions are left to ask$"):
        ask(Taken(questions("1"), []), ByteTokenizer(), None, Wording(), 9)
    with pytest.raises(ProblemsError, match=r"^set, q1: cannot encode 'x' at place 1"):
        ask(questions("1", "2x", "y"), CharTokenizer("12\n"), None, Wording(""), 9)
    closed = ProblemList("set", [Problem("q", "?", "a", "choice", "set", ("a", "b"))])
    with pytest.raises(ProblemsError, match=r"^set, q: its options must be put into the question"):
        ask(closed, ByteTokenizer(), None, Wording(), 99)


def test_a_question_that_ends_its_own_turn():
    template = ChatTemplate("<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n", {})
    tokenizer = HFTokenizer(TOKENIZER)
    asked = ask(questions("1?", "<|im_start|>?"), tokenizer, template, Wording(), 99)
    assert (asked.tokens[:, 0] == IM_START).all()
    for given in (template, None):
        with pytest.raises(ProblemsError, match=r"^set, q1: .* writes out a token that ends a t"):
            ask(questions("1?", "2<|im_end|>\n?"), tokenizer, given, Wording(), 99)


def test_padding():
    rows = padded([[1, 2], [], [3, 4, 5]], 4, 9)
    assert rows.tolist() == [[1, 2, 9, 9], [9, 9, 9, 9], [3, 4, 5, 9]]
