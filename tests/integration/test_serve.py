"""launch/serve.py as a program, and what it refuses; its clients are plain HTTP and plain gRPC."""

import contextlib
import dataclasses
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
import types

import jax
import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("grpc")
import grpc

from s3ac_jax.core.errors import RunError
from s3ac_jax.core.types import Prompt
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.io.hf_weights import save_params
from s3ac_jax.io.orbax_weights import save_orbax
from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout import wire
from s3ac_jax.rollout.backend import seeded_sampling
from s3ac_jax.rollout.server.sinks import EngineFailed
from s3ac_jax.train import policies
from s3ac_jax.train import serve as serving
from s3ac_jax.train.build import build
from s3ac_jax.train.served import WeightsSource
from tests.integration import hf_runs, runs
from tests.integration.servers import TINY, app, free_port, overrides, served

PROMPTS = ["7+4-9*3=", "1-1=", "8*3+5-2*7=", "0+1=", "9*9=", "3-8*7+2="]


@pytest.fixture(scope="module")
def tiny():
    with served(f"--config={runs.TINY}", *overrides(TINY)) as server:
        yield server


@pytest.fixture(scope="module")
def parts():
    return build(runs.small_config())


def connection(server, tls=None):
    if tls is None:
        return http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    return http.client.HTTPSConnection("127.0.0.1", server.http_port, timeout=30, context=tls)


def post(server, path, body, tls=None, headers=None):
    """(status, the answer's JSON)."""
    with contextlib.closing(connection(server, tls)) as client:
        client.request("POST", path, json.dumps(body), headers or {})
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())


def over_http(server, prompts, seeds, temperature):
    """(token ids, log-probs) of each prompt, asked for one by one."""
    found = []
    for ids, seed in zip(prompts, seeds, strict=True):
        status, told = post(
            server, "/v1/completions",
            {"prompt": ids, "seed": seed, "temperature": temperature, "max_tokens": 40,
             "logprobs": 0, "return_token_ids": True},
        )  # fmt: skip
        assert status == 200, told
        (choice,) = told["choices"]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return found


def over_grpc(server, prompts, seeds, temperature, stop_ids):
    """The same in one Generate."""
    requests = wire.Requests(
        np.concatenate(prompts), np.array([len(ids) for ids in prompts], np.int32),
        np.arange(len(prompts), dtype=np.int32),
        seeded_sampling(seeds, temperature=temperature, max_tokens=40, stop_ids=stop_ids),
    )  # fmt: skip
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        message = wire.caller(channel, "Generate")(wire.pack_requests(requests), timeout=60)
    made = wire.unpack_responses(message)
    ends = np.cumsum(made.num_tokens)
    return [
        (made.tokens[end - n : end].tolist(), made.logp[end - n : end].tolist())
        for end, n in zip(ends, made.num_tokens, strict=True)
    ]


