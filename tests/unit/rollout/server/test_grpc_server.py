"""The server over gRPC: the same responses, JetStream's own clients, weights, locks and faults."""

import concurrent.futures
import gc
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request

import jax
import numpy as np
import pytest

pytest.importorskip("jetstream", reason="needs google-jetstream 0.2.2")

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.backend import RolloutError, fingerprint_of
from s3ac_jax.rollout.server import servicer
from s3ac_jax.rollout.server.driver import RolloutDriver
from s3ac_jax.rollout.server.grpc_server import RolloutServer
from s3ac_jax.rollout.server.sinks import Piece
from s3ac_jax.rollout.server.store import ParamStore
from s3ac_jax.rollout.weights_wire import chunks, make_manifest
from s3ac_jax.rollout.wire import (
    ABORT,
    CHANNEL_OPTIONS,
    METHODS,
    caller,
    pack_requests,
    unpack_responses,
)
from tests.helpers import random_params
from tests.unit.rollout.server.serving import (
    CACHE_TOKENS,
    NETWORK,
    STOPS,
    NullEngine,
    batch,
    local_rollout,
    make_driver,
    make_requests,
    null_driver,
    same,
    some,
    threads_left,
    weights,
)

WAIT = 15


class Client:
    """One channel, its methods by name. secret: what is sent as authorization."""

    def __init__(self, server, *, secret=None, credentials=None, host="127.0.0.1"):
        address = f"{host}:{server.port}"
        self.channel = (
            grpc.insecure_channel(address, CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, CHANNEL_OPTIONS)
        )
        self._metadata = (("authorization", secret),) if secret else None

    def __getattr__(self, name):
        call = caller(self.channel, name)
        options = {"timeout": WAIT, "metadata": self._metadata}
        if METHODS[name].server_streams:
            return lambda message: list(call(message, **options))
        return lambda message=None: call(
            METHODS[name].request() if message is None else message, **options
        )

    def responses(self, requests):
        done = unpack_responses(self.Generate(pack_requests(requests)))
        ends = np.cumsum(done.num_tokens)[:-1]
        parts = [np.split(array, ends) for array in (done.tokens, done.logp, done.version)]
        return [Piece(*fields) for fields in zip(*parts, done.finish, strict=True)]


@pytest.fixture(scope="module")
def server():
    before = threading.enumerate()
    server = RolloutServer(make_driver(weights(0)), load=load, bos_id=2)
    yield server
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < 2
    assert threads_left(before) == []


@pytest.fixture
def serving():
    """Starts servers, and sees to it that nothing is left of them."""
    before, made = threading.enumerate(), []

    def start(driver, **options):
        made.append(RolloutServer(driver, **options))
        client = Client(made[-1])
        made.append(client.channel)
        return made[-2], client

    yield start
    begin = time.monotonic()
    for thing in made:
        (thing.stop if isinstance(thing, RolloutServer) else thing.close)()
    assert time.monotonic() - begin < 2 * len(made)
    assert threads_left(before) == []


@pytest.fixture(scope="module")
def client(server):
    client = Client(server)
    yield client
    client.channel.close()


def load(path):
    if path == "broken":
        raise OSError(5, "no such\ndisk")
    if path == "narrow":
        return weights(0) | {"embed": np.zeros((2, 2), np.float32)}
    return weights(int(path))


def refused(code, message, call, *args):
    with pytest.raises(grpc.RpcError) as caught:
        call(*args)
    assert caught.value.code() == code
    assert message in caught.value.details()
    return caught.value.details()


INVALID = grpc.StatusCode.INVALID_ARGUMENT


def test_generate_is_what_the_local_loop_makes(client):
    same(client.responses(batch(*make_requests(1))), local_rollout(1))


def asked(prompt, sampling, row, **fields):
    """Request `row` of a batch as Decode has it."""
    tokens = prompt.tokens[row, : prompt.num_tokens[row]].tolist()
    return pb.DecodeRequest(
        token_content=pb.DecodeRequest.TokenContent(token_ids=tokens), has_bos=True,
        max_tokens=int(sampling.max_tokens[row]), temperature=float(sampling.temperature[row]),
        top_p=float(sampling.top_p[row]), top_k=int(sampling.top_k[row]),
        seed=int(sampling.seed[row]), want_logp=True, **fields,
    )  # fmt: skip


