"""Log-probs, values and drift against float64 loops over single responses."""

import dataclasses
import functools

import numpy as np
import pytest

from s3ac_jax.data.packing import pack
from s3ac_jax.train import score
from tests.helpers import decoder_oracle, logp_oracle, sequence_of
from tests.unit.train.small import (
    ACTOR,
    CLOSE,
    CRITIC,
    PROMPTS,
    RESPONSES,
    SPEC,
    TEMPERATURE,
    cells,
    nine,
    packed_nine,
    params_of_both,
    score_of,
)


@pytest.fixture(scope="module")
def params():
    return params_of_both()


@functools.cache
def wanted():
    """(log-probs, values) of each response, in float64."""
    params, found = params_of_both(), []
    head = np.asarray(params["critic"]["value_head"], np.float64)
    for n in range(9):
        sequence = sequence_of(nine(), n)
        logp = logp_oracle(params["actor"], SPEC, sequence, temperature=TEMPERATURE)
        _, hidden = decoder_oracle(params["critic"]["backbone"], SPEC, sequence)
        found.append((logp[PROMPTS[n] - 1 :], hidden[PROMPTS[n] - 1 : -1] @ head))
    return found


@pytest.mark.parametrize("micro_rows", [2, 4])
def test_score_oracle(params, micro_rows):
    packed = packed_nine()
    logp, values = score_of(micro_rows)(params["actor"], params["critic"], packed)
    for n in range(9):
        np.testing.assert_allclose(logp[cells(packed, n)], wanted()[n][0], **CLOSE)
        np.testing.assert_allclose(values[cells(packed, n)], wanted()[n][1], **CLOSE)
    visited = micro_rows * -(-5 // micro_rows)
    np.testing.assert_array_equal(logp[visited:], 0.0)  # beyond the last micro-batch in use
    assert np.isfinite(logp).all()


def test_without_a_critic_no_values_are_read(params):
    logp, values = score_of(critic=None)(params["actor"], None, packed_nine())
    assert values is None
    both, _ = score_of()(params["actor"], params["critic"], packed_nine())
    np.testing.assert_array_equal(logp, both)
    # Its weights are not looked at, whatever they are.
    again, _ = score_of(critic=None)(params["actor"], {"value_head": np.nan}, packed_nine())
    np.testing.assert_array_equal(logp, again)


def test_values_alone_are_those_of_the_score(params):
    got = score.make_values(CRITIC, micro_rows=4)(params["critic"], packed_nine())
    _, want = score_of()(params["actor"], params["critic"], packed_nine())
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_prompt_values_are_v_of_s0(params):
    # The scheduler's V(s_0) is the value at the first response token.
    prompt = nine().rollout.prompt
    got = score.make_prompt_values(CRITIC)(params["critic"], prompt.tokens, prompt.num_tokens)
    head = np.asarray(params["critic"]["value_head"], np.float64)
    for n in range(9):
        np.testing.assert_allclose(got[n], wanted()[n][1][0], **CLOSE)
        bare = prompt.tokens[n, : PROMPTS[n]]
        _, hidden = decoder_oracle(params["critic"]["backbone"], SPEC, bare)
        np.testing.assert_allclose(got[n], hidden[-1] @ head, **CLOSE)


@pytest.mark.parametrize("micro_rows", [2, 4])
def test_drift_oracle(params, micro_rows):
    """mean |log pi - log mu| of each response; NaN for those that are not there."""
    drift = score.make_drift(
        ACTOR, temperature=TEMPERATURE, micro_rows=micro_rows, num_responses=12
    )
    parts = [
        pack(nine(), np.array(rows, int), pack_tokens=18, max_rows=4)
        for rows in ([2, 0, 7], [8, 6, 1], [])
    ]
    padding = [part.segment_ids == 0 for part in parts]
    parts = [
        dataclasses.replace(part, logp_rollout=np.where(empty, np.nan, part.logp_rollout))
        for part, empty in zip(parts, padding, strict=True)
    ]
    got = drift(params["actor"], parts)
    assert got.shape == (12,)
    for n in range(12):
        if n in (2, 0, 7, 8, 6, 1):
            mu = nine().rollout.logp[n, : RESPONSES[n]].astype(float)
            want = sum(abs(a - b) for a, b in zip(wanted()[n][0], mu, strict=True)) / RESPONSES[n]
            np.testing.assert_allclose(got[n], want, rtol=1e-5)
        else:
            assert np.isnan(got[n])
