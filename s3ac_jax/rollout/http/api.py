"""OpenAI-compatible HTTP endpoints before a driver, so that people can talk to their checkpoint."""

import asyncio
import contextlib
import hmac
import json
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

from s3ac_jax.rollout.backend import RolloutError, Sampling
from s3ac_jax.rollout.http.answer import Answer, Delta
from s3ac_jax.rollout.http.fields import HttpError, parse_object
from s3ac_jax.rollout.http.request import Asked, Served, read_request
from s3ac_jax.rollout.server.driver import RolloutDriver
from s3ac_jax.rollout.server.requests import Handle
from s3ac_jax.rollout.server.sinks import AsyncSink, BadRequest, Piece, QueueFull, Stopped
from s3ac_jax.rollout.server.text_stream import TextTokenizer
from s3ac_jax.rollout.wire import Requests

MAX_BODY_BYTES = 8 << 20
_STOP_SECONDS = 0.25
_LOG = logging.getLogger(__name__)
_FIRST = np.zeros(1, np.int32)
_HANDLER = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpApi:
    """The endpoints as an aiohttp application.

    tokenizer: None where there are only token ids. token: what clients have to send as bearer,
    None for nothing. metrics: () -> the prometheus text.
    Source: OpenAI's API reference.
    """

    def __init__(
        self,
        driver: RolloutDriver,
        served: Served,
        tokenizer: TextTokenizer | None,
        *,
        token: str | None = None,
        metrics: Callable[[], bytes] | None = None,
    ):
        self._driver, self._served, self._tokenizer = driver, served, tokenizer
        self._token, self._metrics = token, metrics

    def application(self) -> web.Application:
        """The routes. Source: OpenAI's API reference; vLLM for /health and /metrics."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _HANDLER) -> web.StreamResponse:
        """Asks for the token, and turns whatever goes wrong into OpenAI's error objects."""
        try:
            if request.path != "/health":
                self._check_token(request)
            return await handler(request)
        except HttpError as error:
            return _error(error)
        except RolloutError as error:
            return _error(_refused(error))
        except web.HTTPRequestEntityTooLarge:
            most = MAX_BODY_BYTES >> 20
            return _error(HttpError(f"the body has more than {most} MiB", status=413))
        except web.HTTPException as error:
            what = f"{request.method} {request.path[:100]}: {error.reason}"
            return _error(HttpError(what, status=error.status))
        except web.RequestPayloadError as error:
            what = f"the body can't be read ({' '.join(str(error).split())})"
            return _error(HttpError(what, status=400))
        except ConnectionResetError:
            # The client is gone; aiohttp finds that out again with this, and keeps quiet about it.
            return web.Response()
        except Exception as error:
            _LOG.exception("%s %s", request.method, request.path)
            return _error(HttpError(f"the server failed: {type(error).__name__}", status=500))

    def _check_token(self, request: web.Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # "surrogateescape" is how aiohttp reads bytes that are no UTF-8.
        sent = given.strip().encode("utf-8", "surrogateescape")
        right = hmac.compare_digest(sent, self._token.encode())
        if scheme.lower() != "bearer" or not right:
            raise HttpError(
                "the server's token is missing or wrong: send Authorization: Bearer TOKEN",
                status=401, code="invalid_api_key",
            )  # fmt: skip

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=True)

    async def _complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        body = await request.read()
        # In a thread: a long text takes a while, and the others' tokens must go on.
        asked = await asyncio.to_thread(self._read, body, chat)
        answer = Answer(asked, self._served.model, self._tokenizer)
        sink = AsyncSink(len(answer.choices), streams=asked.stream or bool(asked.stops))
        handles: list[Handle] = []
        try:
            self._submit(asked, sink, handles)
            if asked.stream:
                return await self._stream(request, answer, sink, handles)
            deltas: list[list[Delta]] = [[] for _ in answer.choices]
            async for number, delta in _deltas(answer, sink, handles):
                deltas[number].append(delta)
            return _json(answer.whole(deltas))
        finally:
            # Also when the client is gone, which ends this coroutine.
            for handle in handles:
                handle.cancel()

    def _submit(self, asked: Asked, sink: AsyncSink, handles: list[Handle]) -> None:
        requests = _requests(asked)
        if not asked.stops:
            handles.append(self._driver.submit(requests, sink))
            return
        # A stop text ends one response and not its siblings, so each is a submission of its own.
        for number, row in enumerate(requests.prompt_row):
            sampling = Sampling(*(field[number : number + 1] for field in requests.sampling))
            tokens = np.asarray(asked.prompts[row], np.int32)
            one = Requests(tokens, requests.lengths[row : row + 1], _FIRST, sampling)
            handles.append(self._driver.submit(one, _Numbered(sink, number)))

    def _read(self, body: bytes, chat: bool) -> Asked:
        fields = parse_object(body)
        return read_request(fields, chat=chat, served=self._served, tokenizer=self._tokenizer)

    async def _stream(
        self, request: web.Request, answer: Answer, sink: AsyncSink, handles: list[Handle]
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
            }
        )
        await response.prepare(request)

        async def send(chunk: dict[str, Any] | None) -> None:
            if chunk is not None:
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        try:
            for choice in answer.choices:
                await send(answer.first(choice))
            async for number, delta in _deltas(answer, sink, handles):
                await send(answer.next(answer.choices[number], delta))
            await send(answer.last())
        except RolloutError as error:
            # The status is out already: what is left is to say it where the client reads.
            await send(_refused(error).body)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, request: web.Request) -> web.Response:
        asked = request.match_info["model"]
        if asked != self._served.model:
            raise HttpError(
                f"no model {asked[:100]!r} is served here, only {self._served.model!r}", "model",
                status=404, code="model_not_found",
            )  # fmt: skip
        return _json(self._described())

    def _described(self) -> dict[str, Any]:
        served, weights = self._served, self._driver.store.get()
        return {
            "id": served.model, "object": "model", "created": 0, "owned_by": "s3ac-jax",
            "max_model_len": served.limits.cache_tokens, "version": weights.version,
            "fingerprint": weights.fingerprint,
        }  # fmt: skip

    async def _health(self, _: web.Request) -> web.Response:
        if self._driver.error is not None:
            # Why is for those who have the token: they read it in their answers.
            raise HttpError("the engine failed", status=503)
        if not self._driver.live:
            raise HttpError("the server is stopping", status=503)
        return _json({"status": "ok"})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        if self._metrics is None:
            raise HttpError("this server keeps no metrics", status=404)
        return web.Response(
            body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )


