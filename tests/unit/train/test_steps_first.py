"""Steps: V_old read by the way, imitation beside the surrogate, batches without any token."""

import dataclasses

import numpy as np
import pytest

from s3ac_jax.algos.surrogates import PpoClip
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import ActorBatch, CriticBatch
from s3ac_jax.data.packing import pack
from s3ac_jax.train import steps
from tests.unit.train.small import (
    ACTOR,
    TEMPERATURE,
    nine,
    packed_nine,
    params_of_both,
    score_of,
    values_of,
)
from tests.unit.train.small_steps import OPTIMIZERS, batches, fresh, gradients, step_of


@pytest.fixture(scope="module")
def packed():
    return packed_nine()


@pytest.fixture(scope="module")
def params():
    return params_of_both()


@pytest.fixture(scope="module")
def batch():
    return batches()


def test_the_critic_step_hands_back_v_from_before(params, packed, batch):
    _, want = score_of()(params["actor"], params["critic"], packed)
    for micro_rows in (2, 4):
        learner = fresh("critic", params, "adam")
        after, _, values = step_of("critic", "adam", micro_rows)(learner, batch["critic"])
        np.testing.assert_allclose(values[packed.mask], want[packed.mask], rtol=1e-6, atol=1e-6)
        moved = score_of()(params["actor"], after.trainable, packed)[1]
        assert np.abs(moved - want).max() > 1e-3


def test_the_first_step_takes_its_own_values_for_v_old(params, packed, batch):
    """At V_old = V the clip does not bite, and nothing of V_old is read."""
    _, values = score_of()(params["actor"], params["critic"], packed)
    told = dataclasses.replace(batch["critic"], values_old=values)
    own = dataclasses.replace(
        batch["critic"], values_old=np.full(packed.mask.shape, np.nan, np.float32),
        first=np.array(True),
    )  # fmt: skip
    (want, want_report), (got, report) = (gradients("critic", params, b) for b in (told, own))
    assert report == pytest.approx(want_report, rel=1e-6)
    for name, leaf in named_leaves(got).items():
        np.testing.assert_allclose(leaf, named_leaves(want)[name], atol=1e-6, err_msg=name)
    other, _ = gradients("critic", params, batch["critic"])  # V_old far from V: other slopes
    assert np.abs(other["value_head"] - got["value_head"]).max() > 1e-3


@pytest.mark.parametrize("micro_rows", [2, 8])
def test_imitation_is_added_once_whatever_the_split(params, packed, batch, micro_rows):
    rng = np.random.default_rng(8)
    coefficient = np.where(packed.mask & (rng.random(packed.mask.shape) < 0.4), 0.02, np.nan)
    coefficient = np.where(packed.mask, np.nan_to_num(coefficient), 0.0).astype(np.float32)
    both = dataclasses.replace(batch["actor"], imitation=coefficient)
    step = steps.make_actor_step(
        ACTOR, PpoClip(), OPTIMIZERS["recorder"], clip=1e9, temperature=TEMPERATURE,
        micro_rows=micro_rows,
    )  # fmt: skip
    found = {}
    for name, one in {"plain": batch["actor"], "both": both}.items():
        learner, report = step(fresh("actor", params, "recorder"), one)
        found[name] = learner.opt_state, values_of(report)
    logp = np.asarray(score_of()(params["actor"], params["critic"], packed)[0], np.float64)
    want = -sum(coefficient[i] * logp[i] for i in map(tuple, np.argwhere(packed.mask)))
    assert found["both"][1]["imitation_loss"] == pytest.approx(want, rel=1e-5)
    assert "imitation_loss" not in found["plain"][1]
    total = found["plain"][1]["policy_loss"] + want
    assert found["both"][1]["policy_loss"] == pytest.approx(total, rel=1e-5)
    assert found["both"][1]["grad_norm"] != pytest.approx(found["plain"][1]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_a_batch_without_tokens_has_no_gradient(params, role):
    packed = pack(nine(), np.array([], int), pack_tokens=18, max_rows=8)
    zeros, one = np.zeros(packed.mask.shape, np.float32), np.float32(0)
    batch = {
        "actor": ActorBatch(packed, zeros, zeros, zeros, None, one),
        "critic": CriticBatch(packed, packed.mask, zeros, zeros, one, np.array(False)),
    }[role]
    got, report = gradients(role, params, batch)
    assert report["grad_norm"] == report["nonfinite"] == 0
    for name, leaf in named_leaves(got).items():
        np.testing.assert_array_equal(leaf, 0.0, err_msg=name)