def joined(messages, sample=0):
    """One sample's stream as a piece, its finish as the wire's number."""
    parts = [message.stream_content.samples[sample] for message in messages]
    finish = [part.finish for part in parts if part.finish]
    assert len(finish) == 1
    assert parts[-1].finish or len(messages[-1].stream_content.samples) > 1
    fields = [
        np.array([value for part in parts for value in getattr(part, name)])
        for name in ("token_ids", "logp", "version")
    ]
    return Piece(*fields, ["stop", "length", "abort"].index(finish[0]))


def stream_tokens(messages):
    return [token for message in messages for token in message.stream_content.samples[0].token_ids]


def test_decode_is_what_the_local_loop_makes(client):
    prompt, sampling = make_requests(1)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        streams = list(pool.map(lambda row: client.Decode(asked(prompt, sampling, row)), range(64)))
    same([joined(messages) for messages in streams], local_rollout(1))
    # Every message has tokens in it, the last one too.
    assert all(m.stream_content.samples[0].token_ids for stream in streams for m in stream)


def test_samples_of_a_decode_have_seeds_that_count_on(client):
    prompt, sampling = make_requests(1)
    together = client.Decode(asked(prompt, sampling, 1, num_samples=3))
    for sample in range(3):
        other = sampling._replace(seed=sampling.seed + np.uint32(sample))
        alone = joined(client.Decode(asked(prompt, other, 1)))
        assert joined(together, sample).tokens.tolist() == alone.tokens.tolist()


def test_without_a_seed_every_decode_is_another(client):
    content = pb.DecodeRequest.TokenContent(token_ids=[3, 4])
    request = pb.DecodeRequest(token_content=content, max_tokens=20, temperature=1.0, stop_ids=[16])
    made = {tuple(stream_tokens(client.Decode(request))) for _ in range(10)}
    assert len(made) > 5


@pytest.mark.parametrize(
    ("fields", "bos"),
    [({}, [2]), ({"has_bos": True}, []), ({"session_cache": "x"}, [])],
    ids=["stock", "has_bos", "session_cache"],
)
def test_bos_is_put_before_token_ids_as_jetstream_does(client, fields, bos):
    request = pb.DecodeRequest(
        token_content=pb.DecodeRequest.TokenContent(token_ids=[5, 6]), max_tokens=12, **fields
    )
    got = stream_tokens(client.Decode(request))
    want = client.responses(
        some(prompt=[*bos, 5, 6], temperature=0.0, max_tokens=12, stop_ids=STOPS)
    )
    assert got == want[0].tokens.tolist()


def test_jetstreams_own_stub_works_unchanged(server, client):
    prompt, sampling = make_requests(1)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
        for row in range(0, 64, 4):  # the greedy ones: the stub knows no temperature
            content = jetstream_pb2.DecodeRequest.TokenContent(
                token_ids=prompt.tokens[row, : prompt.num_tokens[row]].tolist()
            )
            request = jetstream_pb2.DecodeRequest(
                session_cache="x", token_content=content, max_tokens=int(sampling.max_tokens[row])
            )
            found = stream_tokens(stub.Decode(request))
            rollout = local_rollout(1)
            assert found == rollout.tokens[row, : rollout.num_tokens[row]].tolist()


class Letters:
    """Token n is the letter n after `a`; 1 and 5 have no text."""

    vocab_size, stop_ids = 17, STOPS

    def encode(self, text):
        if not text.isalpha():
            raise ValueError(f"no token for {text!r}")
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + number) for number in ids if number not in STOPS)


def test_text_in_and_text_out(serving):
    _, client = serving(make_driver(weights(0)), tokenizer=Letters(), bos_id=2)
    content = pb.DecodeRequest.TextContent(text="cdea")
    messages = client.Decode(
        pb.DecodeRequest(text_content=content, max_tokens=20, temperature=1.0, seed=3)
    )
    samples = [message.stream_content.samples[0] for message in messages]
    ids = [token for sample in samples for token in sample.token_ids]
    assert "".join(sample.text for sample in samples) == Letters().decode(ids)
    # Whether a text begins with a BOS is its tokenizer's affair.
    sampling = some(prompt=(2, 3, 4, 0), stop_ids=STOPS)
    sampling.sampling.seed[:] = 3
    assert ids == client.responses(sampling)[0].tokens.tolist()
    bad = pb.DecodeRequest(text_content=pb.DecodeRequest.TextContent(text="c 4"), max_tokens=3)
    refused(INVALID, "no token for 'c 4'", client.Decode, bad)
    empty = pb.DecodeRequest(text_content=pb.DecodeRequest.TextContent(text="a"), max_tokens=0)
    (only,) = client.Decode(empty)
    assert only.stream_content.samples[0].finish == "length"
    assert not only.stream_content.samples[0].token_ids


