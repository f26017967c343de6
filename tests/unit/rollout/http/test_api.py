"""The HTTP endpoints over a driver that says what it is told to, seen by plain HTTP clients."""

import contextlib
import http.client
import json
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from s3ac_jax.data.hf_tokenizer import HFTokenizer
from tests.unit.data import hf_folder

pytest.importorskip("aiohttp")
from s3ac_jax.rollout import wire
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.http import api
from s3ac_jax.rollout.http.request import Served
from s3ac_jax.rollout.limits import Limits
from s3ac_jax.rollout.server import sinks

MODEL, EOS, VOCAB = "tiny", hf_folder.END_OF_TEXT, 320
SERVED = Served(
    MODEL, Limits(VOCAB, max_prompt_tokens=32, cache_tokens=96), max_requests=64
)  # fmt: skip


class Text:
    """The tiny tokenizer as a server wants it."""

    def __init__(self, path):
        self._tokenizer = HFTokenizer(path)
        self.stop_ids = (EOS,)
        self.encode, self.decode = self._tokenizer.encode, self._tokenizer.decode

    def chat(self, messages, *, thinking=None):
        if messages[0]["role"] == "assistant":
            raise ValueError("the conversation must not begin\nwith the assistant")
        tail = "" if thinking is None else f"[{int(thinking)}]"
        return self.encode("".join(f"{m['role'][0]}:{m['content']}|" for m in messages) + tail)


class Ticket:
    def __init__(self):
        self.cancelled = threading.Event()

    def cancel(self):
        self.cancelled.set()


class Driver:
    """Answers with `say`, in pieces of `step` tokens; hangs after `hang` pieces when that is set.

    Token number i has the log-prob -i - seed / 10.
    """

    def __init__(self):
        self.say, self.step, self.hang, self.raises, self.fails = [], 3, None, None, None
        self.seen, self.tickets, self.live = [], [], True
        self.store = SimpleNamespace(get=lambda: SimpleNamespace(version=7, fingerprint="00c0ffee"))
        self.error = None

    def submit(self, requests, sink):
        if self.raises:
            raise self.raises
        self.seen.append(requests)
        ticket = Ticket()
        self.tickets.append(ticket)
        for sample, row in enumerate(requests.sampling.max_tokens):
            self._answer(requests, sink, sample, int(row))
        if self.fails:
            sink.fail(self.fails)
        return ticket

    def _answer(self, requests, sink, sample, most):
        stops = set(requests.sampling.stop_ids[sample].tolist())
        at = next((n + 1 for n, one in enumerate(self.say) if one in stops), len(self.say))
        ids, finish = self.say[: min(at, most)], wire.LENGTH if most < at else wire.STOP
        if at == len(self.say) and self.say[-1] not in stops:
            finish = wire.LENGTH
        logp = -np.arange(len(ids), dtype=np.float32) - requests.sampling.seed[sample] / 10
        step = self.step if sink.streams else len(ids)
        starts = range(0, len(ids), step)
        for number, start in enumerate(starts):
            if self.hang is not None and number >= self.hang:
                return
            part = slice(start, start + step)
            last = start + step >= len(ids) and self.fails is None
            sink.put(
                sample,
                sinks.Piece(
                    np.array(ids[part], np.int32), logp[part].astype(np.float32),
                    np.full(len(ids[part]), 7, np.int32), finish if last else None,
                ),
            )  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    hf_folder.folder(path, generation_config={"eos_token_id": [EOS]})
    return Text(path)


@contextlib.contextmanager
def serving(driver, tokenizer, served=SERVED, **options):
    server = api.HttpServer(api.HttpApi(driver, served, tokenizer, **options).application())
    port = server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        server.stop()


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def port(driver, text):
    with serving(driver, text, metrics=lambda: b"tokens_total 5\n") as port:
        yield port


