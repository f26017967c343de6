"""What travels: JetStream's messages are read and written as its own, batches come back whole."""

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.backend import RolloutError, Sampling
from s3ac_jax.rollout.wire import (
    METHODS,
    Requests,
    Responses,
    kind,
    pack_requests,
    pack_responses,
    unpack_requests,
    unpack_responses,
)


def test_our_messages_are_jetstreams_and_more():
    stock = pytest.importorskip("jetstream.core.proto.jetstream_pb2")
    asked = stock.DecodeRequest(
        session_cache="s", priority=3, max_tokens=9,
        token_content=stock.DecodeRequest.TokenContent(token_ids=[4, 5]),
    )  # fmt: skip
    read = pb.DecodeRequest.FromString(asked.SerializeToString())
    assert (read.session_cache, read.priority, read.max_tokens) == ("s", 3, 9)
    assert list(read.token_content.token_ids) == [4, 5]
    assert read.temperature == 0
    asked = stock.DecodeRequest(text_content=stock.DecodeRequest.TextContent(text="hi"))
    assert pb.DecodeRequest.FromString(asked.SerializeToString()).text_content.text == "hi"
    sample = pb.DecodeResponse.StreamContent.Sample(
        text="t", token_ids=[7, 8], logp=[-1.5, -2], version=[3, 3], finish="stop"
    )
    content = pb.DecodeResponse.StreamContent(samples=[sample, sample])
    made = pb.DecodeResponse(stream_content=content)
    told = stock.DecodeResponse.FromString(made.SerializeToString())
    assert [s.text for s in told.stream_content.samples] == ["t", "t"]
    assert list(told.stream_content.samples[1].token_ids) == [7, 8]
    for ours, theirs in [("DecodeRequest", 4), ("DecodeResponse", 2), ("HealthCheckResponse", 1)]:
        fields = stock.DESCRIPTOR.message_types_by_name[ours].fields
        mine = pb.DESCRIPTOR.message_types_by_name[ours].fields_by_number
        assert len(fields) >= theirs
        for field in fields:
            assert mine[field.number].name == field.name
            assert mine[field.number].type == field.type


def test_the_table_is_the_services_own():
    service = pb.DESCRIPTOR.services_by_name["Rollout"]
    assert set(METHODS) == {method.name for method in service.methods}
    for method in service.methods:
        ours = METHODS[method.name]
        assert ours.request.DESCRIPTOR is method.input_type
        assert ours.reply.DESCRIPTOR is method.output_type
        assert ours.client_streams == method.client_streaming
        assert ours.server_streams == method.server_streaming
    assert kind(METHODS["PushWeights"]) == "stream_unary"
    assert kind(METHODS["Decode"]) == "unary_stream"


def requests():
    return Requests(
        np.arange(5, dtype=np.int32), np.array([2, 3], np.int32), np.array([1, 0, 1], np.int32),
        Sampling(
            np.array([0, 1, 2**32 - 1], np.uint32), np.array([0, 0.5, 2], np.float32),
            np.array([1, 2, 3], np.int32), np.array([1, 0.9, 1], np.float32),
            np.array([0, 7, 0], np.int32), np.arange(24, dtype=np.int32).reshape(3, 8),
        ), True, "me",
    )  # fmt: skip


def test_requests_come_back_whole():
    message = pack_requests(requests())
    assert message.prompt_lengths == b"\x02\0\0\0\x03\0\0\0"
    assert message.seed == b"\0\0\0\0\x01\0\0\0\xff\xff\xff\xff"
    assert message.temperature == b"\0\0\0\0\0\0\0\x3f\0\0\0\x40"
    found = unpack_requests(pb.GenerateRequest.FromString(message.SerializeToString()))
    for got, want in zip(found[:3], requests()[:3], strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype
    for got, want in zip(found.sampling, requests().sampling, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype
    assert (found.want_routing, found.request_id) == (True, "me")


@pytest.mark.parametrize("routing", [None, np.arange(-1, 29, dtype=np.int16).reshape(5, 3, 2)])
def test_responses_come_back_whole(routing):
    responses = Responses(
        np.array([2, 0, 1], np.int32), np.array([7, 8, 9], np.int32),
        np.array([-1, -2, -3.5], np.float32), np.array([4, 4, 5], np.int32),
        np.array([0, 2, 1], np.uint8), routing,
    )  # fmt: skip
    message = pack_responses(responses)
    assert message.finish == b"\0\x02\x01"
    found = unpack_responses(pb.GenerateResponse.FromString(message.SerializeToString()))
    for got, want in zip(found, responses, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", bytes(8), "num_tokens add up to 1, its tokens has 2"),
        ("logp", b"", "its logp has 0"),
        ("finish", b"", "finish and num_tokens"),
        ("version", bytes(5), "version: 5 bytes"),
    ],
)
def test_replies_that_do_not_fit_are_refused(field, value, message):
    reply = pb.GenerateResponse(
        num_tokens=b"\1\0\0\0", tokens=bytes(4), logp=bytes(4), version=bytes(4), finish=b"\0"
    )
    unpack_responses(reply)
    setattr(reply, field, value)
    with pytest.raises(RolloutError, match=message):
        unpack_responses(reply)
