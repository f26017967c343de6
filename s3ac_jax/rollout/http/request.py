"""Requests of the OpenAI-compatible endpoints: read, checked, and refused in one line each."""

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from s3ac_jax.rollout.backend import MAX_STOP_IDS, Sampling, seeded_sampling
from s3ac_jax.rollout.http.fields import Fields, HttpError, is_int, kind, shown
from s3ac_jax.rollout.limits import Fault, Limits, field_fault, prompt_fault, text_fault
from s3ac_jax.rollout.server.text_stream import TextTokenizer

MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_CHARS = 16, 256
ROLES = ("system", "developer", "user", "assistant")
_DEFAULT_COMPLETION_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Served:
    """What the endpoints serve. model: its name. max_requests: prompts times n of one request.

    Source: ours.
    """

    model: str
    limits: Limits
    max_requests: int


@dataclasses.dataclass(frozen=True)
class Asked:
    """One HTTP request, read. prompts: token ids of each; n responses to each of them.

    stops: texts, beside the token ids in `sampling`. logprobs: None for none, else how many of the
    likeliest tokens, beside the chosen one. echo: texts of the prompts, to stand before those of
    the responses. Source: OpenAI's API reference; vLLM's extra fields.
    """

    chat: bool
    prompts: list[list[int]]
    n: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stops: tuple[str, ...]
    logprobs: int | None
    echo: tuple[str, ...] | None
    stream: bool
    include_usage: bool
    return_token_ids: bool


def read_request(
    fields: Mapping[str, Any], *, chat: bool, served: Served, tokenizer: TextTokenizer | None
) -> Asked:
    """A request of /v1/chat/completions or /v1/completions, tokenised.

    tokenizer: None for a server that has none; then there are only token ids.
    Raises HttpError naming the field. Source: ours.
    """
    given, limits = Fields(fields), served.limits
    model = given.take("model")
    if model is not None and model != served.model:
        raise HttpError(
            f"no model {shown(model)} is served here, only {shown(served.model)}", "model",
            status=404, code="model_not_found",
        )  # fmt: skip
    written = [] if chat else _prompts(given.take("prompt"), served)
    if chat:
        prompts = _messages(given, limits, tokenizer)
    else:
        prompts = [_prompt(one, limits, tokenizer) for one in written]
    n = given.integer("n", 1, 1, MAX_CHOICES) or 1
    if len(prompts) * n > served.max_requests:
        raise HttpError(
            f"{len(prompts)} prompts with n = {n} are more than the {served.max_requests} "
            "responses that one request may ask for", "n",
        )  # fmt: skip
    _check_prompts(prompts, limits, "messages" if chat else "prompt")
    temperature = _number(given, "temperature")
    stops = _stops(given, tokenizer)
    stop_ids = _stop_ids(given, limits, tokenizer)
    logprobs = _logprobs(given, chat=chat, greedy=temperature == 0)
    stream = given.boolean("stream")
    sampling = seeded_sampling(
        _seeds(given, n),
        temperature=temperature,
        max_tokens=_max_tokens(given, chat, limits.cache_tokens - max(map(len, prompts))),
        stop_ids=stop_ids,
        top_p=_number(given, "top_p"),
        # vLLM's word for "all" is -1.
        top_k=max(0, given.integer("top_k", 0, -1, 2**31 - 1) or 0),
    )
    asked = Asked(
        chat=chat, prompts=prompts, n=n, sampling=sampling, stop_ids=frozenset(stop_ids),
        stops=stops, logprobs=logprobs, stream=stream,
        echo=_echo(given, logprobs, written, tokenizer),
        include_usage=_include_usage(given, stream),
        return_token_ids=given.boolean("return_token_ids"),
    )  # fmt: skip
    given.finish()
    return asked


def _prompts(prompt: Any, served: Served) -> list[Any]:
    if prompt is None:
        raise HttpError("prompt is missing: a text, token ids, or a list of either", "prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and is_int(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise HttpError(
            f"prompt must be a text, token ids, or a list of either, got {shown(prompt)}", "prompt"
        )
    if len(prompt) > served.max_requests:
        raise HttpError(
            f"{len(prompt)} prompts are more than the {served.max_requests} responses that one "
            "request may ask for", "prompt",
        )  # fmt: skip
    return prompt


