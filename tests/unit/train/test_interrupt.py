"""A wish to stop, and when a second one is another."""

import os
import signal

import pytest

from s3ac_jax.train import interrupt
from s3ac_jax.train.interrupt import StopRequest


def test_the_first_signal_is_a_wish_and_the_second_ends_at_once():
    with StopRequest() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_of_several_processes_a_signal_may_come_twice_for_one_wish(monkeypatch):
    monkeypatch.setattr(interrupt.hosts, "count", lambda: 2)
    times = iter((10.0, 10.3, 10.6))
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: next(times))
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_others_wish_is_ones_own(monkeypatch):
    monkeypatch.setattr(interrupt.hosts, "exchange", lambda channel, mine: [mine, b"1"])
    with StopRequest() as stop:
        assert stop.asked
