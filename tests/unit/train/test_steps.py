"""Critic step and actor step against float64 loops over single responses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos.guards import MismatchGuard
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import ActorBatch, CriticBatch
from s3ac_jax.data.packing import pack
from s3ac_jax.models import freeze
from s3ac_jax.train import steps
from s3ac_jax.train.learner import make_learner, make_optimizer
from s3ac_jax.train.prepare import make_prepare
from tests.helpers import (
    decoder_oracle,
    make_scored,
    run_config,
    sequence_of,
)
from tests.unit.train.small import (
    ACTOR,
    CLOSE,
    CRITIC,
    NAN_BAND,
    PROMPTS,
    RECIPE,
    SPEC,
    TEMPERATURE,
    cells,
    copy,
    nine,
    packed_nine,
    params_of_both,
    score_of,
    values_of,
)
from tests.unit.train.small_steps import OPTIMIZERS, batches, fresh, gradients, stepped


@pytest.fixture(scope="module")
def scored():
    return nine()


@pytest.fixture(scope="module")
def packed():
    return packed_nine()


@pytest.fixture(scope="module")
def params():
    return params_of_both()


@pytest.fixture(scope="module")
def batch():
    return batches()


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_any_split_gives_the_same_loss_metrics_and_gradients(params, batch, role):
    want, want_report = gradients(role, params, batch[role], micro_rows=8)
    for micro_rows in (2, 4):
        got, report = gradients(role, params, batch[role], micro_rows=micro_rows)
        assert report == pytest.approx(want_report, rel=1e-5, abs=1e-6)
        for name, leaf in named_leaves(got).items():
            np.testing.assert_allclose(leaf, named_leaves(want)[name], err_msg=name, **CLOSE)
    assert want_report["grad_norm"] > 1e-3


def half_mse(batch, values, clip):
    """Loss and d loss / d values of the clipped half MSE, by hand, for one response."""
    old, target = batch
    near = old + np.clip(values - old, -clip, clip)
    plain, clipped = (values - target) ** 2, (near - target) ** 2
    # The larger of the two; the clipped one has no slope beyond the clip.
    slope = np.where((plain >= clipped) | (np.abs(values - old) <= clip), values - target, 0.0)
    return 0.5 * np.maximum(plain, clipped), slope


def test_critic_optimises_half_the_error_and_logs_all_of_it(scored, params, packed, batch):
    batch = batch["critic"]
    got, report = gradients("critic", params, batch)
    head = np.asarray(params["critic"]["value_head"], np.float64)
    gradient, squares, tokens, clipped = np.zeros(SPEC.hidden_size), 0.0, 0, 0
    for n in range(9):
        at, sequence = cells(packed, n), sequence_of(scored, n)
        _, hidden = decoder_oracle(params["critic"]["backbone"], SPEC, sequence)
        hidden = hidden[PROMPTS[n] - 1 : -1]
        values = hidden @ head
        old, target = batch.values_old[at].astype(float), batch.returns[at].astype(float)
        _, slope = half_mse((old, target), values, RECIPE.critic.clip)
        learns = batch.learns[at]
        gradient += slope[learns] @ hidden[learns]  # sum of e_t h_t
        squares += ((values - target) ** 2)[learns].sum()
        clipped += (slope[learns] == 0).sum()
        tokens += learns.sum()
    np.testing.assert_allclose(got["value_head"], gradient / tokens, **CLOSE)
    assert report["value_loss"] == pytest.approx(squares / tokens, rel=1e-5)
    assert 0 < clipped < tokens
    assert report["value_clipped"] == pytest.approx(clipped / tokens, rel=1e-6)
    norms = {
        "head": np.linalg.norm(gradient / tokens),
        "all": np.sqrt(sum(float((np.asarray(g, float) ** 2).sum()) for g in jax.tree.leaves(got))),
    }
    assert report["head_grad_norm"] == pytest.approx(norms["head"], rel=1e-5)
    assert report["grad_norm"] == pytest.approx(norms["all"], rel=1e-5)
    share = norms["head"] ** 2 / norms["all"] ** 2
    assert report["head_share"] == pytest.approx(share, rel=1e-5)
    backbone = norms["all"] ** 2 - norms["head"] ** 2
    assert report["backbone_grad_norm"] == pytest.approx(np.sqrt(backbone), rel=1e-4)


def test_actor_loss_and_entropy_by_hand(scored, params, packed, batch):
    batch = batch["actor"]
    got, report = gradients("actor", params, batch)
    head = np.asarray(params["actor"]["embed"], np.float64).T
    loss, entropy, clipped, final_norm = 0.0, 0.0, 0, np.zeros(SPEC.hidden_size)
    scale = np.asarray(params["actor"]["final_norm"], np.float64)
    for n in range(9):
        at, sequence = cells(packed, n), sequence_of(scored, n)
        _, hidden = decoder_oracle(params["actor"], SPEC, sequence)
        hidden = hidden[PROMPTS[n] - 1 : -1]
        logits = hidden @ head / TEMPERATURE
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        tokens = sequence[PROMPTS[n] :]
        logp = log_p[np.arange(len(tokens)), tokens]
        ratio = np.exp(logp - batch.logp_old[at].astype(float))
        push = batch.weights[at] * np.clip(ratio, 0, 5) * batch.advantages[at]
        loss -= (push * logp).sum()
        entropy -= (np.exp(log_p) * log_p).sum()
        clipped += (ratio > 5).sum()
        # d logp / d final_norm = h / w * (head @ (1_token - p)) / temperature
        chosen = np.eye(SPEC.vocab_size)[tokens] - np.exp(log_p)
        final_norm -= (push[:, None] * (hidden / scale) * (chosen @ head.T)).sum(0) / TEMPERATURE
    tokens = packed.mask.sum()
    np.testing.assert_allclose(
        got["final_norm"], final_norm / batch.denominator, rtol=1e-4, atol=1e-5
    )
    assert report["policy_loss"] == pytest.approx(loss / batch.denominator, rel=1e-4)
    assert report["entropy"] == pytest.approx(entropy / tokens, rel=1e-5)
    assert report["ratio_clipped"] == pytest.approx(clipped / tokens, abs=1e-6)
    assert clipped > 0


@pytest.mark.parametrize("micro_rows", [2, 8])
def test_trap_6_twelve_elevenths(params, micro_rows):
    # Ten tokens of loss 1 in one micro-batch of two rows, one of loss 2 in the next.
    scored = make_scored(6, [5, 5], [10, 1])
    packed = pack(scored, np.arange(2), pack_tokens=18, max_rows=8)
    order = np.array([0, 2, 1, 3, 4, 5, 6, 7])
    packed = jax.tree.map(lambda x: x[order] if x.ndim else np.int32(3), packed)
    zero_head = params["critic"] | {"value_head": jnp.zeros(SPEC.hidden_size)}
    logp, values = (np.array(x) for x in score_of()(params["actor"], zero_head, packed))
    returns, advantages = np.zeros((2, *logp.shape), np.float32)
    for n, error in enumerate((1.0, 2.0)):
        at = cells(packed, n)
        assert set(at[0].tolist()) == {2 * n}
        returns[at], advantages[at] = np.sqrt(error), -error / logp[at]
    both = {"actor": params["actor"], "critic": zero_head}
    weights = packed.mask.astype(np.float32)
    batch = ActorBatch(packed, logp, advantages, weights, None, np.float32(11))
    _, report = gradients("actor", both, batch, micro_rows)
    assert report["policy_loss"] == pytest.approx(12 / 11, rel=1e-5)
    batch = CriticBatch(packed, packed.mask, values, returns, np.float32(11), np.array(False))
    got, report = gradients("critic", both, batch, micro_rows)
    assert report["value_loss"] == pytest.approx(12 / 11, rel=1e-5)
    want = np.zeros(SPEC.hidden_size)
    for n, error in enumerate((1.0, 2.0)):
        _, hidden = decoder_oracle(params["critic"]["backbone"], SPEC, sequence_of(scored, n))
        # The clip of the value loss does not bite: V_old is V.
        want -= np.sqrt(error) * hidden[4:-1].sum(axis=0)
    np.testing.assert_allclose(got["value_head"], want / 11, **CLOSE)


POISONS = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_poisoned_padding_changes_nothing(params, batch, role):
    batch = batch[role]
    want, want_report = gradients(role, params, batch)
    padding = batch.packed.segment_ids == 0
    rng = np.random.default_rng(7)
    for poison in POISONS:

        def spoil(x, poison=poison):
            x = np.array(x)
            if x.ndim < 2 or x.dtype == bool:
                return x
            if x.dtype == np.int32:
                return np.where(padding, rng.integers(17, size=x.shape), x).astype(np.int32)
            return np.where(padding, np.float32(poison), x)

        spoiled = jax.tree.map(spoil, batch)
        # Which row a token stands in is structure, not content.
        packed = dataclasses.replace(
            spoiled.packed, segment_ids=batch.packed.segment_ids, response=batch.packed.response
        )
        spoiled = dataclasses.replace(spoiled, packed=packed)
        got, report = gradients(role, params, spoiled)
        assert report == pytest.approx(want_report, rel=1e-6)
        for name, leaf in named_leaves(got).items():
            np.testing.assert_allclose(leaf, named_leaves(want)[name], atol=1e-7, err_msg=name)


def test_prompt_tokens_hold_no_targets(params, batch):
    # Masked, but real tokens: their targets are not read either.
    packed = batch["actor"].packed
    prompt = (packed.segment_ids > 0) & ~packed.mask
    fields = {
        "critic": ("values_old", "returns"), "actor": ("logp_old", "advantages", "weights")
    }  # fmt: skip
    for role, names in fields.items():
        want, want_report = gradients(role, params, batch[role])
        bad = {n: np.where(prompt, np.float32(np.nan), getattr(batch[role], n)) for n in names}
        spoiled = dataclasses.replace(batch[role], **bad)
        got, report = gradients(role, params, spoiled)
        assert report == pytest.approx(want_report, rel=1e-6)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-7)


@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_everything_rejected_moves_nothing(scored, packed, params, denominator):
    recipe = dataclasses.replace(RECIPE, guard=MismatchGuard(denominator=denominator))
    logp, values = score_of()(params["actor"], params["critic"], packed)
    far = dataclasses.replace(packed, logp_rollout=np.asarray(logp) - 10)
    made = make_prepare(recipe, num_responses=10)(
        [far], [(logp, values)], np.zeros(10, bool), np.zeros(10, np.float32), NAN_BAND
    )
    (batch,), report = made.actor, made.report
    assert report["mismatch_kept"].value() == 0
    assert report["mismatch_vetoed"].value() == 1
    assert float(batch.denominator) == (0 if denominator == "kept" else packed.mask.sum())
    learner, report = stepped("actor", "adam", fresh("actor", params, "adam"), batch)
    assert report["policy_loss"] == report["grad_norm"] == report["nonfinite"] == 0
    for name, leaf in named_leaves(learner.trainable).items():
        np.testing.assert_array_equal(leaf, named_leaves(params["actor"])[name], err_msg=name)


def test_frozen_attention_of_the_critic(params, batch):
    config = dataclasses.replace(run_config().critic, weight_decay=0.3)
    tx = make_optimizer(config)
    step = steps.make_critic_step(CRITIC, RECIPE.critic, tx, clip=10.0, micro_rows=4)
    learner = make_learner(copy(params["critic"]), tx, freeze.frozen_in_critic)
    assert not any("attn/" in name for name in named_leaves(learner.opt_state))
    reports = []
    for _ in range(3):
        learner, report, _ = step(learner, batch["critic"])
        reports.append(report)
    before = named_leaves(params["critic"])
    held = named_leaves(learner.frozen)
    assert {name.split("/")[-1] for name in held} == {
        "q", "k", "v", "o", "q_bias", "k_bias", "v_bias"
    }  # fmt: skip
    for name, leaf in held.items():
        np.testing.assert_array_equal(leaf, before[name], err_msg=name)
    for name, leaf in named_leaves(learner.trainable).items():
        assert np.abs(leaf - before[name]).max() > 1e-3, name
    # The norm is that of the trained weights alone; their gradient is what it is unfrozen.
    grads, full = gradients("critic", params, batch["critic"])
    squares = {name: float(jnp.sum(jnp.square(leaf))) for name, leaf in named_leaves(grads).items()}
    trained = sum(square for name, square in squares.items() if name not in held)
    assert reports[0]["grad_norm"].value() == pytest.approx(trained**0.5, rel=1e-5)
    assert reports[0]["grad_norm"].value() < 0.999 * full["grad_norm"]


@pytest.mark.parametrize(
    ("role", "field", "poison"),
    [("critic", "returns", np.nan), ("actor", "advantages", np.inf), ("actor", "weights", np.nan)],
)
def test_a_nan_loss_leaves_everything_bit_identical(params, batch, role, field, poison):
    batch = batch[role]
    learner, report = stepped(role, "adam", fresh(role, params, "adam"), batch)
    assert report["nonfinite"] == 0
    saved = jax.tree.map(np.array, learner)
    spoiled = np.array(getattr(batch, field))
    where = batch.packed.mask if role == "actor" else batch.learns
    spoiled[tuple(np.argwhere(where)[17])] = poison
    bad = dataclasses.replace(batch, **{field: spoiled})
    after, report = stepped(role, "adam", learner, bad)
    assert report["nonfinite"] == 1
    for name, leaf in named_leaves(saved).items():
        np.testing.assert_array_equal(named_leaves(after)[name], leaf, err_msg=name)
    again, report = stepped(role, "adam", after, batch)  # and the run goes on
    assert report["nonfinite"] == 0
    assert int(again.step) == 2


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_the_learner_is_donated(params, batch, role):
    learner = fresh(role, params, "adam")
    after, _ = stepped(role, "adam", learner, batch[role])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(learner.trainable))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_nobody_looks_and_the_weights_are_the_same_bit_for_bit(params, batch, role):
    given = {"clip": 1.0, "micro_rows": 4, "health": False}
    step = {
        "critic": lambda tx: steps.make_critic_step(CRITIC, RECIPE.critic, tx, **given),
        "actor": lambda tx: steps.make_actor_step(
            ACTOR, RECIPE.surrogate, tx, temperature=TEMPERATURE, **given
        ),
    }[role](OPTIMIZERS["adam"])
    want, want_report = stepped(role, "adam", fresh(role, params, "adam"), batch[role])
    got, report, *_ = step(fresh(role, params, "adam"), batch[role])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    loss = {"critic": "value_loss", "actor": "policy_loss"}[role]
    assert values_of(report) == {name: want_report[name] for name in (loss, "nonfinite")}
