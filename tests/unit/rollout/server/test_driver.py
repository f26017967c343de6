"""The driver in this process: equal to a plain loop, whatever is swapped, cut off or broken."""

import contextlib
import dataclasses
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("jetstream", reason="needs google-jetstream 0.2.2")

from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import MoeSpec
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh, shardings
from s3ac_jax.rollout.backend import RolloutError, Sampling, fingerprint_of
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.jetstream import orchestrator
from s3ac_jax.rollout.local import LocalRollout
from s3ac_jax.rollout.server.delivery import Delivery
from s3ac_jax.rollout.server.driver import RolloutDriver
from s3ac_jax.rollout.server.requests import samples_of, to_jobs
from s3ac_jax.rollout.server.sinks import (
    BadRequest,
    EngineFailed,
    QueueFull,
    Stopped,
    WholeSink,
)
from s3ac_jax.rollout.server.slot_engine import (
    RUNNING,
    JetStreamEngine,
    PromptWithSettings,
    columns,
)
from s3ac_jax.rollout.server.slots import Slots
from s3ac_jax.rollout.server.store import ParamStore, WrongFingerprint
from s3ac_jax.rollout.wire import ABORT, LENGTH
from tests.helpers import logp_oracle, random_params, tiny_spec
from tests.unit.rollout.server import serving
from tests.unit.rollout.server.serving import (
    NETWORK,
    ROWS,
    SLOTS,
    STEPS,
    NullEngine,
    ask,
    batch,
    local_rollout,
    make_driver,
    make_engine,
    make_requests,
    null_driver,
    same,
    some,
    teacher_logp,
    threads_left,
    weights,
)


@pytest.fixture
def stopping():
    """Stops drivers, and sees to it that nothing is left of them."""
    before, made = threading.enumerate(), []

    def add(driver):
        made.append(driver)
        return driver

    yield add
    start = time.monotonic()
    for driver in made:
        driver.stop()
    assert time.monotonic() - start < 2
    assert threads_left(before) == []


@pytest.fixture(scope="module")
def driver():
    driver = make_driver(weights(0))
    yield driver
    driver.stop()


def idle(driver):
    """Waits until nobody is served, and says what the driver counts then."""
    deadline = time.monotonic() + 20
    while (stats := driver.stats())["waiting"] or stats["slots_busy"]:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return stats


def test_64_mixed_requests_are_what_the_local_loop_makes_of_them(driver):
    rollout = local_rollout(1)
    same(ask(driver, batch(*make_requests(1))), rollout)
    assert (rollout.version[rollout.version >= 0] == 7).all()
    assert len(set(rollout.num_tokens.tolist())) > 8
    assert rollout.stopped.any()
    assert not rollout.stopped.all()


def test_a_bare_loop_over_the_jetstream_engine_says_the_same():
    engine, (prompt, sampling) = make_engine(weights(0)), make_requests(1)
    store, state = engine.store, engine.init_decode_state()
    waiting, free, owner = list(range(ROWS)), list(range(SLOTS)), {}
    made = [[] for _ in range(ROWS)]
    while waiting or owner:
        while waiting and free:
            row, slot = waiting.pop(0), free.pop()
            asked = PromptWithSettings(
                np.pad(prompt.tokens[row, : prompt.num_tokens[row]], (0, 3)),
                Sampling(*(field[row : row + 1] for field in sampling)),
            )
            prefix = engine.prefill(
                params=store, padded_tokens=asked, true_length=int(prompt.num_tokens[row])
            )
            state = engine.insert(prefix, state, slot=slot)
            owner[slot] = row
        state, result = engine.generate(store, state)
        data, found = np.asarray(result.data), columns(np.asarray(result.data), STEPS)
        for slot, row in list(owner.items()):
            valid = found.valid[slot]
            # Invalid ones only follow valid ones, and JetStream finds the length where it looks.
            assert (np.diff(valid.astype(int)) <= 0).all()
            made[row] += zip(found.tokens[slot][valid], found.logp[slot][valid], strict=True)
            assert data[slot, result.length_idx[0]] == len(made[row])
            if found.finish[slot] != RUNNING:
                free.append(slot)
                del owner[slot]
    rollout = local_rollout(1)
    for row, pairs in enumerate(made):
        count = rollout.num_tokens[row]
        assert [token for token, _ in pairs] == rollout.tokens[row, :count].tolist()
        logp = [value for _, value in pairs]
        np.testing.assert_allclose(logp, rollout.logp[row, :count], rtol=0, atol=1e-5)


class Channel:
    """What JetStream's own driver answers into."""

    def __init__(self):
        self.tokens, self.closed = [], threading.Event()

    def add_result(self, samples):
        self.tokens += samples[0].token_ids

    def close(self):
        self.closed.set()


