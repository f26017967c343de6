"""What a request may ask for: one set of ranges for whatever takes requests in."""

from typing import Any, NamedTuple

import numpy as np

from s3ac_jax.rollout.backend import Sampling

# Below it logits overflow to NaN, and long before it sampling has become greedy.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 100.0
# As many as the longest tokens of common vocabularies have, which are runs of spaces.
_TOKEN_CHARS = 128
_TOO_LONG = "context_length_exceeded"


class Limits(NamedTuple):
    """What one request may ask for. cache_tokens: prompt and response together.

    Source: ours.
    """

    vocab_size: int
    max_prompt_tokens: int
    cache_tokens: int


class Fault(NamedTuple):
    """The first thing out of range. field: "prompt", or a field of Sampling. said: what and why.

    number: of the prompt, or of the request. code: OpenAI's name for it, where it has one.
    Source: ours.
    """

    field: str
    number: int
    said: str
    code: str | None = None

    def __str__(self) -> str:
        if self.field == "prompt":
            return f"prompt {self.number} {self.said}"
        return f"request {self.number}: {self.field} {self.said}"


_RANGES: dict[str, tuple[Any, str]] = {
    "temperature": (
        lambda x: (x == 0) | ((x >= MIN_TEMPERATURE) & (x <= MAX_TEMPERATURE)),
        f"0 or in {MIN_TEMPERATURE:g}..{MAX_TEMPERATURE:g}",
    ),
    "top_p": (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"),
    "top_k": (lambda x: x >= 0, ">= 0"),
    "stop_ids": (lambda x: (x >= -1).all(axis=-1), ">= -1"),
}


def field_fault(field: str, values: Any) -> Fault | None:
    """The first of a setting's values, one per request, that no request may have.

    Source: ours.
    """
    values = np.asarray(values)
    fits, wanted = _RANGES[field]
    wrong = ~fits(values)
    if not wrong.any():
        return None
    number = int(np.argmax(wrong))
    return Fault(field, number, f"must be {wanted}, got {values[number]}")


def settings_fault(sampling: Sampling, room: np.ndarray) -> Fault | None:
    """The first of B requests' settings that is out of range. room [B]: tokens for a response.

    Source: ours.
    """
    most = np.asarray(sampling.max_tokens)
    wrong = (most < 1) | (most > room)
    if wrong.any():
        number = int(np.argmax(wrong))
        return Fault("max_tokens", number, f"must be in 1..{room[number]}, got {most[number]}")
    faults = (field_fault(field, getattr(sampling, field)) for field in _RANGES)
    return next((fault for fault in faults if fault is not None), None)


def prompt_fault(lengths: np.ndarray, tokens: np.ndarray, limits: Limits) -> Fault | None:
    """The first of P prompts that is empty, too long or no text of the model.

    lengths [P]; tokens: of all prompts, end to end.
    Source: ours.
    """
    if (empty := lengths < 1).any():
        return Fault("prompt", int(np.argmax(empty)), "is empty, it has no token")
    if (long := lengths > limits.max_prompt_tokens).any():
        return length_fault(number := int(np.argmax(long)), int(lengths[number]), limits)
    if (strange := (tokens < 0) | (tokens >= limits.vocab_size)).any():
        place = int(np.argmax(strange))
        number = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
        said = f"holds token {tokens[place]}, the model knows 0..{limits.vocab_size - 1}"
        return Fault("prompt", number, said)
    return None


def length_fault(number: int, length: int, limits: Limits) -> Fault | None:
    """Whether prompt `number`, of so many tokens, is too long; before anything is made of it.

    Source: ours.
    """
    if length <= limits.max_prompt_tokens:
        return None
    said = f"has {length} tokens, the limit is {limits.max_prompt_tokens}"
    return Fault("prompt", number, said, _TOO_LONG)


def text_fault(text: str, limits: Limits) -> Fault | None:
    """Whether a text is too long for any prompt; before it is cut into tokens, which takes a while.

    Source: ours.
    """
    most = limits.max_prompt_tokens * _TOKEN_CHARS
    if len(text) <= most:
        return None
    said = f"has {len(text)} characters, {limits.max_prompt_tokens} tokens have at most {most}"
    return Fault("prompt", 0, said, _TOO_LONG)
