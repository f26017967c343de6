"""The connection to one rollout server over gRPC: what `remote.py` hands to the fleet."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from s3ac_jax.core.types import PyTree
from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.client.link import CallFailed, Verdict
from s3ac_jax.rollout.hosts import check_token_hidden
from s3ac_jax.rollout.weights_wire import Manifest, chunks, make_manifest
from s3ac_jax.rollout.wire import ABORT, CHANNEL_OPTIONS, Responses, caller, unpack_responses

_CHECK_S = 10.0
CONTROL_S = 30.0
# A server that takes nothing of the weights for so long has stopped reading them.
_STALL_S = 60.0
_CODES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Verdict.BUSY,
    grpc.StatusCode.UNAVAILABLE: Verdict.DOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED: Verdict.DOWN,
    grpc.StatusCode.INTERNAL: Verdict.DOWN,
    grpc.StatusCode.UNKNOWN: Verdict.DOWN,
    grpc.StatusCode.CANCELLED: Verdict.DOWN,
    grpc.StatusCode.ABORTED: Verdict.DOWN,
}
# A server that was restarted is there again sooner than gRPC would look by itself.
_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
)


class WeightsUpdate:
    """The current weights as they are sent. path: of a checkpoint of them, None to stream them.

    params: None for the servers' own, which nobody sends. Source: ours.
    """

    def __init__(
        self, params: PyTree, version: int, fingerprint: str, in_flight: bool, path: str | None
    ):
        self.params, self.version, self.fingerprint = params, version, fingerprint
        self.in_flight, self.path = in_flight, path
        self._manifest: Manifest | None = None
        self._one = threading.Lock()

    def manifest(self) -> Manifest:
        """Made when the first server needs it: that takes reading every leaf. Source: ours."""
        with self._one:
            if self._manifest is None:
                self._manifest = make_manifest(
                    self.params, self.version, self.fingerprint, self.in_flight
                )
            return self._manifest


class GenerateCall(NamedTuple):
    """One call of Generate. rows: which requests of the batch.

    Source: ours.
    """

    rows: np.ndarray
    message: pb.GenerateRequest


class _Push:
    """The messages of one PushWeights, made in gRPC's thread, and how far that is.

    error: what kept them from being made; the stream ends early then and the server refuses it.
    call: its future.
    """

    def __init__(self, weights: WeightsUpdate):
        self._weights = weights
        self._waits: float | None = None
        self.sent = 0
        self.error: Exception | None = None
        self.call: Any = None

    def __iter__(self) -> Iterator[pb.WeightsChunk]:
        # gRPC asks for the next message when the server has taken the last one.
        try:
            for message in self._messages():
                self._waits = time.monotonic()
                yield message
                self._waits = None
                self.sent += len(message.data)
        except Exception as error:
            self.error = error
        self._waits = None

    def _messages(self) -> Iterator[pb.WeightsChunk]:
        manifest = self._weights.manifest()
        yield pb.WeightsChunk(manifest=manifest.to_json())
        for data in chunks(self._weights.params, manifest):
            yield pb.WeightsChunk(data=data)

    def stalled(self) -> bool:
        """Whether the server has not taken a message for too long."""
        waits = self._waits if self.call and not self.call.done() else None
        return waits is not None and time.monotonic() - waits > _STALL_S


class GrpcLink:
    """The connection to one server. timeout_s: of one call, a weight update included.

    paused: this client wants the server to stand still.
    Raises RolloutError on a certificate that can't be read, and on a token without one, unless the
    server is on this machine.
    Source: ours; the protocol is that of `server_link.Link`.
    """

    def __init__(self, address: str, token: str | None, tls_ca: str | None, timeout_s: float):
        fix = "set rollout.tls_ca, or leave out rollout.token_file"
        check_token_hidden(address, token, tls_ca is not None, fix)
        self.address = address
        self.timeout_s = timeout_s
        self.weights: Any = None
        self.paused = False
        self._owes_resume = False
        self._seen = ""  # fingerprint of the server's weights, as it said last
        self._cheap = self._whole = False
        self._push: _Push | None = None
        self._pushed_bytes = 0
        self._cut: set[str] = set()
        # Calls that nobody waits for; one that nobody holds is cancelled.
        self._aside: dict[str, Any] = {}
        options = (*CHANNEL_OPTIONS, *_RECONNECT)
        self._tls = tls_ca is not None
        if tls_ca is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            try:
                trusted = Path(tls_ca).read_bytes()
            except OSError as error:
                raise RolloutError(f"TLS: can't read {tls_ca}: {error.strerror}") from None
            credentials = grpc.ssl_channel_credentials(trusted)
            self._channel = grpc.secure_channel(address, credentials, options)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def call(self, name: str, message: Any, timeout_s: float) -> Any:
        """Future of method `name`; `message` is an iterator of them where the client streams."""
        method = caller(self._channel, name)
        try:
            return method.future(message, timeout=timeout_s, metadata=self._metadata)
        except ValueError:
            raise RolloutError(f"the connection to {self.address} was closed") from None

    def told(self, name: str, future: Any) -> Any:
        """What came of Pause, Resume or Stats: its reply, or a CallFailed. Source: ours."""
        try:
            reply = future.result()
        except Exception as error:
            return CallFailed(*self.verdict(error, name))
        if name == "Resume":
            self.paused = self._owes_resume = False
        return reply

    def hold(self) -> Any:
        """Future of Pause. Source: ours."""
        future = self.call("Pause", pb.PauseRequest(), CONTROL_S)
        self.paused = self._owes_resume = True
        return future

    def go_on(self, timeout_s: float = CONTROL_S) -> Any:
        """Future of Resume. Source: ours."""
        return self.call("Resume", pb.Empty(), timeout_s)

    def check(self) -> Any:
        """Future of whether Stats names the current weights. Source: ours."""
        return _Then(self.call("Stats", pb.Empty(), _CHECK_S), self._compare)

    def _compare(self, reply: pb.StatsReply) -> bool:
        found = json.loads(reply.json)
        if found.get("is_live") is False:
            raise CallFailed(Verdict.DOWN, "its engine has failed: restart it")
        if self._push is not None and self._push.stalled():
            raise CallFailed(Verdict.DOWN, "it takes no more of the weights that it is sent")
        self._seen = found.get("fingerprint") or ""
        if found.get("paused") and not self.paused:
            if self._owes_resume:  # it was away when it should have gone on
                self._aside["Resume"] = self.go_on()
            raise CallFailed(Verdict.PAUSED, "somebody has paused it: resume or restart it")
        want = self.weights.fingerprint, self.weights.version
        return (self._seen, found.get("version")) == want

    def refresh(self) -> Any:
        """Future of the cheapest update that brings the current weights.

        Raises RolloutError when these are the servers' own. Source: ours.
        """
        weights = self.weights
        if weights.params is None:
            raise RolloutError(
                f"{self.address} has other weights than it had ({self._seen or 'none'} now, before "
                f"{weights.fingerprint}, version {weights.version}), and none are sent to it"
            )
        self._cheap = self._seen == weights.fingerprint and not self._whole
        self._seen = ""
        if self._cheap or weights.path is not None:
            message = pb.UpdateWeightsRequest(
                path="" if self._cheap else weights.path, version=weights.version,
                fingerprint=weights.fingerprint, in_flight=weights.in_flight,
            )  # fmt: skip
            return self.call("UpdateWeights", message, self.timeout_s)
        self._pushed_bytes = self.pushed_bytes
        self._push = push = _Push(weights)
        push.call = self.call("PushWeights", iter(push), self.timeout_s)
        return push.call

    @property
    def pushed_bytes(self) -> int:
        """Bytes of weights that the server has taken so far. Source: ours."""
        return self._pushed_bytes + (0 if self._push is None else self._push.sent)

    def refreshed(self, reply: pb.WeightsReply) -> None:
        """RolloutError when the server's fingerprint or version is another afterwards.

        Source: ours.
        """
        self._whole = False
        want = self.weights.fingerprint, self.weights.version
        if (reply.fingerprint, reply.version) != want:
            raise RolloutError(
                f"{self.address} has weights {reply.fingerprint} (version {reply.version}) after "
                f"the update, it was sent {want[0]} (version {want[1]}): its model is another, or "
                "another trainer uses it"
            )

    def send(self, work: GenerateCall) -> Any:
        """Future of Generate, with the weights as they are now or not at all. Source: ours."""
        work.message.weights_fingerprint = self.weights.fingerprint
        return self.call("Generate", work.message, self.timeout_s)

    def read(self, work: GenerateCall, reply: pb.GenerateResponse) -> Responses:
        """The responses; RolloutError on wrong sizes, and on weights that are not the current ones.

        A CallFailed when somebody else has aborted them. Source: ours.
        """
        try:
            responses = unpack_responses(reply)
        except ValueError as error:
            raise RolloutError(f"{self.address}: a reply that can't be read: {error}") from None
        if len(responses.num_tokens) != len(work.rows):
            raise RolloutError(
                f"{self.address} answered {len(responses.num_tokens)} requests of {len(work.rows)}"
            )
        found = np.unique(responses.version)
        newest = self.weights.version
        if found.size and (
            found[-1] > newest or (found[0] < newest and not self.weights.in_flight)
        ):
            raise RolloutError(
                f"{self.address} answered with weights of version {found.tolist()}, current is "
                f"{newest}: does another trainer use it?"
            )
        if work.message.request_id not in self._cut and (responses.finish == ABORT).any():
            raise CallFailed(Verdict.RETRY, "somebody else has aborted responses of ours")
        return responses

    def abort(self, works: list[GenerateCall]) -> None:
        """Names these calls to the server, which then answers them. Source: ours."""
        self._cut = {work.message.request_id for work in works}
        message = pb.AbortRequest(request_id=sorted(self._cut))
        self._aside["Abort"] = self.call("Abort", message, CONTROL_S)

    def verdict(self, error: Exception, call: str) -> tuple[Verdict, str]:
        """What a call's error means, by its status code. Source: ours."""
        failed = None if self._push is None else self._push.error
        if call == "refresh" and failed is not None:
            known = isinstance(failed, RolloutError)
            said = str(failed) if known else f"{type(failed).__name__}: {failed}"
            return Verdict.FATAL, f"the weights can't be sent: {' '.join(said.split())}"
        if isinstance(error, CallFailed):
            return error.verdict, str(error)
        if not isinstance(error, grpc.RpcError):
            return Verdict.FATAL, f"{type(error).__name__}: {error}"
        code, details = error.code(), " ".join((error.details() or "").split())
        verdict = _CODES.get(code, Verdict.FATAL)
        if "larger than max" in details:
            verdict = Verdict.FATAL
        elif code is grpc.StatusCode.FAILED_PRECONDITION and call == "send":
            verdict = Verdict.STALE
        elif code is grpc.StatusCode.FAILED_PRECONDITION and call == "refresh" and self._cheap:
            verdict, self._whole = Verdict.RETRY, True  # other weights than it said: all of them
        elif code is grpc.StatusCode.ABORTED and call == "refresh":
            verdict = Verdict.FATAL if self.paused else Verdict.PAUSED
        elif code is grpc.StatusCode.INTERNAL and call == "refresh":
            verdict = Verdict.RETRY  # no room for them, perhaps; a look says if its engine failed
        return verdict, f"{code.name} {details}{self._hint(code, details)}"

    def _hint(self, code: grpc.StatusCode, details: str) -> str:
        """What to set where the error alone doesn't say it."""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return " (rollout.token_file)"
        if code is grpc.StatusCode.UNAVAILABLE and "Socket closed" in details and not self._tls:
            return " (if it serves TLS: rollout.tls_ca)"
        return ""

    def close(self) -> None:
        """Ends the connection; calls in flight are cancelled. Source: ours."""
        self._channel.close()


class _Then:
    """A future of what `then` makes of another's result."""

    def __init__(self, future: Any, then: Callable[[Any], Any]):
        self._future, self._then = future, then

    def result(self) -> Any:
        return self._then(self._future.result())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._future.add_done_callback(lambda _: callback(self))

    def cancel(self) -> None:
        self._future.cancel()