def test_jetstreams_own_driver_runs_the_engine(capfd):
    # Greedy, as it knows nothing else; its limit counts whole calls of the engine.
    limits = np.random.default_rng(0).integers(1, 6, ROWS) * STEPS
    options = {"temperature": 0.0, "max_tokens": tuple(limits.tolist())}
    rollout, (prompt, _) = local_rollout(1, **options), make_requests(1, **options)
    engine = make_engine(weights(0))
    stock = orchestrator.Driver([engine], [engine], [engine.store], [engine.store], True, False)
    asked = []
    for row in range(ROWS):
        tokens = np.asarray(prompt.tokens[row, : prompt.num_tokens[row]])
        request = orchestrator.ActiveRequest(
            max_tokens=int(limits[row]), return_channel=Channel(), prefill_content=tokens,
            is_client_side_tokenization=True, history_path="goes on, so without a BOS",
        )  # fmt: skip
        stock.place_request_on_prefill_queue(request)
        asked.append(request.return_channel)
    for channel in asked:
        assert channel.closed.wait(60)
    stock.stop()
    for row, channel in enumerate(asked):
        assert channel.tokens == rollout.tokens[row, : rollout.num_tokens[row]].tolist()
    assert capfd.readouterr().out == ""


def test_logp_is_that_of_the_whole_sequence(driver):
    prompt, sampling = make_requests(2, 12)
    sequences = [prompt.tokens[n, : prompt.num_tokens[n]] for n in range(12)]
    for n, piece in enumerate(ask(driver, batch(prompt, sampling))):
        whole = np.concatenate([sequences[n], piece.tokens])
        temperature = float(sampling.temperature[n]) or 1.0
        want = logp_oracle(weights(0), serving.SPEC, whole, temperature=temperature)
        want = want[len(sequences[n]) - 1 :]
        np.testing.assert_allclose(piece.logp, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_order_and_company_do_not_matter(driver, seed):
    rng = np.random.default_rng(seed)
    rows = rng.permutation(ROWS)[: rng.integers(10, ROWS)]
    requests = make_requests(1)
    parts = np.array_split(rows, 5)
    sinks = [WholeSink(len(part)) for part in parts]
    for part, sink in zip(parts, sinks, strict=True):
        driver.submit(batch(*requests, part), sink)
        time.sleep(0.003)
    for part, sink in zip(parts, sinks, strict=True):
        same(sink.result(30), local_rollout(1), part)


def test_samples_of_one_prompt_share_its_prefill_and_nothing_else(stopping):
    driver = stopping(make_driver(weights(0)))
    # More samples than slots: the last ones wait for a slot, their prefix with them.
    requests = some(2, n=20, prompt=(3, 4, 5, 6))
    pieces = ask(driver, requests)
    assert driver.stats()["prefills"] == 2
    assert driver.stats()["prompt_tokens"] == 8
    alone = [
        ask(driver, requests._replace(
            tokens=requests.tokens[:4], lengths=requests.lengths[:1],
            prompt_row=np.zeros(1, np.int32),
            sampling=Sampling(*(field[n : n + 1] for field in requests.sampling)),
        ))[0]
        for n in (0, 17, 39)
    ]  # fmt: skip
    for n, piece in zip((0, 17, 39), alone, strict=True):
        assert pieces[n].tokens.tolist() == piece.tokens.tolist()
    assert len({tuple(piece.tokens) for piece in pieces}) == 40


def test_settings_of_several_samples_count_the_seed_on():
    requests = samples_of([3, 4], some().sampling._replace(seed=np.array([2**32 - 1], "u4")), 3, "")
    assert requests.sampling.seed.tolist() == [2**32 - 1, 0, 1]
    assert requests.prompt_row.tolist() == [0, 0, 0]
    assert requests.tokens.tolist() == [3, 4]


def test_experts_are_those_that_the_local_loop_records(stopping):
    moe = MoeSpec(num_experts=6, per_token=2, width=7, dense_layers=(1,))
    network = actor_network(tiny_spec(num_layers=3, moe=moe))
    core = Engine(
        network, slots=4, cache_tokens=serving.CACHE_TOKENS, steps_per_dispatch=STEPS,
        stop_ids=serving.STOPS, record_routing=True,
    )  # fmt: skip
    params, requests = random_params(network, 0), make_requests(1, 10)
    room = LocalRollout(core, insert_batch=2, max_prompt_tokens=12, max_response_tokens=20)
    room.update_weights(params, 7)
    rollout = room.generate(*requests)
    store = ParamStore(params, 7)
    engine = JetStreamEngine(core, store, max_prompt_tokens=12, insert_batch=2)
    driver = stopping(RolloutDriver(engine, store))
    pieces = ask(driver, batch(*requests, want_routing=True))
    same(pieces, rollout)
    for n, piece in enumerate(pieces):
        count = rollout.prompt.num_tokens[n] + rollout.num_tokens[n]
        np.testing.assert_array_equal(piece.routing, rollout.routing[n, :count])
        assert (piece.routing[:-1] >= 0).all()
        assert (piece.routing[-1] == -1).all()
    assert ask(driver, batch(*requests))[0].routing is None
    # One that is cut off before it has a slot was asked for its prompt's experts all the same.
    driver.pause()
    sink = WholeSink(1)
    driver.submit(batch(*requests, rows=[0], want_routing=True), sink).cancel()
    (piece,) = sink.result(10)
    assert piece.finish == ABORT
    shape = (requests[0].num_tokens[0], *core.routing_shape)
    np.testing.assert_array_equal(piece.routing, np.full(shape, -1))


def test_experts_of_a_prompt_are_those_of_the_weights_that_read_it():
    """Six samples and four slots: the last two begin under other weights, delivered late."""
    network = actor_network(tiny_spec(num_layers=2, moe=MoeSpec(6, 2, width=7)))
    core = Engine(
        network, slots=4, cache_tokens=32, steps_per_dispatch=STEPS, stop_ids=(),
        record_routing=True,
    )  # fmt: skip
    both = [random_params(network, seed, std=0.5) for seed in (0, 1)]
    prompt, sampling = make_requests(1, 1)
    want = []
    for params in both:
        room = LocalRollout(core, insert_batch=2, max_prompt_tokens=12, max_response_tokens=20)
        room.update_weights(params, 7)
        want.append(room.generate(prompt, sampling).routing[0, : prompt.num_tokens[0] - 1])
    assert (want[0] != want[1]).any()
    store = ParamStore.of(core, both[0], 7)
    slots = Slots(JetStreamEngine(core, store, max_prompt_tokens=12, insert_batch=4), store)
    sink = WholeSink(6)
    ids = prompt.tokens[0, : prompt.num_tokens[0]]
    slots.queue.extend(
        to_jobs(some(prompt=ids, n=6, max_tokens=4)._replace(want_routing=True), sink)
    )
    made = []
    while slots.queue or slots.busy.any():
        slots.admit()
        made.append(slots.step())
        store.set(store.ready(both[1], 8))
    delivery = Delivery(4, 32, 8, core.routing_shape)
    for one in made:
        delivery.take(one)
    for number, piece in enumerate(sink.result(0)):
        np.testing.assert_array_equal(piece.routing[: len(ids) - 1], want[number >= 4])


def test_with_one_width_the_bits_are_the_local_loops(stopping):
    kind = lambda params, version: make_engine(params, version, prompt_widths=())  # noqa: E731
    driver, rollout = stopping(make_driver(weights(0), kind=kind)), local_rollout(1)
    for n, piece in enumerate(ask(driver, batch(*make_requests(1)))):
        np.testing.assert_array_equal(piece.logp, rollout.logp[n, : rollout.num_tokens[n]])


def test_prompts_are_padded_to_few_widths():
    changed = dataclasses.replace(serving.engine(), cache_tokens=120)
    make = lambda **options: JetStreamEngine(  # noqa: E731
        changed, ParamStore({}, 0), insert_batch=4, **options
    )
    assert make(max_prompt_tokens=100).prompt_widths == [16, 32, 64, 100]
    assert make(max_prompt_tokens=12).prompt_widths == [12]
    assert make(max_prompt_tokens=100, prompt_widths=(50,)).prompt_widths == [50, 100]
    with pytest.raises(RolloutError, match=r"max_prompt_tokens must be in 1..119"):
        make(max_prompt_tokens=120)


def test_a_prompt_that_jetstream_cut_is_cut_and_kills_nobody():
    """Its driver keeps the last tokens that fit in its width, and the length of all of them."""
    engine = make_engine(weights(0))
    assert engine.max_prefill_length == 16
    cut = np.arange(16) % 17
    prefix = engine.prefill(params=engine.store, padded_tokens=cut, true_length=40)
    assert prefix.prompts[0].tolist() == cut[-12:].tolist()
    assert prefix.prefix.lengths[0] == 12
    assert prefix.sampling.max_tokens.tolist() == [20]
    with pytest.raises(RolloutError, match="existing prefix"):
        engine.prefill(
            params=engine.store, existing_prefix=prefix, padded_tokens=cut, true_length=3
        )


def test_weights_over_a_mesh(stopping):
    mesh = make_mesh(MeshSpec(tensor=2), jax.devices()[:2])
    params = jax.device_put(weights(0), shardings(NETWORK.axes, NETWORK.abstract, mesh))
    spread = [leaf for leaf in jax.tree.leaves(params) if not leaf.is_fully_replicated]
    assert spread
    kind = lambda params, version: make_engine(params, version, mesh=mesh)  # noqa: E731
    driver = stopping(make_driver(params, kind=kind))
    same(ask(driver, batch(*make_requests(1))), local_rollout(1))
    host = jax.tree.map(np.asarray, weights(1))
    driver.update(host, 8, fingerprint=fingerprint_of(host))
    embed = driver.store.get().params["embed"]
    assert embed.sharding.is_equivalent_to(params["embed"].sharding, 2)
    prompt, sampling = make_requests(4, 8, temperature=1.0)
    pieces = ask(driver, batch(prompt, sampling))
    prompts = [prompt.tokens[n, : prompt.num_tokens[n]] for n in range(8)]
    for piece, want in zip(pieces, teacher_logp(weights(1), prompts, pieces), strict=True):
        np.testing.assert_allclose(piece.logp, want, rtol=0, atol=1e-5)


class Stream:
    streams = True

    def __init__(self):
        self.pieces, self.ended = [], threading.Event()

    def put(self, sample, piece):
        self.pieces.append(piece)
        if piece.finish is not None:
            self.ended.set()

    def fail(self, error):
        self.pieces.append(error)
        self.ended.set()


def test_a_stream_is_the_whole_response_in_pieces(stopping):
    driver = stopping(make_driver(weights(0), stream_tokens=5))
    whole = ask(driver, some())[0]
    sink = Stream()
    driver.submit(some(), sink)
    assert sink.ended.wait(20)
    # The first piece as soon as there is a token, the others of at least five: steps make four.
    assert [len(piece.tokens) for piece in sink.pieces] == [4, 8, 8]
    assert [piece.finish for piece in sink.pieces] == [None, None, LENGTH]
    for field in ("tokens", "logp", "version"):
        parts = [getattr(piece, field) for piece in sink.pieces]
        assert np.concatenate(parts).tolist() == getattr(whole, field).tolist()


def check_versions(driver, swap, *, base, count=100, rows=24):
    """Asks all the time while `swap(version)` brings new weights; every token's log-prob is right.

    base: version -> weights.
    """
    prompt, _ = make_requests(3, rows)
    sampling = some(rows).sampling
    prompts = [prompt.tokens[n, : prompt.num_tokens[n]] for n in range(rows)]
    requests, stop, found = batch(prompt, sampling), threading.Event(), []

    def load():
        while not stop.is_set():
            found.append(ask(driver, requests))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for version in range(8, 8 + count):
            swap(version)
    finally:
        stop.set()
        thread.join()
    mixed, seen = 0, set()
    for pieces in found:
        scores = [teacher_logp(base(version), prompts, pieces) for version in range(3)]
        for n, piece in enumerate(pieces):
            want = np.stack([score[n] for score in scores])
            chosen = want[piece.version % 3, np.arange(len(piece.tokens))]
            np.testing.assert_allclose(piece.logp, chosen, rtol=0, atol=2e-5)
            assert (np.diff(piece.version) >= 0).all()
            mixed += len(set(piece.version.tolist())) > 1
            seen |= set(piece.version.tolist())
    return mixed, seen


def test_100_drained_swaps_under_load(stopping):
    driver = stopping(make_driver(weights(7 % 3), 7))
    mixed, seen = check_versions(
        driver, lambda version: driver.update(weights(version % 3), version),
        base=lambda version: weights(version % 3),
    )  # fmt: skip
    assert mixed == 0
    assert len(seen) > 10
    assert driver.stats()["version"] == 107


def test_100_swaps_in_flight_under_load(stopping):
    # Weights that differ in the head only, so that the keys and values in the slots stay right.
    def base(version):
        return weights(0) | {"lm_head": weights(version % 3)["lm_head"]}

    driver = stopping(make_driver(base(7), 7))

    def swap(version):
        driver.update(base(version), version, in_flight=True)
        time.sleep(0.002)

    mixed, seen = check_versions(driver, swap, base=base)
    assert mixed > 5
    assert len(seen) > 30


def test_a_prefix_of_old_weights_is_made_anew(monkeypatch, stopping):
    """20 samples, 16 slots: four wait with their prefix while the weights are exchanged."""
    driver = stopping(make_driver(weights(0)))
    step, stepped, go = driver.engine.generate, threading.Event(), threading.Event()

    def slow(params, state):
        stepped.set()
        assert go.wait(20)
        return step(params, state)

    monkeypatch.setattr(driver.engine, "generate", slow)
    sink = WholeSink(20)
    driver.submit(some(n=20), sink)
    assert stepped.wait(20)
    done = driver.begin_update(weights(1), 8, in_flight=True)
    go.set()
    done.result(20)
    pieces = sink.result(30)
    last = [piece for piece in pieces if (piece.version == 8).all()]
    assert len(last) == 4
    scores = teacher_logp(weights(1), [(3, 4, 5)] * 4, last)
    for piece, want in zip(last, scores, strict=True):
        np.testing.assert_allclose(piece.logp, want, rtol=0, atol=1e-5)


def test_an_update_that_is_not_what_was_sent_changes_nothing(driver):
    want = fingerprint_of(weights(1))
    with pytest.raises(WrongFingerprint, match=f"{want}.*12345678.*version 7 stays"):
        driver.update(weights(1), 8, fingerprint="12345678")
    with pytest.raises(RolloutError, match="final_norm is missing"):
        driver.update({k: v for k, v in weights(1).items() if k != "final_norm"}, 8)
    with pytest.raises(RolloutError, match="extra is unknown"):
        driver.update(weights(1) | {"extra": np.zeros(3)}, 8)
    with pytest.raises(RolloutError, match=r"embed is float32 \[3, 3\], the model reads"):
        driver.update(weights(1) | {"embed": np.zeros((3, 3), np.float32)}, 8)
    assert driver.stats()["version"] == 7
    assert driver.stats()["fingerprint"] == fingerprint_of(weights(0))
    same(ask(driver, batch(*make_requests(1))), local_rollout(1))


def test_weights_that_gave_nan_leave_nothing_behind(stopping):
    driver, requests = stopping(make_driver(weights(0))), batch(*make_requests(1))
    driver.update(jax.tree.map(lambda leaf: leaf * np.nan, weights(0)), 8)
    assert np.isnan(ask(driver, requests)[0].logp).all()
    driver.update(weights(0), 7)
    same(ask(driver, requests), local_rollout(1))


class NoisyEngine(NullEngine):
    """Says NaN where there is no token."""

    def generate(self, params, state):
        state, result = super().generate(params, state)
        nan = np.array(np.nan, np.float32).view(np.int32)
        result.data[:, 3] = np.where(result.data[:, 1] > 0, 0, nan)
        return state, result


def test_nan_in_a_slot_of_nobody_keeps_nobody_out(stopping):
    """A long response is under way; short ones beside it begin and end all the same."""
    engine = NoisyEngine(4, cache_tokens=1 << 20)
    driver = stopping(RolloutDriver(engine, ParamStore({"w": jax.numpy.zeros(1)}, 1)))
    handle = driver.submit(some(max_tokens=1 << 19), WholeSink(1))
    while driver.stats()["steps"] < 10:
        time.sleep(0.001)
    for _ in range(3):
        assert len(ask(driver, some(), timeout=5)[0].tokens) == 20
    assert driver.stats()["slots_busy"] == 1
    handle.cancel()


class SlowEngine(NullEngine):
    """An engine whose steps take a millisecond, so that things happen while it is at work."""

    def generate(self, params, state):
        time.sleep(0.001)
        return super().generate(params, state)


def slow_driver(slots=4, **options):
    return RolloutDriver(SlowEngine(slots), ParamStore({"w": jax.numpy.zeros(1)}, 1), **options)


def long(count, *, prompt=(1,), **changes):
    return some(count, prompt=prompt, **{"max_tokens": 400} | changes)


def test_abort_by_name_frees_the_slots_of_this_name(stopping):
    driver, first, other = stopping(slow_driver()), WholeSink(6), WholeSink(2)
    driver.submit(long(6, request_id="long"), first)
    driver.submit(some(2, request_id="short"), other)
    while driver.stats()["response_tokens"] < 20:
        time.sleep(0.002)
    assert driver.abort(["nobody"]) == 0
    assert driver.abort(["long"]) == 6
    assert driver.abort(["long"]) == 0
    pieces = first.result(5)
    assert [piece.finish for piece in pieces] == [ABORT] * 6
    # Four were at work, two had not begun.
    assert sorted(len(piece.tokens) > 0 for piece in pieces) == [False] * 2 + [True] * 4
    assert [piece.finish for piece in other.result(5)] == [LENGTH] * 2
    assert [piece.tokens.tolist() for piece in other.result()] == [list(range(12, 32))] * 2
    stats = idle(driver)
    assert stats["requests"] == {"stop": 0, "length": 2, "abort": 6, "refused": 0, "failed": 0}


def test_only_the_one_that_left_leaves_the_queue(stopping):
    driver = stopping(slow_driver(slots=1))
    driver.pause()
    sinks = [WholeSink(1) for _ in range(3)]
    handles = [driver.submit(some(), sink) for sink in sinks]
    handles[1].cancel()
    assert sinks[1].result(5)[0].finish == ABORT
    driver.resume()
    assert [sinks[n].result(5)[0].finish for n in (0, 2)] == [LENGTH, LENGTH]


def test_abort_everything(stopping):
    driver, sink = stopping(slow_driver()), WholeSink(9)
    driver.submit(long(9), sink)
    assert driver.abort() == 9
    assert [piece.finish for piece in sink.result(5)] == [ABORT] * 9
    idle(driver)


def test_a_slot_refilled_after_an_abort_is_not_aborted_too(stopping):
    driver = stopping(slow_driver(slots=1))
    for _ in range(30):
        gone, next_one = WholeSink(1), WholeSink(1)
        handle = driver.submit(long(1), gone)
        driver.submit(some(prompt=(5,)), next_one)
        time.sleep(0.003)
        handle.cancel()
        handle.cancel()
        assert next_one.result(5)[0].tokens.tolist() == list(range(5, 25))
        assert gone.result(5)[0].finish == ABORT


def test_pause_stands_still_and_resume_goes_on(stopping):
    driver, sink = stopping(slow_driver()), WholeSink(6)
    driver.submit(long(6), sink)
    while not driver.stats()["slots_busy"]:
        time.sleep(0.001)
    driver.pause()
    steps = driver.stats()["steps"]
    time.sleep(0.05)
    assert driver.stats()["steps"] == steps
    assert driver.stats()["paused"]
    with pytest.raises(RolloutError, match="resume, abort them, or update in flight"):
        driver.update({"w": np.zeros(1, np.float32)}, 2)
    driver.update({"w": np.zeros(1, np.float32)}, 2, in_flight=True)
    driver.resume()
    assert all(piece.version[-1] == 2 for piece in sink.result(10))
    assert [len(piece.tokens) for piece in sink.result()] == [400] * 6


def test_pause_with_drain_finishes_what_is_in_the_slots(stopping):
    driver, sink = stopping(slow_driver()), WholeSink(6)
    driver.submit(long(6, max_tokens=50), sink)
    while not driver.stats()["slots_busy"]:
        time.sleep(0.001)
    driver.pause(drain=True)
    stats = driver.stats()
    assert (stats["slots_busy"], stats["waiting"], stats["response_tokens"]) == (0, 2, 200)
    assert not driver.begin_update({"w": np.zeros(1, np.float32)}, 2).exception(5)
    driver.resume()
    assert [set(piece.version.tolist()) for piece in sink.result(10)] == [{1}] * 4 + [{2}] * 2


def test_a_drain_does_not_let_a_frozen_server_go_on(stopping):
    driver, sink = stopping(slow_driver()), WholeSink(2)
    driver.submit(long(2), sink)
    while not driver.stats()["slots_busy"]:
        time.sleep(0.001)
    driver.pause()
    steps = driver.stats()["steps"]
    drained = driver.begin_pause(drain=True)
    time.sleep(0.05)
    assert driver.stats()["steps"] == steps
    driver.pause()
    assert not drained.done()
    # Once nothing is in the slots, it holds.
    assert driver.abort() == 2
    assert drained.result(5) is None
    again = WholeSink(1)
    driver.submit(long(1), again)
    driver.resume()
    while not driver.stats()["slots_busy"]:
        time.sleep(0.001)
    late = driver.begin_pause(drain=True)
    driver.pause()
    assert not late.done()
    driver.resume()
    with pytest.raises(RolloutError, match="resumed by somebody before the pause held"):
        late.result(5)
    assert len(again.result(10)[0].tokens) == 400


def test_a_frozen_server_that_is_to_be_drained_rests(stopping):
    driver = stopping(slow_driver())
    driver.submit(long(2), WholeSink(2))
    while not driver.stats()["slots_busy"]:
        time.sleep(0.001)
    driver.pause()
    driver.begin_pause(drain=True)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_requests_for_other_weights_are_refused(stopping):
    driver = stopping(slow_driver())
    found = driver.stats()["fingerprint"]
    assert len(ask(driver, some()._replace(weights_fingerprint=found))) == 1
    with pytest.raises(WrongFingerprint, match=rf"version 1 here have .*{found}.* is for abcd1234"):
        ask(driver, some()._replace(weights_fingerprint="abcd1234"))
    assert driver.stats()["requests"]["refused"] == 1
    assert driver.submit(some(), WholeSink(1)).version == 1


def test_weights_of_the_host_go_straight_to_their_shards():
    mesh, seen = make_mesh(MeshSpec(fsdp=2)), []
    places = shardings(NETWORK.axes, NETWORK.abstract, mesh)

    def prepare(params):
        seen.append(jax.tree.map(lambda leaf: leaf.sharding, params))
        return NETWORK.in_compute_dtype(params)

    store = ParamStore(jax.device_put(weights(0), places), 1, prepare=prepare)
    new = store.ready(jax.tree.map(np.asarray, weights(1)), 2)
    assert seen == [places, places]
    assert new.fingerprint == fingerprint_of(weights(1))


def test_the_queue_has_an_end(stopping):
    driver, sink = stopping(slow_driver(max_waiting=8)), WholeSink(8)
    driver.pause()
    driver.submit(long(8, max_tokens=3), sink)
    with pytest.raises(QueueFull, match="8 of at most 8 requests wait"):
        driver.submit(some(), WholeSink(1))
    with pytest.raises(BadRequest, match="9 requests never fits in the queue of 8"):
        driver.submit(some(9), WholeSink(9))
    driver.resume()
    assert len(sink.result(5)) == 8
    assert len(ask(driver, some(8))) == 8
    assert driver.stats()["requests"]["refused"] == 2


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (some(prompt=()), "prompt 0 is empty"),
        (some(prompt=[1] * 13), "prompt 0 has 13 tokens, the limit is 12"),
        (some(2, prompt=(3, 99)), r"prompt 0 holds token 99, the model knows 0..16"),
        (some(prompt=(3, -1)), r"prompt 0 holds token -1, the model knows 0..16"),
        (some(max_tokens=-1), r"request 0: max_tokens must be in 1..29, got -1"),
        (some(max_tokens=0), r"request 0: max_tokens must be in 1..29, got 0"),
        (some(3, max_tokens=[3, 30, 4]), r"request 1: max_tokens must be in 1..29, got 30"),
        (
            some(2, temperature=[1, np.nan]),
            "request 1: temperature must be 0 or in 0.001..100, got",
        ),
        (some(temperature=-0.5), "request 0: temperature must be 0 or in 0.001..100, got"),
        (some(temperature=np.inf), "request 0: temperature must be 0 or in 0.001..100, got"),
        (some(temperature=1e-4), "request 0: temperature must be 0 or in 0.001..100, got 9.99"),
        (
            some(2, temperature=[1, 200]),
            "request 1: temperature must be 0 or in 0.001..100, got 200",
        ),
        (some(top_p=0.0), "request 0: top_p must be above 0 and at most 1, got 0.0"),
        (some(top_p=np.nan), "request 0: top_p must be"),
        (some(top_k=-1), "request 0: top_k must be >= 0, got -1"),
        (some(stop_ids=(3, -7)), "request 0: stop_ids must be >= -1"),
    ],
)
def test_what_is_refused(driver, requests, message):
    before = driver.stats()["requests"]["refused"]
    with pytest.raises(BadRequest, match=message):
        driver.submit(requests, WholeSink(len(requests.prompt_row)))
    assert driver.stats()["requests"]["refused"] == before + 1
    assert driver.stats()["waiting"] == 0


