"""The loop around the engine: what may interrupt it, what it keeps, what it counts."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core.trees import fingerprint
from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.engine import Engine
from tests.unit.rollout.rollouts import (
    PROMPTS,
    TEMPERATURES,
    make_rollout,
    responses,
    same_rollout,
    settings,
    take,
)


def test_int8_keys_and_values_cost_little_and_something(params, mixed):
    """Rounding to 1/127 of the largest number of a head: near, not equal, and not another model."""
    rounded = make_rollout(params, kv_dtype="int8")
    rollout = rounded.generate(PROMPTS, settings(11, temperature=TEMPERATURES))
    first = rollout.tokens[:, 0] == mixed.tokens[:, 0]
    assert first.mean() > 0.8
    gap = np.abs(rollout.logp - mixed.logp)[first, 0]
    assert 0 < gap.max() < 0.05
    cache = rounded._state.cache.kv
    assert {x.dtype.name for x in jax.tree.leaves((cache.keys, cache.values))} == {"int8"}
    assert {x.dtype.name for x in jax.tree.leaves(cache[2:])} == {"float32"}


def test_bfloat16_keys_and_values(params, mixed):
    rounded = make_rollout(params, kv_dtype="bfloat16")
    rollout = rounded.generate(PROMPTS, settings(11, temperature=TEMPERATURES))
    first = rollout.tokens[:, 0] == mixed.tokens[:, 0]
    gap = np.abs(rollout.logp - mixed.logp)[first, 0]
    assert first.mean() > 0.8
    assert 0 < gap.max() < 0.05
    assert {x.dtype for x in jax.tree.leaves(rounded._state.cache.kv)} == {jnp.dtype("bfloat16")}


def test_an_aborted_call_returns_what_there_is(params, mixed, monkeypatch):
    room = make_rollout(params, slots=3, insert_batch=1)
    looks, generate = [], Engine.generate

    def spied(self, params, state):
        looks.append(1)
        if len(looks) == 3:
            room.abort()
        return generate(self, params, state)

    sampling = settings(11, temperature=TEMPERATURES)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "generate", spied)
        cut = room.generate(PROMPTS, sampling)
    assert len(looks) == 3
    assert 0 < cut.aborted.sum() < 11
    assert (cut.num_tokens[cut.aborted] < mixed.num_tokens[cut.aborted]).all()
    # What was made is a beginning of what would have been made, and whole where it isn't cut.
    for short, long in zip(responses(cut), responses(mixed), strict=True):
        assert long[: len(short)] == short
    done = ~cut.aborted
    same_rollout(take(dataclasses.replace(cut, aborted=None), done), take(mixed, done))
    assert room.stats()["aborted"] == cut.aborted.sum()
    # Nothing of it is left for the next call.
    same_rollout(room.generate(PROMPTS, sampling), mixed)


def test_a_paused_call_goes_on_where_it_was(params, mixed):
    room, made = make_rollout(params), []
    room.pause()
    thread = threading.Thread(
        target=lambda: made.append(room.generate(PROMPTS, settings(11, temperature=TEMPERATURES)))
    )
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert room.stats()["tokens"] == 0
    room.resume()
    thread.join(60)
    same_rollout(made[0], mixed)


def test_a_paused_call_can_be_aborted_and_the_pause_stays(params):
    room, made = make_rollout(params), []
    room.pause()
    thread = threading.Thread(target=lambda: made.append(room.generate(PROMPTS, settings(11))))
    thread.start()
    thread.join(0.2)
    room.abort()
    thread.join(60)
    assert made[0].aborted.all()
    again = threading.Thread(target=lambda: made.append(room.generate(PROMPTS, settings(11))))
    again.start()
    again.join(0.2)
    assert again.is_alive()
    room.resume()
    again.join(60)
    assert made[1].aborted is None


def test_closing_waits_for_a_call_in_progress(params, monkeypatch):
    room, made, closers = make_rollout(params, slots=3, insert_batch=1), [], []
    generate = Engine.generate

    def spied(self, params, state):
        if not closers:
            closers.append(threading.Thread(target=room.close))
            closers[0].start()
            closers[0].join(0.2)
            assert closers[0].is_alive()
        return generate(self, params, state)

    monkeypatch.setattr(Engine, "generate", spied)
    made = room.generate(PROMPTS, settings(11))
    closers[0].join(60)
    assert made.aborted.any()
    with pytest.raises(RolloutError, match="this rollout is closed"):
        room.generate(PROMPTS, settings(11))


def test_stats_and_close(params):
    room = make_rollout(params)
    rollout = room.generate(PROMPTS, settings(11))
    stats = room.stats()
    assert stats["requests"] == 11
    assert stats["tokens"] == rollout.num_tokens.sum()
    assert stats["version"] == 7
    assert stats["fingerprint"] == f"{int(fingerprint(params)):08x}"
    room.close()
    with pytest.raises(RolloutError, match="this rollout is closed"):
        room.generate(PROMPTS, settings(11))
