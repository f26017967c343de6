"""RemoteRollout against servers whose answers are known: what is sent where, and every fault."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("grpc")
import grpc

from s3ac_jax.core.types import Prompt
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import MoeSpec
from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.backend import MAX_STOP_IDS, RolloutError, Sampling, fingerprint_of
from s3ac_jax.rollout.client.fleet_server import Timing
from s3ac_jax.rollout.client.remote import RemoteRollout
from tests.helpers import random_params, tiny_spec
from tests.unit.rollout.client.fake_server import VOCAB, FakeServer, experts, response

MOE = MoeSpec(num_experts=6, per_token=2, width=7, dense_layers=(1,))
NETWORK = actor_network(tiny_spec(num_layers=3, moe=MOE, vocab_size=VOCAB, dtype="bfloat16"))
PARAMS = random_params(NETWORK, 0)
CAST = NETWORK.in_compute_dtype(PARAMS)
FINGERPRINT = fingerprint_of(CAST)
PROMPT, RESPONSE = 6, 9
QUICK = Timing(patience=1.0, retry=(0.02, 0.1), beat=0.3, tries=5)
# Where the tries are to run out first, on a busy machine too.
PATIENT = dataclasses.replace(QUICK, patience=60.0)


@pytest.fixture
def servers():
    made = []

    def make(count=2, **options):
        made.extend(FakeServer(CAST, **options) for _ in range(count))
        return made[-count:]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def remote():
    made = []

    def make(servers, **options):
        options = {
            "network": NETWORK, "timing": QUICK, "max_in_flight": 16, "record_routing": True,
        } | options  # fmt: skip
        made.append(
            RemoteRollout(
                [getattr(server, "address", server) for server in servers],
                max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE, **options,
            )
        )  # fmt: skip
        return made[-1]

    yield make
    for client in made:
        client.close()


def prompts(rows, *, samples=1, seed=0):
    """`samples` of each prompt; the padding holds tokens too."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, PROMPT + 1, rows).astype(np.int32)
    tokens = rng.integers(VOCAB, size=(rows, PROMPT)).astype(np.int32)
    each = np.repeat(np.arange(rows, dtype=np.int32), samples)
    return Prompt(each, tokens[each], lengths[each])


def settings(rows, **changes):
    rng = np.random.default_rng(rows)
    made = Sampling(
        rng.integers(1 << 32, size=rows, dtype=np.uint32),
        np.ones(rows, np.float32),
        rng.integers(1, RESPONSE + 1, size=rows).astype(np.int32),
        np.ones(rows, np.float32),
        np.zeros(rows, np.int32),
        np.full((rows, MAX_STOP_IDS), -1, np.int32),
    )
    return made._replace(**changes)


def check(rollout, prompt, sampling, version, *, routing=True):
    """Against the servers' arithmetic, one request at a time."""
    for n, length in enumerate(prompt.num_tokens):
        shown = prompt.tokens[n, :length]
        tokens, logp, stopped = response(shown, sampling.seed[n], sampling.max_tokens[n])
        assert rollout.num_tokens[n] == len(tokens)
        assert rollout.tokens[n].tolist() == tokens + [0] * (RESPONSE - len(tokens))
        np.testing.assert_array_equal(rollout.logp[n, : len(tokens)], np.float32(logp))
        assert (rollout.logp[n, len(tokens) :] == 0).all()
        assert rollout.stopped[n] == stopped
        assert rollout.version[n].tolist() == [version] * len(tokens) + [-1] * (
            RESPONSE - len(tokens)
        )
        if routing:
            whole = shown.tolist() + tokens
            np.testing.assert_array_equal(rollout.routing[n, : len(whole)], experts(whole))
            assert (rollout.routing[n, len(whole) :] == -1).all()
    assert rollout.aborted is None
    assert rollout.prompt is prompt


def run(client, rows=12, *, samples=3, version=5):
    prompt, sampling = prompts(rows, samples=samples), settings(rows * samples)
    check(client.generate(prompt, sampling), prompt, sampling, version)


def test_results_are_in_order_and_groups_stay_together(servers, remote):
    pair = servers(2)
    client = remote(pair)
    client.update_weights(PARAMS, 5)
    run(client)
    batches = [batch for server in pair for batch in server.batches]
    assert all(server.batches for server in pair)
    assert sum(map(len, batches)) == 36
    homes = {}
    for number, batch in enumerate(batches):
        for prompt in map(tuple, batch):
            homes.setdefault(prompt, set()).add(number)
    assert {len(places) for places in homes.values()} == {1}


