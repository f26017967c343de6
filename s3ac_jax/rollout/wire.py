"""What server and clients agree on: the methods, and batches of requests as arrays in bytes."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int16, Int32, UInt8

from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.backend import MAX_STOP_IDS, RolloutError, Sampling

SERVICE = "s3ac.rollout.Rollout"
STOCK_SERVICE = "jetstream_proto.Orchestrator"
# The finish reasons of a response, as the numbers of GenerateResponse.finish.
STOP, LENGTH, ABORT = range(3)
FINISH_NAMES = ("stop", "length", "abort")
# gRPC's own limit is 4 MiB, less than a batch with its routing.
MAX_MESSAGE_BYTES = 1 << 30
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


class Method(NamedTuple):
    """One method of the service. request, reply: message classes; streams: which sides stream.

    Source: ours.
    """

    request: type
    reply: type
    client_streams: bool = False
    server_streams: bool = False


METHODS = {
    "Decode": Method(pb.DecodeRequest, pb.DecodeResponse, server_streams=True),
    "HealthCheck": Method(pb.HealthCheckRequest, pb.HealthCheckResponse),
    "Generate": Method(pb.GenerateRequest, pb.GenerateResponse),
    "UpdateWeights": Method(pb.UpdateWeightsRequest, pb.WeightsReply),
    "PushWeights": Method(pb.WeightsChunk, pb.WeightsReply, client_streams=True),
    "Abort": Method(pb.AbortRequest, pb.AbortReply),
    "Pause": Method(pb.PauseRequest, pb.Empty),
    "Resume": Method(pb.Empty, pb.Empty),
    "Stats": Method(pb.Empty, pb.StatsReply),
}
STOCK_METHODS = ("Decode", "HealthCheck")


def kind(method: Method) -> str:
    """gRPC's name of what `method` is, such as "unary_stream": of a channel's and handlers' makers.

    Source: ours.
    """
    sides = (method.client_streams, method.server_streams)
    return "_".join("stream" if streams else "unary" for streams in sides)


def caller(channel, name: str):
    """The client's side of method `name` on a channel of grpc or grpc.aio.

    Source: ours.
    """
    method = METHODS[name]
    return getattr(channel, kind(method))(
        f"/{SERVICE}/{name}",
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.reply.FromString,
    )


class Requests(NamedTuple):
    """A batch of B requests over P prompts, on the host.

    tokens: all prompts end to end, `lengths` [P] of each. prompt_row [B]: the prompt of each
    request. sampling: settings of the B requests. weights_fingerprint: what the weights must have,
    "" for whatever they have.
    Source: ours.
    """

    tokens: Int32[np.ndarray, "N"]
    lengths: Int32[np.ndarray, "P"]
    prompt_row: Int32[np.ndarray, "B"]
    sampling: Sampling
    want_routing: bool = False
    request_id: str = ""
    weights_fingerprint: str = ""


class Responses(NamedTuple):
    """What came of a batch, end to end in the order of its requests.

    num_tokens [B]: of each response. logp: nats. version: of the weights behind each token.
    finish [B]: STOP, LENGTH or ABORT. routing: experts of all tokens, a request's prompt before
    its response, -1 where not recorded; None when not asked for.
    Source: ours.
    """

    num_tokens: Int32[np.ndarray, "B"]
    tokens: Int32[np.ndarray, "N"]
    logp: Float32[np.ndarray, "N"]
    version: Int32[np.ndarray, "N"]
    finish: UInt8[np.ndarray, "B"]
    routing: Int16[np.ndarray, "M L k"] | None = None


# Field of GenerateRequest -> its dtype; those of `Sampling` have its names.
_SAMPLING = {
    "seed": "<u4", "temperature": "<f4", "max_tokens": "<i4", "top_p": "<f4", "top_k": "<i4",
    "stop_ids": "<i4",
}  # fmt: skip
_RESPONSES = {"num_tokens": "<i4", "tokens": "<i4", "logp": "<f4", "version": "<i4", "finish": "u1"}


def _bytes(array: np.ndarray, dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _array(name: str, data: bytes, dtype: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise RolloutError(f"{name}: {len(data)} bytes are no whole number of {dtype}")
    return np.frombuffer(data, dtype)


def pack_requests(requests: Requests) -> pb.GenerateRequest:
    """The message of a batch. Source: ours."""
    return pb.GenerateRequest(
        prompt_tokens=_bytes(requests.tokens, "<i4"),
        prompt_lengths=_bytes(requests.lengths, "<i4"),
        prompt_row=_bytes(requests.prompt_row, "<i4"),
        want_routing=requests.want_routing,
        request_id=requests.request_id,
        weights_fingerprint=requests.weights_fingerprint,
        **{
            name: _bytes(getattr(requests.sampling, name), dtype)
            for name, dtype in _SAMPLING.items()
        },
    )


def unpack_requests(message: pb.GenerateRequest) -> Requests:
    """The batch in a message, its sizes checked against each other.

    Raises RolloutError, naming the field, where they do not fit.
    Source: ours.
    """
    tokens, lengths, row = (
        _array(name, getattr(message, name), "<i4")
        for name in ("prompt_tokens", "prompt_lengths", "prompt_row")
    )
    fields = {
        name: _array(name, getattr(message, name), dtype) for name, dtype in _SAMPLING.items()
    }
    rows = len(row)
    for name, array in fields.items():
        want = rows * (MAX_STOP_IDS if name == "stop_ids" else 1)
        if len(array) != want:
            raise RolloutError(
                f"{name} has {len(array)} entries, {want} needed for {rows} requests"
                + (f" ({MAX_STOP_IDS} each, -1 for none)" if name == "stop_ids" else "")
            )
    if rows and not (row.min() >= 0 and row.max() < len(lengths)):
        raise RolloutError(f"prompt_row names a prompt outside 0..{len(lengths) - 1}")
    if len(lengths) and lengths.min() < 0:
        raise RolloutError("prompt_lengths must not be negative")
    if (total := int(lengths.sum(dtype=np.int64))) != len(tokens):
        raise RolloutError(f"prompt_lengths add up to {total}, prompt_tokens has {len(tokens)}")
    fields["stop_ids"] = fields["stop_ids"].reshape(rows, MAX_STOP_IDS)
    return Requests(
        tokens, lengths, row, Sampling(**fields), message.want_routing, message.request_id,
        message.weights_fingerprint,
    )  # fmt: skip


def pack_responses(responses: Responses) -> pb.GenerateResponse:
    """The message of what came of a batch. Source: ours."""
    message = pb.GenerateResponse(
        **{name: _bytes(getattr(responses, name), dtype) for name, dtype in _RESPONSES.items()}
    )
    if responses.routing is not None:
        message.routing = _bytes(responses.routing, "<i2")
        _, message.routing_layers, message.routing_experts_per_token = responses.routing.shape
    return message


def unpack_responses(message: pb.GenerateResponse) -> Responses:
    """What came of a batch. Raises RolloutError where the sizes do not fit. Source: ours."""
    fields = {
        name: _array(name, getattr(message, name), dtype) for name, dtype in _RESPONSES.items()
    }
    if len(fields["finish"]) != len(fields["num_tokens"]):
        raise RolloutError("a reply's finish and num_tokens are of different lengths")
    total = int(fields["num_tokens"].sum(dtype=np.int64))
    for name in ("tokens", "logp", "version"):
        if len(fields[name]) != total:
            raise RolloutError(
                f"a reply's num_tokens add up to {total}, its {name} has {len(fields[name])}"
            )
    routing = None
    if message.routing:
        shape = (-1, message.routing_layers, message.routing_experts_per_token)
        routing = _array("routing", message.routing, "<i2").reshape(shape)
    return Responses(**fields, routing=routing)