def test_a_limit_beyond_the_cache_is_cut_for_decode(client):
    content = pb.DecodeRequest.TokenContent(token_ids=[3, 4])
    request = pb.DecodeRequest(
        token_content=content, has_bos=True, max_tokens=4000, temperature=1.0, stop_ids=[16],
        seed=1, want_logp=True,
    )  # fmt: skip
    piece = joined(client.Decode(request))
    assert len(piece.tokens) == CACHE_TOKENS - 2 or piece.tokens[-1] == 16


MALFORMED = {
    "nothing": (pb.DecodeRequest(max_tokens=3), "no content"),
    "text": (
        pb.DecodeRequest(max_tokens=3, text_content=pb.DecodeRequest.TextContent(text="a")),
        "no tokenizer",
    ),
    "empty": (
        pb.DecodeRequest(max_tokens=3, token_content=pb.DecodeRequest.TokenContent()),
        "prompt 0 is empty",
    ),
    "oversized": ([3] * 300, "prompt 0 has 300 tokens, the limit is"),
    "bad id": ([3, 1000], "prompt 0 holds token 1000"),
    "negative id": ([-3], "prompt 0 holds token -3"),
    "negative": (pb.DecodeRequest(max_tokens=-5), "max_tokens must be in 1.."),
    "stops": (pb.DecodeRequest(max_tokens=3, stop_ids=range(10000)), "at most 8 stop_ids"),
    "samples": (pb.DecodeRequest(max_tokens=3, num_samples=10**9), "num_samples must be at most"),
    "heat": (pb.DecodeRequest(max_tokens=3, temperature=float("nan")), "temperature must be"),
}


def malformed(name):
    request, message = MALFORMED[name]
    if isinstance(request, list):
        content = pb.DecodeRequest.TokenContent(token_ids=request)
        request = pb.DecodeRequest(max_tokens=3, token_content=content)
    made = pb.DecodeRequest()
    made.CopyFrom(request)
    made.has_bos = True
    if made.WhichOneof("content") is None and name != "nothing":
        made.token_content.token_ids.extend([3, 4])
    return made, message


@pytest.mark.parametrize("name", MALFORMED)
def test_what_decode_refuses(client, name):
    request, message = malformed(name)
    refused(INVALID, message, client.Decode, request)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": b""}, "max_tokens has 0 entries, 2 needed for 2 requests"),
        ({"stop_ids": bytes(8)}, "stop_ids has 2 entries, 16 needed"),
        ({"seed": bytes(3)}, "seed: 3 bytes are no whole number"),
        ({"prompt_row": np.array([0, 9], "<i4").tobytes()}, "prompt_row names a prompt outside"),
        ({"prompt_row": np.array([0, -1], "<i4").tobytes()}, "prompt_row names a prompt outside"),
        ({"prompt_tokens": bytes(4)}, "prompt_lengths add up to 6, prompt_tokens has 1"),
        ({"prompt_lengths": np.array([-1, 7], "<i4").tobytes()}, "must not be negative"),
        ({"max_tokens": np.array([3, -3], "<i4").tobytes()}, "request 1: max_tokens must be in"),
    ],
)
def test_what_generate_refuses(client, changes, message):
    request = pack_requests(some(2))
    for name, value in changes.items():
        setattr(request, name, value)
    refused(INVALID, message, client.Generate, request)


def test_a_batch_of_nothing(client):
    assert client.Generate(pb.GenerateRequest()).num_tokens == b""


def push(client, params, version, *, fingerprint=None, in_flight=False, spoil=None, drop=0):
    manifest = make_manifest(params, version, fingerprint or fingerprint_of(params), in_flight)
    parts = list(chunks(params, manifest, 1000))
    if spoil is not None:
        parts[spoil] = bytes([parts[spoil][0] ^ 1]) + parts[spoil][1:]
    parts = parts[: len(parts) - drop]
    first = pb.WeightsChunk(manifest=manifest.to_json())
    return client.PushWeights(iter([first, *(pb.WeightsChunk(data=part) for part in parts)]))


