"""RemoteRollout with real rollout servers: as if there were none, whatever befalls them."""

import contextlib
import threading
import time

import jax
import numpy as np
import pytest

pytest.importorskip("grpc")
pytest.importorskip("jetstream")
from s3ac_jax.core.types import Prompt
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import MoeSpec
from s3ac_jax.rollout import weights_wire
from s3ac_jax.rollout.backend import RolloutError, fingerprint_of
from s3ac_jax.rollout.client import grpc_link
from s3ac_jax.rollout.client.fleet_server import Timing
from s3ac_jax.rollout.client.remote import RemoteRollout
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout
from s3ac_jax.rollout.server.driver import RolloutDriver
from s3ac_jax.rollout.server.grpc_server import RolloutServer
from s3ac_jax.rollout.server.slot_engine import JetStreamEngine
from s3ac_jax.rollout.server.store import ParamStore
from tests.helpers import random_params, tiny_spec
from tests.unit.rollout.server.serving import (
    NETWORK,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    local_rollout,
    make_driver,
    make_requests,
    threads_left,
    weights,
)


@pytest.fixture
def servers():
    """Servers with other weights than the client has."""
    made = []

    def make(count, **options):
        made.extend(RolloutServer(make_driver(weights(3), 0), **options) for _ in range(count))
        return made[-count:]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def remote():
    made = []

    def make(servers, network=NETWORK, **options):
        options = {"timing": Timing(patience=20.0, retry=(0.05, 0.5))} | options
        made.append(
            RemoteRollout(
                [f"127.0.0.1:{server.port}" for server in servers], network=network,
                max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=RESPONSE_TOKENS, **options,
            )
        )  # fmt: skip
        return made[-1]

    yield make
    for client in made:
        client.close()


def same(got, want):
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.num_tokens, want.num_tokens)
    np.testing.assert_array_equal(got.stopped, want.stopped)
    np.testing.assert_array_equal(got.version, want.version)
    np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=1e-5)
    assert got.aborted is None


@pytest.mark.parametrize("max_in_flight", [5, 512])
def test_two_servers_are_as_none(servers, remote, max_in_flight):
    pair = servers(2, token="abc")
    client = remote(pair, max_in_flight=max_in_flight, token="abc")
    client.update_weights(weights(0), 7)
    same(client.generate(*make_requests(0)), local_rollout(0))
    stats = client.stats()
    assert (stats["requests"], stats["refreshes"], stats["retries"]) == (64, 2, 0)
    for found in stats["servers"].values():
        assert (found["version"], found["fingerprint"]) == (7, stats["fingerprint"])
        assert found["response_tokens"] > 0
    with pytest.raises(RolloutError, match="UNAUTHENTICATED"):
        remote(pair).update_weights(weights(0), 7)


def test_a_server_killed_midway_leaves_no_trace(servers, remote):
    one, two = servers(2)
    client = remote([one, two], max_in_flight=8)
    client.update_weights(weights(0), 7)

    def kill():
        while two._driver.stats()["response_tokens"] < 20:
            time.sleep(0.001)
        two.stop()

    killer = threading.Thread(target=kill)
    killer.start()
    got = client.generate(*make_requests(0))
    killer.join()
    same(got, local_rollout(0))
    stats = client.stats()
    assert stats["lost_servers"] == 1
    assert stats["tokens"] == local_rollout(0).num_tokens.sum()
    assert "error" in stats["servers"][f"127.0.0.1:{two.port}"]
    client.update_weights(weights(1), 8)  # training goes on with the other
    assert (client.generate(*make_requests(0)).version.max(axis=1) == 8).all()


def test_a_restarted_server_works_with_the_current_weights(servers, remote):
    one, two = servers(2)
    client = remote([one, two], max_in_flight=8)
    client.update_weights(weights(0), 7)
    two.stop()
    same(client.generate(*make_requests(0)), local_rollout(0))
    again = RolloutServer(make_driver(weights(4), 7), port=two.port)
    try:
        time.sleep(0.6)
        same(client.generate(*make_requests(0)), local_rollout(0))
        assert again._driver.stats()["response_tokens"] > 0
        assert again._driver.stats()["fingerprint"] == client.stats()["fingerprint"]
    finally:
        again.stop()