def test_a_prompt_in_the_middle_is_named(driver):
    requests = some(3)
    requests.tokens[7] = 99
    with pytest.raises(BadRequest, match="prompt 2 holds token 99"):
        driver.submit(requests, WholeSink(3))


def test_no_requests_are_no_responses(driver):
    assert ask(driver, batch(*make_requests(1), rows=[0])._replace(
        tokens=np.zeros(0, np.int32), lengths=np.zeros(0, np.int32),
        prompt_row=np.zeros(0, np.int32), sampling=Sampling(*(f[:0] for f in some().sampling)),
    )) == []  # fmt: skip


class BrokenEngine(NullEngine):
    """Raises in the method `fails` once there were `after` steps."""

    fails, after, steps_made = "generate", 3, 0

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "fails") and self.steps_made >= self.after:
            raise RuntimeError("the chip\nis on fire")
        return object.__getattribute__(self, name)

    def generate(self, params, state):
        self.steps_made += 1
        return super().generate(params, state)


@pytest.mark.parametrize("fails", ["generate", "prefill_many", "insert_many", "release"])
def test_a_broken_engine_reaches_everybody_who_waits(stopping, fails):
    engine = BrokenEngine(2)
    engine.fails = fails
    driver = stopping(RolloutDriver(engine, ParamStore({"w": jax.numpy.zeros(1)}, 1)))
    driver.pause()
    sinks = [WholeSink(1) for _ in range(5)]
    for sink in sinks:
        driver.submit(some(max_tokens=9), sink)
    driver.resume()
    if fails == "release":
        # It may break between two of them, and then refuses the next.
        with contextlib.suppress(EngineFailed):
            while driver.healthy():
                sink = WholeSink(1)
                handle = driver.submit(long(1), sink)
                sinks.append(sink)
                time.sleep(0.01)
                handle.cancel()
                time.sleep(0.01)
        sinks = sinks[-1:]
    failed = "engine failed: RuntimeError: the chip is on fire"
    # The first two fill the slots, and may be done before the next ones are let in.
    for sink in sinks[2 * (fails in ("prefill_many", "insert_many")) :]:
        with pytest.raises(EngineFailed, match=failed):
            sink.result(10)
    assert not driver.healthy()
    for ask_again in (
        lambda: driver.submit(some(), WholeSink(1)),
        lambda: driver.update({"w": np.zeros(1, np.float32)}, 3),
        driver.pause,
    ):
        with pytest.raises(EngineFailed, match="engine failed"):
            ask_again()


