"""The rollout server: JetStream's gRPC server with the methods, and the locks, of ours."""

import asyncio
import hmac
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from s3ac_jax.core.types import PyTree
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.hosts import is_loopback
from s3ac_jax.rollout.jetstream import server_lib
from s3ac_jax.rollout.server.driver import RolloutDriver
from s3ac_jax.rollout.server.metrics import Metrics
from s3ac_jax.rollout.server.servicer import Servicer
from s3ac_jax.rollout.server.text_stream import TextTokenizer
from s3ac_jax.rollout.wire import MAX_MESSAGE_BYTES

# Seconds that answers under way may still take when the server stops: by then every one of them
# is an error that only has to be sent.
_GRACE = 0.5
# Threads that compare checksums and cut texts into tokens; batches of token ids need none.
_THREADS = 4
# Calls that wait beside those that ask for responses: updates, pauses, statistics.
_OTHER_CALLS = 64
# Of one request beside its prompt's tokens: its settings and its part of the rest.
_SETTINGS_BYTES = 128
# Of a message: at least what a chunk of weights takes, at most what one batch may.
_LEAST_BYTES, _MOST_BYTES = 8 << 20, 256 << 20


class _Token(grpc.aio.ServerInterceptor):
    """Lets nobody in who does not send the token, whatever the method."""

    def __init__(self, token: str):
        self._want = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        sent = dict(handler_call_details.invocation_metadata).get("authorization", "")
        sent = sent if isinstance(sent, bytes) else sent.encode()
        if hmac.compare_digest(sent, self._want):
            return await continuation(handler_call_details)

        # As if everybody streamed: then no message is read of somebody who has no business here.
        async def refuse(_: Any, context: Any) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the server's token is missing or wrong: send metadata authorization: Bearer TOKEN",
            )

        return grpc.stream_stream_rpc_method_handler(refuse)


def check_exposure(host: str, *, tls: bool, token: str | None, insecure: bool) -> None:
    """Raises RolloutError when strangers could read or steer what this host would serve.

    Source: ours.
    """
    missing = [name for name, there in (("TLS", tls), ("a token", token)) if not there]
    if missing and not insecure and not is_loopback(host):
        raise RolloutError(
            f"{host} can be reached from other machines: that needs {' and '.join(missing)} (or "
            "say that it is meant to be insecure)"
        )


class RolloutServer(server_lib.JetStreamServer):
    """Serves a driver over gRPC from construction until `stop`, which stops the driver too.

    port: 0 for a free one; `port` says which. tls: paths of certificate and key, PEM. token: what
    clients have to send as bearer. insecure: another host than loopback without these two.
    metrics_port: for Prometheus, at metrics_host, plain HTTP for everybody; None for none. metrics:
    what it shows, where somebody else does so too. The rest as for Servicer.
    Raises RolloutError when the host is exposed or a file can't be read, and when the port is
    taken, in which case the driver is stopped.
    Source: JetStream's JetStreamServer (google/JetStream, server_lib.py, 0.2.2), whose __init__ is
    not called: it binds all interfaces, and to its own servicer.
    """

    def __init__(
        self,
        driver: RolloutDriver,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: tuple[str, str] | None = None,
        token: str | None = None,
        insecure: bool = False,
        metrics_host: str = "127.0.0.1",
        metrics_port: int | None = None,
        metrics: Metrics | None = None,
        tokenizer: TextTokenizer | None = None,
        bos_id: int | None = None,
        load: Callable[[str], PyTree] | None = None,
    ):
        check_exposure(host, tls=tls is not None, token=token, insecure=insecure)
        credentials = _credentials(tls)
        self._driver = driver
        self.metrics = metrics or Metrics(driver)
        self._executor = ThreadPoolExecutor(_THREADS, "rollout-server")
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._executor)
        self._loop_thread = threading.Thread(
            target=self._loop.run_forever, name="rollout-loop", daemon=True
        )
        self._loop_thread.start()
        self._stopping = threading.Lock()
        self._stopped = False
        options = (
            ("grpc.max_receive_message_length", _request_bytes(driver)),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Two servers on one port would share its clients without a word.
            ("grpc.so_reuseport", 0),
            # A client whose machine is gone leaves its slots, and its stream of weights ends.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        )
        calls = driver.max_waiting + driver.engine.max_concurrent_decodes + _OTHER_CALLS

        async def make() -> int:
            guards = [_Token(token)] if token else []
            self._grpc_server = grpc.aio.server(
                interceptors=guards, options=options, maximum_concurrent_rpcs=calls
            )
            servicer = Servicer(driver, tokenizer=tokenizer, bos_id=bos_id, load=load)
            self._grpc_server.add_generic_rpc_handlers(tuple(servicer.handlers()))
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if credentials is None:
                return self._grpc_server.add_insecure_port(address)
            return self._grpc_server.add_secure_port(address, credentials)

        try:
            self.port = asyncio.run_coroutine_threadsafe(make(), self._loop).result()
            self.start()
            if metrics_port is not None:
                metrics_port = self.metrics.serve(metrics_port, metrics_host)
        except (RuntimeError, OSError) as error:
            self.stop()
            said = " ".join(str(error).split())[:300]
            raise RolloutError(f"can't serve at {host}:{port}: {said}") from None
        self.metrics_port = metrics_port

    async def _async_stop(self) -> None:
        await self._grpc_server.stop(_GRACE)

    def stop(self) -> None:
        """Fails what is open, closes the ports and ends all threads; again does nothing.

        Source: ours.
        """
        with self._stopping:
            if self._stopped:
                return
            self._stopped = True
            # Its port is looked after twice a second, which need not be waited for in turn.
            closing = threading.Thread(target=self.metrics.close)
            closing.start()
            super().stop()
            self._executor.shutdown(wait=False, cancel_futures=True)
            closing.join()
            self._loop.close()


def _request_bytes(driver: RolloutDriver) -> int:
    """The largest message that makes sense: a batch that fills the queue."""
    batch = driver.max_waiting * (4 * driver.limits.max_prompt_tokens + _SETTINGS_BYTES)
    return min(max(batch, _LEAST_BYTES), _MOST_BYTES)


def _credentials(tls: tuple[str, str] | None) -> grpc.ServerCredentials | None:
    if tls is None:
        return None
    try:
        certificate, key = (Path(path).read_bytes() for path in tls)
    except OSError as error:
        raise RolloutError(f"TLS: can't read {error.filename}: {error.strerror}") from None
    return grpc.ssl_server_credentials([(key, certificate)])
