"""OpenAIRollout against endpoints that answer as the real ones do, out of a table."""

import dataclasses
import functools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip("aiohttp")
from s3ac_jax.core.types import Prompt
from s3ac_jax.rollout.backend import MAX_STOP_IDS, RolloutError, Sampling
from s3ac_jax.rollout.client.fleet_server import Timing
from s3ac_jax.rollout.client.openai import OpenAIRollout
from tests.unit.rollout.client.fake_http import FakeEndpoint

VOCAB, PROMPT, RESPONSE, ROWS = 50, 4, 6, 24
STOPS = (3, 7)
QUICK = Timing(patience=1.0, retry=(0.02, 0.1), beat=0.3, tries=5)
# Where the tries are to run out first, on a busy machine too.
PATIENT = dataclasses.replace(QUICK, patience=60.0)
# Endpoints that hang up or stand still leave sockets behind for the collector to find.
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
KINDS = ("vllm", "sglang", "s3ac")
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, PROMPT + 1, ROWS).astype(np.int32)
TOKENS = RNG.integers(VOCAB, size=(ROWS, PROMPT)).astype(np.int32)
SEEDS = RNG.integers(1 << 32, size=ROWS, dtype=np.uint32)
LIMITS = RNG.integers(2, RESPONSE + 1, ROWS).astype(np.int32)


def made_up(row):
    """Token ids, log-probs and finish reason of a request, by chance."""
    stops = RNG.random() < 0.5
    count = RNG.integers(1, LIMITS[row] + 1) if stops else LIMITS[row]
    tokens = RNG.integers(10, VOCAB, count).tolist()
    if stops:
        tokens[-1] = int(RNG.choice(STOPS))
    return tokens, (-RNG.random(count)).tolist(), "stop" if stops else "length"


EXPECTED = [made_up(row) for row in range(ROWS)]
TABLE = {
    (tuple(TOKENS[row, : LENGTHS[row]].tolist()), int(SEEDS[row])): EXPECTED[row]
    for row in range(ROWS)
}
PROMPTS = Prompt(np.arange(ROWS, dtype=np.int32), TOKENS, LENGTHS)


def settings(**changes):
    stops = np.full((ROWS, MAX_STOP_IDS), -1, np.int32)
    stops[:, [0, 4]] = STOPS
    made = Sampling(
        SEEDS, np.linspace(0, 1.5, ROWS, dtype=np.float32), LIMITS, np.ones(ROWS, np.float32),
        np.zeros(ROWS, np.int32), stops,
    )  # fmt: skip
    return made._replace(**changes)


def check(rollout, version):
    for row, (tokens, logp, finish) in enumerate(EXPECTED):
        count = len(tokens)
        assert rollout.num_tokens[row] == count
        assert rollout.tokens[row].tolist() == tokens + [0] * (RESPONSE - count)
        np.testing.assert_array_equal(rollout.logp[row, :count], np.float32(logp))
        assert (rollout.logp[row, count:] == 0).all()
        assert rollout.stopped[row] == (finish == "stop")
        assert (rollout.version[row, :count] == version).all()
        assert (rollout.version[row, count:] == -1).all()
    assert rollout.routing is None
    assert rollout.aborted is None


@pytest.fixture
def endpoints():
    made = []

    def make(kind, count=1, **options):
        made.extend(FakeEndpoint(kind, TABLE, **options) for _ in range(count))
        return made[-count:]

    yield make
    for endpoint in made:
        endpoint.stop()


@pytest.fixture
def rollouts():
    made = []

    def make(endpoints, **options):
        options = {"export": lambda params, version: f"shared/{params}-{version}"} | options
        made.append(
            OpenAIRollout(
                [getattr(endpoint, "address", endpoint) for endpoint in endpoints],
                options.pop("flavour", None) or endpoints[0].kind, vocab_size=VOCAB,
                max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE,
                **{"timing": QUICK, "max_in_flight": 8} | options,
            )
        )  # fmt: skip
        return made[-1]

    yield make
    for rollout in made:
        rollout.close()