def test_a_broken_sink_is_an_engine_failure_too(stopping):
    driver, other = stopping(slow_driver()), WholeSink(1)
    sink = WholeSink(1)
    sink.put = None
    driver.submit(long(1), other)
    driver.submit(some(), sink)
    for waiting in (other, sink):
        with pytest.raises(EngineFailed, match="engine failed: TypeError"):
            waiting.result(10)


def test_deleted_weights_do_not_kill_the_process(stopping):
    driver = stopping(make_driver(jax.tree.map(lambda leaf: leaf + 0, weights(0))))
    jax.tree.map(lambda leaf: leaf.delete(), driver.store.get().params)
    with pytest.raises(EngineFailed, match=r"engine failed: .*deleted"):
        ask(driver, some())


@pytest.mark.parametrize("state", ["idle", "busy", "paused", "updating"])
def test_stop_is_quick_and_nobody_is_left_waiting(state):
    before, driver, sink = threading.enumerate(), slow_driver(), WholeSink(9)
    waits = []
    if state != "idle":
        driver.submit(long(9), sink)
        time.sleep(0.01)
    if state == "paused":
        driver.pause()
        waits.append(driver.begin_pause(drain=True))
    if state == "updating":
        waits.append(driver.begin_update({"w": np.zeros(1, np.float32)}, 2))
    start = time.monotonic()
    driver.stop()
    driver.stop()
    assert time.monotonic() - start < 2
    assert threads_left(before) == []
    if state != "idle":
        with pytest.raises(Stopped, match="stopping"):
            sink.result(0)
    for done in waits:
        assert done.done()
    with pytest.raises(Stopped):
        driver.submit(some(), WholeSink(1))
    with pytest.raises(Stopped):
        driver.update({"w": np.zeros(1, np.float32)}, 2)
    driver.resume()


