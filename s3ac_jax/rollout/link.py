"""The connection to one rollout server over gRPC: what `remote.py` hands to the fleet."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from s3ac_jax.core.types import PyTree
from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.fleet import Verdict
from s3ac_jax.rollout.weights_wire import Manifest, chunks, make_manifest
from s3ac_jax.rollout.wire import CHANNEL_OPTIONS, Responses, caller, unpack_responses

_CHECK_S = 10.0
CONTROL_S = 30.0
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


class Weights:
    """The current weights as they are sent. path: of a checkpoint of them, None to stream them.

    Source: ours.
    """

    def __init__(
        self, params: PyTree, version: int, fingerprint: str, in_flight: bool, path: str | None
    ):
        self.params, self.version, self.fingerprint = params, version, fingerprint
        self.in_flight, self.path = in_flight, path
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        """Made when the first server needs it: that takes reading every leaf."""
        if self._manifest is None:
            self._manifest = make_manifest(
                self.params, self.version, self.fingerprint, self.in_flight
            )
        return self._manifest


class Work(NamedTuple):
    """One Generate call. rows: which requests of the batch.

    Source: ours.
    """

    rows: np.ndarray
    message: pb.GenerateRequest


class GrpcLink:
    """The connection to one server. timeout_s: of one call, a weight update included.

    Source: ours; the protocol is that of `fleet.Link`.
    """

    def __init__(self, address: str, token: str | None, tls_ca: str | None, timeout_s: float):
        self.address = address
        self.timeout_s = timeout_s
        self.weights: Any = None
        self.pushed_bytes = 0
        self._seen = ""  # fingerprint of the server's weights, as it said last
        self._cheap = False
        self._abort: Any = None
        options = (*CHANNEL_OPTIONS, *_RECONNECT)
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

    def check(self) -> Any:
        """Future of whether Stats names the current weights. Source: ours."""
        return _Then(self.call("Stats", pb.Empty(), _CHECK_S), self._compare)

    def _compare(self, reply: pb.StatsReply) -> bool:
        found = json.loads(reply.json)
        self._seen = found.get("fingerprint") or ""
        want = self.weights.fingerprint, self.weights.version
        return (self._seen, found.get("version")) == want

    def refresh(self) -> Any:
        """Future of the cheapest update that brings the current weights. Source: ours."""
        weights = self.weights
        self._cheap = self._seen == weights.fingerprint
        self._seen = ""
        if self._cheap or weights.path is not None:
            message = pb.UpdateWeightsRequest(
                path="" if self._cheap else weights.path, version=weights.version,
                fingerprint=weights.fingerprint, in_flight=weights.in_flight,
            )  # fmt: skip
            return self.call("UpdateWeights", message, self.timeout_s)
        return self.call("PushWeights", self._stream(weights), self.timeout_s)

    def _stream(self, weights: Weights) -> Any:
        manifest = weights.manifest()

        def messages():
            yield pb.WeightsChunk(manifest=manifest.to_json())
            for data in chunks(weights.params, manifest):
                self.pushed_bytes += len(data)
                yield pb.WeightsChunk(data=data)

        return messages()

    def refreshed(self, reply: pb.WeightsReply) -> None:
        """RolloutError when the server's fingerprint or version is another afterwards.

        Source: ours.
        """
        want = self.weights.fingerprint, self.weights.version
        if (reply.fingerprint, reply.version) != want:
            raise RolloutError(
                f"{self.address} has weights {reply.fingerprint} (version {reply.version}) after "
                f"the update, it was sent {want[0]} (version {want[1]}): its model is another, or "
                "another trainer uses it"
            )

    def send(self, work: Work) -> Any:
        """Future of Generate. Source: ours."""
        return self.call("Generate", work.message, self.timeout_s)

    def read(self, work: Work, reply: pb.GenerateResponse) -> Responses:
        """The responses; RolloutError on wrong sizes, and on weights that are not the current ones.

        Source: ours.
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
        return responses

    def abort(self, works: list[Work]) -> None:
        """Names these calls to the server, which then answers them. Source: ours."""
        message = pb.AbortRequest(request_id=[work.message.request_id for work in works])
        # A call that nobody holds is cancelled.
        self._abort = self.call("Abort", message, CONTROL_S)

    def verdict(self, error: Exception) -> tuple[Verdict, str]:
        """What a call's error means, by its status code. Source: ours."""
        if not isinstance(error, grpc.RpcError):
            return Verdict.FATAL, f"{type(error).__name__}: {error}"
        code, details = error.code(), " ".join((error.details() or "").split())
        verdict = _CODES.get(code, Verdict.FATAL)
        if "larger than max" in details:
            verdict = Verdict.FATAL
        if self._cheap and code is grpc.StatusCode.FAILED_PRECONDITION:
            verdict = Verdict.RETRY  # other weights than it said: send all of them
        return verdict, f"{code.name} {details}"

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