def test_weights_arrive_by_stream_and_by_path(serving):
    _, client = serving(make_driver(weights(0)), load=load)
    requests = batch(*make_requests(1))
    old = client.responses(requests)
    reply = push(client, weights(1), 8)
    assert (reply.version, reply.fingerprint) == (8, fingerprint_of(weights(1)))
    new = client.responses(requests)
    assert [piece.tokens.tolist() for piece in new] != [piece.tokens.tolist() for piece in old]
    assert {8} == {version for piece in new for version in piece.version.tolist()}
    reply = client.UpdateWeights(
        pb.UpdateWeightsRequest(path="0", version=9, fingerprint=fingerprint_of(weights(0)))
    )
    assert (reply.version, reply.fingerprint) == (9, fingerprint_of(weights(0)))
    for piece, want in zip(client.responses(requests), old, strict=True):
        assert piece.tokens.tolist() == want.tokens.tolist()
        assert set(piece.version.tolist()) == {9}
    reply = client.UpdateWeights(pb.UpdateWeightsRequest(version=10))
    assert (reply.version, reply.fingerprint) == (10, fingerprint_of(weights(0)))
    assert json.loads(client.Stats().json)["version"] == 10


def test_weights_that_do_not_arrive_whole_change_nothing(client):
    failed = grpc.StatusCode.FAILED_PRECONDITION
    old = json.loads(client.Stats().json)
    update = lambda **fields: client.UpdateWeights(pb.UpdateWeightsRequest(**fields))  # noqa: E731
    refused(INVALID, "did not arrive as it was sent", lambda: push(client, weights(1), 8, spoil=1))
    refused(INVALID, "the stream ended in", lambda: push(client, weights(1), 8, drop=1))
    refused(INVALID, "a manifest", lambda: client.PushWeights(iter([])))
    refused(INVALID, "no JSON", lambda: client.PushWeights(iter([pb.WeightsChunk(manifest=b"x")])))
    wrong = random_params(NETWORK, 3) | {"embed": np.zeros((3, 4), np.float32)}
    refused(INVALID, "embed has shape [3, 4]", lambda: push(client, wrong, 8))
    refused(failed, "have the fingerprint", lambda: push(client, weights(1), 8, fingerprint="x"))
    message = "have the fingerprint"
    refused(failed, message, lambda: update(path="1", version=8, fingerprint="abc"))
    refused(failed, message, lambda: update(version=8, fingerprint="abc"))
    message = "can't take the weights from broken: OSError: [Errno 5] no such disk"
    refused(failed, message, lambda: update(path="broken", version=8))
    refused(failed, "embed is float32 [2, 2]", lambda: update(path="narrow", version=8))
    refused(INVALID, "a version must be in 0..", lambda: update(path="1", version=-1))
    refused(INVALID, "a version must be in 0..", lambda: update(path="1", version=1 << 31))
    new = json.loads(client.Stats().json)
    assert (new["version"], new["fingerprint"]) == (old["version"], old["fingerprint"])
    same(client.responses(batch(*make_requests(1))), local_rollout(1))


def stalled(client, params, parts=1):
    """A stream of weights that stands still after so many of its messages, and what ends it."""
    manifest, go = make_manifest(params, 8, fingerprint_of(params), False), threading.Event()

    def messages():
        first = pb.WeightsChunk(manifest=manifest.to_json())
        data = [pb.WeightsChunk(data=part) for part in chunks(params, manifest, 1000)]
        yield from [first, *data][:parts]
        go.wait(20)

    call = caller(client.channel, "PushWeights").future(messages(), timeout=WAIT)
    return call, go


def test_a_stream_of_weights_that_stalls_ends(serving, monkeypatch):
    monkeypatch.setattr(servicer, "_PATIENCE", 0.3)
    _, client = serving(make_driver(weights(0)), load=load)
    call, go = stalled(client, weights(1), parts=2)
    time.sleep(0.1)
    start = time.monotonic()
    # It waits for the stalled one and no longer.
    assert client.UpdateWeights(pb.UpdateWeightsRequest(path="1", version=9)).version == 9
    assert time.monotonic() - start < 5
    assert call.exception(5).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "nothing came of the weights for 0.3 s" in call.exception().details()
    go.set()


def test_a_stream_that_has_not_begun_keeps_nobody_waiting(serving):
    _, client = serving(make_driver(weights(0)))
    call, go = stalled(client, weights(1), parts=0)
    time.sleep(0.1)
    assert push(client, weights(1), 9).version == 9
    assert not call.done()
    call.cancel()
    go.set()
    bad = iter([pb.WeightsChunk(manifest=b"{}")])
    refused(INVALID, "version must be an integer", lambda: client.PushWeights(bad))
    manifest = make_manifest(weights(1), 8, fingerprint_of(weights(1)), False)
    idle = [pb.WeightsChunk(manifest=manifest.to_json()), pb.WeightsChunk()]
    refused(INVALID, "a message without data", lambda: client.PushWeights(iter(idle)))


