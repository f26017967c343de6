"""One token per character."""

import pytest

from s3ac_jax.data.tokenizer import ByteTokenizer, CharTokenizer


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