def test_weights_damaged_on_their_way_are_refused(servers, remote, monkeypatch):
    (server,) = servers(1)
    client = remote([server])
    client.update_weights(weights(0), 7)

    def damaged(params, manifest):
        for number, chunk in enumerate(weights_wire.chunks(params, manifest, 1000)):
            yield chunk if number != 2 else chunk[:-1] + bytes([chunk[-1] ^ 1])

    monkeypatch.setattr(grpc_link, "chunks", damaged)
    with pytest.raises(RolloutError, match=r"INVALID_ARGUMENT .* did not arrive as it was sent"):
        client.update_weights(weights(1), 8)
    found = server._driver.stats()
    assert (found["version"], found["fingerprint"]) == (7, fingerprint_of(weights(0)))
    old = remote([server])
    old.update_weights(weights(0), 7)  # they are there: nothing is sent, so nothing is damaged
    same(old.generate(*make_requests(0)), local_rollout(0))
    monkeypatch.undo()
    client.update_weights(weights(1), 8)
    assert server._driver.stats()["fingerprint"] == fingerprint_of(weights(1))


def test_another_model_is_named(servers, remote):
    wider = actor_network(tiny_spec(num_layers=3, tie_embeddings=False))
    with pytest.raises(RolloutError, match=r"layers/\S+ has shape \[3, .*needs \[2, "):
        remote(servers(1), wider).update_weights(random_params(wider, 0), 0)


MOE = MoeSpec(num_experts=6, per_token=2, width=7, dense_layers=(1,))
EXPERTS = actor_network(tiny_spec(num_layers=3, moe=MOE))


@pytest.fixture
def recording():
    """A server that records experts, and its engine."""
    engine = Engine(
        EXPERTS, slots=4, cache_tokens=PROMPT_TOKENS + RESPONSE_TOKENS, steps_per_dispatch=4,
        stop_ids=(1, 5), record_routing=True,
    )  # fmt: skip
    store = ParamStore(random_params(EXPERTS, 1), 0, prepare=EXPERTS.in_compute_dtype)
    slots = JetStreamEngine(engine, store, max_prompt_tokens=PROMPT_TOKENS, insert_batch=4)
    server = RolloutServer(RolloutDriver(slots, store))
    yield server, engine
    server.stop()


def test_experts_come_with_the_tokens(remote, recording):
    server, engine = recording
    params = random_params(EXPERTS, 0, std=0.3)
    prompt, sampling = make_requests(2, 8)
    prompt = jax.tree.map(lambda leaf: np.repeat(leaf[:4], 2, axis=0), prompt)
    local = LocalRollout(
        engine, insert_batch=4, max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
    )  # fmt: skip
    local.update_weights(params, 7)
    want = local.generate(prompt, sampling)
    client = remote([server], EXPERTS, record_routing=True)
    client.update_weights(params, 7)
    got = client.generate(prompt, sampling)
    same(got, want)
    np.testing.assert_array_equal(got.routing, want.routing)
    assert (got.routing >= 0).any()
    assert client.generate(prompt, sampling, keep_routing=False).routing is None


def test_an_abort_with_experts(remote, recording):
    server, _ = recording
    client = remote([server], EXPERTS, record_routing=True, max_in_flight=64)
    client.update_weights(random_params(EXPERTS, 0, std=0.3), 7)
    prompt, sampling = make_requests(2, stops=(), max_tokens=RESPONSE_TOKENS)
    client.generate(prompt, sampling)  # compiled by now
    server._driver.pause()

    def some_then_abort():
        while not server._driver.stats()["waiting"]:
            time.sleep(0.001)
        seen = server._driver.stats()["response_tokens"]
        server._driver.resume()
        while server._driver.stats()["response_tokens"] == seen:
            time.sleep(0.001)
        client.abort()

    aborter = threading.Thread(target=some_then_abort)
    aborter.start()
    made = client.generate(prompt, sampling)
    aborter.join()
    assert made.aborted.any()
    unbegun = made.num_tokens == 0
    assert unbegun.any()  # four slots for 64 requests: most never got one
    assert (made.routing[unbegun] == -1).all()
    begun = ~unbegun & ~made.aborted | (made.num_tokens > 1)
    for row in np.flatnonzero(begun):
        whole = prompt.num_tokens[row] + made.num_tokens[row]
        assert (made.routing[row, : whole - 1] >= 0).all()
        assert (made.routing[row, whole:] == -1).all()
    again = client.generate(prompt, sampling)
    assert again.aborted is None


def test_abort_and_pause_reach_the_server(servers, remote):
    (server,) = servers(1)
    client = remote([server], max_in_flight=16)
    client.update_weights(weights(0), 7)
    client.pause()
    threading.Timer(0.3, client.abort).start()
    threading.Timer(0.6, client.resume).start()
    made = client.generate(*make_requests(0))
    assert made.aborted.all()
    assert made.num_tokens.sum() == 0
    same(client.generate(*make_requests(0)), local_rollout(0))