def locally(parts, params, prompts, seeds, temperature, stop_ids):
    """The same from the sampler that training uses."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    sampling = seeded_sampling(seeds, temperature=temperature, max_tokens=40, stop_ids=stop_ids)
    with parts.on_mesh():
        parts.rollout.update_weights(params, 0)
        prompt = Prompt(np.arange(len(prompts), dtype=np.int32), tokens, lengths)
        made = parts.rollout.generate(prompt, sampling)
    return [
        (made.tokens[row, :n].tolist(), made.logp[row, :n].tolist())
        for row, n in enumerate(made.num_tokens)
    ]


def same(found, wanted):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, mine), (_, theirs) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_http_grpc_and_the_trainers_sampler_agree(tiny, parts, temperature):
    tokenizer = parts.task.tokenizer
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    seeds = [5, 6, 7, 2**32 - 1, 0, 5]
    stop_ids = tokenizer.stop_ids
    wanted = locally(parts, runs.late_policy(parts), prompts, seeds, temperature, stop_ids)
    same(over_grpc(tiny, prompts, seeds, temperature, stop_ids), wanted)
    same(over_http(tiny, prompts, seeds, temperature), wanted)
    # The same in text.
    body = {"prompt": PROMPTS[1], "seed": seeds[1], "temperature": temperature}
    status, told = post(tiny, "/v1/completions", body)
    assert status == 200, told
    assert told["choices"][0]["text"] == tokenizer.decode(wanted[1][0])


def test_what_is_said_at_the_start_can_be_pasted(tiny):
    assert f"  gRPC     127.0.0.1:{tiny.port}   (no TLS, no token)" in tiny.lines
    (command,) = [line for line in tiny.lines if line.startswith("  curl ")]
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    done = subprocess.run(["sh", "-c", f"{command} -s"], capture_output=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["finish_reason"] == "stop"


def test_weights_from_a_path_are_served_next(tiny, parts, tmp_path):
    late = runs.late_policy(parts)
    early = policies.load_policies(
        policies.embedded_folder(), parts.actor.network, ("early",)
    )["early"]  # fmt: skip
    tokenizer = parts.task.tokenizer
    prompts, seeds = [tokenizer.encode(text) for text in PROMPTS], [1] * len(PROMPTS)
    save_orbax(early, parts.config.model, None, tmp_path / "early")
    save_params(early, parts.config.model, None, tmp_path / "folder")
    with grpc.insecure_channel(f"127.0.0.1:{tiny.port}") as channel:
        update = wire.caller(channel, "UpdateWeights")

        def send(path, version):
            return update(pb.UpdateWeightsRequest(path=str(path), version=version), timeout=60)

        try:
            prints = [
                send(tmp_path / name, version).fingerprint
                for name, version in (("folder", 5), ("early", 7))
            ]
            assert prints[0] == prints[1]
            wanted = locally(parts, early, prompts, seeds, 1.0, tokenizer.stop_ids)
            same(over_http(tiny, prompts, seeds, 1.0), wanted)
            with pytest.raises(grpc.RpcError) as caught:
                send(tmp_path / "nowhere", 8)
            assert f"no folder {tmp_path / 'nowhere'}" in caught.value.details()
            _, told = post(tiny, "/v1/completions", {"prompt": "1+1="})
            assert told["system_fingerprint"] == "weights-7"
        finally:
            save_orbax(late, parts.config.model, None, tmp_path / "late")
            send(tmp_path / "late", 9)


def test_updates_come_from_one_folder_where_that_is_said(parts, tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    save_orbax(runs.late_policy(parts), parts.config.model, None, inside / "late")
    save_orbax(runs.late_policy(parts), parts.config.model, None, outside)
    (inside / "link").symlink_to(outside)
    source = WeightsSource(parts.config, parts.actor, parts.mesh, str(inside))
    assert source.any(str(inside / "late")).keys() == runs.late_policy(parts).keys()
    for path in (outside, inside / "link", inside / ".." / "outside", tmp_path / "inside2"):
        with pytest.raises(RunError, match=r"is not in .*inside, .* \(--weights_root\)"):
            source.any(str(path))


def run_folder(path, parts, params):
    """A run's workdir as far as a server reads it: its config and its latest checkpoint."""
    path.mkdir()
    config = {"model": dataclasses.asdict(parts.config.model), "start": {"hf": ""}}
    (path / "config.json").write_text(json.dumps(config))
    checkpoints = Checkpoints(path / "checkpoints")
    for tick in (2, 4):
        weights = jax.tree.map(lambda leaf, tick=tick: np.asarray(leaf) * (tick == 4), params)
        checkpoints.save(tick, {"actor": {"trainable": weights, "frozen": {}}}, {})
    checkpoints.close()
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_with_requests_under_way(parts, tmp_path, number):
    params = runs.late_policy(parts)
    run = run_folder(tmp_path / "run", parts, params)
    where = run if number == signal.SIGTERM else run / "checkpoints" / "4"
    with served(
        f"--config={runs.TINY}", *overrides(TINY), f"--checkpoint={where}",
        "--max_response_tokens=4000",
    ) as server:  # fmt: skip
        assert f"the actor of {run} at tick 4, version 4" in server.text()
        prompts = [parts.task.tokenizer.encode(text) for text in PROMPTS]
        wanted = locally(parts, params, prompts, [3] * 6, 1.0, parts.task.tokenizer.stop_ids)
        same(over_http(server, prompts, [3] * 6, 1.0), wanted)
        with contextlib.closing(connection(server)) as client:
            body = {"prompt": "1+1=", "max_tokens": 4000, "ignore_eos": True, "stream": True}
            client.request("POST", "/v1/completions", json.dumps(body))
            answer = client.getresponse()
            assert answer.readline().startswith(b"data: ")
            started = time.monotonic()
            server.process.send_signal(number)
            rest = answer.read().decode()
            assert time.monotonic() - started < 1
            assert server.process.wait(timeout=20) == 0
            # Alone on the machine it takes 0.6 s, most of them the interpreter's own end.
            assert time.monotonic() - started < 4
        assert "the server is stopping" in rest
        assert server.process.stderr.read() == ""


