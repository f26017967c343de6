"""A server's life: weights, compilation, gRPC and HTTP, until a signal ends it."""

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.config.run import RunConfig, StartConfig
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.rollout.backend import RolloutError, seeded_sampling
from s3ac_jax.train.programs import Role, make_actor
from s3ac_jax.train.rollouts import make_engine
from s3ac_jax.train.served import LoadedWeights, ServeError, Text, WeightsSource, make_text
from s3ac_jax.train.tasks import Task, make_task
from s3ac_jax.train.token_file import read_token

try:
    from s3ac_jax.rollout.http.api import HttpApi, HttpServer
    from s3ac_jax.rollout.http.request import Served
    from s3ac_jax.rollout.server.driver import RolloutDriver
    from s3ac_jax.rollout.server.grpc_server import RolloutServer, check_exposure
    from s3ac_jax.rollout.server.metrics import Metrics
    from s3ac_jax.rollout.server.sinks import WholeSink
    from s3ac_jax.rollout.server.slot_engine import JetStreamEngine
    from s3ac_jax.rollout.server.store import ParamStore
    from s3ac_jax.rollout.wire import Requests
except ModuleNotFoundError as error:
    raise ServeError(
        f"serving needs more packages ({error}): pip install 's3ac-jax[serve]'"
    ) from error

# So many prompts times n in one HTTP request.
_MOST_REQUESTS = 1024
_LOOK_SECONDS = 1.0
_PREFILL_CHUNK, _WIDER = 64, 8


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to serve and where. checkpoint, hf: paths; neither: the config's base policy.

    http_port, metrics_port: 0 for none. metrics_host: of the latter, which has no token. tls_cert,
    tls_key, token_file: paths. weights_root: the folder that updates by path may come from, None
    for any. max_pending: responses that may wait for a slot. insecure: others than this machine may
    come without TLS and token. max_prompt_tokens, max_response_tokens: of one request, the config's
    when 0.
    Source: ours.
    """

    checkpoint: str | None = None
    hf: str | None = None
    host: str = "127.0.0.1"
    port: int = 9000
    http_port: int = 8000
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    tls_cert: str | None = None
    tls_key: str | None = None
    token_file: str | None = None
    weights_root: str | None = None
    max_pending: int = 4096
    insecure: bool = False
    max_prompt_tokens: int = 0
    max_response_tokens: int = 0


class _Locks(NamedTuple):
    """tls: paths of certificate and key. context: the same for HTTP. token: of the clients."""

    tls: tuple[str, str] | None
    context: ssl.SSLContext | None
    token: str | None


def serve(config: RunConfig, wanted: Wanted) -> None:
    """Serves until SIGINT or SIGTERM, then ends within two seconds; a second signal ends at once.

    Raises RunError, in one line, for whatever can't be read, had or bound. Source: ours.
    """
    locks = _check(wanted)
    if wanted.hf and config.start.hf:
        # Its tokenizer and chat template too are the folder's.
        config = dataclasses.replace(config, start=StartConfig(wanted.hf))
    with _Signals() as signals, contextlib.ExitStack() as ends:
        try:
            mesh, role = parallel.make_mesh(config.mesh), make_actor(config)
            task = make_task(config)
        except ValueError as error:
            raise ServeError(str(error)) from error
        _say(f"loading {wanted.checkpoint or wanted.hf or 'the base policy'}")
        source = WeightsSource(config, role, mesh, wanted.weights_root)
        text, why_no_chat = make_text(task.tokenizer, wanted.hf, config.start.hf)
        with jax.set_mesh(mesh):
            driver, told = _driver(config, wanted, role, mesh, text, source)
        ends.callback(driver.stop)
        _compile(driver)
        # Ends last, so that its clients are still told why the driver gave up.
        metrics = Metrics(driver)
        http = HttpServer(_application(config, wanted, driver, text, locks, metrics))
        ends.callback(http.stop)
        server = RolloutServer(
            driver, host=wanted.host, port=wanted.port, tls=locks.tls, token=locks.token,
            insecure=wanted.insecure, metrics_host=wanted.metrics_host,
            metrics_port=wanted.metrics_port or None, metrics=metrics, tokenizer=text,
            bos_id=text.bos_id, load=source.any,
        )  # fmt: skip
        ends.callback(server.stop)
        http_port = None
        if wanted.http_port:
            http_port = http.start(wanted.host, wanted.http_port, locks.context)
        chat = why_no_chat is None
        _say(f"serving {config.name}: {told}")
        _announce(config, wanted, driver, server, http_port, _example(task, text, chat))
        if not chat:
            _say(f"no /v1/chat/completions: {why_no_chat}")
        _say("ready")
        signals.wait(driver)
        _say("stopping")


def _check(wanted: Wanted) -> _Locks:
    """Whatever can be told before anything is loaded."""
    for name in ("checkpoint", "hf"):
        if getattr(wanted, name) == "":
            raise CommandLineError(f"--{name} is empty; name a folder, or leave it out")
    if wanted.checkpoint and wanted.hf:
        raise CommandLineError("give --checkpoint or --hf, not both")
    if bool(wanted.tls_cert) != bool(wanted.tls_key):
        missing = "--tls_key" if wanted.tls_cert else "--tls_cert"
        raise CommandLineError(f"TLS needs both --tls_cert and --tls_key; {missing} is missing")
    tls, context = None, None
    if wanted.tls_cert and wanted.tls_key:
        tls = wanted.tls_cert, wanted.tls_key
        context = _tls(*tls)
    try:
        token = read_token(wanted.token_file, "--token_file") if wanted.token_file else None
    except ValueError as error:
        raise ServeError(str(error)) from error
    if wanted.weights_root and not Path(wanted.weights_root).is_dir():
        raise ServeError(f"--weights_root: no folder {wanted.weights_root}")
    try:
        check_exposure(wanted.host, tls=tls is not None, token=token, insecure=wanted.insecure)
    except RolloutError as error:
        raise ServeError(
            f"{error}: --tls_cert, --tls_key and --token_file, or --insecure"
        ) from error
    ports = {
        name: port for name in ("port", "http_port", "metrics_port")
        if (port := getattr(wanted, name))
    }  # fmt: skip
    for name, port in ports.items():
        if list(ports.values()).count(port) > 1:
            raise CommandLineError(f"--{name}={port} is given twice")
        _check_free(wanted.metrics_host if name == "metrics_port" else wanted.host, port, name)
    return _Locks(tls, context, token)


def _tls(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password, or OpenSSL would ask for that of an encrypted key.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is one
        raise ServeError(
            f"TLS: {certificate} and {key} are no certificate and its key, PEM and unencrypted "
            f"({error.strerror or error})"
        ) from error
    return context


def _check_free(host: str, port: int, name: str) -> None:
    """The server binds again later; here it is told before the weights are loaded."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise ServeError(
            f"can't serve at {host}:{port} ({getattr(error, 'strerror', None) or error}); choose "
            f"another --{name} or --host"
        ) from error


