"""What a token costs between the engine and whoever asked for it: CPU time, without a model.

  python benchmarks/serving_overhead.py

The engine here makes numbers in place of tokens, in numpy, one step per call, and its own time is
taken off. In-process: the whole process. gRPC: server and client each in a process of its own.
Microseconds of CPU per token, user and system, all threads; the best of `--repeats`.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import grpc
import jax
import numpy as np

from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.backend import seeded_sampling
from s3ac_jax.rollout.server.driver import RolloutDriver
from s3ac_jax.rollout.server.grpc_server import RolloutServer
from s3ac_jax.rollout.server.sinks import WholeSink
from s3ac_jax.rollout.server.slot_engine import RUNNING, RolloutTokens
from s3ac_jax.rollout.server.store import ParamStore
from s3ac_jax.rollout.wire import (
    CHANNEL_OPTIONS,
    LENGTH,
    Requests,
    caller,
    pack_requests,
    unpack_responses,
)

PROMPT_TOKENS, RESPONSE_TOKENS = 16, 64


class NullEngine:
    """What RolloutDriver asks of an engine. Token number n of a response is (sum of prompt + n)."""

    steps, insert_batch, vocab_size, stop_ids, routing_shape = 1, 16, 1000, (), None

    def __init__(self, slots: int, cache_tokens: int = 512, max_prompt_tokens: int = 256):
        self.max_concurrent_decodes = slots
        self.cache_tokens, self.max_prompt_tokens = cache_tokens, max_prompt_tokens
        self.serial = 0

    def init_decode_state(self):
        # number of the next token, tokens made, tokens asked for
        return np.zeros((3, self.max_concurrent_decodes), np.int32)

    def prefill_many(self, params, prompts):
        return np.array([prompt.sum() for prompt in prompts])

    def insert_many(self, prefix, state, rows, slots, sampling):
        state[0, slots] = prefix[rows]
        state[1, slots] = 0
        state[2, slots] = sampling.max_tokens
        return prefix, state

    def generate(self, params, state):
        data = np.empty((self.max_concurrent_decodes, 6), np.int32)
        active = state[1] < state[2]
        state[1] += active
        np.remainder(state[0], self.vocab_size, out=data[:, 0])
        state[0] += 1
        data[:, 1] = active
        data[:, 2] = state[1]
        data[:, 3] = 0
        data[:, 4] = params.get().version
        data[:, 5] = np.where(state[1] < state[2], RUNNING, LENGTH)
        return state, RolloutTokens(data, (0, 1), (1, 2), (2, 3), 1)

    def release(self, state, slots):
        state[2, slots] = 0
        return state

    def get_tokenizer(self):
        return None

    def build_tokenizer(self, metadata=None):
        return None


def null_driver(slots: int, **options) -> RolloutDriver:
    """A running driver over a NullEngine."""
    return RolloutDriver(NullEngine(slots), ParamStore({"w": jax.numpy.zeros(1)}, 1), **options)


def batch(rows: int, tokens: int = RESPONSE_TOKENS) -> Requests:
    """`rows` requests, each with a prompt of its own."""
    sampling = seeded_sampling(np.arange(rows), temperature=1.0, max_tokens=tokens, stop_ids=())
    lengths = np.full(rows, PROMPT_TOKENS, np.int32)
    prompts = np.ones(rows * PROMPT_TOKENS, np.int32)
    return Requests(prompts, lengths, np.arange(rows, dtype=np.int32), sampling)


def best(work, tokens: int, repeats: int, cpu=time.process_time) -> float:
    """Least CPU microseconds per token of `work`, after one run that is not counted."""
    work()
    found = []
    for _ in range(repeats):
        start = cpu()
        work()
        found.append((cpu() - start) / tokens * 1e6)
    return min(found)


def bare(slots: int, rows: int, repeats: int) -> float:
    """The engine's own cost: its steps in a loop, nobody served."""
    engine, store = NullEngine(slots), ParamStore({"w": jax.numpy.zeros(1)}, 1)
    requests = batch(slots)

    def work():
        for _ in range(rows // slots):
            state = engine.init_decode_state()
            engine.insert_many(
                np.zeros(slots, np.int32), state, np.arange(slots), np.arange(slots),
                requests.sampling,
            )  # fmt: skip
            for _ in range(RESPONSE_TOKENS):
                state, _ = engine.generate(store, state)

    return best(work, rows * RESPONSE_TOKENS, repeats)


def in_process(slots: int, rows: int, repeats: int) -> float:
    """Through a driver and a sink of this process."""
    driver, requests = null_driver(slots), batch(rows)

    def work():
        sink = WholeSink(rows)
        driver.submit(requests, sink)
        assert sum(len(piece.tokens) for piece in sink.result()) == rows * RESPONSE_TOKENS

    try:
        return best(work, rows * RESPONSE_TOKENS, repeats)
    finally:
        driver.stop()


def serve(slots: int, stream_tokens: int) -> None:
    """A server that says its port, then its CPU seconds for every line it is sent."""
    driver = null_driver(slots, stream_tokens=stream_tokens)
    server = RolloutServer(driver)
    print(server.port, flush=True)
    for _ in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, flush=True)
    server.stop()


def over_grpc(slots: int, rows: int, repeats: int, *, stream_tokens: int = 0) -> list[float]:
    """Server and client, with Generate, or with `rows` Decode streams at a time."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(slots), "--stream-tokens", str(stream_tokens)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with (
        process,
        grpc.insecure_channel(
            f"127.0.0.1:{int(process.stdout.readline())}", CHANNEL_OPTIONS
        ) as channel,
    ):
        message = pack_requests(batch(rows))
        generate, decode = caller(channel, "Generate"), caller(channel, "Decode")

        def one_batch():
            done = unpack_responses(generate(message))
            assert len(done.tokens) == rows * RESPONSE_TOKENS

        def streams():
            content = pb.DecodeRequest.TokenContent(token_ids=[1] * PROMPT_TOKENS)
            asked = pb.DecodeRequest(
                max_tokens=RESPONSE_TOKENS, token_content=content, has_bos=True
            )
            for stream in [decode(asked) for _ in range(rows)]:
                for _ in stream:
                    pass

        def used() -> np.ndarray:
            process.stdin.write("\n")
            process.stdin.flush()
            return np.array([float(process.stdout.readline()), time.process_time()])

        work = streams if stream_tokens else one_batch
        work()
        found = []
        for _ in range(repeats):
            start = used()
            work()
            found.append((used() - start) / (rows * RESPONSE_TOKENS) * 1e6)
        process.stdin.close()
    return np.min(found, axis=0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slots", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", type=int)
    parser.add_argument("--stream-tokens", type=int, default=8)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.stream_tokens or 8)
        return
    for slots in args.slots:
        rows = max(256, 2 * slots)
        own = bare(slots, rows, args.repeats)
        server, client = over_grpc(slots, rows, args.repeats)
        stream, reader = over_grpc(slots, rows, args.repeats, stream_tokens=args.stream_tokens)
        found = {
            "slots": slots,
            "engine": own,
            "in_process": in_process(slots, rows, args.repeats) - own,
            "generate_server": server - own,
            "generate_client": client,
            "decode_server": stream - own,
            "decode_client": reader,
        }
        print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()