def ask(port, path, body=None, method=None, headers=None):
    """(status, body as text, headers) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def complete(port, path="/v1/completions", **body):
    status, told, _ = ask(port, path, body)
    assert status == 200, told
    return json.loads(told)


def events(port, path="/v1/completions", **body):
    """The JSON objects of a stream, which has to end with [DONE]."""
    status, told, headers = ask(port, path, body | {"stream": True})
    assert status == 200, told
    assert headers["Content-Type"].startswith("text/event-stream")
    lines = told.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def refusal(port, body, path="/v1/completions"):
    """(status, error object) of a request that is refused; the message is one line."""
    status, told, _ = ask(port, path, body)
    error = json.loads(told)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) < 300
    return status, error


def test_a_completion_has_openais_shape(port, driver, text):
    driver.say = [*text.encode("Hello 🙂 world"), EOS]
    told = complete(port, model=MODEL, prompt="say", max_tokens=60, seed=3)
    assert set(told) >= {"id", "object", "created", "model", "choices", "usage"}
    assert (told["object"], told["model"]) == ("text_completion", MODEL)
    assert abs(told["created"] - time.time()) < 60
    assert told["choices"] == [
        {"index": 0, "text": "Hello 🙂 world", "finish_reason": "stop", "logprobs": None}
    ]
    prompt, made = len(text.encode("say")), len(driver.say)
    assert told["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made
    }  # fmt: skip


def test_what_reaches_the_driver(port, driver, text):
    driver.say = [EOS]
    complete(
        port, prompt=["ab", "c"], n=2, max_tokens=9, temperature=0.5, top_p=0.25, top_k=7, seed=-1,
        stop_token_ids=[5, EOS],
    )  # fmt: skip
    (seen,) = driver.seen
    assert seen.tokens.tolist() == text.encode("ab") + text.encode("c")
    assert seen.lengths.tolist() == [len(text.encode("ab")), len(text.encode("c"))]
    assert seen.prompt_row.tolist() == [0, 0, 1, 1]
    sampling = seen.sampling
    assert sampling.seed.tolist() == [2**32 - 1, 0] * 2
    assert sampling.max_tokens.tolist() == [9] * 4
    assert sampling.temperature.tolist() == [0.5] * 4
    assert sampling.top_p.tolist() == [0.25] * 4
    assert sampling.top_k.tolist() == [7] * 4
    assert sampling.stop_ids.tolist() == [[EOS, 5, -1, -1, -1, -1, -1, -1]] * 4


def test_defaults_are_openais(port, driver):
    driver.say = [EOS]
    complete(port, prompt="a")
    complete(port, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    plain, chat = (seen.sampling for seen in driver.seen)
    assert (plain.temperature.item(), plain.top_p.item(), plain.top_k.item()) == (1, 1, 0)
    assert plain.max_tokens.item() == 16
    # A chat answer may fill what the cache leaves.
    assert chat.max_tokens.item() == 96 - driver.seen[1].lengths.item()
    # No seed given: two requests are not the same draw.
    assert plain.seed.item() != chat.seed.item()


@pytest.mark.parametrize(
    ("prompt", "rows"),
    [("ab", [[0]]), ([65, 66], [[65, 66]]), ([[65], [66, 67]], [[65], [66, 67]])],
)
def test_prompts_are_text_or_ids_one_or_many(port, driver, text, prompt, rows):
    rows = [text.encode("ab")] if prompt == "ab" else rows
    driver.say = [EOS]
    told = complete(port, prompt=prompt, return_token_ids=True)
    assert [one["prompt_token_ids"] for one in told["choices"]] == rows
    assert told["usage"]["prompt_tokens"] == sum(map(len, rows))


def test_ids_and_logprobs_come_back_as_they_were_made(port, driver, text):
    driver.say = [*text.encode("Hé"), EOS]
    told = complete(port, prompt="a", n=2, seed=0, logprobs=0, return_token_ids=True)
    assert [one["index"] for one in told["choices"]] == [0, 1]
    for number, choice in enumerate(told["choices"]):
        assert choice["token_ids"] == driver.say
        logp = [-i - number / 10 for i in range(len(driver.say))]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logp)
        assert len(choice["logprobs"]["tokens"]) == len(driver.say)
        assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
        assert choice["logprobs"]["text_offset"][0] == 0
        assert choice["logprobs"]["top_logprobs"] is None
    assert told["system_fingerprint"] == "weights-7"


def test_offsets_say_where_in_the_text_a_token_begins(port, driver, text):
    driver.say = text.encode("one two")
    logprobs = complete(port, prompt="a", logprobs=0)["choices"][0]["logprobs"]
    whole = "one two"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert whole[offset : offset + len(token)] == token


def test_the_likeliest_token_is_known_when_greedy(port, driver, text):
    driver.say = text.encode("ab")
    told = complete(port, prompt="a", logprobs=1, temperature=0, seed=0)
    logprobs = told["choices"][0]["logprobs"]
    first = {logprobs["tokens"][0]: logprobs["token_logprobs"][0]}
    assert logprobs["top_logprobs"][0] == first
    status, error = refusal(port, {"prompt": "a", "logprobs": 1})
    assert (status, error["param"]) == (400, "logprobs")


def test_a_chat_answer_has_openais_shape(port, driver, text):
    driver.say = [*text.encode("Hi 🙂"), EOS]
    told = complete(
        port, "/v1/chat/completions", model=MODEL, logprobs=True, seed=0, return_token_ids=True,
        messages=[
            {"role": "developer", "content": "be short"},
            {"role": "user", "content": [{"type": "text", "text": part} for part in ("he", "y")]},
        ],
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert told["object"] == "chat.completion"
    (choice,) = told["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hi 🙂"}
    assert choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert [one["logprob"] for one in content] == pytest.approx(list(range(0, -len(content), -1)))
    assert all(set(one) == {"token", "logprob", "bytes", "top_logprobs"} for one in content)
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    assert choice["token_ids"] == driver.say
    # A developer's word is the system's, and the template gets it so.
    assert text.decode(driver.seen[0].tokens) == "s:be short|u:hey|[0]"
    assert told["prompt_token_ids"] == driver.seen[0].tokens.tolist()


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_a_stream_says_the_same_as_the_whole(port, driver, text, step):
    driver.say, driver.step = [*text.encode("naïve 🙂 日本, ok"), EOS], step
    asked = {
        "prompt": "a",
        "n": 2,
        "seed": 1,
        "max_tokens": 60,
        "logprobs": 0,
        "return_token_ids": True,
    }
    whole = complete(port, **asked)
    chunks = events(port, **asked, stream_options={"include_usage": True})
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert not any("\ufffd" in one["text"] for one in mine)
        assert [t for one in mine for t in one["token_ids"]] == choice["token_ids"]
        parts = [one["logprobs"] for one in mine if one["logprobs"]]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [v for part in parts for v in part[name]] == choice["logprobs"][name]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["stop"]
        prompts = [one["prompt_token_ids"] for one in mine if "prompt_token_ids" in one]
        assert prompts == [choice["prompt_token_ids"]]


def test_a_chat_stream_begins_with_the_role(port, driver, text):
    driver.say = [*text.encode("Hi 🙂 there"), EOS]
    messages = [{"role": "user", "content": "hey"}]
    chunks = events(port, "/v1/chat/completions", messages=messages)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi 🙂 there"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_cuts_the_text_and_frees_the_slot(port, driver, text, stream):
    ids = text.encode("one STOP two three four")
    driver.say, driver.step = ids, 1
    body = {"prompt": "a", "stop": ["STOP", "unused"], "n": 2, "max_tokens": 60}
    if stream:
        chunks = events(port, **body)
        texts = ["", ""]
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ["one ", "one "]
    else:
        told = complete(port, **body, return_token_ids=True)
        assert [one["text"] for one in told["choices"]] == ["one ", "one "]
        assert {one["finish_reason"] for one in told["choices"]} == {"stop"}
        cut = told["choices"][0]["token_ids"]
        assert cut == ids[: len(cut)]
        assert "STOP" in text.decode(cut)
        assert "STOP" not in text.decode(cut[:-1])
        assert told["usage"]["completion_tokens"] == 2 * len(cut)
    assert len(driver.tickets) == 2
    assert all(ticket.cancelled.wait(5) for ticket in driver.tickets)


def test_one_stop_text_leaves_the_siblings_alone(port, driver, text):
    driver.say = text.encode("a STOP b")
    told = complete(port, prompt="a", stop="STOP", n=3, seed=0, logprobs=0)
    assert [one["text"] for one in told["choices"]] == ["a "] * 3
    # Each has its own seed still.
    firsts = [one["logprobs"]["token_logprobs"][0] for one in told["choices"]]
    assert firsts == pytest.approx([0, -0.1, -0.2])


def test_ignore_eos_goes_on_behind_it(port, driver, text):
    driver.say = [*text.encode("a"), EOS, *text.encode("b")]
    assert complete(port, prompt="x")["choices"][0]["text"] == "a"
    told = complete(port, prompt="x", ignore_eos=True)
    assert told["choices"][0]["text"] == "ab"
    assert told["choices"][0]["finish_reason"] == "length"


def test_a_stop_token_of_the_request_has_no_text(port, driver, text):
    (comma,) = text.encode(",")
    driver.say = [*text.encode("a"), comma, *text.encode("b")]
    told = complete(port, prompt="x", stop_token_ids=[comma], return_token_ids=True)
    assert told["choices"][0]["text"] == "a"
    assert told["choices"][0]["token_ids"][-1] == comma


def test_echo_puts_the_prompt_first(port, driver, text):
    driver.say = [*text.encode("b"), EOS]
    assert complete(port, prompt="a ", echo=True)["choices"][0]["text"] == "a b"
    chunks = events(port, prompt=text.encode("a "), echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a b"


def test_length_limit_is_told(port, driver, text):
    driver.say = text.encode("many words to say")
    told = complete(port, prompt="a", max_tokens=3)
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 3


CHAT = "/v1/chat/completions"
BAD = [
    (b"{", None, "no JSON"),
    (b"\xff\xfe", None, "UTF-8"),
    (b"[" * 200_000, None, "nested"),
    (b'{"max_tokens": 1' + b"0" * 5000 + b"}", None, "no JSON"),
    ([1], None, "object"),
    ({}, "prompt", "missing"),
    ({"prompt": 5}, "prompt", "prompt"),
    ({"prompt": []}, "prompt", "prompt"),
    ({"prompt": ""}, "prompt", "no token"),
    ({"prompt": [[]]}, "prompt", "no token"),
    ({"prompt": {"a": 1}}, "prompt", "an object"),
    ({"prompt": ["a", 5]}, "prompt", "a prompt must be"),
    ({"prompt": [65, "a"]}, "prompt", "whole numbers"),
    ({"prompt": [65, True]}, "prompt", "whole numbers"),
    ({"prompt": [65, -1]}, "prompt", "0..319"),
    ({"prompt": [65, VOCAB]}, "prompt", "0..319"),
    ({"prompt": [10**30]}, "prompt", "more than 64 bits"),
    ({"prompt": [2**63]}, "prompt", "must be whole numbers, got 9223372036854775808"),
    ({"prompt": [2**62, 2**62]}, "prompt", "holds token 4611686018427387904"),
    ({"prompt": [65] * 33}, "prompt", "33 tokens, the limit is 32"),
    ({"prompt": "a" * 4097}, "prompt", "has 4097 characters, 32 tokens have at most 4096"),
    ({"prompt": [[65], [66, -1]]}, "prompt", "prompt 1 holds token -1"),
    ({"prompt": ["a"] * 65}, "prompt", "64"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"prompt": "a", "n": 0}, "n", "1..128"),
    ({"prompt": "a", "n": 10**9}, "n", "1..128"),
    ({"prompt": "a", "n": 100}, "n", "64"),
    ({"prompt": "a", "n": "2"}, "n", "whole number"),
    ({"prompt": "a", "n": 1.5}, "n", "whole number"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "1..95"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "1..95"),
    ({"prompt": "a", "max_tokens": 96}, "max_tokens", "1..95"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", "whole number"),
    ({"prompt": "a", "temperature": -1}, "temperature", "0 or in"),
    ({"prompt": "a", "temperature": 1e-9}, "temperature", "0 or in"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature", "finite"),
    ({"prompt": "a", "temperature": 10**400}, "temperature", "finite"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "number"),
    ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "a", "top_p": 1.1}, "top_p", "at most 1"),
    ({"prompt": "a", "top_k": -2}, "top_k", "-1.."),
    ({"prompt": "a", "seed": 2**70}, "seed", "64 bits"),
    ({"prompt": "a", "stop": 5}, "stop", "text"),
    ({"prompt": "a", "stop": ["", "b"]}, "stop", "1..256"),
    ({"prompt": "a", "stop": ["x"] * 5000}, "stop", "16 texts"),
    ({"prompt": "a", "stop": "x" * 257}, "stop", "1..256"),
    ({"prompt": "a", "stop": "\udc00"}, "stop", "surrogate"),
    ({"prompt": "a", "stop_token_ids": list(range(5000))}, "stop_token_ids", "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": list(range(8))}, "stop_token_ids", "8 stop token ids"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", "0..319"),
    ({"prompt": "a", "stop_token_ids": "5"}, "stop_token_ids", "list"),
    ({"prompt": "a", "stream": "yes"}, "stream", "true or false"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "stream"),
    ({"prompt": "a", "stream": True, "stream_options": 1}, "stream_options", "object"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "whole number"),
    ({"prompt": "a", "logprobs": 5}, "logprobs", "chosen token"),
    ({"prompt": "a", "logprobs": 0, "echo": True}, "echo", "not supported"),
    ({"prompt": "a", "best_of": 3}, "best_of", "not supported"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"prompt": "a", "temprature": 0}, "temprature", "did you mean temperature"),
    ({"prompt": "a", "x" * 9999: 0}, "x" * 60, "known"),
]
BAD_CHAT = [
    ({}, "messages", "at least one"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "at least one"),
    ({"messages": ["hi"]}, "messages", "object"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages", "role"),
    ({"messages": [{"role": "user"}]}, "messages", "content"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages", "surrogate"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages", "type text",
    ),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "must not begin"),
    ({"messages": [{"role": "user", "content": "a " * 60}]}, "messages", "limit is 32"),
    ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, "top_logprobs", "true"),
    (
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
        "top_logprobs", "chosen token",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1}},
        "chat_template_kwargs", "enable_thinking",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
        "tools", "not supported",
    ),
]  # fmt: skip


def test_bad_requests_get_one_clear_line_each(port, driver):
    for path, cases in (("/v1/completions", BAD), (CHAT, BAD_CHAT)):
        for body, param, said in cases:
            status, error = refusal(port, body, path)
            wanted = (400, "invalid_request_error", param)
            assert (status, error["type"], error["param"]) == wanted, (body, error)
            assert said in error["message"], (body, error)
    assert driver.seen == []


def test_fields_that_say_nothing_here_are_taken(port, driver):
    driver.say = [EOS]
    complete(
        port, prompt="a", user="me", frequency_penalty=0.0, presence_penalty=0, logit_bias={},
        suffix=None, best_of=1, stop=None, n=None, skip_special_tokens=True, top_k=-1,
    )  # fmt: skip


def test_models(port):
    status, told, _ = ask(port, "/v1/models")
    told = json.loads(told)
    assert (status, told["object"]) == (200, "list")
    assert [one["id"] for one in told["data"]] == [MODEL]
    assert told["data"][0]["max_model_len"] == 96
    assert (told["data"][0]["version"], told["data"][0]["fingerprint"]) == (7, "00c0ffee")
    assert json.loads(ask(port, f"/v1/models/{MODEL}")[1])["id"] == MODEL
    assert ask(port, "/v1/models/other")[0] == 404
    for path in ("/v1/completions", CHAT):
        status, error = refusal(port, {"model": "gpt-4", "prompt": "a"}, path)
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_unknown_paths_and_methods_answer_in_json(port):
    status, told, _ = ask(port, "/v2/nothing")
    assert (status, json.loads(told)["error"]["type"]) == (404, "not_found_error")
    status, told, _ = ask(port, "/v1/completions", method="GET")
    assert (status, "error" in json.loads(told)) == (405, True)


def test_health_and_metrics(port, driver):
    assert ask(port, "/health")[0] == 200
    assert ask(port, "/metrics")[1] == "tokens_total 5\n"
    driver.live = False
    assert ask(port, "/health")[0] == 503
    driver.live, driver.error = True, sinks.EngineFailed("engine failed: boom")
    status, told, _ = ask(port, "/health")
    # Anybody may ask, so it does not say why.
    assert (status, json.loads(told)["error"]["message"]) == (503, "the engine failed")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (sinks.BadRequest("request 0: max_tokens"), 400, "invalid_request_error"),
        (sinks.QueueFull("the queue is full"), 429, "rate_limit_error"),
        (sinks.Stopped("the server is stopping"), 503, "server_error"),
        (sinks.EngineFailed("engine failed: boom"), 500, "server_error"),
        (RolloutError("something else"), 500, "server_error"),
    ],
)
def test_what_the_driver_says_reaches_the_client(port, driver, error, status, kind):
    driver.raises = error
    for stream in (False, True):
        found, told = refusal(port, {"prompt": "a", "stream": stream})
        assert (found, told["type"], told["message"]) == (status, kind, str(error))
    headers = ask(port, "/v1/completions", {"prompt": "a"})[2]
    assert ("Retry-After" in headers) == (status == 429)


def test_a_bug_is_logged_and_told_without_its_details(port, driver, caplog):
    driver.raises = KeyError("secret")
    status, error = refusal(port, {"prompt": "a"})
    assert (status, error["message"]) == (500, "the server failed: KeyError")
    assert "secret" in caplog.text


def test_a_failure_midway_is_told_in_the_stream(port, driver, text):
    driver.say, driver.fails = text.encode("one two"), sinks.EngineFailed("engine failed: boom")
    chunks = events(port, prompt="a")
    assert chunks[-1]["error"]["message"] == "engine failed: boom"
    status, error = refusal(port, {"prompt": "a"})
    assert (status, error["message"]) == (500, "engine failed: boom")


def test_a_vanished_client_frees_its_slots(port, driver, text):
    driver.say = text.encode("one two three")
    for stream in (True, False):
        driver.hang = int(stream)
        body = json.dumps({"prompt": "a", "n": 2, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        before = len(driver.tickets)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head.encode() + body)
            wait_for(lambda: len(driver.tickets) > before)  # noqa: B023
            if stream:
                assert client.recv(20).startswith(b"HTTP/1.1 200")
            assert not driver.tickets[-1].cancelled.is_set()
        assert driver.tickets[-1].cancelled.wait(5)


def wait_for(true, seconds=5.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_the_token_is_asked_for(driver, text):
    driver.say = [EOS]
    with serving(driver, text, token="sécret") as port:
        for headers in (
            {}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"},
            {"Authorization": "sécret".encode()}, {"Authorization": "Basic sécret".encode()},
            {"Authorization": b"Bearer \xff\xfe"},
        ):  # fmt: skip
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/models", None)):
                status, told, answered = ask(port, path, body, headers=headers)
                assert status == 401, told
                assert json.loads(told)["error"]["code"] == "invalid_api_key"
                assert answered["WWW-Authenticate"] == "Bearer"
                assert "sécret" not in told
        assert driver.seen == []
        right = {"Authorization": "Bearer sécret".encode()}
        assert ask(port, "/v1/completions", {"prompt": "a"}, headers=right)[0] == 200
        assert ask(port, "/health")[0] == 200


def test_the_size_of_a_body_is_bounded(port):
    body = b'{"prompt": "' + b"a" * api.MAX_BODY_BYTES + b'"}'
    # aiohttp stops reading; a client that goes on writing may see the connection end.
    try:
        status, told, _ = ask(port, "/v1/completions", body)
    except (ConnectionError, http.client.HTTPException):
        pytest.skip("the connection ended before the answer was read")
    assert status == 413
    assert json.loads(told)["error"]["message"] == "the body has more than 8 MiB"


def test_without_a_tokenizer_there_are_ids_only(driver):
    driver.say = [5, 6]
    with serving(driver, None) as port:
        told = complete(port, prompt=[1, 2], logprobs=0, return_token_ids=True)
        assert told["choices"][0]["token_ids"] == [5, 6]
        assert told["choices"][0]["text"] == ""
        assert told["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]
        for body in ({"prompt": "a"}, {"prompt": [1], "stop": "x"}, {"prompt": [1], "echo": True}):
            status, error = refusal(port, body)
            assert (status, "tokenizer" in error["message"]) == (400, True)
        assert refusal(port, {"messages": [{"role": "user", "content": "a"}]}, CHAT)[0] == 400


def test_a_port_that_is_taken_is_told_in_one_line(port, driver, text):
    server = api.HttpServer(api.HttpApi(driver, SERVED, text).application())
    with pytest.raises(RolloutError, match=f"127.0.0.1:{port} .*--http_port"):
        server.start("127.0.0.1", port)
    assert not server._thread.is_alive()


def test_stop_ends_what_is_under_way(driver, text):
    driver.say, driver.hang = text.encode("one two three"), 1
    before = threading.active_count()
    server = api.HttpServer(api.HttpApi(driver, SERVED, text).application())
    port = server.start("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port)) as client:
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_for(lambda: driver.tickets)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 2
    assert driver.tickets[0].cancelled.is_set()
    wait_for(lambda: threading.active_count() <= before)
