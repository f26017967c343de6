"""The methods of the rollout service: messages in, a driver's answers out, faults as gRPC codes."""

import asyncio
import contextlib
import json
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from typing import Any

import grpc
import numpy as np

from s3ac_jax.core.errors import RunError
from s3ac_jax.core.types import PyTree
from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.backend import MAX_STOP_IDS, RolloutError, Sampling, seeded_sampling
from s3ac_jax.rollout.limits import Fault, length_fault, text_fault
from s3ac_jax.rollout.server.driver import RolloutDriver
from s3ac_jax.rollout.server.requests import samples_of
from s3ac_jax.rollout.server.sinks import (
    AsyncSink,
    BadRequest,
    EngineFailed,
    Piece,
    QueueFull,
    StandsStill,
    Stopped,
    WholeSink,
)
from s3ac_jax.rollout.server.store import StoredWeights, WrongFingerprint
from s3ac_jax.rollout.server.text_stream import TextStream, TextTokenizer
from s3ac_jax.rollout.weights_wire import Receiver, WeightsWireError, read_manifest
from s3ac_jax.rollout.wire import (
    FINISH_NAMES,
    METHODS,
    SERVICE,
    STOCK_METHODS,
    STOCK_SERVICE,
    STOP,
    Responses,
    kind,
    pack_responses,
    unpack_requests,
)

# Seconds that a stream of weights may keep the others waiting without a word.
_PATIENCE = 60.0


class Stalled(RolloutError):
    """A stream of weights that does not go on. Source: ours."""


