"""Tokenizers behind one protocol: token ids in, token ids out; text is for people."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What the rest of the code may ask of a tokenizer.

    stop_ids: tokens that end a response. pad_id fills unused places and may equal a stop id, so
    masks are made from lengths, never from `ids != pad_id`.
    Source: ours.
    """

    vocab_size: int
    pad_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; raises ValueError naming what can't be encoded. Source: ours."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once. Source: ours."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, stop and padding tokens left out. Source: ours."""
        ...

    def decode_all(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """`decode` of many rows at once. Source: ours."""
        ...


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, for people; a stop token is "<stop>".

    A character of several tokens shows with the last of them, the others as U+FFFD or nothing; so
    does a special token.
    Source: ours: what a token is worth in text depends on those before it, and on a few of them.
    """
    before = tokenizer.decode_all(ids[max(0, n - 4) : n] for n in range(len(ids)))
    after = tokenizer.decode_all(ids[max(0, n - 4) : n + 1] for n in range(len(ids)))
    stops = set(tokenizer.stop_ids)
    return [
        "<stop>" if one in stops else _added(old, new)
        for one, old, new in zip(ids, before, after, strict=True)
    ]


def _added(old: str, new: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))
    return new[sum(1 for _ in same) :]


class CharTokenizer:
    """One token per character of a fixed alphabet, after padding (0) and end-of-text (1).

    Source: ours.
    """

    pad_id: int = 0
    stop_ids: tuple[int, ...] = (1,)

    def __init__(self, alphabet: str):
        if len(set(alphabet)) != len(alphabet):
            raise ValueError(f"alphabet {alphabet!r} repeats a character")
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 2
        self._id = {char: number + 2 for number, char in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        """Token ids; raises ValueError with the character and its place. Source: ours."""
        unknown = next((place for place, char in enumerate(text) if char not in self._id), None)
        if unknown is not None:
            raise ValueError(
                f"cannot encode {text[unknown]!r} at place {unknown}; the alphabet is "
                f"{self.alphabet!r}"
            )
        return [self._id[char] for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text; padding and end-of-text vanish. Source: ours."""
        return "".join(self.alphabet[number - 2] for number in ids if number >= 2)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text. Source: ours."""
        return [self.encode(text) for text in texts]

    def decode_all(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """`decode` of each row. Source: ours."""
        return [self.decode(row) for row in rows]


class ByteTokenizer:
    """One token per byte of UTF-8, after padding (0) and end-of-text (1): text without a model.

    Source: ByT5 (2105.13626), a vocabulary of bytes behind the special tokens.
    """

    pad_id: int = 0
    stop_ids: tuple[int, ...] = (1,)
    vocab_size: int = 258

    def encode(self, text: str) -> list[int]:
        """Token ids; a lone surrogate, which UTF-8 can't write, becomes "?". Source: ours."""
        return [byte + 2 for byte in text.encode(errors="replace")]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text. Source: ours."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text; what is no UTF-8 becomes U+FFFD; padding, end-of-text and ids beyond the bytes,
        which a model may have, vanish.

        Source: ours.
        """
        return bytes(one - 2 for one in ids if 2 <= one < 258).decode(errors="replace")

    def decode_all(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """`decode` of each row. Source: ours."""
        return [self.decode(row) for row in rows]
