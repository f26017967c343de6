"""Connections to rollout servers over HTTP: what `openai.py` hands to the fleet."""

import asyncio
import atexit
import json
import math
import threading
from collections.abc import Coroutine
from typing import Any

import aiohttp

from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.client.link import CallFailed, Verdict
from s3ac_jax.rollout.client.openai_flavours import Completion, CompletionRequest, Flavour
from s3ac_jax.rollout.wire import ABORT, LENGTH, STOP

_CHECK_S, _CONNECT_S, _CONTROL_S = 10.0, 10.0, 30.0
# Shorter than that of the servers (uvicorn: 5 s): a connection that they close is not used again.
_KEEPALIVE_S = 2.0
_SHOWN_CHARS = 300


class LoopThread:
    """An event loop in a thread of its own, with one pool of connections.

    headers: of every request. Source: ours.
    """

    def __init__(self, headers: dict[str, str]):
        self.loop = asyncio.new_event_loop()
        # A trainer that dies without `close` must not be kept from its end, nor complain at it.
        atexit.register(self.close)
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="rollout-http", daemon=True
        )
        self._thread.start()
        self.session = self.submit(self._open(headers)).result()

    async def _open(self, headers: dict[str, str]) -> aiohttp.ClientSession:
        pool = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        return aiohttp.ClientSession(connector=pool, headers=headers)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Future of a coroutine; from any other thread. Source: ours."""
        if self.loop.is_closed():
            work.close()
            raise RolloutError("the connection to the rollout servers was closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.session.close()

    def close(self) -> None:
        """Cancels what is under way and ends the thread. Source: ours."""
        atexit.unregister(self.close)
        if self.loop.is_closed():
            return
        self.submit(self._end()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class HttpLink:
    """The way to one server.

    folder: where the current weights lie, None where nobody exported any. version: of the weights
    that answers have to be of, -1 for any.
    Source: ours; the protocol is that of `server_link.Link`.
    """

    def __init__(
        self,
        address: str,
        flavour: Flavour,
        loop: LoopThread,
        model: str | None,
        vocab_size: int,
        timeout_s: float,
    ):
        self.address = address
        self.root = (address if "://" in address else f"http://{address}").rstrip("/")
        self.flavour, self.model = flavour, model
        self.vocab_size, self.timeout_s = vocab_size, timeout_s
        self.folder: str | None = None
        self.version, self.in_flight = -1, False
        self._loop = loop
        self._going: dict[int, asyncio.Task] = {}
        self._cut: set[int] = set()
        self._aborting: Any = None

    async def call(
        self, method: str, path: str, body: Any = None, timeout_s: float = _CONTROL_S
    ) -> Any:
        """What the answer's JSON holds; None for an empty one. Raises CallFailed. Source: ours."""
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._loop.session.request(
                method, self.root + path, json=body, timeout=limits
            ) as answer:
                status, data = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise CallFailed(Verdict.DOWN, f"{path}: {said}") from None
        if status >= 300:
            said = " ".join(data[:_SHOWN_CHARS].decode("utf-8", "replace").split())
            hint = " (see docs/serving.md for how to start it)" if status == 404 else ""
            raise CallFailed(_verdict(status), f"{path}: HTTP {status} {said}{hint}")
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise CallFailed(Verdict.FATAL, f"{path}: the answer is no JSON") from None

    def check(self) -> Any:
        """Future of whether the server has the current weights. Source: ours."""

        async def look() -> bool | None:
            def call(method: str, path: str, body: Any = None) -> Any:
                return self.call(method, path, body, _CHECK_S)

            return await self.flavour.check(call, self.version)

        return self._loop.submit(look())

    def refresh(self) -> Any:
        """Future of having the server load the current weights. Source: ours."""

        async def reload() -> None:
            def call(method: str, path: str, body: Any = None) -> Any:
                return self.call(method, path, body, self.timeout_s)

            if self.folder is None:
                return
            try:
                await self.flavour.reload(call, self.folder, self.version, self.in_flight)
            except RolloutError as error:
                raise RolloutError(f"{self.address}: {error}") from None
            except CallFailed as fault:
                # A server that fails to load would fail again.
                again = fault.verdict is not Verdict.RETRY
                raise CallFailed(fault.verdict if again else Verdict.FATAL, str(fault)) from None

        return self._loop.submit(reload())

    def refreshed(self, reply: None) -> None:
        """Nothing: `refresh` has looked at all answers. Source: ours."""

    def send(self, work: CompletionRequest) -> Any:
        """Future of the response to one request. Source: ours."""
        return self._loop.submit(self._send(work))

    async def _send(self, work: CompletionRequest) -> Completion:
        path, body = self.flavour.request(work, self.model)
        task = asyncio.current_task()
        assert task is not None
        self._going[work.row] = task
        try:
            found = await self.call("POST", path, body, self.timeout_s)
        except asyncio.CancelledError:
            if work.row in self._cut:
                return Completion([], [], ABORT)
            raise
        finally:
            # A run that ended badly may still be ending when the next asks for the same row.
            if self._going.get(work.row) is task:
                del self._going[work.row]
        try:
            answer = self.flavour.answer(found)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CallFailed(
                Verdict.FATAL,
                f"{path}: an answer without token ids and log-probs as they were asked for "
                f"({type(error).__name__}: {error})",
            ) from None
        if answer.finish == ABORT and not self._cut:
            raise CallFailed(Verdict.RETRY, f"{path}: the server aborted a response")
        return answer

    def read(self, work: CompletionRequest, reply: Completion) -> Completion:
        """The response; RolloutError when it can't be trained on. Source: ours."""
        if (fault := self._wrong(work, reply)) is not None:
            raise RolloutError(f"{self.address}: {fault}")
        return reply

    def _wrong(self, work: CompletionRequest, answer: Completion) -> str | None:
        """What is not as it should be about a response; None for nothing."""
        tokens, logp = answer.tokens, answer.logp
        if len(tokens) != len(logp):
            return f"{len(tokens)} tokens with {len(logp)} log-probs"
        if not all(type(token) is int for token in tokens):
            return "token ids that are no integers"
        if strange := [token for token in tokens if not 0 <= token < self.vocab_size]:
            return f"token {strange[0]}, the model knows 0..{self.vocab_size - 1}"
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in logp):
            return "log-probs that are no finite numbers"
        known = answer.version is not None and self.version >= 0 and not self.in_flight
        if known and answer.version != str(self.version):
            return f"weights of version {answer.version}, current is {self.version}"
        if answer.finish == ABORT:
            return None
        if not 1 <= len(tokens) <= work.max_tokens:
            return f"a response of {len(tokens)} tokens, at most {work.max_tokens} asked for"
        if any(token in work.stop_ids for token in tokens[:-1]):
            return "a response that goes on behind a stop token"
        if (answer.finish == STOP) != (tokens[-1] in work.stop_ids):
            ended = "ended" if answer.finish == STOP else "did not end"
            return (
                f"a response that {ended} with token {tokens[-1]}, stop ids are {work.stop_ids}: "
                "the model's own end tokens must be among them"
            )
        if answer.finish == LENGTH and len(tokens) < work.max_tokens:
            return (
                f"a response cut off at {len(tokens)} tokens of {work.max_tokens}: the server's "
                "context is too short"
            )
        return None

    def abort(self, works: list[CompletionRequest]) -> None:
        """Has these answered with what there is. Source: ours."""
        self._cut |= {work.row for work in works}

        async def cut() -> None:
            if not await self.flavour.abort(self.call):
                for work in works:
                    if task := self._going.get(work.row):
                        task.cancel()

        self._aborting = self._loop.submit(cut())

    def begin(self) -> None:
        """Forgets what an earlier call aborted. Source: ours."""
        self._cut.clear()

    def verdict(self, error: Exception, call: str) -> tuple[Verdict, str]:
        """What a call's error means. Source: ours."""
        if isinstance(error, CallFailed):
            return error.verdict, str(error)
        return Verdict.FATAL, f"{type(error).__name__}: {error}"


def _verdict(status: int) -> Verdict:
    if status in (429, 503):
        return Verdict.BUSY
    return Verdict.RETRY if status in (408, 500, 502, 504) else Verdict.FATAL
