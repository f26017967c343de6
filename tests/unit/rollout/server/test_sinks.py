"""Where responses land: whole for threads, in pieces for a loop that may be gone."""

import asyncio
import threading

import numpy as np
import pytest

from s3ac_jax.rollout.server.sinks import AsyncSink, EngineFailed, Piece, Stopped, WholeSink


def piece(*tokens, finish=None):
    count = len(tokens)
    return Piece(
        np.array(tokens, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32), finish
    )


def test_whole_responses_in_their_order():
    ends = []
    sink = WholeSink(3, lambda: ends.append(1))
    for sample in (2, 0):
        sink.put(sample, piece(sample, finish=0))
    with pytest.raises(TimeoutError, match="1 responses are missing"):
        sink.result(0.01)
    assert ends == []
    threading.Timer(0.02, sink.put, (1, piece(1, finish=1))).start()
    assert [p.tokens.tolist() for p in sink.result(5)] == [[0], [1], [2]]
    assert ends == [1]
    sink.fail(Stopped("too late to matter"))
    assert len(sink.result(0)) == 3
    assert ends == [1]


def test_the_first_failure_is_the_one_told():
    ends = []
    sink = WholeSink(2, lambda: ends.append(1))
    sink.put(0, piece(finish=0))
    sink.fail(EngineFailed("first"))
    sink.fail(Stopped("second"))
    sink.put(1, piece(finish=0))
    with pytest.raises(EngineFailed, match="first"):
        sink.result(0)
    assert ends == [1]
    assert WholeSink(0).result(0) == []


def test_a_loop_gets_all_pieces_in_order_and_then_the_end():
    async def read():
        sink = AsyncSink(2)

        def write():
            for n in range(300):
                sink.put(n % 2, piece(n))
            sink.put(0, piece(finish=0))
            sink.put(1, piece(999, finish=1))

        thread = threading.Thread(target=write)
        thread.start()
        got, looks = {0: [], 1: []}, 0
        while some := await sink.ready():
            looks += 1
            for sample, part in some:
                got[sample] += part.tokens.tolist()
        thread.join()
        assert await sink.ready() == []
        return got, looks

    got, looks = asyncio.run(read())
    assert got == {0: list(range(0, 300, 2)), 1: [*range(1, 300, 2), 999]}
    assert looks <= 302


def test_pieces_that_wait_come_in_one_look():
    async def read():
        sink = AsyncSink()
        for n in range(50):
            sink.put(0, piece(n))
        return len(await sink.ready())

    assert asyncio.run(read()) == 50


def test_an_error_comes_after_the_pieces_before_it():
    async def read():
        sink, got = AsyncSink(), []
        sink.put(0, piece(1))
        sink.fail(EngineFailed("gone"))
        got += await sink.ready()
        with pytest.raises(EngineFailed, match="gone"):
            await sink.ready()
        return [(sample, part.tokens.tolist()) for sample, part in got]

    assert asyncio.run(read()) == [(0, [1])]


def test_a_loop_that_is_closed_is_nobodys_failure():
    async def make():
        return AsyncSink()

    sink = asyncio.run(make())
    sink.put(0, piece(1))
    sink.put(0, piece(2, finish=0))
    sink.fail(Stopped("the server is stopping"))