def _weights(source: WeightsSource, wanted: Wanted) -> LoadedWeights:
    if wanted.checkpoint:
        return source.checkpoint(wanted.checkpoint)
    return source.hf(wanted.hf) if wanted.hf else source.base()


def _driver(
    config: RunConfig, wanted: Wanted, role: Role, mesh: Mesh, text: Text, source: WeightsSource
) -> tuple[RolloutDriver, str]:
    """A driver, and what its weights are. Nobody else keeps them: the first update frees them."""
    prompt = wanted.max_prompt_tokens or config.task.max_prompt_tokens
    response = wanted.max_response_tokens or config.rollout.max_response_tokens
    # Read in chunks, a short prompt costs what it is long, so few widths will do; each of them is
    # a program of all layers to compile.
    chunk = min(config.rollout.prefill_chunk or _PREFILL_CHUNK, prompt)
    widths = [width for n in range(8) if (width := chunk * _WIDER**n) < prompt]
    engine = dataclasses.replace(
        make_engine(config, role.network, text.stop_ids), cache_tokens=prompt + response,
        prefill_chunk=chunk,
    )  # fmt: skip
    weights = _weights(source, wanted)
    store = ParamStore.of(engine, weights.params, weights.version)
    slots = JetStreamEngine(
        engine, store, max_prompt_tokens=prompt, insert_batch=config.rollout.insert_batch,
        tokenizer=text, bos_id=text.bos_id, mesh=mesh, prompt_widths=widths,
    )  # fmt: skip
    told = f"{weights.told}, version {weights.version}, fingerprint {store.get().fingerprint}"
    rounded = [name for name in ("weights", "kv_dtype") if getattr(engine, name) == "int8"]
    if rounded:
        told += f"; sampled with rollout.{' and rollout.'.join(rounded)} = int8"
    return RolloutDriver(slots, store, max_waiting=wanted.max_pending), told


