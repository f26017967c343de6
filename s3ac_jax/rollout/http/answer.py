"""Answers of the OpenAI-compatible endpoints: responses on their way from token ids to JSON."""

import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from s3ac_jax.rollout.http.request import Asked
from s3ac_jax.rollout.server.sinks import Piece
from s3ac_jax.rollout.server.text_stream import TextStream, TextTokenizer
from s3ac_jax.rollout.wire import FINISH_NAMES

# JSON has no infinity; this is what others write for a log-prob of minus infinity.
_LOWEST_LOGP = -9999.0


class Delta(NamedTuple):
    """What came anew of one response. offsets: characters of its text before each token.

    finish: "stop", "length" or "abort" with its last part, else None. Source: ours.
    """

    text: str
    tokens: list[int]
    logp: list[float]
    offsets: list[int]
    finish: str | None


NOTHING = Delta("", [], [], [], None)


def _joined(parts: Sequence[Delta]) -> Delta:
    return Delta(
        "".join(part.text for part in parts),
        [one for part in parts for one in part.tokens],
        [one for part in parts for one in part.logp],
        [one for part in parts for one in part.offsets],
        parts[-1].finish,
    )


class Choice:
    """One response of an answer. version: of the weights behind its latest token, -1 before it.

    Source: ours.
    """

    def __init__(self, number: int, asked: Asked, tokenizer: TextTokenizer | None):
        self.number, self._asked = number, asked
        self.prompt = number // asked.n
        self.num_tokens, self.version = 0, -1
        self.finish: str | None = None
        self._text = TextStream(tokenizer, asked.stops) if tokenizer else None

    def take(self, piece: Piece) -> Delta:
        """The part of a piece that belongs to the response; nothing after a stop text.

        A stop token has no text but is a token of the response. Source: ours.
        """
        if self.finish is not None:
            return NOTHING
        ids = piece.tokens.tolist()
        last = next((at for at, one in enumerate(ids) if one in self._asked.stop_ids), len(ids))
        text, used, offsets = self._shown(ids[:last])
        if not self.cut:
            used = len(ids)  # the stop token too
            if piece.finish is not None:
                text += self._text.finish() if self._text else ""
                self.finish = FINISH_NAMES[piece.finish]
        if self.cut:
            self.finish = "stop"
        offsets += [self._length] * (used - len(offsets))
        self.num_tokens += used
        if len(piece.version):
            self.version = int(piece.version[-1])
        logp = [max(_LOWEST_LOGP, one) for one in piece.logp[:used].tolist()]
        return Delta(text, ids[:used], logp, offsets[:used], self.finish)

    @property
    def cut(self) -> bool:
        """Whether a stop text ended it, of which the engine knows nothing. Source: ours."""
        return self._text is not None and self._text.stopped

    @property
    def _length(self) -> int:
        return self._text.length if self._text else 0

    def _shown(self, ids: list[int]) -> tuple[str, int, list[int]]:
        """Text, tokens used for it, and offsets, which only log-probs ask for."""
        if self._text is None:
            return "", len(ids), []
        if self._asked.logprobs is None:
            return *self._text.push(ids), []
        text, used, offsets = "", 0, []
        while used < len(ids) and not self.cut:
            offsets.append(self._length)
            text += self._text.push(ids[used : used + 1])[0]
            used += 1
        return text, used, offsets


class Answer:
    """Writes one answer, whole or in chunks, as OpenAI shapes them.

    Source: OpenAI's API reference; vLLM's token_ids and prompt_token_ids.
    """

    def __init__(self, asked: Asked, model: str, tokenizer: TextTokenizer | None):
        self._asked, self._tokenizer = asked, tokenizer
        self.choices = [
            Choice(number, asked, tokenizer) for number in range(len(asked.prompts) * asked.n)
        ]
        kind = "text_completion"
        if asked.chat:
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def usage(self) -> dict[str, int]:
        """Tokens; a prompt counts once, whatever n. Source: OpenAI's API reference."""
        prompt = sum(map(len, self._asked.prompts))
        made = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made
        }  # fmt: skip

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """The answer; deltas: all of each choice, in order. Source: OpenAI's API reference."""
        asked, choices = self._asked, []
        for choice, parts in zip(self.choices, deltas, strict=True):
            delta = _joined(parts)
            one = self._choice(choice, delta)
            if asked.chat:
                one["message"] = {"role": "assistant", "content": delta.text}
            else:
                one["text"] = self._echoed(choice) + delta.text
                if asked.return_token_ids:
                    one["prompt_token_ids"] = asked.prompts[choice.prompt]
            choices.append(one)
        answer = self._head | {"choices": choices, "usage": self.usage()} | self._made_with()
        if asked.chat and asked.return_token_ids:
            answer["prompt_token_ids"] = asked.prompts[0]
        return answer

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before a choice's first tokens, where there is something to say.

        Source: OpenAI's API reference.
        """
        asked = self._asked
        ids = {"prompt_token_ids": asked.prompts[choice.prompt]} if asked.return_token_ids else {}
        one = self._choice(choice, NOTHING)
        if asked.chat:
            one["delta"] = {"role": "assistant", "content": ""}
            return self._chunk(one) | ids
        if asked.echo is None and not ids:
            return None
        return self._chunk(one | {"text": self._echoed(choice)} | ids)

    def next(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        """The chunk of what came anew; None when nobody could see any of it.

        Source: OpenAI's API reference.
        """
        asked = self._asked
        ids = delta.tokens and (asked.return_token_ids or asked.logprobs is not None)
        if not (delta.text or delta.finish or ids):
            return None
        one = self._choice(choice, delta)
        if asked.chat:
            one["delta"] = {"content": delta.text} if delta.text else {}
        else:
            one["text"] = delta.text
        return self._chunk(one)

    def last(self) -> dict[str, Any] | None:
        """The chunk with the usage, if it was asked for. Source: OpenAI's API reference."""
        if not self._asked.include_usage:
            return None
        return self._head | {"choices": [], "usage": self.usage()} | self._made_with()

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._asked.include_usage else {}
        return self._head | {"choices": [choice]} | usage

    def _made_with(self) -> dict[str, str | None]:
        version = max(choice.version for choice in self.choices)
        return {"system_fingerprint": f"weights-{version}" if version >= 0 else None}

    def _echoed(self, choice: Choice) -> str:
        return "" if self._asked.echo is None else self._asked.echo[choice.prompt]

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        one: dict[str, Any] = {"index": choice.number, "finish_reason": delta.finish}
        one["logprobs"] = self._logprobs(delta)
        if self._asked.return_token_ids:
            one["token_ids"] = delta.tokens
        return one

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        top, tokenizer = self._asked.logprobs, self._tokenizer
        if top is None:
            return None
        # Without a tokenizer a token is called by its number.
        texts = [
            tokenizer.decode([one]) if tokenizer else f"token_id:{one}" for one in delta.tokens
        ]
        if not self._asked.chat:
            likeliest = [{text: logp} for text, logp in zip(texts, delta.logp, strict=True)]
            return {
                "tokens": texts, "token_logprobs": delta.logp, "text_offset": delta.offsets,
                "top_logprobs": likeliest if top else None,
            }  # fmt: skip
        entries = []
        for text, logp in zip(texts, delta.logp, strict=True):
            # A part of a character has no text of its own, and its bytes are not known here.
            raw = None if "\ufffd" in text else list(text.encode())
            entry = {"token": text, "logprob": logp, "bytes": raw}
            entries.append(entry | {"top_logprobs": [entry] if top else []})
        return {"content": entries, "refusal": None}
