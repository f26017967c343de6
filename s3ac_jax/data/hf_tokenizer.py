"""The tokenizer of a Hugging Face folder, behind the protocol of data/tokenizer.py.

The files of a folder contradict each other. What ends a response is collected from all that speak
of it; what begins a text is only the tokenizer's own to say: for one well-known family config.json
names another token.
"""

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from s3ac_jax.core.errors import RunError

# The turn's end in ChatML. A base model's files name only the text's end.
END_OF_TURN = "<|im_end|>"


class TokenizerError(RunError, ValueError):
    """A tokenizer or chat template that can't be used; the message is one line for the user.

    Source: ours.
    """


def read_json(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """The object in this file of the folder, empty when there is no such file.

    Raises TokenizerError when it can't be read. Source: ours.
    """
    path = folder / name
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} can't be read ({error}); fetch the folder again") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} holds no JSON object; fetch the folder again")
    return found


def token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json, which is text or an object with `content`.

    Source: the format of Hugging Face's files.
    """
    return value.get("content") if isinstance(value, dict) else value


class HFTokenizer:
    """tokenizer.json of a folder. bos_id: what a bare text begins with, None for nothing.

    vocab_size: one more than the largest id it gives; the model's vocabulary may be padded beyond.
    Raises TokenizerError naming the file.
    Source: ours, on Hugging Face's `tokenizers`.
    """

    def __init__(self, folder: str | pathlib.Path):
        folder = pathlib.Path(folder)
        self._tokenizer = _load(folder / "tokenizer.json")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        said = read_json(folder, "tokenizer_config.json")
        generation = read_json(folder, "generation_config.json")
        self.stop_ids = self._stops(folder, said, generation)
        self.bos_id = self._bos(said)
        pad = self._tokenizer.token_to_id(token_text(said.get("pad_token")) or "")
        if pad is None:
            pad = generation.get("pad_token_id")
        self.pad_id = int(self.stop_ids[0] if pad is None else pad)

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Token ids; written special tokens become theirs. bos: begin with BOS, but only once.

        Source: ours: nothing is added unasked, for a chat template holds all that belongs there.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once. Source: ours."""
        made = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [one.ids for one in made]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`; special tokens only if asked for. Source: ours."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def decode_all(self, rows: Iterable[Sequence[int]], *, special: bool = False) -> list[str]:
        """`decode` of many rows at once. Source: ours."""
        return self._tokenizer.decode_batch(list(map(list, rows)), skip_special_tokens=not special)

    def has(self, token: str) -> bool:
        """Whether this text is one token of the vocabulary. Source: ours."""
        return self._tokenizer.token_to_id(token) is not None

    def _stops(
        self, folder: pathlib.Path, said: dict[str, Any], generation: dict[str, Any]
    ) -> tuple[int, ...]:
        found = _ids(generation.get("eos_token_id"))
        if named := token_text(said.get("eos_token")):
            number = self._tokenizer.token_to_id(named)
            if number is None:
                raise TokenizerError(
                    f"{folder / 'tokenizer_config.json'}: eos_token {named!r} is no token of "
                    "tokenizer.json; the folder mixes two models"
                )
            found.append(number)
        if not found:
            config = read_json(folder, "config.json")
            below = config.get("text_config")
            found = _ids(config.get("eos_token_id"))
            if not found and isinstance(below, dict):
                found = _ids(below.get("eos_token_id"))
        turn = self._tokenizer.token_to_id(END_OF_TURN)
        if turn is not None:
            found.append(turn)
        if not found:
            raise TokenizerError(
                f"{folder} doesn't say what ends a response: set eos_token in tokenizer_config.json"
            )
        return tuple(dict.fromkeys(found))

    def _bos(self, said: dict[str, Any]) -> int | None:
        if said.get("add_bos_token") is False:
            return None
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        if whole[: len(plain)] != plain:
            return whole[0]
        if said.get("add_bos_token"):
            return self._tokenizer.token_to_id(token_text(said.get("bos_token")) or "")
        return None


def _ids(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _load(path: pathlib.Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(
            f"reading {path} needs the package tokenizers: pip install 's3ac-jax[hf]'"
        ) from error
    if not path.is_file():
        raise TokenizerError(
            f"no tokenizer at {path}; start.hf must be the folder of a model, its tokenizer.json "
            "included"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path} is no tokenizer ({error}); fetch the folder again") from error