def _prompt(prompt: Any, limits: Limits, tokenizer: TextTokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise HttpError("this server has no tokenizer: send token ids as prompt", "prompt")
        _check_length(prompt, limits, "prompt")
        return _encoded(tokenizer.encode, _text(prompt, "prompt"), "prompt")
    if not isinstance(prompt, list):
        raise HttpError(
            f"a prompt must be a text or a list of token ids, got {shown(prompt)}", "prompt"
        )
    # What JSON calls a number may have any size; the model's own limit is for later.
    wrong = next((one for one in prompt if not is_int(one) or one.bit_length() > 63), None)
    if wrong is not None:
        raise HttpError(f"token ids must be whole numbers, got {shown(wrong)}", "prompt")
    return prompt


def _messages(given: Fields, limits: Limits, tokenizer: TextTokenizer | None) -> list[list[int]]:
    messages, thinking = given.take("messages"), _thinking(given)
    if not isinstance(messages, list) or not messages:
        raise HttpError("messages must be a list of at least one message", "messages")
    read = [_message(number, one) for number, one in enumerate(messages)]
    if tokenizer is None:
        raise HttpError("this server has no tokenizer: use /v1/completions with token ids")
    _check_length("".join(one["content"] for one in read), limits, "messages")
    ids = _encoded(lambda read: tokenizer.chat(read, thinking=thinking), read, "messages")
    if ids is None:
        raise HttpError("this model has no chat template: use /v1/completions", "messages")
    return [ids]


def _message(number: int, message: Any) -> dict[str, str]:
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise HttpError(f"{where} must be an object, got {kind(message)}", "messages")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise HttpError(f"{where}.role must be one of {', '.join(ROLES)}", "messages")
    if isinstance(content, list):
        parts = [_part(one, where) for one in content]
        content = "".join(parts)
    if not isinstance(content, str):
        raise HttpError(f"{where}.content must be text, got {kind(content)}", "messages")
    # Templates know the older word.
    role = "system" if role == "developer" else role
    return {"role": role, "content": _text(content, f"{where}.content", "messages")}


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise HttpError(f"{where}.content may hold only parts of type text", "messages")


def _thinking(given: Fields) -> bool | None:
    options = given.take("chat_template_kwargs")
    if options is None:
        return None
    known = isinstance(options, dict) and set(options) <= {"enable_thinking"}
    if not known or not isinstance(options.get("enable_thinking", True), bool):
        raise HttpError(
            "chat_template_kwargs may hold enable_thinking, true or false, and no more",
            "chat_template_kwargs",
        )
    return options.get("enable_thinking")


def _encoded(encode: Callable[[Any], Any], what: Any, param: str) -> Any:
    try:
        return encode(what)
    except ValueError as error:
        raise HttpError(" ".join(str(error).split()), param) from error


def _text(text: str, where: str, param: str | None = None) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise HttpError(
            f"{where} holds half a surrogate pair at place {error.start}, which is no character",
            param or where,
        ) from error
    return text


def _check_prompts(prompts: Sequence[list[int]], limits: Limits, param: str) -> None:
    lengths = np.array([len(ids) for ids in prompts])
    tokens = np.array([one for ids in prompts for one in ids], np.int64)
    fault = prompt_fault(lengths, tokens, limits)
    _refuse(fault, param, f"prompt {fault.number}" if fault and len(prompts) > 1 else "the prompt")


def _check_length(text: str, limits: Limits, param: str) -> None:
    _refuse(text_fault(text, limits), param, "the prompt")


def _refuse(fault: Fault | None, param: str, what: str) -> None:
    if fault is not None:
        raise HttpError(f"{what} {fault.said}", param, code=fault.code)


def _max_tokens(given: Fields, chat: bool, most: int) -> int:
    """most: what the cache leaves beside the longest prompt."""
    default = most if chat else min(most, _DEFAULT_COMPLETION_TOKENS)
    asked = given.integer("max_tokens", None, 1, most)
    newer = given.integer("max_completion_tokens", None, 1, most) if chat else None
    return newer or asked or default


def _number(given: Fields, name: str) -> float:
    value = given.number(name, 1.0)
    _refuse(field_fault(name, [value]), name, name)
    return value


def _seeds(given: Fields, n: int) -> list[int]:
    """Of the n responses to a prompt; every prompt has the same ones."""
    first = given.integer("seed", None, -(2**63), 2**64 - 1)
    if first is None:
        return [secrets.randbits(32) for _ in range(n)]
    return [(first + number) % 2**32 for number in range(n)]


def _stops(given: Fields, tokenizer: TextTokenizer | None) -> tuple[str, ...]:
    stop = given.take("stop")
    if stop is None or stop == []:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise HttpError("stop must be a text or a list of texts", "stop")
    if len(stops) > MAX_STOPS:
        raise HttpError(f"stop may hold {MAX_STOPS} texts, got {len(stops)}", "stop")
    if tokenizer is None:
        raise HttpError("this server has no tokenizer: use stop_token_ids", "stop")
    for one in stops:
        if not 1 <= len(_text(one, "stop")) <= MAX_STOP_CHARS:
            raise HttpError(
                f"a stop text must have 1..{MAX_STOP_CHARS} characters, got {len(one)}", "stop"
            )
    return tuple(stops)


def _stop_ids(given: Fields, limits: Limits, tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    ids, ignored = given.take("stop_token_ids"), given.boolean("ignore_eos")
    ids = [] if ids is None else ids
    if not isinstance(ids, list) or not all(
        is_int(one) and 0 <= one < limits.vocab_size for one in ids
    ):
        raise HttpError(
            f"stop_token_ids must be a list of token ids in 0..{limits.vocab_size - 1}",
            "stop_token_ids",
        )
    own = () if ignored or tokenizer is None else tokenizer.stop_ids
    found = tuple(dict.fromkeys([*own, *ids]))
    if len(found) > MAX_STOP_IDS:
        raise HttpError(
            f"{MAX_STOP_IDS} stop token ids are possible, the model's own {len(own)} among them; "
            f"got {len(found)}", "stop_token_ids",
        )  # fmt: skip
    return found


def _logprobs(given: Fields, *, chat: bool, greedy: bool) -> int | None:
    if chat:
        wanted, name = given.boolean("logprobs"), "top_logprobs"
        top = given.integer(name, None, 0, 20)
        if top is not None and not wanted:
            raise HttpError("top_logprobs needs logprobs to be true", name)
        top = (top or 0) if wanted else None
    else:
        name = "logprobs"
        top = given.integer(name, None, 0, 20)
    # The likeliest token is known only where it is the one that was chosen.
    if top is not None and top > int(greedy):
        raise HttpError(
            f"{name} must be 0: only the chosen token's log-prob is known"
            + ("" if greedy else " (with temperature 0 it may be 1)"), name,
        )  # fmt: skip
    return top


def _echo(
    given: Fields, logprobs: int | None, written: list[Any], tokenizer: TextTokenizer | None
) -> tuple[str, ...] | None:
    if not given.boolean("echo"):
        return None
    if logprobs is not None:
        raise HttpError("echo with logprobs is not supported: prompts have no log-probs", "echo")
    if tokenizer is None:
        raise HttpError("this server has no tokenizer, so nothing to echo", "echo")
    return tuple(one if isinstance(one, str) else tokenizer.decode(one) for one in written)


def _include_usage(given: Fields, stream: bool) -> bool:
    options = given.take("stream_options")
    if options is None:
        return False
    if not stream:
        raise HttpError("stream_options is for stream = true", "stream_options")
    if not isinstance(options, dict):
        raise HttpError("stream_options must be an object", "stream_options")
    wanted = options.get("include_usage", False)
    if not isinstance(wanted, bool):
        raise HttpError("stream_options.include_usage must be true or false", "stream_options")
    return wanted