def test_a_signal_before_anything_is_served():
    with app(f"--config={runs.TINY}", f"--port={free_port()}", "--http_port=0") as process:
        assert process.stdout.readline() == "loading the base policy\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "stopped before anything was served\n"
    assert "ready" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prt=3"], "no flag --prt; did you mean --port?"),
        (["--port=3"], "--config is required: the config file, say --config=configs/tiny.py"),
        ([f"--config={runs.TINY}", "--config.rollout.slotss=3"], "did you mean slots?"),
        ([f"--config={runs.TINY}", "--port=70000"], "--port=70000"),
    ],
)
def test_a_typo_is_told_in_one_line(arguments, said):
    with app(*arguments) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_an_engine_that_failed_ends_the_server():
    driver = types.SimpleNamespace(error=EngineFailed("engine failed: boom"))
    with serving._Signals() as signals, pytest.raises(RunError, match="engine failed: boom"):
        signals.wait(driver)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out",
         certificate, "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def test_a_folder_is_talked_to_behind_tls_and_a_token(certificate, tmp_path):
    pytest.importorskip("jinja2")
    tokenizers = pytest.importorskip("tokenizers")
    folder = hf_runs.make_folder(tmp_path / "model")
    (tmp_path / "token").write_text("open sesame".replace(" ", "-") + "\n")
    metrics = free_port()
    with served(
        f"--config={hf_runs.CONFIG}", *overrides(hf_runs.SMALL | {"start.hf": folder}),
        f"--hf={folder}", "--host=0.0.0.0",
        f"--tls_cert={certificate[0]}", f"--tls_key={certificate[1]}",
        f"--token_file={tmp_path / 'token'}", f"--metrics_port={metrics}",
        f"--weights_root={tmp_path}",
    ) as server:  # fmt: skip
        # Not at the host of the rest, which others can reach: it has no token.
        assert f"  metrics  http://127.0.0.1:{metrics}/metrics" in server.lines
        tls = ssl.create_default_context(cafile=str(certificate[0]))
        allowed = {"Authorization": "Bearer open-sesame"}
        body = {
            "messages": [{"role": "user", "content": "1+1"}], "temperature": 0, "max_tokens": 6,
            "return_token_ids": True,
        }  # fmt: skip
        assert post(server, "/v1/chat/completions", body, tls)[0] == 401
        status, told = post(server, "/v1/chat/completions", body, tls, allowed)
        assert status == 200, told
        # The template of the folder, written out by hand.
        asked = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert told["prompt_token_ids"] == tokenizer.encode(asked, add_special_tokens=False).ids
        ids = told["choices"][0]["token_ids"]
        shown = tokenizer.decode([one for one in ids if one < tokenizer.get_vocab_size()])
        assert told["choices"][0]["message"]["content"] == shown
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            post(server, "/v1/chat/completions", body)
        root = grpc.ssl_channel_credentials(certificate[0].read_bytes())
        with grpc.secure_channel(f"localhost:{server.port}", root) as channel:
            stats = wire.caller(channel, "Stats")
            with pytest.raises(grpc.RpcError) as caught:
                stats(pb.Empty(), timeout=20)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            reply = stats(
                pb.Empty(), timeout=20, metadata=[("authorization", "Bearer open-sesame")]
            )
        assert json.loads(reply.json)["version"] == 0
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", metrics)) as client:
            client.request("GET", "/metrics")
            assert b"rollout_slots 16.0" in client.getresponse().read()


def refused(wanted, changes=None):
    """The one line with which a server is refused."""
    ports = {"port": free_port(), "http_port": 0}
    with pytest.raises(RunError) as caught:
        serving.serve(runs.small_config(changes), serving.Wanted(**ports | wanted))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_served_is_told_in_one_line(parts, tmp_path):
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    (tmp_path / "token").write_text("two words\n")
    spec = dataclasses.replace(parts.config.model, rope_theta=5.0)
    save_orbax(runs.late_policy(parts), spec, None, other)
    folder = hf_runs.make_folder(tmp_path / "model")
    assert refused({"checkpoint": str(tmp_path / "no")}).startswith(f"no folder {tmp_path / 'no'};")
    assert "holds no weights" in refused({"checkpoint": str(empty)})
    assert refused({"hf": str(tmp_path / "no")}).startswith(f"no folder {tmp_path / 'no'};")
    assert "model.rope_theta is 10000.0 in the config, but 5.0 in" in refused(
        {"checkpoint": str(other)}
    )
    assert "in the config, but" in refused({"hf": str(folder)})
    assert "not both" in refused({"checkpoint": "a", "hf": "b"})
    assert "--tls_key is missing" in refused({"tls_cert": "cert.pem"})
    assert "--tls_cert is missing" in refused({"tls_key": "key.pem"})
    assert "PEM and unencrypted" in refused({"tls_cert": "no.pem", "tls_key": "no.pem"})
    assert "one token" in refused({"token_file": str(tmp_path / "token")})
    assert "can't be read" in refused({"token_file": str(tmp_path / "no")})
    assert "--weights_root: no folder" in refused({"weights_root": str(tmp_path / "no")})
    told = refused({"host": "0.0.0.0"})
    assert "TLS and a token" in told
    assert told.endswith("--tls_cert, --tls_key and --token_file, or --insecure")
    assert "given twice" in refused({"port": 7000, "http_port": 7000})
    assert "--host" in refused({"host": "no.such.host.invalid"} | {"insecure": True})
    assert "--checkpoint" in refused({}, {"sft.embedded": False})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} (Address already in use)" in refused({"port": port})
        assert "--http_port" in refused({"http_port": port})