class _Numbered:
    """A sink for the one response of a submission, as response `number` of another sink."""

    def __init__(self, sink: AsyncSink, number: int):
        self.streams = sink.streams
        self._sink, self._number = sink, number
        self.fail = sink.fail

    def put(self, sample: int, piece: Piece) -> None:
        self._sink.put(self._number + sample, piece)


async def _deltas(answer: Answer, sink: AsyncSink, handles: list[Handle]):
    """(choice, what came anew of it), until all have ended."""
    open_choices = len(answer.choices)
    while open_choices:
        for number, piece in await sink.ready():
            choice = answer.choices[number]
            if choice.finish is not None:
                continue
            delta: Delta = choice.take(piece)
            if choice.finish is not None:
                open_choices -= 1
                if choice.cut and piece.finish is None:
                    handles[number].cancel()
            yield number, delta


def _requests(asked: Asked) -> Requests:
    """The batch of a request: n responses to each prompt, which share its prefill."""
    prompts = len(asked.prompts)
    return Requests(
        tokens=np.concatenate([np.asarray(ids, np.int32) for ids in asked.prompts]),
        lengths=np.array([len(ids) for ids in asked.prompts], np.int32),
        prompt_row=np.repeat(np.arange(prompts, dtype=np.int32), asked.n),
        sampling=Sampling(*(np.concatenate([field] * prompts) for field in asked.sampling)),
    )


def _refused(error: RolloutError) -> HttpError:
    """What the driver says, as HTTP says it."""
    if isinstance(error, BadRequest):
        return HttpError(str(error))
    if isinstance(error, QueueFull):
        return HttpError(str(error), status=429, code="queue_full")
    return HttpError(str(error), status=503 if isinstance(error, Stopped) else 500)


def _error(error: HttpError) -> web.Response:
    response = _json(error.body, error.status)
    if error.status == 429:
        response.headers["Retry-After"] = "1"
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        body=json.dumps(body).encode(), status=status, content_type="application/json"
    )


class HttpServer:
    """Serves an application on an event loop and a thread of its own, until `stop`.

    Source: ours: text is made while the loop of the RPCs goes on.
    """

    def __init__(self, application: web.Application):
        self._application = application
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._runner: web.AppRunner | None = None

    def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Binds and begins to serve; returns the port, which the system chose if it was 0.

        Raises RolloutError when the address can't be had. Source: ours.
        """
        self._thread.start()
        try:
            return self._do(self._start(host, port, tls))
        except OSError as error:
            self.stop()
            raise RolloutError(
                f"HTTP can't be served at {host}:{port} ({error.strerror or error}); choose "
                "another --http_port or --host"
            ) from error

    def stop(self) -> None:
        """Ends what is under way within half a second, then the thread. Source: ours."""
        if self._thread.is_alive():
            self._do(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        self._runner = web.AppRunner(
            self._application, access_log=None, handler_cancellation=True,
            shutdown_timeout=_STOP_SECONDS,
        )  # fmt: skip
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        return self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        with contextlib.suppress(RuntimeError):
            await self._loop.shutdown_default_executor()
