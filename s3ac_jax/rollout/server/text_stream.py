"""From token ids that arrive bit by bit to text that can be shown, cut at stop strings."""

from collections.abc import Mapping, Sequence
from typing import Protocol

# What decoders write for bytes that are no character, and for one whose last bytes are missing.
_BROKEN = "\ufffd"
# A character has at most four bytes, so no more than three of them can wait for the rest.
_MOST_BROKEN = 3


class TextTokenizer(Protocol):
    """Text in and out for people. stop_ids: tokens that end a response and have no text.

    Source: ours.
    """

    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a bare text, its BOS included. Raises ValueError if it has none. Source: ours."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out. Source: ours."""
        ...

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, thinking: bool | None = None
    ) -> list[int] | None:
        """Ids of a conversation up to where the answer begins; None without a chat template.

        thinking: whether the model may think first, the template's habit when None.
        Raises ValueError when the template refuses the messages. Source: ours.
        """
        ...


class TextStream:
    """Text of one response. decode: ids -> text. stops: texts that end it and are never shown.

    stopped: a stop text was met. length: characters that were decoded so far, shown or not.
    What `push` and `finish` return, end to end, is the text of the response; no piece ends inside
    a character, and none holds the beginning of what may become a stop text.
    Source: ours: the window of tokens that is decoded anew is what lies behind the last whole
    character but one push, because a token's text may depend on the token before it.
    """

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str] = ()):
        self._decode, self._stops = tokenizer.decode, tuple(stops)
        self._window: list[int] = []
        self._before = 0  # tokens of the window whose text is out, up to a whole character
        self._given = 0  # characters of the window's text that are out
        self._held = ""  # decoded, but perhaps the beginning of a stop text
        self.stopped, self.length = False, 0

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """Text that can be shown now, and how many of `ids` belong to the response.

        Fewer than all when a stop text was met: with stop texts the ids are looked at one by one.
        Source: ours.
        """
        if not self._stops:
            return self._decoded(ids), len(ids)
        shown = ""
        for used, number in enumerate(ids):
            if self.stopped:
                return shown, used
            shown += self._without_stops(self._decoded([number]))
        return shown, len(ids)

    def finish(self) -> str:
        """The rest: nothing more will come. Source: ours."""
        if self.stopped:
            return ""
        tail = self._decode(self._window)[self._given :]
        self._given += len(tail)
        self.length += len(tail)
        shown = self._without_stops(tail) + self._held
        self._held = ""
        return shown

    def _decoded(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        text = self._decode(self._window)
        whole = len(text.rstrip(_BROKEN))
        end = max(whole, len(text) - _MOST_BROKEN)
        fresh = text[self._given : end]
        self._given = max(self._given, end)
        self.length += len(fresh)
        if fresh and end == len(text):
            del self._window[: self._before]
            self._before = len(self._window)
            self._given = len(self._decode(self._window))
        return fresh

    def _without_stops(self, text: str) -> str:
        self._held += text
        met = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if met:
            shown, self._held, self.stopped = self._held[: min(met)], "", True
            return shown
        longest = max(map(len, self._stops), default=0)
        for start in range(max(0, len(self._held) - longest + 1), len(self._held)):
            if any(stop.startswith(self._held[start:]) for stop in self._stops):
                shown, self._held = self._held[:start], self._held[start:]
                return shown
        shown, self._held = self._held, ""
        return shown