@pytest.fixture(params=["vllm", "sglang"])
def kind(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_table(kind, endpoints, rollouts):
    pair = endpoints(kind, 2, slow=0.01)
    rollout = rollouts(pair, export=None, token="abc")
    check(rollout.generate(PROMPTS, settings()), 12 if kind == "s3ac" else 0)
    for endpoint in pair:
        assert endpoint.bodies
        assert endpoint.most_open <= 8
        assert len(endpoint.connections) <= 8  # used again and again
        assert endpoint.headers["Authorization"] == "Bearer abc"
    assert sum(len(endpoint.bodies) for endpoint in pair) == ROWS
    stats = rollout.stats()
    assert stats["requests"] == ROWS
    assert stats["tokens"] == sum(len(tokens) for tokens, _, _ in EXPECTED)
    assert stats["servers"] == {endpoint.address: {"is_live": True} for endpoint in pair}


def test_what_vllm_is_asked(endpoints, rollouts):
    (endpoint,) = endpoints("vllm")
    rollouts([endpoint], export=None, model="m").generate(PROMPTS, settings())
    row = 5
    (body,) = [body for body in endpoint.bodies if body["seed"] == int(SEEDS[row])]
    assert body == {
        "model": "m", "prompt": TOKENS[row, : LENGTHS[row]].tolist(),
        "max_tokens": int(LIMITS[row]), "seed": int(SEEDS[row]),
        "temperature": pytest.approx(1.5 * row / (ROWS - 1)), "top_p": 1.0, "top_k": 0,
        "stop_token_ids": list(STOPS), "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip


def test_what_sglang_is_asked(endpoints, rollouts):
    (endpoint,) = endpoints("sglang")
    cut = settings(top_p=np.full(ROWS, 0.5, np.float32), top_k=np.full(ROWS, 9, np.int32))
    rollouts([endpoint], export=None).generate(PROMPTS, cut)
    row = 5
    (body,) = [
        body for body in endpoint.bodies if body["sampling_params"]["sampling_seed"] == SEEDS[row]
    ]
    assert body == {
        "input_ids": TOKENS[row, : LENGTHS[row]].tolist(), "return_logprob": True,
        "logprob_start_len": -1, "stream": False,
        "sampling_params": {
            "max_new_tokens": int(LIMITS[row]), "sampling_seed": int(SEEDS[row]),
            "temperature": pytest.approx(1.5 * row / (ROWS - 1)), "top_p": 0.5, "top_k": 9,
            "stop_token_ids": list(STOPS), "no_stop_trim": True, "skip_special_tokens": False,
        },
    }  # fmt: skip
    endpoint.bodies.clear()
    rollouts([endpoint], export=None).generate(PROMPTS, settings())
    assert {body["sampling_params"]["top_k"] for body in endpoint.bodies} == {-1}


def test_vllms_log_probs_are_not_those_of_a_cut(endpoints, rollouts):
    (endpoint,) = endpoints("vllm")
    rollout = rollouts([endpoint], export=None)
    for cut in ({"top_p": np.full(ROWS, 0.9)}, {"top_k": np.full(ROWS, 5)}):
        with pytest.raises(RolloutError, match="use top_p 1 and top_k 0"):
            rollout.generate(PROMPTS, settings(**cut))


def test_vllm_loads_what_is_exported(endpoints, rollouts):
    pair = endpoints("vllm", 2)
    rollout = rollouts(pair)
    rollout.update_weights("p", 4)
    for endpoint in pair:
        assert endpoint.calls == [
            ("GET", "/health", None),
            ("POST", "/pause?mode=wait", None),
            (
                "POST",
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": "shared/p-4"}},
            ),
            ("POST", "/reset_prefix_cache?reset_running_requests=true", None),
            ("POST", "/resume", None),
        ]
    check(rollout.generate(PROMPTS, settings()), 4)
    inside = rollouts(pair, in_flight=True)
    inside.update_weights("p", 5)
    assert ("POST", "/pause?mode=keep", None) in pair[0].calls


def test_sglang_loads_what_is_exported(endpoints, rollouts):
    (endpoint,) = endpoints("sglang")
    rollout = rollouts([endpoint])
    rollout.update_weights("p", 4)
    load = {"model_path": "shared/p-4", "flush_cache": True, "weight_version": "4"}
    assert endpoint.calls == [
        ("GET", "/get_model_info", None),
        ("POST", "/update_weights_from_disk", load),
    ]
    check(rollout.generate(PROMPTS, settings()), 4)
    endpoint.weights = "3"
    time.sleep(0.11)
    endpoint.calls.clear()
    check(rollout.generate(PROMPTS, settings()), 4)  # it has been restarted: weights before work
    assert endpoint.calls[1] == ("POST", "/update_weights_from_disk", load)
    endpoint.faults.append(lambda found: found["meta_info"].update(weight_version="5"))
    with pytest.raises(RolloutError, match="weights of version 5, current is 4"):
        rollout.generate(PROMPTS, settings())
    inside = rollouts([endpoint], in_flight=True)
    endpoint.calls.clear()
    inside.update_weights("p", 6)
    assert endpoint.calls[1] == ("POST", "/pause_generation", {"mode": "retract"})
    assert endpoint.calls[-1] == ("POST", "/continue_generation", {})


@pytest.mark.parametrize(
    ("kind", "path", "answer", "message"),
    [
        ("vllm", "/collective_rpc", (500, {"error": "no such file"}), "HTTP 500 .*no such file"),
        ("vllm", "/pause", (404, {}), "/pause.*: HTTP 404.*docs/serving.md"),
        ("vllm", "/reset_prefix_cache", (200, {"success": False}), "old weights are still there"),
        (
            "sglang", "/update_weights_from_disk",
            (400, {"success": False, "message": "bad shape"}), "HTTP 400 .*bad shape",
        ),
        (
            "sglang", "/update_weights_from_disk",
            (200, {"success": False, "message": "bad shape"}), "of shared/p-4: bad shape",
        ),
        ("s3ac", None, None, "rollout.backend=remote"),
    ],
)  # fmt: skip
def test_a_failed_reload_is_an_error(kind, path, answer, message, endpoints, rollouts):
    pair = endpoints(kind, 2)
    if path:
        pair[1].control[path] = answer
    rollout = rollouts(pair)
    with pytest.raises(RolloutError, match=message) as caught:
        rollout.update_weights("p", 4)
    assert (pair[1].address if path else "127.0.0.1") in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(RolloutError, match="call update_weights"):
        rollout.generate(PROMPTS, settings())
    if path:
        assert [at.split("?")[0] for _, at, _ in pair[1].calls].count(path) == 1
    # It may hold half of each: nobody is served from it.
    assert ("POST", "/resume", None) not in pair[1].calls


def test_without_an_export_there_is_no_update(endpoints, rollouts):
    with pytest.raises(RolloutError, match="without an export"):
        rollouts(endpoints("vllm"), export=None).update_weights("p", 4)


@pytest.mark.parametrize("fault", [429, 503, 500, 502, "cut"])
def test_what_may_pass_is_tried_again(kind, fault, endpoints, rollouts):
    (endpoint,) = endpoints(kind)
    rollout = rollouts([endpoint])
    rollout.update_weights("p", 4)
    endpoint.calls.clear()
    endpoint.faults.extend([fault] * 3)
    check(rollout.generate(PROMPTS, settings()), 4)
    assert rollout.stats()["retries"] >= 3
    loads = [path for _, path, _ in endpoint.calls if "rpc" in path or "disk" in path]
    # Only a lost connection says that the server may be another one; SGLang can tell.
    assert bool(loads) == (fault == "cut" and kind == "vllm")


def abort_it(found):
    if "choices" in found:
        found["choices"][0]["finish_reason"] = "abort"
    else:
        found["meta_info"]["finish_reason"] = {"type": "abort", "message": "preempted"}


def test_what_the_server_aborts_by_itself_is_asked_for_again(kind, endpoints, rollouts):
    (endpoint,) = endpoints(kind)
    endpoint.faults.extend([abort_it] * 3)
    rollout = rollouts([endpoint], export=None)
    check(rollout.generate(PROMPTS, settings()), 0)
    assert rollout.stats()["retries"] == 3


def spoil(kind, what, found):
    if kind == "sglang":
        pairs = found["meta_info"]["output_token_logprobs"]
        if what == "ids":
            del found["output_ids"], found["meta_info"]["output_token_logprobs"]
        elif what == "logp":
            found["meta_info"]["output_token_logprobs"] = pairs[:-1]
        elif what == "none":
            pairs[0][0] = None
        elif what == "vocab":
            pairs[0][1] = found["output_ids"][0] = VOCAB
        elif what == "text":
            pairs[0][1] = found["output_ids"][0] = "7"
        elif what == "finish":
            found["meta_info"]["finish_reason"] = None
        return
    (choice,) = found["choices"]
    logprobs = choice["logprobs"]
    if what == "ids":
        del choice["token_ids"]
    elif what == "logp":
        del logprobs["token_logprobs"][-1]
    elif what == "none":
        logprobs["token_logprobs"][0] = None
    elif what == "vocab":
        choice["token_ids"][0] = VOCAB
    elif what == "text":
        choice["token_ids"][0] = "7"
    elif what == "finish":
        choice["finish_reason"] = "tool_calls"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (400, "HTTP 400 .*not.*now"),
        (401, "HTTP 401"),
        (lambda found: '{"choices": [', "the answer is no JSON"),
        (lambda found: "[]", "without token ids and log-probs"),
        (lambda found: "NaN", "without token ids and log-probs"),
        ("ids", "without token ids and log-probs"),
        ("logp", "tokens with .* log-probs|name other tokens"),
        ("none", "no finite numbers"),
        ("vocab", r"token 50, the model knows 0\.\.49"),
        ("text", "no integers"),
        ("finish", "without token ids and log-probs"),
    ],
)
def test_an_answer_that_is_none_is_refused(kind, fault, message, endpoints, rollouts):
    (endpoint,) = endpoints(kind)
    if isinstance(fault, str):
        fault = functools.partial(spoil, kind, fault)
    rollout = rollouts([endpoint], export=None)
    endpoint.faults.append(fault)
    with pytest.raises(RolloutError, match=message) as caught:
        rollout.generate(PROMPTS, settings())
    assert endpoint.address in str(caught.value)
    assert "\n" not in str(caught.value)
    check(rollout.generate(PROMPTS, settings()), 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (([20, 21], [-1.0, -1.0], "stop"), r"ended with token 21, stop ids are \[3, 7\]"),
        (([20, 3], [-1.0, -1.0], "length"), "did not end with token 3"),
        (([3, 20], [-1.0, -1.0], "length"), "goes on behind a stop token"),
        (([20], [-1.0], "length"), "cut off at 1 tokens of 2: the server's context"),
        (([], [], "length"), "a response of 0 tokens, at most 2"),
        (([20, 21, 3], [-1.0] * 3, "stop"), "a response of 3 tokens, at most 2"),
        (([20, 21], [-1.0, float("inf")], "length"), "no finite numbers"),
    ],
)
def test_a_response_that_cannot_be_is_refused(kind, row, message, endpoints, rollouts, monkeypatch):
    (endpoint,) = endpoints(kind)
    monkeypatch.setattr(endpoint, "_row", lambda prompt, seed, limit: row)
    rollout = rollouts([endpoint], export=None)
    if not row[0]:
        monkeypatch.setattr(endpoint, "_vllm", lambda body: {"choices": [empty()]})
    with pytest.raises(RolloutError, match=message):
        rollout.generate(PROMPTS, settings(max_tokens=np.full(ROWS, 2, np.int32)))