def test_the_number_of_servers_does_not_matter(servers, remote):
    prompt, sampling = prompts(10, samples=2), settings(20)
    made = []
    for count in (1, 3):
        client = remote(servers(count))
        client.update_weights(PARAMS, 0)
        made.append(client.generate(prompt, sampling))
    jax.tree.map(np.testing.assert_array_equal, *made)


def test_a_big_group_is_cut_at_what_a_server_takes(servers, remote):
    (server,) = servers(1)
    client = remote([server], max_in_flight=4)
    client.update_weights(PARAMS, 5)
    run(client, 1, samples=10)
    assert [len(batch) for batch in server.batches] == [4, 4, 2]


def test_a_server_never_has_more_than_it_takes(servers, remote):
    pair = servers(2, slow=0.02)
    client = remote(pair, max_in_flight=4)
    client.update_weights(PARAMS, 5)
    lock, now, most = threading.Lock(), {}, []
    for server in pair:
        inner = server.Generate

        def counted(message, context, server=server, inner=inner):
            rows = len(message.prompt_row) // 4
            with lock:
                now[server] = now.get(server, 0) + rows
                most.append(now[server])
            try:
                return inner(message, context)
            finally:
                with lock:
                    now[server] -= rows

        server.Generate = counted
        server.stop()
        server.start()
    time.sleep(0.11)
    run(client)
    assert 1 < max(most) <= 4


def test_a_quick_server_takes_more(servers, remote):
    quick, slow = servers(2)
    slow.slow = 0.3
    client = remote([quick, slow], max_in_flight=4)
    client.update_weights(PARAMS, 5)
    run(client, 40, samples=1)
    assert len(quick.batches) > 2 * len(slow.batches) > 0


def test_routing_is_not_asked_for_in_vain(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    client.update_weights(PARAMS, 1)
    prompt, sampling = prompts(3), settings(3)
    made = client.generate(prompt, sampling, keep_routing=False)
    assert made.routing is None
    check(made, prompt, sampling, 1, routing=False)
    assert remote([server], record_routing=False).routing_shape is None
    server.routing = False
    with pytest.raises(RolloutError, match=r"experts of shape None, \[\d+, 2, 2\] needed"):
        client.generate(prompt, sampling)


def test_weights_arrive_as_they_are_read(servers, remote):
    pair = servers(2)
    client = remote(pair)
    client.update_weights(PARAMS, 3)
    for server in pair:
        assert (server.version, server.fingerprint) == (3, FINGERPRINT)
        jax.tree.map(np.testing.assert_array_equal, server.weights, jax.device_get(CAST))
        assert server.weights["embed"].dtype == jnp.bfloat16
        assert server.in_flight is False
    assert client.stats()["pushed_bytes"] == 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(CAST))


def test_a_server_that_comes_back_gets_weights_that_the_trainer_has_donated(servers, remote):
    (server,) = servers(1)
    server.abstract = PARAMS
    # What needs no cast is sent as it is.
    whole = actor_network(dataclasses.replace(NETWORK.spec, dtype="float32"))
    client = remote([server], network=whole, copies=True)
    params = jax.tree.map(jnp.copy, PARAMS)
    client.update_weights(params, 5)
    jax.tree.map(lambda leaf: leaf.delete(), params)
    server.stop()
    server.start()
    run(client)
    assert server.seen.count("PushWeights") == 2


def test_the_same_weights_are_not_sent_twice(servers, remote):
    (server,) = servers(1)
    client = remote([server], in_flight=True)
    client.update_weights(PARAMS, 3)
    assert server.in_flight is True
    client.update_weights(PARAMS, 4)
    assert server.seen == ["Stats", "PushWeights", "Stats", "UpdateWeights"]
    assert (server.version, server.path) == (4, "")
    client.update_weights(PARAMS, 4)
    assert server.seen[4:] == ["Stats"]
    client.update_weights(random_params(NETWORK, 1), 5)
    assert server.seen[5:] == ["Stats", "PushWeights"]


