"""One token per character."""

import pytest

from s3ac_jax.data.tokenizer import ByteTokenizer, CharTokenizer, pieces


def test_round_trip_and_ids():
    tokenizer = CharTokenizer("ab0=")
    assert tokenizer.vocab_size == 6
    assert tokenizer.encode("a=0b") == [2, 5, 4, 3]
    assert tokenizer.decode([2, 5, 4, 3]) == "a=0b"
    assert tokenizer.encode("") == []


def test_padding_and_stop_are_no_characters():
    tokenizer = CharTokenizer("ab")
    special = {tokenizer.pad_id, *tokenizer.stop_ids}
    assert special == {0, 1}
    assert not special & set(tokenizer.encode("ab"))
    assert tokenizer.decode([0, 2, 1, 3, 0]) == "ab"


def test_unknown_character_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"'x' at place 2.*'ab'"):
        CharTokenizer("ab").encode("abx")


def test_alphabet_without_repeats():
    with pytest.raises(ValueError, match="repeats"):
        CharTokenizer("aba")


def test_bytes_are_utf8_behind_the_special_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("Aé") == [2 + 0x41, 2 + 0xC3, 2 + 0xA9]
    assert tokenizer.decode([2 + 0x41, 0, 2 + 0xC3, 2 + 0xA9, 1]) == "Aé"
    assert tokenizer.vocab_size == 2 + 256
    assert tokenizer.encode("a\ud800") == [99, 2 + ord("?")]
    assert tokenizer.decode([2 + 0xC3]) == "\ufffd"
    assert tokenizer.decode([300, 2 + 0x41, 258]) == "A"


def test_many_at_once_are_each_by_itself():
    for tokenizer in (ByteTokenizer(), CharTokenizer("ab")):
        assert tokenizer.encode_all(["ab", "", "b"]) == [
            tokenizer.encode("ab"), [], tokenizer.encode("b")
        ]  # fmt: skip
        assert tokenizer.decode_all([tokenizer.encode("ab"), []]) == ["ab", ""]


@pytest.mark.parametrize("length", range(9))
def test_pieces_of_characters_are_the_characters(length):
    tokenizer, text = CharTokenizer("ab0= "), " a=0 b= a"[:length]
    assert pieces(tokenizer, tokenizer.encode(text)) == list(text)


def test_a_stop_is_named_and_padding_is_nothing():
    tokenizer = CharTokenizer("ab")
    assert pieces(tokenizer, [2, 1, 0, 3, 0, 1]) == ["a", "<stop>", "", "b", "", "<stop>"]
    # More than the few tokens that are looked back at.
    assert pieces(tokenizer, [2] + [0] * 9 + [3]) == ["a"] + [""] * 9 + ["b"]
    assert pieces(tokenizer, []) == []


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("é", ["\ufffd", "é"]),
        ("a€b", ["a", "\ufffd", "", "€", "b"]),
        ("€€", ["\ufffd", "", "€", "\ufffd", "", "€"]),
        ("x😀😀", ["x", "\ufffd", "", "", "😀", "\ufffd", "", "", "😀"]),
        ("aaaa\ufffda", ["a", "a", "a", "a", "\ufffd", "", "", "a"]),
    ],
)
def test_a_character_of_several_bytes_comes_with_its_last(text, want):
    tokenizer = ByteTokenizer()
    assert pieces(tokenizer, tokenizer.encode(text)) == want
    # Behind any other text it is the same.
    before = tokenizer.encode("öööö")
    assert pieces(tokenizer, before + tokenizer.encode(text))[8:] == want


def test_pieces_are_the_text_but_for_what_is_not_whole_yet():
    tokenizer, text = ByteTokenizer(), "  Zwölf plus 30 ≥ 41? 😀\n\t"
    found = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(found).replace("\ufffd", "") == text
    # Half a character that stays one.
    assert pieces(tokenizer, [2 + 0xC3, 2 + 0x41]) == ["\ufffd", "A"]
