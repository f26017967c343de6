"""What a server does between loading and serving, and the file with its token."""

import dataclasses
import threading
import time

import jax
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("jetstream", reason="needs google-jetstream 0.2.2")

from s3ac_jax.parallel.mesh import MeshSpec, make_mesh, shardings
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.server.driver import RolloutDriver
from s3ac_jax.rollout.server.sinks import WholeSink
from s3ac_jax.rollout.server.slot_engine import JetStreamEngine
from s3ac_jax.rollout.server.store import ParamStore
from s3ac_jax.rollout.wire import ABORT
from s3ac_jax.train import serve
from s3ac_jax.train.token_file import read_token
from tests.unit.rollout.server.serving import CACHE_TOKENS, NETWORK, ask, engine, some, weights

PROGRAMS = (Engine.prefill, Engine.insert, Engine.generate, Engine.release)


@pytest.mark.parametrize("mesh", [None, MeshSpec(fsdp=2)], ids=["one device", "two devices"])
def test_once_it_serves_nothing_is_compiled(mesh):
    params, mesh = weights(0), None if mesh is None else make_mesh(mesh)
    if mesh is not None:
        params = jax.device_put(params, shardings(NETWORK.axes, NETWORK.abstract, mesh))
    core = dataclasses.replace(engine(), cache_tokens=CACHE_TOKENS + 8)
    store = ParamStore.of(core, params, 7)
    slots = JetStreamEngine(
        core, store, max_prompt_tokens=12, insert_batch=4, mesh=mesh, prompt_widths=(4, 8)
    )
    driver = RolloutDriver(slots, store)
    try:
        serve._compile(driver)
        compiled = [program._cache_size() for program in PROGRAMS]
        step, stepped, go = slots.generate, threading.Event(), threading.Event()

        def slow(*args):
            made = step(*args)
            stepped.set()
            assert go.wait(20)
            return made

        slots.generate = slow
        sink = WholeSink(1)
        handle = driver.submit(some(), sink)
        assert stepped.wait(20)
        handle.cancel()
        go.set()
        assert sink.result(20)[0].finish == ABORT
        for prompt in ((3, 4), (3,) * 7, (3,) * 12):
            # More than one call inserts, and fewer than there are slots.
            assert len(ask(driver, some(6, prompt=prompt, n=2))) == 12
            time.sleep(0.01)
        assert [program._cache_size() for program in PROGRAMS] == compiled
    finally:
        driver.stop()


def test_a_token_is_one_word_of_ascii(tmp_path):
    path = tmp_path / "token"
    path.write_text(" open-sesame\n")
    assert read_token(str(path), "--token_file") == "open-sesame"
    for bad in ("", "two words", "sésame", "x" * 5000):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"^--token_file: .*token must hold one token, ASCII"):
            read_token(str(path), "--token_file")
    with pytest.raises(ValueError, match=r"^rollout.token_file: .*nowhere can't be read"):
        read_token(str(tmp_path / "nowhere"), "rollout.token_file")