def _compile(driver: RolloutDriver) -> None:
    """Requests of every width that prompts are padded to, so that no client waits for it."""
    engine, start = driver.engine, time.perf_counter()
    widths = engine.prompt_widths
    _say(f"compiling, for prompts of up to {', '.join(map(str, widths))} tokens")
    # On a mesh what a step leaves lies differently from what it was given, at first: another
    # program. Hence several steps, and the first width three times.
    for width in (widths[0], widths[0], *widths):
        sink, length = WholeSink(1), np.array([width], np.int32)
        tokens = min(3 * engine.steps, engine.cache_tokens - width)
        sampling = seeded_sampling([0], temperature=1.0, max_tokens=tokens, stop_ids=())
        prompt = np.zeros(width, np.int32)
        driver.submit(Requests(prompt, length, np.zeros(1, np.int32), sampling), sink)
        sink.result()
    _say(f"compiled in {time.perf_counter() - start:.1f} s")


def _application(
    config: RunConfig, wanted: Wanted, driver: RolloutDriver, text: Text, locks: _Locks,
    metrics: Metrics,
) -> Any:  # fmt: skip
    served = Served(config.name, driver.limits, min(_MOST_REQUESTS, wanted.max_pending))
    return HttpApi(driver, served, text, token=locks.token, metrics=metrics.text).application()


def _announce(
    config: RunConfig, wanted: Wanted, driver: RolloutDriver, server: RolloutServer,
    http_port: int | None, example: tuple[str, dict[str, Any]],
) -> None:  # fmt: skip
    """How much is served, where, and a command to try."""
    limits = driver.limits
    _say(
        f"  {driver.engine.max_concurrent_decodes} slots, prompts of up to "
        f"{limits.max_prompt_tokens} tokens, with their responses up to {limits.cache_tokens}"
    )
    host = _shown(wanted.host)
    locked = "TLS" if wanted.tls_cert else "no TLS", "token" if wanted.token_file else "no token"
    _say(f"  gRPC     {host}:{server.port}   ({', '.join(locked)})")
    if server.metrics_port:
        _say(f"  metrics  http://{_shown(wanted.metrics_host)}:{server.metrics_port}/metrics")
    if http_port is None:
        return
    scheme = "https" if wanted.tls_cert else "http"
    path, body = example
    _say(f"  HTTP     {scheme}://{host}:{http_port}/v1   (model {config.name!r})")
    extra = f" --cacert {shlex.quote(wanted.tls_cert)}" if wanted.tls_cert else ""
    if wanted.token_file:
        extra += f' -H "Authorization: Bearer $(cat {shlex.quote(wanted.token_file)})"'
    # All addresses together are no name to ask for.
    named = "localhost" if wanted.host in ("0.0.0.0", "::") else host
    url = f"{scheme}://{named}:{http_port}{path}"
    _say(
        f"try:\n  curl {url}{extra} -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _example(task: Task, text: Text, chat: bool) -> tuple[str, dict[str, Any]]:
    if chat:
        messages = [{"role": "user", "content": "What is 7 + 4?"}]
        return "/v1/chat/completions", {"messages": messages}
    prompts = task.held_out.prompts
    prompt = text.decode(prompts.tokens[0, : prompts.num_tokens[0]].tolist())
    return "/v1/completions", {"prompt": prompt, "max_tokens": 32, "temperature": 0}


class _Signals:
    """SIGINT and SIGTERM: the end while the server is being made, then an event to wait for.

    A second one ends the process at once, whatever hangs.
    """

    def __init__(self):
        self._asked = threading.Event()
        self._waits = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self._asked.is_set():
            print("stopped at once", file=sys.stderr, flush=True)
            os._exit(130)
        self._asked.set()
        if not self._waits:
            # At once: the driver's thread may be deep in a compilation, which the interpreter must
            # not be taken away from under.
            print("stopped before anything was served", file=sys.stderr, flush=True)
            os._exit(130)

    def wait(self, driver: RolloutDriver) -> None:
        """Until a signal comes.

        Raises ServeError when the engine fails: whoever started the server can start it again.
        """
        self._waits = True
        while not self._asked.wait(_LOOK_SECONDS):
            if driver.error is not None:
                raise ServeError(str(driver.error))


def _say(line: str) -> None:
    # A log file or a pipe must show it now.
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # Nobody reads it any more, which is no reason to end; the next line mustn't fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
