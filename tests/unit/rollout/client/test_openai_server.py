"""OpenAIRollout with our own HTTP server: the same responses as without one."""

import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("jetstream")
from s3ac_jax.rollout.backend import fingerprint_of
from s3ac_jax.rollout.client.openai import OpenAIRollout
from s3ac_jax.rollout.http.api import HttpApi, HttpServer
from s3ac_jax.rollout.http.request import Served
from s3ac_jax.rollout.limits import Limits
from tests.unit.rollout.server.serving import (
    CACHE_TOKENS,
    NETWORK,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SPEC,
    local_rollout,
    make_driver,
    make_requests,
    weights,
)


@pytest.fixture
def address():
    driver = make_driver(weights(0))
    served = Served("tiny", Limits(SPEC.vocab_size, PROMPT_TOKENS, CACHE_TOKENS), 64)
    server = HttpServer(HttpApi(driver, served, None, token="abc").application())
    yield f"127.0.0.1:{server.start('127.0.0.1', 0)}"
    server.stop()
    driver.stop()


def test_responses_over_http_are_those_of_a_local_rollout(address):
    rollout = OpenAIRollout(
        [address], "s3ac", vocab_size=SPEC.vocab_size, max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS, token="abc",
    )  # fmt: skip
    try:
        said = rollout.adopt_weights()
        assert said.fingerprint == fingerprint_of(NETWORK.in_compute_dtype(weights(0)))
        got, want = rollout.generate(*make_requests(0)), local_rollout(0)
    finally:
        rollout.close()
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.num_tokens, want.num_tokens)
    np.testing.assert_array_equal(got.stopped, want.stopped)
    np.testing.assert_array_equal(got.version, want.version)  # the server says which it has
    np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=1e-5)