def test_stop_does_not_wait_for_a_checkpoint():
    go, reading, before = threading.Event(), threading.Event(), threading.enumerate()

    def slow(path):
        reading.set()
        assert go.wait(20)
        return weights(1)

    server = RolloutServer(make_driver(weights(0)), load=slow)
    client = Client(server)
    update = caller(client.channel, "UpdateWeights").future(
        pb.UpdateWeightsRequest(path="1", version=9), timeout=WAIT
    )
    assert reading.wait(10)
    start = time.monotonic()
    server.stop()
    assert time.monotonic() - start < 2
    assert update.exception(5) is not None
    client.channel.close()
    # Nobody waits for a daemon.
    assert [t.daemon for t in threading.enumerate() if t.name == "rollout-weights"] == [True]
    go.set()
    assert threads_left(before) == []


def test_weights_that_find_no_room_change_nothing(serving, monkeypatch):
    driver = make_driver(weights(0))
    _, client = serving(driver, load=load)

    def full(params):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile allocating")

    monkeypatch.setattr(driver.store, "_prepare", full)
    failed = grpc.StatusCode.FAILED_PRECONDITION
    said = "RESOURCE_EXHAUSTED: Out of memory while allocating"
    told = refused(failed, said, lambda: push(client, weights(1), 8))
    assert told.startswith("can't take the weights that were pushed: JaxRuntimeError")
    path = pb.UpdateWeightsRequest(path="1", version=9)
    assert "the weights from 1: " in refused(failed, said, client.UpdateWeights, path)
    same(client.responses(batch(*make_requests(1))), local_rollout(1))


def test_requests_for_other_weights_are_refused(serving):
    """Two trainers that count alike: their version numbers say nothing."""
    driver = slow_driver()
    _, client = serving(driver)
    found = json.loads(client.Stats().json)["fingerprint"]
    mine = pack_requests(some(2)._replace(weights_fingerprint=found))
    assert len(unpack_responses(client.Generate(mine)).num_tokens) == 2
    failed = grpc.StatusCode.FAILED_PRECONDITION
    other = pack_requests(some(2)._replace(weights_fingerprint="0000ffff"))
    told = refused(failed, "the request is for 0000ffff", client.Generate, other)
    assert f"version 1 here have the fingerprint {found}" in told
    # Taken while they were in use, answered when others have their number.
    waiting = caller(client.channel, "Generate").future(
        pack_requests(long(1)._replace(weights_fingerprint=found)), timeout=WAIT
    )
    until(lambda: driver.stats()["slots_busy"])
    driver.update({"w": np.ones(1, np.float32)}, 1, in_flight=True)
    assert waiting.exception(WAIT).code() == failed
    assert f"the request is for {found}" in waiting.exception().details()
    # Newer ones of the same trainer are its own affair.
    driver.update({"w": np.zeros(1, np.float32)}, 1)
    waiting = caller(client.channel, "Generate").future(
        pack_requests(long(1)._replace(weights_fingerprint=found)), timeout=WAIT
    )
    until(lambda: driver.stats()["slots_busy"])
    driver.update({"w": np.ones(1, np.float32)}, 2, in_flight=True)
    assert set(unpack_responses(waiting.result()).version.tolist()) == {1, 2}


class RoutedEngine(NullEngine):
    routing_shape = (2, 3)


def test_what_never_began_has_its_prompts_experts_unrecorded(serving):
    driver = RolloutDriver(RoutedEngine(2), ParamStore({"w": jax.numpy.zeros(1)}, 1))
    _, client = serving(driver)
    client.Pause()
    requests = some(3, prompt=(1, 2, 3, 4), request_id="mine")._replace(want_routing=True)
    waiting = caller(client.channel, "Generate").future(pack_requests(requests), timeout=WAIT)
    until(lambda: driver.stats()["waiting"] == 3)
    assert client.Abort(pb.AbortRequest(request_id=["mine"])).aborted == 3
    done = unpack_responses(waiting.result())
    assert done.finish.tolist() == [ABORT] * 3
    np.testing.assert_array_equal(done.routing, np.full((12, 2, 3), -1))


class Watched:
    """A tokenizer that says in which threads it worked."""

    stop_ids = ()

    def __init__(self):
        self.threads = []

    def encode(self, text):
        self.threads.append(threading.current_thread().name)
        return [1, 2]

    def decode(self, ids):
        return "x" * len(ids)