def test_a_step_that_hangs_does_not_hold_up_stop():
    class Stuck(NullEngine):
        def generate(self, params, state):
            assert stuck.wait(20)
            return super().generate(params, state)

    stuck, before, sink = threading.Event(), threading.enumerate(), WholeSink(1)
    driver = RolloutDriver(Stuck(1), ParamStore({"w": jax.numpy.zeros(1)}, 1))
    driver.submit(some(), sink)
    start = time.monotonic()
    driver.stop()
    assert time.monotonic() - start < 1.9
    with pytest.raises(Stopped):
        sink.result(0)
    stuck.set()
    assert threads_left(before, 5) == []


def test_a_process_that_forgets_to_stop_ends_all_the_same():
    code = (
        "from tests.unit.rollout.server.serving import ask, null_driver, some\n"
        "driver = null_driver(4)\n"
        "print(len(ask(driver, some(3))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).parents[4],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_start_and_stop_again_and_again():
    before = threading.enumerate()
    for _ in range(20):
        driver = null_driver(4)
        assert len(ask(driver, some(8))) == 8
        driver.stop()
    assert threads_left(before) == []


def test_many_submit_at_once(stopping):
    driver, found = stopping(null_driver(64)), queue.Queue()

    def client(number):
        prompt = (number,)
        for _ in range(20):
            for piece in ask(driver, some(4, prompt=prompt)):
                found.put(piece.tokens.tolist() == list(range(number, number + 20)))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found.get_nowait() for _ in range(16 * 20 * 4)] == [True] * 16 * 20 * 4
    idle(driver)


def test_stats_count(stopping):
    driver = stopping(null_driver(4))
    ask(driver, some(6, n=2, max_tokens=5))
    stats = idle(driver)
    assert stats["prompt_tokens"] == 18
    assert stats["response_tokens"] == 60
    assert stats["requests"]["length"] == 12
    assert stats["slots"] == 4
    assert stats["steps"] >= 15
