"""Bodies of HTTP requests: JSON objects whose fields are taken one by one and checked."""

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

_SHOWN_CHARS = 60
# What clients send along that says nothing about the text.
_NO_MATTER = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "request_id", "cache_salt", "priority",
    "detokenize", "verbosity",
}  # fmt: skip
# What would change the text, and the values with which it doesn't; null never does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "length_penalty": (1,), "min_p": (0,), "min_tokens": (0,), "logit_bias": ({},),
    "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "prompt_logprobs": (), "truncate_prompt_tokens": (), "reasoning_effort": (),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "add_special_tokens": (True,),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,), "structured_outputs": (), "prompt_embeds": (),
}  # fmt: skip


class HttpError(Exception):
    """An answer that is an error, as OpenAI shapes them. param: the field at fault.

    Source: OpenAI's API reference, error objects.
    """

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        named = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        other = "invalid_request_error" if status < 500 else "server_error"
        shown = {"message": message, "type": named.get(status, other), "param": param, "code": code}
        self.body = {"error": shown}


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body. Raises HttpError. Source: ours."""
    try:
        found = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise HttpError(f"the body is not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise HttpError("the body is nested too deeply") from error
    except ValueError as error:
        raise HttpError(f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise HttpError(f"the body must be a JSON object, got {kind(found)}")
    return found


class Fields:
    """Fields of a request, taken one by one; what is left over is unknown. null is absent.

    All methods raise HttpError naming the field. Source: ours.
    """

    def __init__(self, fields: Mapping[str, Any]):
        self._left = {name: value for name, value in fields.items() if value is not None}
        self._taken: list[str] = []

    def take(self, name: str) -> Any:
        """Anything; None when absent. Source: ours."""
        self._taken.append(name)
        return self._left.pop(name, None)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number in low..high. Source: ours."""
        value = self.take(name)
        if value is None:
            return default
        if not is_int(value):
            raise HttpError(f"{name} must be a whole number, got {shown(value)}", name)
        if not low <= value <= high:
            raise HttpError(f"{name} must be in {low}..{high}, got {shown(value)}", name)
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number. Source: ours."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise HttpError(f"{name} must be a number, got {shown(value)}", name)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise HttpError(f"{name} must be a finite number", name)
        return number

    def boolean(self, name: str) -> bool:
        """true or false; false when absent. Source: ours."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise HttpError(f"{name} must be true or false, got {shown(value)}", name)
        return bool(value)

    def finish(self) -> None:
        """Refuses what is left and would change the answer. Source: ours."""
        for name, value in self._left.items():
            if name in _NO_MATTER:
                continue
            if name not in _NEUTRAL:
                near = difflib.get_close_matches(name[:_SHOWN_CHARS], self._taken, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise HttpError(f"no field {shown(name)} is known here{hint}", name[:_SHOWN_CHARS])
            if value not in _NEUTRAL[name]:
                raise HttpError(f"{name} is not supported; leave it out", name)


def is_int(value: Any) -> bool:
    """Whether this is a whole number; true and false are none. Source: JSON's types."""
    return isinstance(value, int) and not isinstance(value, bool)


def kind(value: Any) -> str:
    """What JSON calls this, for messages. Source: ours."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")


def shown(value: Any) -> str:
    """A value in a message: short, and on one line. Source: ours."""
    if isinstance(value, dict | list):
        return kind(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