def test_texts_are_cut_into_tokens_beside_the_loop_and_only_if_they_may_fit(serving):
    tokenizer = Watched()
    _, client = serving(null_driver(2), tokenizer=tokenizer)

    def decode(text):
        content = pb.DecodeRequest.TextContent(text=text)
        return client.Decode(pb.DecodeRequest(text_content=content, max_tokens=3))

    assert len(stream_tokens(decode("abc"))) == 3
    assert tokenizer.threads
    assert "rollout-loop" not in tokenizer.threads
    # 256 tokens of at most 128 characters each.
    del tokenizer.threads[:]
    refused(INVALID, "has 32769 characters, 256 tokens have at most 32768", decode, "x" * 32769)
    assert tokenizer.threads == []
    assert decode("x" * 32768)


def test_calls_and_messages_have_a_limit(serving):
    driver = null_driver(2, max_waiting=4)
    _, client = serving(driver)
    calls = [stalled(client, {"w": np.zeros(1, np.float32)}, parts=0) for _ in range(70)]
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    refused(exhausted, "oncurrent", client.Stats)
    for call, go in calls:
        call.cancel()
        go.set()
    until(lambda: not [call for call, _ in calls if not call.done()])
    time.sleep(0.1)
    assert client.Stats().json
    big = pb.GenerateRequest(prompt_tokens=bytes(9 << 20))
    refused(exhausted, "larger than max", client.Generate, big)
    assert len(client.responses(some(2))) == 2


class SlowEngine(NullEngine):
    def generate(self, params, state):
        time.sleep(0.001)
        return super().generate(params, state)


def slow_driver(slots=4, **options):
    return RolloutDriver(SlowEngine(slots), ParamStore({"w": jax.numpy.zeros(1)}, 1), **options)


def long(count, **changes):
    return some(count, prompt=(1,), **{"max_tokens": 500} | changes)


def until(check):
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_abort_pause_and_resume_over_the_wire(serving):
    driver = slow_driver()
    _, client = serving(driver)
    call = caller(client.channel, "Generate")
    future = call.future(pack_requests(long(6, request_id="mine")), timeout=WAIT)
    until(lambda: driver.stats()["slots_busy"])
    client.Pause(pb.PauseRequest(drain=False))
    steps = driver.stats()["steps"]
    time.sleep(0.03)
    assert driver.stats()["steps"] == steps
    client.Resume()
    until(lambda: driver.stats()["steps"] > steps)
    assert client.Abort(pb.AbortRequest(request_id=["other"])).aborted == 0
    assert client.Abort(pb.AbortRequest(request_id=["mine"])).aborted == 6
    done = unpack_responses(future.result())
    assert done.finish.tolist() == [ABORT] * 6
    assert len(done.tokens) == done.num_tokens.sum()
    assert client.Abort().aborted == 0
    client.Pause(pb.PauseRequest(drain=True))
    client.Resume()
    assert len(client.responses(some(3))) == 3


def test_a_client_that_leaves_frees_its_slots(serving):
    driver = slow_driver()
    _, client = serving(driver)
    generate = caller(client.channel, "Generate").future(pack_requests(long(3)), timeout=WAIT)
    content = pb.DecodeRequest.TokenContent(token_ids=[1])
    request = pb.DecodeRequest(token_content=content, max_tokens=500)
    decode = caller(client.channel, "Decode")(request)
    next(decode)
    until(lambda: driver.stats()["slots_busy"] == 4)
    generate.cancel()
    decode.cancel()
    until(lambda: driver.stats()["slots_busy"] == 0)
    # Slots are free before whoever delivers has counted.
    until(lambda: driver.stats()["requests"]["abort"] == 4)
    late = caller(client.channel, "Generate")
    with pytest.raises(grpc.RpcError) as caught:
        late(pack_requests(long(1)), timeout=0.05)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: driver.stats()["slots_busy"] == 0)


def test_a_full_queue_is_said(serving):
    driver = slow_driver(max_waiting=4)
    _, client = serving(driver)
    client.Pause()
    waiting = caller(client.channel, "Generate").future(pack_requests(long(4)), timeout=WAIT)
    until(lambda: driver.stats()["waiting"] == 4)
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    refused(exhausted, "4 of at most 4", client.Generate, pack_requests(long(1)))
    content = pb.DecodeRequest.TokenContent(token_ids=[1])
    request = pb.DecodeRequest(token_content=content, max_tokens=5)
    refused(exhausted, "4 of at most 4", client.Decode, request)
    refused(INVALID, "never fits", client.Generate, pack_requests(long(5)))
    client.Resume()
    assert len(unpack_responses(waiting.result()).num_tokens) == 4


