import random

import pytest

from s3ac_jax.data.hf_tokenizer import HFTokenizer
from s3ac_jax.rollout.server.text_stream import TextStream
from tests.unit.data import hf_folder

TEXTS = [
    "plain words, and a second sentence.",
    "naïve café — 3 € and 5 £",
    "日本語のテキスト、한국어, العربية",
    "🙂 and 👩‍👩‍👧‍👦 and 🇫🇷, e\u0301",
    "tail 🙂",
    "a literal \ufffd stays",
    "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd",
    "<|im_start|>user\nhi<|im_end|> special ones have no text",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    hf_folder.folder(path, generation_config={"eos_token_id": [hf_folder.END_OF_TEXT]})
    return HFTokenizer(path)


def pieces(ids, seed):
    rng, out = random.Random(seed), []
    while ids:
        take = rng.randint(1, 5)
        out.append(ids[:take])
        ids = ids[take:]
    return out


def told(tokenizer, ids, stops=(), seed=0):
    """(the texts of all pushes and the end, tokens used)."""
    stream, texts, used = TextStream(tokenizer, stops), [], 0
    for piece in pieces(ids, seed):
        text, count = stream.push(piece)
        texts.append(text)
        used += count
        if stream.stopped:
            break
    return [*texts, stream.finish()], used


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_end_to_end_are_the_text_of_all_ids(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) > 5
    for seed in range(20):
        assert "".join(told(tokenizer, ids, seed=seed)[0]) == tokenizer.decode(ids)


def test_no_piece_ends_inside_a_character(tokenizer):
    # One byte per token: every character of more than one byte comes in parts.
    for text in TEXTS[1:5]:
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer)
        texts = [stream.push([one])[0] for one in ids]
        assert "\ufffd" not in "".join(texts)
        assert len([one for one in texts if one]) > 1
        assert "".join(texts) == tokenizer.decode(ids)


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer):
    ids = tokenizer.encode("ab🙂")[:-1]
    texts, _ = told(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids)
    assert texts[-1] == "\ufffd"


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("one two three four", ["three"]),
        ("one two three four", ["four", "two"]),
        ("one two three four", ["absent"]),
        ("aaaaaab", ["aab"]),
        ("ababac", ["abac"]),
        ("x\n\ny\n\nz", ["\n\n"]),
        ("ends with a beginnin", ["beginning"]),
        ("cut 🙂 here", ["🙂"]),
        ("tail 🙂", ["🙂"]),
        ("stop at once", ["s"]),
        ("both ab and abc", ["abc", "ab"]),
    ],
)
def test_a_stop_text_ends_the_response_and_never_shows(tokenizer, text, stops):
    ids = tokenizer.encode(text)
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    wanted = text[: min(places)] if places else text
    for seed in range(20):
        texts, used = told(tokenizer, ids, stops, seed)
        assert "".join(texts) == wanted
        if places and used < len(ids):
            # Not one token more than the stop text needed.
            shown = tokenizer.decode(ids[:used])
            assert any(stop in shown for stop in stops)
            assert not any(stop in tokenizer.decode(ids[: used - 1]) for stop in stops)
        # No piece gave away what the next one took back.
        assert all(wanted.startswith("".join(texts[:n])) for n in range(len(texts)))


def test_what_is_surely_no_stop_text_is_shown_at_once(tokenizer):
    stream = TextStream(tokenizer, ["XYZ"])
    shown = [stream.push(tokenizer.encode(one))[0] for one in ("a", "X", "Y", "b", "X")]
    assert shown == ["a", "", "", "XYb", ""]
    assert stream.finish() == "X"


def test_length_counts_all_that_was_decoded(tokenizer):
    stream = TextStream(tokenizer, ["XY"])
    stream.push(tokenizer.encode("abX"))
    assert stream.length == 3
    stream.push(tokenizer.encode("🙂"))
    assert stream.length == 4