def test_weights_by_path(servers, remote):
    saved = []

    def save(params, version):
        saved.append((fingerprint_of(params), version))
        return f"shared/{version}"

    pair = servers(2)
    client = remote(pair, save=save)
    client.update_weights(PARAMS, 6)
    assert saved == [(FINGERPRINT, 6)]
    for server in pair:
        assert server.seen == ["Stats", "UpdateWeights"]
        assert (server.path, server.version, server.fingerprint) == ("shared/6", 6, FINGERPRINT)
    # The same weights again are a new number, and no second set of files; others are.
    client.update_weights(PARAMS, 7)
    assert [server.version for server in pair] == [7, 7]
    assert [version for _, version in saved] == [6]
    client.update_weights(random_params(NETWORK, 1), 8)
    assert [version for _, version in saved] == [6, 8]
    assert [(server.path, server.version) for server in pair] == [("shared/8", 8)] * 2


def test_weights_that_arrive_as_others_are_an_error(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    server.server.stop(0).wait()
    other = pb.WeightsReply(version=6, fingerprint="12345678")
    server.PushWeights = lambda messages, context: [*messages] and other
    server.start()
    with pytest.raises(RolloutError, match=f"{server.address} has weights 12345678.*{FINGERPRINT}"):
        client.update_weights(PARAMS, 6)


def test_a_servers_refusal_is_not_repeated(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    server.push_fault = grpc.StatusCode.INVALID_ARGUMENT, "embed has shape [1], the model needs"
    with pytest.raises(RolloutError, match=r"INVALID_ARGUMENT embed has shape \[1\]"):
        client.update_weights(PARAMS, 0)
    assert server.seen.count("PushWeights") == 1
    server.push_fault = None
    client.update_weights(PARAMS, 5)
    server.faults.append(grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(RolloutError, match=r"INVALID_ARGUMENT no invalid_argument today$"):
        client.generate(prompts(1), settings(1))
    assert server.seen.count("Generate") == 1
    run(client)  # and the client is as good as before


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"])
def test_what_may_pass_is_tried_again(servers, remote, code):
    (server,) = servers(1)
    client = remote([server])
    client.update_weights(PARAMS, 5)
    server.faults.extend([grpc.StatusCode[code]] * 3)
    run(client)
    assert client.stats()["retries"] >= 3


def test_a_busy_server_is_given_up_after_a_while(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    client.update_weights(PARAMS, 5)
    server.faults.extend([grpc.StatusCode.RESOURCE_EXHAUSTED] * 1000)
    began = time.monotonic()
    with pytest.raises(RolloutError, match=f"for 1 s .{server.address}: RESOURCE_EXHAUSTED"):
        client.generate(prompts(1), settings(1))
    assert 1 <= time.monotonic() - began < 4


def test_a_busy_server_is_asked_less_and_less(servers, remote):
    (server,) = servers(1)
    client = remote([server], timing=Timing(patience=1.5, retry=(0.02, 0.4)))
    client.update_weights(PARAMS, 5)
    server.faults.extend([grpc.StatusCode.RESOURCE_EXHAUSTED] * 1000)
    with pytest.raises(RolloutError, match="no rollout server"):
        client.generate(prompts(1), settings(1))
    # After 20 ms, 40, 80, 160, 320, 400, 400, whatever it answers to looks in between.
    assert 5 <= server.seen.count("Generate") <= 9


def test_work_that_fails_everywhere_is_given_up(servers, remote):
    pair = servers(2)
    client = remote(pair, timing=PATIENT)
    client.update_weights(PARAMS, 5)
    for server in pair:
        server.faults.extend([grpc.StatusCode.INTERNAL] * 1000)
    with pytest.raises(RolloutError, match=r"failed 5 times, last on .*INTERNAL no internal today"):
        client.generate(prompts(1), settings(1))


def test_a_server_that_dies_leaves_its_work_to_the_others(servers, remote):
    one, two = servers(2, slow=0.02)
    client = remote([one, two], max_in_flight=8)
    client.update_weights(PARAMS, 5)
    two.faults.append("die")
    run(client, 30, samples=2)
    assert client.stats()["lost_servers"] == 1
    assert "error" in client.stats()["servers"][two.address]
    assert client.stats()["servers"][one.address]["slots"] == 4
    client.update_weights(random_params(NETWORK, 1), 6)  # one is enough
    assert one.version == 6


def test_a_server_that_comes_back_gets_the_weights_before_work(servers, remote):
    one, two = servers(2, slow=0.05)
    client = remote([one, two], max_in_flight=4)
    client.update_weights(PARAMS, 5)
    two.stop()
    two.seen.clear()
    two.batches.clear()
    threading.Timer(0.3, two.start).start()
    run(client, 60, samples=1)
    assert two.batches
    assert two.version == 5
    assert two.seen.index("PushWeights") < two.seen.index("Generate")


def test_a_restart_between_calls_is_noticed(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    client.update_weights(PARAMS, 5)
    run(client)
    server.stop()
    server.start()
    time.sleep(0.11)  # longer than an answer is taken as a sign of life
    server.seen.clear()
    run(client)
    assert server.seen[:3] == ["Stats", "PushWeights", "Generate"]


def test_a_server_that_says_nothing_is_left(servers, remote, monkeypatch):
    monkeypatch.setattr("s3ac_jax.rollout.client.grpc_link._CHECK_S", 0.2)
    monkeypatch.setattr("s3ac_jax.rollout.client.remote.CONTROL_S", 0.2)
    one, two = servers(2)
    client = remote([one, two], max_in_flight=4)
    client.update_weights(PARAMS, 5)
    two.faults.extend(["hang"] * 4)
    began = time.monotonic()
    run(client)
    assert 0.4 < time.monotonic() - began < 3
    assert "Generate" in two.seen
    assert client.stats()["servers"][two.address] == {
        "error": "DEADLINE_EXCEEDED Deadline Exceeded"
    }


def test_no_server_at_all(remote):
    client = remote(["127.0.0.1:9", "127.0.0.1:10"])
    began = time.monotonic()
    with pytest.raises(RolloutError) as caught:
        client.update_weights(PARAMS, 0)
    assert 1 <= time.monotonic() - began < 4
    text = str(caught.value)
    assert "no rollout server to be had for 1 s" in text
    assert "127.0.0.1:9: UNAVAILABLE" in text
    assert "127.0.0.1:10: UNAVAILABLE" in text
    assert "\n" not in text
    with pytest.raises(RolloutError, match=r"rollout\.addresses"):
        remote([])
    with pytest.raises(RolloutError, match=r"TLS: can't read no/ca\.pem: No such file"):
        remote(["127.0.0.1:9"], tls_ca="no/ca.pem")


def test_other_weights_than_the_current_are_an_error(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    client.update_weights(PARAMS, 5)
    server.claims = 4
    with pytest.raises(RolloutError, match=r"version \[4\], current is 5"):
        client.generate(prompts(1), settings(1))
    lenient = remote([server], in_flight=True)
    lenient.update_weights(PARAMS, 5)
    assert lenient.generate(prompts(1), settings(1)).version[0, 0] == 4
    server.claims = 6
    with pytest.raises(RolloutError, match=r"version \[6\], current is 5"):
        lenient.generate(prompts(1), settings(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda made: made._replace(num_tokens=made.num_tokens[:2], finish=made.finish[:2]),
            r"num_tokens add up|answered 2 requests of 3",
        ),
        (
            lambda made: made._replace(
                num_tokens=np.append(made.num_tokens, 0), finish=np.append(made.finish, 0)
            ),
            "answered 4 requests of 3",
        ),
        (lambda made: made._replace(tokens=made.tokens + VOCAB), r"token outside 0\.\.16"),
        (lambda made: made._replace(tokens=made.tokens - VOCAB), r"token outside 0\.\.16"),
        (lambda made: made._replace(num_tokens=np.array([-1, 2, 1])), "another length than asked"),
        (lambda made: made._replace(num_tokens=np.array([0, 1, 1])), "another length than asked"),
        (lambda made: made._replace(num_tokens=np.array([2, 0, 0])), "another length than asked"),
        (lambda made: made._replace(logp=made.logp[:1]), "its logp has 1"),
        (lambda made: made._replace(routing=made.routing[1:]), "experts of shape"),
        (lambda made: made._replace(routing=made.routing[..., :1]), "experts of shape"),
    ],
)
def test_an_answer_that_is_none_is_refused(servers, remote, change, message):
    (server,) = servers(1)
    client = remote([server], max_in_flight=64)
    client.update_weights(PARAMS, 5)
    # One token each, so that an answer of two requests fits in no other place.
    sampling = settings(3, max_tokens=np.ones(3, np.int32))
    prompt = prompts(1, samples=3)

    def spoil(made):
        made = change(made)
        total = max(int(made.num_tokens.sum()), 0)
        return made._replace(
            tokens=made.tokens[:total], version=made.version[:total], logp=made.logp[:total]
        )

    server.spoil = spoil
    with pytest.raises(RolloutError, match=message) as caught:
        client.generate(prompt, sampling)
    assert "\n" not in str(caught.value)
    server.spoil = None
    check(client.generate(prompt, sampling), prompt, sampling, 5)


def test_long_prompts_go_first(servers, remote):
    (server,) = servers(1)
    client = remote([server], max_in_flight=4)
    client.update_weights(PARAMS, 5)
    client._fleet.max_in_flight = 1  # one piece after the other
    run(client, 20, samples=1)
    lengths = [len(prompt) for batch in server.batches for prompt in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 3


def test_abort_returns_what_there_is(servers, remote):
    (server,) = servers(1, slow=5.0)
    client = remote([server], max_in_flight=8)
    client.update_weights(PARAMS, 5)
    threading.Timer(0.3, client.abort).start()
    began = time.monotonic()
    made = client.generate(prompts(20), settings(20))
    assert time.monotonic() - began < 3
    assert made.aborted.all()
    assert set(made.num_tokens.tolist()) == {0, 1}
    assert 0 < (made.num_tokens == 1).sum() <= 8
    assert (made.version[made.num_tokens == 0] == -1).all()
    assert not made.stopped.any()
    assert client.stats()["aborted"] == 20
    server.slow = 0
    run(client)


def test_pause_holds_and_resume_goes_on(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    client.update_weights(PARAMS, 5)
    client.pause()
    assert server.seen[-1] == "Pause"
    threading.Timer(1.3, client.resume).start()  # longer than the patience
    began = time.monotonic()
    run(client)
    assert time.monotonic() - began > 1.2
    assert "Resume" in server.seen


def test_the_token_travels(servers, remote):
    (server,) = servers(1)
    client = remote([server], token="abc")
    client.update_weights(PARAMS, 5)
    assert server.metadata["authorization"] == "Bearer abc"


def test_close_ends_a_call_and_all_threads(servers):
    (server,) = servers(1, slow=5.0)
    before = set(threading.enumerate())
    client = RemoteRollout(
        [server.address], network=NETWORK, max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE
    )
    client.update_weights(PARAMS, 5)
    threading.Timer(0.2, client.close).start()
    began = time.monotonic()
    with pytest.raises(RolloutError, match="closed"):
        client.generate(prompts(4), settings(4))
    assert time.monotonic() - began < 2
    with pytest.raises(RolloutError, match="closed"):
        client.generate(prompts(4), settings(4))
    server.stop()
    deadline = time.monotonic() + 2
    left = threading.enumerate()
    while time.monotonic() < deadline and left:
        left = [t for t in set(threading.enumerate()) - before if not t.daemon]
        time.sleep(0.01)
    assert left == []


def test_limits_are_named(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    with pytest.raises(RolloutError, match="call update_weights"):
        client.generate(prompts(1), settings(1))
    client.update_weights(PARAMS, 5)
    with pytest.raises(ValueError, match=r"max_tokens must be in 1\.\.9"):
        client.generate(prompts(1), settings(1, max_tokens=np.array([10])))
    assert "Generate" not in server.seen


LOUD = Timing(patience=1.0, retry=(0.02, 0.1), beat=0.3, notice=(0.1, 0.2), tries=5)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_server_whose_engine_failed_is_done_without(servers, remote, says_so):
    good, bad = servers(2, slow=0.03)
    client = remote([good, bad], max_in_flight=4)
    client.update_weights(PARAMS, 5)
    bad.is_live = not says_so
    bad.faults.extend([grpc.StatusCode.INTERNAL] * 1000)
    run(client, 60, samples=1)
    # What it has failed is not given back to it, however idle it is.
    assert len(set(bad.asked)) == len(bad.asked) > 0
    bad.seen.clear()
    if says_so:
        client.update_weights(random_params(NETWORK, 1), 6)
        assert set(bad.seen) == {"Stats"}
        assert good.version == 6
        alone = remote([bad])
        with pytest.raises(RolloutError, match=r"for 1 s .*its engine has failed: restart it"):
            alone.update_weights(PARAMS, 5)


def test_a_server_left_paused_is_named(servers, remote):
    (server,) = servers(1)
    server.paused = True
    lines = []
    client = remote([server], timing=LOUD, notice=lines.append)
    with pytest.raises(RolloutError, match=f"{server.address}: somebody has paused it: resume"):
        client.update_weights(PARAMS, 5)
    assert server.seen.count("PushWeights") == 0
    assert f"waiting for a rollout server (1 s at most): {server.address}: somebody" in lines[0]
    threading.Timer(0.4, lambda: setattr(server, "paused", False)).start()
    client.update_weights(PARAMS, 5)
    server.paused = True
    with pytest.raises(RolloutError, match="somebody has paused it"):
        client.generate(prompts(4), settings(4))
    server.paused = False
    run(client)


@pytest.mark.parametrize("count", [1, 2])
def test_a_pause_by_somebody_in_the_middle(servers, remote, count):
    server, *others = servers(count, slow=0.1)
    client = remote([server, *others], max_in_flight=4)
    client.update_weights(PARAMS, 5)
    threading.Timer(0.05, lambda: setattr(server, "paused", True)).start()
    if not others:  # what it has stays with it
        threading.Timer(0.8, lambda: setattr(server, "paused", False)).start()
    run(client, 24, samples=1)
    assert client.stats()["lost_servers"] == 0
    assert server.paused == bool(others)


def test_a_resume_that_did_not_arrive_is_made_up_for(servers, remote):
    (server,) = servers(1)
    lines = []
    client = remote([server], notice=lines.append)
    client.update_weights(PARAMS, 5)
    client.pause()
    server.stop()
    client.resume()
    assert f"rollout server {server.address} did not resume: UNAVAILABLE" in lines[0]
    server.start()
    assert server.paused
    run(client)
    assert not server.paused


def test_no_server_is_left_paused(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    client.pause()
    client.close()
    assert not server.paused
    client.close()


def test_a_refused_pause_is_an_error(servers, remote):
    good, bad, dead = servers(3)
    lines = []
    client = remote([good, bad, dead], notice=lines.append)
    dead.stop()
    bad.pause_fault = grpc.StatusCode.UNAUTHENTICATED, "no"
    with pytest.raises(
        RolloutError, match=f"did not pause .{bad.address}: UNAUTHENTICATED no .rollout.token_file"
    ):
        client.pause()
    assert good.paused
    bad.pause_fault = None
    client.pause()
    assert f"rollout server {dead.address} did not pause: UNAVAILABLE" in lines[0]


def test_after_close_there_are_statistics(servers, remote):
    (server,) = servers(1)
    client = remote([server])
    client.update_weights(PARAMS, 5)
    run(client)
    client.close()
    stats = client.stats()
    assert (stats["requests"], stats["version"]) == (36, 5)
    assert "closed" in stats["servers"][server.address]["error"]
    with pytest.raises(RolloutError, match="closed"):
        client.pause()


def test_what_somebody_else_aborts_is_asked_for_again(servers, remote):
    (server,) = servers(1)
    client = remote([server], timing=PATIENT)
    client.update_weights(PARAMS, 5)
    left = [1, 0, 1]

    def spoil(made):
        aborted = made.finish * 0 + 2
        return made._replace(finish=aborted) if left and left.pop() else made

    server.spoil = spoil
    run(client)
    assert client.stats()["retries"] == 2
    server.spoil = lambda made: made._replace(finish=made.finish * 0 + 2)
    with pytest.raises(RolloutError, match=r"failed 5 times.*somebody else has aborted"):
        client.generate(prompts(2), settings(2))


def test_another_trainer_with_the_same_version(servers, remote, monkeypatch):
    monkeypatch.setattr("s3ac_jax.rollout.client.fleet._RECENT_S", 60.0)  # no look before the work
    (server,) = servers(1)
    ours, theirs = remote([server]), remote([server])
    ours.update_weights(PARAMS, 5)
    theirs.update_weights(random_params(NETWORK, 1), 5)
    server.seen.clear()
    run(ours)
    assert server.seen[0] == "Generate"  # refused, for it names the weights that it is for
    assert "PushWeights" in server.seen
    assert server.fingerprint == FINGERPRINT


def test_weights_that_are_others_than_it_said_are_sent_whole(servers, remote):
    (server,) = servers(1, version=4, fingerprint=FINGERPRINT)
    server.cheap_fault = grpc.StatusCode.FAILED_PRECONDITION, "others"
    remote([server]).update_weights(PARAMS, 5)
    assert server.seen == ["Stats", "UpdateWeights", "Stats", "PushWeights"]


@pytest.mark.parametrize("address", ["10.0.0.7:9000", "host.example:9000", "dns:///10.0.0.7:1"])
def test_no_token_travels_in_clear(remote, address):
    with pytest.raises(RolloutError, match=r"in clear: set rollout\.tls_ca"):
        remote([address], token="abc")
    remote([address])
    remote(["localhost:9000", "[::1]:9000"], token="abc")


def test_people_hear_of_servers_that_are_away(remote):
    lines = []
    client = remote(["127.0.0.1:9"], timing=LOUD, notice=lines.append)
    with pytest.raises(RolloutError, match="no rollout server"):
        client.update_weights(PARAMS, 0)
    assert 3 <= len(lines) <= 6
    for line in lines:
        assert line.startswith("waiting for a rollout server (1 s at most): 127.0.0.1:9: UNAVAIL")
        assert "\n" not in line


def test_people_hear_on_stderr_unless_told_otherwise(remote, capsys):
    with pytest.raises(RolloutError, match="no rollout server"):
        remote(["127.0.0.1:9"], timing=LOUD).update_weights(PARAMS, 0)
    assert "waiting for a rollout server" in capsys.readouterr().err


def test_people_hear_of_weights_that_are_waited_for(servers, remote):
    (server,) = servers(1, version=4)
    server.push_slow = 0.7
    lines = []
    remote([server], timing=LOUD, notice=lines.append).update_weights(PARAMS, 5)
    assert f"waiting for a rollout server: {server.address}: takes in the weights" in lines[0]


def test_people_hear_of_one_that_is_lost_and_comes_back(servers, remote):
    one, two = servers(2, slow=0.05)
    lines = []
    client = remote([one, two], max_in_flight=4, timing=LOUD, notice=lines.append)
    client.update_weights(PARAMS, 5)
    run(client)
    assert lines == []
    two.stop()
    run(client, 60, samples=1)
    assert f"rollouts go on without some servers: {two.address}: UNAVAILABLE" in lines[0]
    two.start()
    run(client, 60, samples=1)
    assert lines[-1] == f"rollout server {two.address} is there again"


def test_a_server_that_stops_taking_weights_is_left(servers, remote, monkeypatch):
    monkeypatch.setattr("s3ac_jax.rollout.client.grpc_link._STALL_S", 0.3)
    monkeypatch.setattr(
        "s3ac_jax.rollout.client.grpc_link.chunks",
        lambda params, manifest: iter([bytes(3 << 20)] * 40),
    )
    good, bad = servers(2, version=4, fingerprint=FINGERPRINT)
    bad.fingerprint = bad.start_with = "other"
    bad.push_slow = 30.0
    client = remote([good, bad])
    began = time.monotonic()
    client.update_weights(PARAMS, 5)
    assert 0.3 < time.monotonic() - began < 6
    assert "takes no more of the weights" in client._fleet.servers[1].says()
    bad.push_slow = 0.0
    monkeypatch.undo()
    client.update_weights(PARAMS, 6)
    assert bad.version == 6  # it is looked at again


def test_a_server_that_hangs_with_new_weights_is_left(servers, remote, monkeypatch):
    monkeypatch.setattr("s3ac_jax.rollout.client.grpc_link._CHECK_S", 0.2)
    good, bad = servers(2)
    client = remote([good, bad])
    client.update_weights(PARAMS, 5)
    bad.push_slow = 30.0
    threading.Timer(0.2, lambda: setattr(bad, "mute", True)).start()
    began = time.monotonic()
    client.update_weights(random_params(NETWORK, 1), 6)
    assert 0.5 < time.monotonic() - began < 6
    assert good.version == 6
    run(client, version=6)


def test_weights_that_cannot_be_read_are_our_own_fault(servers, remote, monkeypatch):
    def broken(params, manifest):
        yield b"abc"
        raise RuntimeError("Array has been\ndeleted.")

    monkeypatch.setattr("s3ac_jax.rollout.client.grpc_link.chunks", broken)
    (server,) = servers(1)
    with pytest.raises(RolloutError, match=r"can't be sent: RuntimeError: Array has been deleted"):
        remote([server]).update_weights(PARAMS, 5)
    assert server.seen == ["Stats", "PushWeights"]


def test_one_of_two_refuses_later(servers, remote):
    one, two = servers(2)
    lines = []
    client = remote([one, two], timing=LOUD, notice=lines.append)
    client.update_weights(PARAMS, 5)
    two.push_fault = grpc.StatusCode.INVALID_ARGUMENT, "embed has shape [1], the model needs"
    client.update_weights(random_params(NETWORK, 1), 6)
    run(client, version=6)
    assert (one.version, two.version) == (6, 5)
    one.push_fault = two.push_fault
    # Neither has these yet: a push, not a new number.
    with pytest.raises(RolloutError, match=r"embed has shape \[1\]"):
        client.update_weights(random_params(NETWORK, 2), 7)
    # One that has never worked has been started wrongly.
    good, bad = servers(2)
    bad.push_fault = one.push_fault
    with pytest.raises(RolloutError, match=f"{bad.address}: INVALID_ARGUMENT embed"):
        remote([good, bad]).update_weights(PARAMS, 5)
    # But one that comes late ends nothing.
    bad.stop()
    client = remote([good, bad])
    client.update_weights(PARAMS, 5)
    bad.start()
    client.update_weights(PARAMS, 6)
    run(client, version=6)
    assert bad.seen[-1] == "PushWeights"


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "INTERNAL"])
def test_one_of_two_has_no_room_for_the_weights(servers, remote, code):
    one, two = servers(2)
    two.push_fault = grpc.StatusCode[code], "no room"
    client = remote([one, two])
    client.update_weights(PARAMS, 5)
    assert two.seen.count("PushWeights") == 3
    run(client)
    with pytest.raises(RolloutError, match=f"{two.address}: {code} no room"):
        remote([two]).update_weights(PARAMS, 5)


def test_the_servers_own_weights_are_taken_as_they_are(servers, remote):
    pair = servers(2, version=4, fingerprint="0badcafe")
    client = remote(pair)
    assert client.adopt_weights() == 4
    run(client, version=4)
    found = client.stats()
    assert (found["version"], found["fingerprint"]) == (4, "0badcafe")
    assert not any({"PushWeights", "UpdateWeights"} & set(server.seen) for server in pair)


def test_servers_with_different_weights_are_named(servers, remote):
    (one,) = servers(1, version=4, fingerprint="0badcafe")
    (other,) = servers(1, version=5, fingerprint="0000beef")
    with pytest.raises(RolloutError, match=rf"{other.address} has 0000beef \(version 5\)"):
        remote([one, other]).adopt_weights()


def test_weights_that_change_under_an_evaluation_are_an_error(servers, remote):
    (server,) = servers(1, version=4, fingerprint="0badcafe")
    client = remote([server])
    client.adopt_weights()
    run(client, version=4)
    server.fingerprint = "0000beef"
    prompt, sampling = prompts(2), settings(2)
    with pytest.raises(RolloutError, match=r"has other weights than it had.*0badcafe, version 4"):
        client.generate(prompt, sampling)
    assert not {"PushWeights", "UpdateWeights"} & set(server.seen)


def test_a_server_that_is_away_is_waited_for(servers, remote, monkeypatch):
    monkeypatch.setattr("s3ac_jax.rollout.client.link._AGAIN_S", 0.02)
    (server,) = servers(1, version=4, fingerprint="0badcafe")
    server.stop()
    said = []
    back = threading.Timer(0.3, server.start)
    back.start()
    client = remote([server], timing=PATIENT, notice=said.append)
    assert client.adopt_weights() == 4
    back.join()
    assert len(said) == 1
    assert "waiting for a rollout server" in said[0]
    server.stop()
    with pytest.raises(RolloutError, match=r"no rollout server to be had for 0\.1 s"):
        remote([server], timing=dataclasses.replace(QUICK, patience=0.1)).adopt_weights()