class BrokenEngine(NullEngine):
    def generate(self, params, state):
        raise RuntimeError("out of memory")


def test_a_broken_engine_is_internal_and_the_process_lives(serving):
    _, client = serving(RolloutDriver(BrokenEngine(4), ParamStore({"w": jax.numpy.zeros(1)}, 1)))
    internal = grpc.StatusCode.INTERNAL
    message = "engine failed: RuntimeError: out of memory"
    refused(internal, message, client.Generate, pack_requests(some(6)))
    content = pb.DecodeRequest.TokenContent(token_ids=[1])
    request = pb.DecodeRequest(token_content=content, max_tokens=5)
    refused(internal, message, client.Decode, request)
    refused(internal, message, client.Pause)
    assert not client.HealthCheck().is_live
    assert not json.loads(client.Stats().json)["is_live"]


def test_stop_with_requests_in_flight():
    before = threading.enumerate()
    driver = slow_driver()
    server = RolloutServer(driver)
    client = Client(server)
    call = caller(client.channel, "Generate")
    waiting = [call.future(pack_requests(long(3)), timeout=WAIT) for _ in range(20)]
    content = pb.DecodeRequest.TokenContent(token_ids=[1])
    decode = caller(client.channel, "Decode")
    streams = [decode(pb.DecodeRequest(token_content=content, max_tokens=500)) for _ in range(20)]
    until(lambda: driver.stats()["waiting"] == 76)
    start = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - start < 2
    for future in waiting:
        assert future.exception(5).code() == grpc.StatusCode.UNAVAILABLE
        assert "the server is stopping" in future.exception().details()
    for stream in streams:
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    client.channel.close()
    assert threads_left(before) == []


def test_a_thousand_requests_with_vanishing_clients_and_malformed_requests(serving):
    driver = null_driver(16, max_waiting=2000, stream_tokens=8)
    _, client = serving(driver)
    names = list(MALFORMED)
    rng = np.random.default_rng(0)
    kinds = rng.permutation(["bad"] * 50 + ["gone"] * 100 + ["batch"] * 300 + ["stream"] * 550)
    decode, generate = (caller(client.channel, name) for name in ("Decode", "Generate"))

    def begin(number):
        kind, tokens = kinds[number], int(number % 60 + 1)
        if kind == "bad":
            return decode(malformed(names[number % len(names)])[0], timeout=WAIT)
        if kind == "batch":
            requests = some(prompt=(number,), max_tokens=tokens)
            return generate.future(pack_requests(requests), timeout=WAIT)
        content = pb.DecodeRequest.TokenContent(token_ids=[number])
        tokens = 250 if kind == "gone" else tokens
        asked = pb.DecodeRequest(token_content=content, max_tokens=tokens, has_bos=True)
        return decode(asked, timeout=WAIT)

    def end(number, call):
        kind, tokens = kinds[number], int(number % 60 + 1)
        if kind == "bad":
            refused(INVALID, malformed(names[number % len(names)])[1], list, call)
        elif kind == "batch":
            found = unpack_responses(call.result()).tokens.tolist()
            assert found == [(number + n) % 1000 for n in range(tokens)]
        elif kind == "stream":
            assert stream_tokens(call) == [(number + n) % 1000 for n in range(tokens)]

    calls = [begin(number) for number in range(1000)]
    for number in np.flatnonzero(kinds == "gone").tolist():
        if number % 2:
            next(calls[number])
        calls[number].cancel()
    for number, call in enumerate(calls):
        end(number, call)
    until(lambda: not (driver.stats()["slots_busy"] or driver.stats()["waiting"]))
    counts = driver.stats()["requests"]
    assert counts["length"] + counts["abort"] + counts["refused"] <= 1000
    assert counts["length"] >= 850
    assert counts["failed"] == 0
    assert driver._open == {}
    assert sorted(driver._slots._free) == list(range(16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: null_driver(64), lambda: make_driver(weights(0))], ids=["null", "tiny"]
)
def test_memory_is_flat_over_20000_requests(serving, make):
    driver = make()
    _, client = serving(driver)

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def thousand():
        for _ in range(10):
            assert len(client.responses(some(100, max_tokens=8))) == 100

    for _ in range(5):
        thousand()
    start = resident()
    for _ in range(20):
        thousand()
    assert resident() - start < 4 << 20
    assert driver.stats()["requests"]["length"] == 25000