_CODES: dict[type[Exception], grpc.StatusCode] = {
    BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineFailed: grpc.StatusCode.INTERNAL,
    Stopped: grpc.StatusCode.UNAVAILABLE,
    WrongFingerprint: grpc.StatusCode.FAILED_PRECONDITION,
    WeightsWireError: grpc.StatusCode.INVALID_ARGUMENT,
    StandsStill: grpc.StatusCode.ABORTED,
    Stalled: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@contextlib.asynccontextmanager
async def _faults(context: Any) -> AsyncGenerator[None, None]:
    """What goes wrong, as a status for the client."""
    try:
        yield
    except RunError as error:
        code = _CODES.get(type(error), grpc.StatusCode.FAILED_PRECONDITION)
        await context.abort(code, str(error))


class Servicer:
    """Answers for one driver; its methods are those of the wire's table.

    tokenizer: for prompts of text and the text of responses; None refuses the former. bos_id: what
    JetStream's clients expect to be put before their token ids, None for nothing. load: weights
    from a path.
    Source: JetStream's LLMOrchestrator (orchestrator.py, 0.2.2) for Decode and HealthCheck.
    """

    def __init__(
        self,
        driver: RolloutDriver,
        *,
        tokenizer: TextTokenizer | None = None,
        bos_id: int | None = None,
        load: Callable[[str], PyTree] | None = None,
    ):
        self._driver, self._load = driver, load
        self._tokenizer, self._bos_id = tokenizer, bos_id
        # One set of new weights in memory at a time.
        self._updating = asyncio.Lock()

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """For the service under its own name and under JetStream's. Source: ours."""
        made = {
            name: getattr(grpc, f"{kind(method)}_rpc_method_handler")(
                getattr(self, name),
                request_deserializer=method.request.FromString,
                response_serializer=method.reply.SerializeToString,
            )
            for name, method in METHODS.items()
        }
        stock = {name: made[name] for name in STOCK_METHODS}
        return [
            grpc.method_handlers_generic_handler(SERVICE, made),
            grpc.method_handlers_generic_handler(STOCK_SERVICE, stock),
        ]

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Whether requests are served. Source: JetStream."""
        return pb.HealthCheckResponse(is_live=self._driver.healthy())

    async def Stats(self, request: Any, context: Any) -> Any:
        """The driver's counts as JSON. Source: ours."""
        return pb.StatsReply(json=json.dumps(self._driver.stats()))

    async def Abort(self, request: Any, context: Any) -> Any:
        """Ends responses as they are. Source: ours."""
        return pb.AbortReply(aborted=self._driver.abort(list(request.request_id) or None))

    async def Pause(self, request: Any, context: Any) -> Any:
        """Answers once no token is made any more. Source: ours."""
        async with _faults(context):
            await asyncio.wrap_future(self._driver.begin_pause(request.drain))
            return pb.Empty()

    async def Resume(self, request: Any, context: Any) -> Any:
        """Ends a pause. Source: ours."""
        self._driver.resume()
        return pb.Empty()

    async def Generate(self, request: Any, context: Any) -> Any:
        """A whole batch; a client that leaves frees its slots. Source: ours."""
        async with _faults(context):
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()

            def wake() -> None:
                # The loop may be gone before the last response is: nobody waits then.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(ended.set)

            try:
                requests = unpack_requests(request)
            except RolloutError as error:
                raise BadRequest(str(error)) from None
            sink = WholeSink(len(requests.prompt_row), wake)
            handle = self._driver.submit(requests, sink)
            context.add_done_callback(handle.cancel)
            try:
                await ended.wait()
            finally:
                handle.cancel()
            pieces = sink.result()
            if requests.weights_fingerprint:
                self._driver.store.check(handle.version, requests.weights_fingerprint)
            # In a thread: with experts it may be a gigabyte.
            return await asyncio.to_thread(
                lambda: pack_responses(_together(pieces, requests.want_routing))
            )

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """One prompt's samples as they are made, several tokens to a message.

        As JetStream's, but that the token that stops a response is among its token ids, and that
        the stream ends with the last token and no empty message after it.
        Source: JetStream.
        """
        async with _faults(context):
            prompt = await self._prompt(request)
            count = max(request.num_samples, 1)
            if count > self._driver.max_waiting:
                raise BadRequest(f"num_samples must be at most {self._driver.max_waiting}")
            # JetStream answers a limit of none with one empty message, and cuts one that is larger
            # than the cache.
            if request.max_tokens == 0:
                samples = [pb.DecodeResponse.StreamContent.Sample(finish="length")] * count
                yield _message(samples)
                return
            sampling = self._settings(request, len(prompt))
            sink = AsyncSink(count)
            requests = samples_of(prompt, sampling, count, request.request_id)
            handle = self._driver.submit(requests, sink)
            context.add_done_callback(handle.cancel)
            texts = None
            if request.WhichOneof("content") == "text_content" and self._tokenizer is not None:
                texts = [TextStream(self._tokenizer) for _ in range(count)]
            try:
                while some := await sink.ready():
                    samples = [pb.DecodeResponse.StreamContent.Sample() for _ in range(count)]
                    for number, piece in some:
                        self._fill(samples[number], piece, request.want_logp)
                        if texts is not None:
                            samples[number].text += self._text(texts[number], piece)
                    yield _message(samples)
            finally:
                handle.cancel()

    async def _prompt(self, request: Any) -> list[int]:
        limits = self._driver.limits
        content = request.WhichOneof("content")
        if content is None:
            raise BadRequest("no content: send text_content or token_content")
        if content == "text_content":
            if self._tokenizer is None:
                raise BadRequest("this server has no tokenizer: send token_content")
            text = request.text_content.text
            _refuse(text_fault(text, limits))
            try:
                return await asyncio.to_thread(self._tokenizer.encode, text)
            except ValueError as error:
                raise BadRequest(str(error)) from None
        _refuse(length_fault(0, len(request.token_content.token_ids), limits))
        tokens = list(request.token_content.token_ids)
        # An empty prompt stays empty, so that it is refused.
        if not tokens or request.has_bos or request.session_cache or self._bos_id is None:
            return tokens
        return [self._bos_id, *tokens]

    def _settings(self, request: Any, prompt_tokens: int) -> Sampling:
        seed = request.seed if request.HasField("seed") else secrets.randbits(32)
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise BadRequest(f"at most {MAX_STOP_IDS} stop_ids, got {len(request.stop_ids)}")
        stops = tuple(request.stop_ids) or self._driver.engine.stop_ids
        room = self._driver.limits.cache_tokens - prompt_tokens
        return seeded_sampling(
            [seed], temperature=request.temperature, max_tokens=min(request.max_tokens, room),
            stop_ids=stops, top_p=request.top_p or 1.0, top_k=request.top_k,
        )  # fmt: skip

    def _fill(self, sample: Any, piece: Piece, want_logp: bool) -> None:
        sample.token_ids.extend(piece.tokens.tolist())
        if want_logp:
            sample.logp.extend(piece.logp.tolist())
            sample.version.extend(piece.version.tolist())
        if piece.finish is not None:
            sample.finish = FINISH_NAMES[piece.finish]

    def _text(self, stream: TextStream, piece: Piece) -> str:
        ids = piece.tokens.tolist()
        text, _ = stream.push(ids[:-1] if piece.finish == STOP else ids)
        return text + stream.finish() if piece.finish is not None else text

    async def UpdateWeights(self, request: Any, context: Any) -> Any:
        """Weights from a path that the server can read; or the same weights, of another version.

        Source: ours.
        """
        async with _faults(context):
            _check_version(request.version)
            if request.path and self._load is None:
                raise BadRequest("this server reads no checkpoints: push the weights")
            async with self._updating:
                return await self._update(
                    lambda: self._load(request.path) if self._load and request.path else None,
                    f"from {request.path}" if request.path else "in use",
                    request.version, request.in_flight, request.fingerprint,
                )  # fmt: skip

    async def PushWeights(self, chunks: AsyncIterator[Any], context: Any) -> Any:
        """Weights as a stream; in use only when every byte of them is here and right.

        Source: ours.
        """
        async with _faults(context):
            chunk = await _next(chunks)
            if chunk is None:
                raise WeightsWireError("an empty stream: its first message must hold a manifest")
            receiver = await asyncio.to_thread(self._receiver, chunk.manifest)
            async with self._updating:
                while chunk is not None:
                    await asyncio.to_thread(receiver.feed, chunk.data)
                    chunk = await _next(chunks)
                    if chunk is not None and chunk.manifest:
                        raise WeightsWireError("a second manifest in one stream")
                    if chunk is not None and not chunk.data:
                        raise WeightsWireError("a message without data in the stream")
                manifest = receiver.manifest
                return await self._update(
                    receiver.finish, "that were pushed",
                    manifest.version, manifest.in_flight, manifest.fingerprint,
                )  # fmt: skip

    def _receiver(self, manifest: bytes) -> Receiver:
        found = read_manifest(manifest)
        _check_version(found.version)
        return Receiver(found, self._driver.store.abstract)

    async def _update(
        self, read: Callable[[], PyTree | None], which: str, version: int, in_flight: bool,
        fingerprint: str,
    ) -> Any:  # fmt: skip
        def begin() -> Future:
            try:
                return self._driver.begin_update(
                    read(), version, in_flight=in_flight, fingerprint=fingerprint
                )
            except RunError:
                raise
            except Exception as error:
                # Such as no room for them on the devices.
                said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                raise RolloutError(f"can't take the weights {which}: {said}") from None

        done = await asyncio.wrap_future(_aside(begin))
        weights: StoredWeights = await asyncio.wrap_future(done)
        return pb.WeightsReply(version=weights.version, fingerprint=weights.fingerprint)


async def _next(chunks: AsyncIterator[Any]) -> Any:
    """The next message of a stream, None after the last."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return await anext(chunks, None)
    except TimeoutError:
        raise Stalled(
            f"nothing came of the weights for {_PATIENCE:g} s: the old ones stay in use"
        ) from None


def _aside(work: Callable[[], Any]) -> Future:
    """What takes minutes, in a thread that nobody waits for when the server stops."""
    done: Future = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="rollout-weights", daemon=True).start()
    return done


def _refuse(fault: Fault | None) -> None:
    if fault is not None:
        raise BadRequest(str(fault))


def _check_version(version: int) -> None:
    if not 0 <= version < 1 << 31:
        raise BadRequest(f"a version must be in 0..{(1 << 31) - 1}, got {version}")


def _message(samples: list[Any]) -> Any:
    content = pb.DecodeResponse.StreamContent(samples=samples)
    return pb.DecodeResponse(stream_content=content)


def _together(pieces: list[Piece], want_routing: bool) -> Responses:
    """The responses of a batch end to end."""

    def joined(dtype: Any, parts: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *parts])

    routing = [piece.routing for piece in pieces if piece.routing is not None]
    return Responses(
        np.array([len(piece.tokens) for piece in pieces], np.int32),
        joined(np.int32, (piece.tokens for piece in pieces)),
        joined(np.float32, (piece.logp for piece in pieces)),
        joined(np.int32, (piece.version for piece in pieces)),
        np.array([piece.finish for piece in pieces], np.uint8),
        np.concatenate(routing) if want_routing and routing else None,
    )  # fmt: skip
