"""A small engine behind a driver, and 64 mixed requests, that the tests of the server share."""

import functools
import importlib.util
import threading
import time
from pathlib import Path

import jax
import numpy as np

from s3ac_jax.core.types import Prompt
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.token_logp import before, token_logp
from s3ac_jax.rollout.backend import Sampling, seeded_sampling
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout
from s3ac_jax.rollout.server.driver import RolloutDriver
from s3ac_jax.rollout.server.sinks import WholeSink
from s3ac_jax.rollout.server.slot_engine import JetStreamEngine
from s3ac_jax.rollout.server.store import ParamStore
from s3ac_jax.rollout.wire import Requests
from tests.helpers import random_params, tiny_spec

# Not by name: JetStream's wheel installs a package called benchmarks.
_path = Path(__file__).parents[4] / "benchmarks" / "serving_overhead.py"
_found = importlib.util.spec_from_file_location("serving_overhead", _path)
overhead = importlib.util.module_from_spec(_found)
_found.loader.exec_module(overhead)
NullEngine, null_driver = overhead.NullEngine, overhead.null_driver

# The head of its own lets weights differ where keys and values do not.
SPEC = tiny_spec(num_layers=2, tie_embeddings=False)
NETWORK = actor_network(SPEC)
SLOTS, STEPS, INSERT = 16, 4, 4
PROMPT_TOKENS, RESPONSE_TOKENS = 12, 20
CACHE_TOKENS = PROMPT_TOKENS + RESPONSE_TOKENS
STOPS = (1, 5)
ROWS = 64


@functools.cache
def engine() -> Engine:
    # One object for all tests: it is what compiled programs are found by.
    return Engine(
        NETWORK, slots=SLOTS, cache_tokens=CACHE_TOKENS, steps_per_dispatch=STEPS, stop_ids=STOPS
    )


@functools.cache
def weights(seed: int):
    return random_params(NETWORK, seed, std=0.3)


def make_engine(params, version=7, **changes) -> JetStreamEngine:
    store = ParamStore.of(engine(), params, version)
    limits = {"max_prompt_tokens": PROMPT_TOKENS, "insert_batch": INSERT}
    return JetStreamEngine(engine(), store, **limits | changes)


def make_driver(params, version=7, *, kind=make_engine, **options) -> RolloutDriver:
    slot_engine = kind(params, version)
    return RolloutDriver(slot_engine, slot_engine.store, **options)


def make_requests(seed, rows=ROWS, *, temperature=None, stops=STOPS, max_tokens=None):
    """Prompts of 1 to 12 tokens, four temperatures, limits of 4 to 20 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, PROMPT_TOKENS + 1, rows).astype(np.int32)
    tokens = rng.integers(SPEC.vocab_size, size=(rows, PROMPT_TOKENS)).astype(np.int32)
    if temperature is None:
        temperature = np.tile([0.0, 1.0, 0.7, 1.3], -(-rows // 4))[:rows]
    if max_tokens is None:
        max_tokens = rng.integers(4, RESPONSE_TOKENS + 1, rows)
    sampling = seeded_sampling(
        rng.integers(1 << 32, size=rows), temperature=temperature, max_tokens=max_tokens,
        stop_ids=stops, top_p=np.where(np.arange(rows) % 5 == 4, 0.8, 1.0),
        top_k=np.where(np.arange(rows) % 7 == 6, 5, 0),
    )  # fmt: skip
    return Prompt(np.arange(rows, dtype=np.int32), tokens, lengths), sampling


def batch(prompt, sampling, rows=None, **options) -> Requests:
    """The requests `rows`, in this order, every one with a prompt of its own."""
    rows = np.arange(len(prompt.index)) if rows is None else np.asarray(rows)
    parts = [prompt.tokens[n, : prompt.num_tokens[n]] for n in rows]
    return Requests(
        np.concatenate(parts), prompt.num_tokens[rows], np.arange(len(rows), dtype=np.int32),
        Sampling(*(field[rows] for field in sampling)), **options,
    )  # fmt: skip


def some(count=1, *, prompt=(3, 4, 5), n=1, **changes) -> Requests:
    """`count` equal prompts of n samples each, as long as they may be and never stopped."""
    rows = count * n
    fields = {"temperature": 1.0, "max_tokens": RESPONSE_TOKENS, "stop_ids": ()} | changes
    options = {name: fields.pop(name) for name in ("request_id",) if name in fields}
    return Requests(
        np.tile(np.asarray(prompt, np.int32), count), np.full(count, len(prompt), np.int32),
        np.repeat(np.arange(count, dtype=np.int32), n),
        seeded_sampling(np.arange(rows), **fields), **options,
    )  # fmt: skip


def ask(driver, requests, timeout=60):
    sink = WholeSink(len(requests.prompt_row))
    driver.submit(requests, sink)
    return sink.result(timeout)


@functools.cache
def local_rollout(seed: int, **options):
    """What LocalRollout makes of `make_requests(seed)` with `weights(0)`."""
    room = LocalRollout(
        engine(), insert_batch=INSERT, max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
    )  # fmt: skip
    room.update_weights(weights(0), 7)
    return room.generate(*make_requests(seed, **options))


def same(pieces, rollout, rows=None):
    """Token for token, and log-prob to 1e-5."""
    rows = range(len(rollout.num_tokens)) if rows is None else rows
    assert len(pieces) == len(rows)
    for piece, n in zip(pieces, rows, strict=True):
        count = rollout.num_tokens[n]
        assert piece.tokens.tolist() == rollout.tokens[n, :count].tolist()
        np.testing.assert_allclose(piece.logp, rollout.logp[n, :count], rtol=0, atol=1e-5)
        assert piece.finish == (0 if rollout.stopped[n] else 1)


@functools.cache
def _teacher():
    @jax.jit
    def score(params, tokens, ids, temperature):
        model = NETWORK.bind(params)
        hidden, _ = model(tokens, np.broadcast_to(np.arange(CACHE_TOKENS), ids.shape), ids)
        flat = before(hidden).reshape(-1, hidden.shape[-1])
        logp, _ = token_logp(flat, model.head(), tokens.reshape(-1), temperature=temperature)
        return logp.reshape(tokens.shape)

    return score


def teacher_logp(params, prompts, pieces, temperature=1.0):
    """Log-probs of every response's tokens when the whole sequence is read at once."""
    rows = len(pieces)
    tokens, ids = np.zeros((2, rows, CACHE_TOKENS), np.int32)
    for n, (prompt, piece) in enumerate(zip(prompts, pieces, strict=True)):
        whole = np.concatenate([prompt, piece.tokens])
        tokens[n, : len(whole)], ids[n, : len(whole)] = whole, 1
    logp = np.asarray(_teacher()(params, tokens, ids, temperature))
    return [
        logp[n, len(prompt) : len(prompt) + len(piece.tokens)]
        for n, (prompt, piece) in enumerate(zip(prompts, pieces, strict=True))
    ]


def threads_left(before, seconds=1.0):
    """Threads that were not in `before`, gRPC's own poller apart, and are alive after `seconds`.

    The threads of gRPC's client take a moment to see that their channel is closed.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = [
            thread.name
            for thread in threading.enumerate()
            if thread not in before and "poll_wrapper" not in thread.name
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