def test_only_this_machine_unless_told_otherwise(serving):
    driver = null_driver(2)
    server, _ = serving(driver)
    # Not reachable by the name that the machine has for others.
    other = socket.gethostbyname(socket.gethostname())
    if not other.startswith("127."):
        with socket.socket() as outside:
            assert outside.connect_ex((other, server.port)) != 0
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(RolloutError, match=r"needs TLS and a token"):
            RolloutServer(driver, host=host)
        with pytest.raises(RolloutError, match=r"other machines: that needs TLS \("):
            RolloutServer(driver, host=host, token="x")
    assert driver.healthy()
    open_server, _ = serving(null_driver(2), host="0.0.0.0", insecure=True)
    assert open_server.port


def test_a_taken_port_is_an_error(serving):
    server, _ = serving(null_driver(2))
    before, driver = threading.enumerate(), null_driver(2)
    with pytest.raises(RolloutError, match=f"can't serve at 127.0.0.1:{server.port}"):
        RolloutServer(driver, port=server.port)
    assert threads_left(before) == []


def test_a_token_locks_every_method(serving):
    server, stranger = serving(null_driver(2), token="sésame")
    code = grpc.StatusCode.UNAUTHENTICATED
    for name, method in METHODS.items():
        message = method.request()
        refused(code, "Bearer TOKEN", getattr(stranger, name),
                iter([message]) if method.client_streams else message)  # fmt: skip
    for secret in ("Bearer sesame", "sesame", "Bearer ", "Bearer sesamee"):
        wrong = Client(server, secret=secret)
        refused(code, "token is missing or wrong", wrong.HealthCheck)
        # What strangers send is not read: here it would be too long.
        big = pb.GenerateRequest(prompt_tokens=bytes(9 << 20))
        refused(code, "token is missing or wrong", wrong.Generate, big)
        wrong.channel.close()


def test_the_token_opens(serving):
    server, _ = serving(null_driver(2), token="sesame")
    friend = Client(server, secret="Bearer sesame")
    assert friend.HealthCheck().is_live
    assert len(friend.responses(some(2))) == 2
    friend.channel.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls(tmp_path, serving):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    server, plain = serving(null_driver(2), tls=(certificate, key), token="sesame")
    trusted = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
    friend = Client(server, secret="Bearer sesame", credentials=trusted)
    assert len(friend.responses(some(2))) == 2
    friend.channel.close()
    with pytest.raises(grpc.RpcError):
        plain.HealthCheck()
    driver = null_driver(2)
    with pytest.raises(RolloutError, match=r"TLS: can't read .*nothing.pem: No such file"):
        RolloutServer(driver, tls=(str(tmp_path / "nothing.pem"), key))
    driver.stop()


def test_metrics_stay_here_unless_told_otherwise(serving):
    server, _ = serving(null_driver(2), host="0.0.0.0", insecure=True, metrics_port=0)
    other = socket.gethostbyname(socket.gethostname())
    if not other.startswith("127."):
        with socket.socket() as outside:
            assert outside.connect_ex((other, server.metrics_port)) != 0
    assert server.metrics._open[0].server_address[0] == "127.0.0.1"
    shown, _ = serving(null_driver(2), metrics_host="0.0.0.0", metrics_port=0)
    assert shown.metrics._open[0].server_address[0] == "0.0.0.0"


def test_metrics_are_shown_and_closed(serving):
    driver = null_driver(3)
    server, client = serving(driver, metrics_port=0)
    client.responses(some(4, max_tokens=6))
    refused(INVALID, "empty", client.Generate, pack_requests(some(prompt=())))
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with urllib.request.urlopen(url) as answer:
        lines = answer.read().decode().splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert shown['rollout_requests_total{outcome="length"}'] == "4.0"
    assert shown['rollout_requests_total{outcome="refused"}'] == "1.0"
    assert shown['rollout_tokens_total{kind="response"}'] == "24.0"
    assert shown['rollout_tokens_total{kind="prompt"}'] == "12.0"
    assert shown["rollout_slots"] == "3.0"
    assert shown["rollout_slots_busy"] == "0.0"
    assert shown["rollout_waiting"] == "0.0"
    assert shown["rollout_version"] == "1.0"
    assert float(shown["rollout_step_seconds_count"]) >= 12
    assert float(shown["rollout_step_seconds_sum"]) > 0
    assert float(shown["rollout_prefill_seconds_count"]) == 2
    assert not [name for name in shown if name.startswith(("python_", "process_", "jetstream_"))]
    assert server.metrics.text().decode().splitlines()[0].startswith("# HELP rollout_requests")