def empty():
    return {"token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "length"}


def test_one_of_two_servers_is_dead(kind, endpoints, rollouts):
    one, two = endpoints(kind, 2, slow=0.01)
    rollout = rollouts([one, two])
    rollout.update_weights("p", 4)
    two.stop()
    check(rollout.generate(PROMPTS, settings()), 4)
    assert "error" in rollout.stats()["servers"][two.address]
    rollout.update_weights("p", 5)
    two.calls.clear()
    two.weights = "default"
    two.start()
    time.sleep(0.12)
    one.slow = 0.2
    check(rollout.generate(PROMPTS, settings()), 5)
    assert two.bodies
    paths = [path for _, path, _ in two.calls]
    assert any("rpc" in path or "disk" in path for path in paths)


def test_no_server_at_all(rollouts):
    rollout = rollouts(["http://127.0.0.1:9", "127.0.0.1:10"], flavour="vllm", export=None)
    began = time.monotonic()
    with pytest.raises(RolloutError, match="no rollout server to be had for 1 s") as caught:
        rollout.generate(PROMPTS, settings())
    assert 1 <= time.monotonic() - began < 4
    assert "http://127.0.0.1:9: /health: " in str(caught.value)
    assert "127.0.0.1:10: /health: " in str(caught.value)


def test_what_fails_again_and_again_is_given_up(endpoints, rollouts):
    (endpoint,) = endpoints("vllm")
    endpoint.faults.extend([500] * 1000)
    with pytest.raises(RolloutError, match=r"failed 5 times, last on .*HTTP 500"):
        rollouts([endpoint], export=None, timing=PATIENT).generate(PROMPTS, settings())


@pytest.mark.parametrize("kind", KINDS)
def test_abort_returns_what_there_is(kind, endpoints, rollouts):
    (endpoint,) = endpoints(kind, slow=5.0)
    rollout = rollouts([endpoint], export=None)
    threading.Timer(0.3, rollout.abort).start()
    began = time.monotonic()
    made = rollout.generate(PROMPTS, settings())
    assert time.monotonic() - began < 2
    assert made.aborted.all()
    some = made.num_tokens > 0
    assert some.sum() == (0 if kind == "s3ac" else 8)
    for row in np.flatnonzero(some):
        assert made.tokens[row, 0] == EXPECTED[row][0][0]
    endpoint.aborting.clear()
    endpoint.slow = 0
    check(rollout.generate(PROMPTS, settings()), 12 if kind == "s3ac" else 0)


def test_pause_holds_and_resume_goes_on(kind, endpoints, rollouts):
    (endpoint,) = endpoints(kind)
    rollout = rollouts([endpoint], export=None)
    rollout.pause()
    threading.Timer(0.3, rollout.resume).start()
    began = time.monotonic()
    check(rollout.generate(PROMPTS, settings()), 0)
    assert time.monotonic() - began > 0.25
    said = [(path, body) for method, path, body in endpoint.calls if method == "POST"]
    want = {
        "vllm": [("/pause?mode=keep", None), ("/resume", None)],
        "sglang": [("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})],
    }
    assert said == want[kind]


def test_close_ends_a_call_and_all_threads(endpoints):
    (endpoint,) = endpoints("vllm", slow=5.0)
    before = set(threading.enumerate())
    rollout = OpenAIRollout(
        [endpoint.address], "vllm", vocab_size=VOCAB, max_prompt_tokens=PROMPT,
        max_response_tokens=RESPONSE,
    )  # fmt: skip
    timer = threading.Timer(0.2, rollout.close)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RolloutError, match="closed"):
        rollout.generate(PROMPTS, settings())
    assert time.monotonic() - began < 2
    timer.join()
    with pytest.raises(RolloutError, match="closed"):
        rollout.generate(PROMPTS, settings())
    assert "closed" in rollout.stats()["servers"][endpoint.address]["error"]
    rollout.close()
    assert set(threading.enumerate()) <= before


def test_messages(rollouts):
    with pytest.raises(RolloutError, match=r"rollout\.addresses"):
        rollouts([], flavour="vllm")
    with pytest.raises(RolloutError, match="no flavour 'tgi': use one of vllm, sglang, s3ac"):
        rollouts(["a:1"], flavour="tgi")
    rollout = rollouts(["a:1"], flavour="vllm")
    with pytest.raises(RolloutError, match="call update_weights"):
        rollout.generate(PROMPTS, settings())
    with pytest.raises(ValueError, match=r"max_tokens must be in 1\.\.6"):
        rollouts(["a:1"], flavour="vllm", export=None).generate(
            PROMPTS, settings(max_tokens=np.full(ROWS, 7))
        )


@pytest.mark.parametrize(
    "made",
    [
        "client.openai import OpenAIRollout; kept = OpenAIRollout(['a:1'], 'vllm', vocab_size=9, ",
        "client.remote import RemoteRollout; kept = RemoteRollout(['a:1'], network=network, ",
    ],
)
def test_a_process_that_forgets_to_close_ends(made):
    pytest.importorskip("grpc")
    code = (
        "from tests.helpers import tiny_spec\n"
        "from s3ac_jax.models.network import actor_network\n"
        "network = actor_network(tiny_spec())\n"
        f"from s3ac_jax.rollout.{made} max_prompt_tokens=1, max_response_tokens=1)\n"
        "raise SystemExit(7)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], timeout=60, stderr=subprocess.PIPE, text=True
    )
    assert ended.returncode == 7
    assert "Traceback" not in ended.stderr


def test_no_token_travels_in_clear(rollouts):
    for address in ("http://10.0.0.7:8000", "host.example:8000"):
        with pytest.raises(RolloutError, match="in clear: use https://"):
            rollouts([address], flavour="vllm", token="abc")
    rollouts(["https://host.example:8000", "localhost:80"], flavour="vllm", token="abc")
    rollouts(["http://10.0.0.7:8000"], flavour="vllm")


def test_a_refused_pause_is_an_error(endpoints, rollouts):
    good, bad, dead = endpoints("vllm", 3)
    lines = []
    rollout = rollouts([good, bad, dead], export=None, notice=lines.append)
    dead.stop()
    bad.control["/pause"] = (401, {})
    with pytest.raises(RolloutError, match=f"did not pause .{bad.address}: /pause.*HTTP 401"):
        rollout.pause()
    assert ("POST", "/pause?mode=keep", None) in good.calls
    del bad.control["/pause"]
    rollout.pause()
    assert f"rollout server {dead.address} did not pause: " in lines[0]
    rollout.close()  # and none is left paused
    assert good.calls[-1] == bad.calls[-1] == ("POST", "/resume", None)


def test_people_hear_of_servers_that_are_away(endpoints, rollouts):
    lines = []
    loud = Timing(patience=1.0, retry=(0.02, 0.1), notice=(0.1, 0.2))
    rollout = rollouts(
        ["127.0.0.1:9"], flavour="vllm", export=None, timing=loud, notice=lines.append
    )
    with pytest.raises(RolloutError, match="no rollout server"):
        rollout.generate(PROMPTS, settings())
    assert 3 <= len(lines) <= 6
    assert "waiting for a rollout server (1 s at most): 127.0.0.1:9: /health: " in lines[0]


def test_a_server_that_only_says_it_is_busy_holds_up_nobody(kind, endpoints, rollouts):
    good, bad = endpoints(kind, 2)
    look = {"vllm": "/health", "sglang": "/get_model_info"}[kind]
    bad.control[look] = (503, {"error": "the engine is dead"})
    rollout = rollouts([good, bad])
    rollout.update_weights("p", 4)
    check(rollout.generate(PROMPTS, settings()), 4)
    assert not bad.bodies


def models(*listed):
    return 200, {"object": "list", "data": list(listed)}


OURS = {"id": "tiny", "object": "model", "version": 12, "fingerprint": "00c0ffee"}


def test_our_own_server_says_which_weights_answer(endpoints, rollouts):
    pair = endpoints("s3ac", 2)
    for endpoint in pair:
        endpoint.control["/v1/models"] = models({"id": "other"}, OURS)
    rollout = rollouts(pair, export=None, model="tiny")
    assert rollout.adopt_weights() == ("tiny", "00c0ffee", 12)
    assert rollout.stats()["fingerprint"] == "00c0ffee"
    check(rollout.generate(PROMPTS, settings()), 12)
    pair[1].control["/v1/models"] = models(OURS | {"fingerprint": "0badcafe"})
    with pytest.raises(RolloutError, match=r"different weights.*has 00c0ffee .*has 0badcafe"):
        rollout.adopt_weights()


def test_weights_that_change_meanwhile_are_noticed(endpoints, rollouts):
    (endpoint,) = endpoints("s3ac")
    endpoint.control["/v1/models"] = models(OURS | {"version": 11})
    rollout = rollouts([endpoint], export=None)
    rollout.adopt_weights()
    with pytest.raises(RolloutError, match="weights of version 12, current is 11"):
        rollout.generate(PROMPTS, settings())


def test_others_say_what_they_call_their_model(endpoints, rollouts):
    (vllm,), (sglang,) = endpoints("vllm"), endpoints("sglang")
    vllm.control["/v1/models"] = models({"id": "qwen", "root": "folder"})
    assert rollouts([vllm], export=None).adopt_weights() == ("qwen", None, 0)
    assert rollouts([sglang], export=None).adopt_weights() == ("m, version default", None, 0)
    check(rollouts([sglang], export=None).generate(PROMPTS, settings()), 0)
    for strange in ([], {"data": 3}, {"data": [3]}, {}):
        vllm.control["/v1/models"] = 200, strange
        assert rollouts([vllm], export=None).adopt_weights().fingerprint is None


def test_weights_are_waited_for(endpoints, rollouts):
    lines = []
    rollout = rollouts(["127.0.0.1:9"], flavour="s3ac", export=None, notice=lines.append)
    with pytest.raises(RolloutError, match="no rollout server to be had for 1 s"):
        rollout.adopt_weights()
    assert "waiting for a rollout server (1 s at most): 127.0.0.1:9 did not say" in lines[0]
    (endpoint,) = endpoints("s3ac")
    endpoint.control["/v1/models"] = 503, {"error": "loading"}
    timer = threading.Timer(0.3, lambda: endpoint.control.update({"/v1/models": models(OURS)}))
    timer.start()
    assert rollouts([endpoint], export=None, notice=lines.append).adopt_weights().version == 12
    timer.join()