def test_a_server_whose_engine_fails_midway_is_done_without(servers, remote, monkeypatch):
    one, two = servers(2)
    client = remote([one, two], max_in_flight=8)
    client.update_weights(weights(0), 7)

    def fail(*_):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(two._driver._slots, "step", fail)
    same(client.generate(*make_requests(0)), local_rollout(0))
    found = client.stats()["servers"]
    assert not found[f"127.0.0.1:{two.port}"]["is_live"]  # its process lives
    client.update_weights(weights(1), 8)
    assert (client.generate(*make_requests(0)).version.max(axis=1) == 8).all()
    alone = remote([two], timing=Timing(patience=0.5, retry=(0.05, 0.5)))
    with pytest.raises(RolloutError, match="its engine has failed: restart it"):
        alone.update_weights(weights(0), 7)


def test_a_server_left_paused_is_named(servers, remote):
    (server,) = servers(1)
    gone = remote([server])
    gone.pause()
    lines = []
    timing = Timing(patience=0.5, retry=(0.05, 0.1), notice=(0.1, 0.2))
    client = remote([server], timing=timing, notice=lines.append)
    with pytest.raises(RolloutError, match="somebody has paused it: resume or restart it"):
        client.update_weights(weights(0), 7)
    assert "somebody has paused it" in lines[0]
    gone.close()  # which resumes
    client.update_weights(weights(0), 7)
    same(client.generate(*make_requests(0)), local_rollout(0))


def test_a_pause_while_weights_are_waited_for(servers, remote):
    (server,) = servers(1)
    other = remote([server])
    other.update_weights(weights(1), 3)

    def work():
        with contextlib.suppress(RolloutError):  # those that had no slot when the weights changed
            other.generate(*make_requests(1))

    working = threading.Thread(target=work)
    lines = []
    timing = Timing(patience=20.0, retry=(0.05, 0.1), notice=(0.1, 0.2))
    client = remote([server], timing=timing, notice=lines.append)
    working.start()
    while not server._driver.stats()["slots_busy"]:
        time.sleep(0.001)
    server._driver.pause()
    # As if the pause came just after the look: the server has to refuse the update itself.
    looks = iter([False])
    truth = server._driver.stats
    server._driver.stats = lambda: truth() | {"paused": next(looks, truth()["paused"])}
    begin, updates = server._driver.begin_update, []
    server._driver.begin_update = lambda *a, **k: updates.append(1) or begin(*a, **k)
    threading.Timer(0.5, server._driver.resume).start()
    client.update_weights(weights(0), 7)
    assert len(updates) == 2
    assert client.stats()["lost_servers"] == 0
    assert any("somebody has paused it" in line for line in lines)
    other.close()
    working.join()
    same(client.generate(*make_requests(0)), local_rollout(0))


def test_two_trainers_with_one_version(servers, remote, monkeypatch):
    monkeypatch.setattr("s3ac_jax.rollout.client.fleet._RECENT_S", 60.0)  # no look before the work
    (server,) = servers(1)
    ours, theirs = remote([server]), remote([server])
    ours.update_weights(weights(0), 7)
    theirs.update_weights(weights(1), 7)
    same(ours.generate(*make_requests(0)), local_rollout(0))
    assert ours.stats()["retries"] > 0


def test_nothing_is_left_after_close():
    before = set(threading.enumerate())
    server = RolloutServer(make_driver(weights(0)))
    client = RemoteRollout(
        [f"127.0.0.1:{server.port}"], network=NETWORK, max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
    )  # fmt: skip
    client.update_weights(weights(1), 1)
    threading.Timer(0.02, client.close).start()
    prompt, sampling = make_requests(0)
    many = Prompt(*(np.tile(field, (20,) + (1,) * (field.ndim - 1)) for field in (
        prompt.index, prompt.tokens, prompt.num_tokens)))  # fmt: skip
    with pytest.raises(RolloutError, match="closed"):
        client.generate(many, jax.tree.map(lambda leaf: np.concatenate([leaf] * 20), sampling))
    deadline = time.monotonic() + 5
    while server._driver.stats()["slots_busy"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server._driver.stats()["slots_busy"] == 0  # the server noticed
    server.stop()
    while threads_left(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [name for name in threads_left(before) if "channel_spin" not in name] == []
