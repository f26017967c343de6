"""Score, prepare, critic step and actor step against float64 loops over single responses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.algos import recipe as recipes
from s3ac_jax.algos.guards import MismatchGuard
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import TrainBatch
from s3ac_jax.data.packing import pack
from s3ac_jax.models import freeze
from s3ac_jax.models.network import actor_network, critic_network
from s3ac_jax.train import steps
from s3ac_jax.train.learner import make_learner, make_optimizer
from tests.helpers import (
    decoder_oracle,
    gradient_recorder,
    logp_oracle,
    make_scored,
    random_params,
    run_config,
    sequence_of,
    tiny_spec,
)

SPEC = tiny_spec(num_layers=2)
ACTOR, CRITIC = actor_network(SPEC), critic_network(SPEC)
RECIPE = run_config().recipe
TEMPERATURE = 0.8
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PROMPTS = (3, 1, 5, 2, 4, 3, 2, 6, 1)
# Uneven on purpose: a row of one token, others of twelve.
RESPONSES = (9, 1, 12, 4, 7, 2, 11, 3, 5)


@pytest.fixture(scope="module")
def scored():
    return make_scored(0, PROMPTS, RESPONSES)


@pytest.fixture(scope="module")
def packed(scored):
    # 5 rows of 18 are used, 8 are there.
    made = pack(scored, np.arange(9)[::-1], pack_tokens=18, max_rows=8)
    assert made.rows == 5
    return made


@pytest.fixture(scope="module")
def params():
    return {"actor": random_params(ACTOR, 1, std=0.3), "critic": random_params(CRITIC, 2, std=0.3)}


def cells(packed, number):
    """Row and columns of the trainable tokens of one response."""
    row, columns = np.nonzero((packed.response == number) & packed.mask)
    return row, columns


def copy(tree):
    return jax.tree.map(jnp.array, tree)  # steps donate what they get


@pytest.fixture(scope="module")
def batch(packed):
    """A TrainBatch of random targets, some tokens rejected; nothing in it depends on a split."""
    rng = np.random.default_rng(3)
    shape, mask = packed.mask.shape, packed.mask
    normal = rng.normal(size=(4, *shape)).astype(np.float32)
    keep = mask & (rng.random(shape) < 0.8)
    logp_old = np.where(mask, packed.logp_rollout + 0.3 * normal[0], 0)
    logp_old[tuple(x[3] for x in cells(packed, 2))] = -12.0  # a ratio beyond the cap
    return TrainBatch(
        packed=packed,
        logp_old=logp_old,
        values_old=np.where(mask, normal[1], 0),
        advantages=np.where(mask, normal[2], 0),
        returns=np.where(mask, np.sign(normal[3]), 0).astype(np.float32),
        weights=np.where(keep, rng.uniform(0.5, 2, size=shape), 0).astype(np.float32),
        actor_tokens=np.float32(keep.sum()),
        critic_tokens=np.float32(mask.sum()),
    )


OPTIMIZERS = {"recorder": gradient_recorder(), "adam": make_optimizer(run_config().actor)}


@functools.cache
def step_of(role, optimizer, micro_rows=4):
    """Compiled once for all tests, whose batches share one shape. The recorder sees no clip."""
    tx, clip = OPTIMIZERS[optimizer], 1e9 if optimizer == "recorder" else 1.0
    if role == "critic":
        return steps.make_critic_step(CRITIC, RECIPE.critic, tx, clip=clip, micro_rows=micro_rows)
    return steps.make_actor_step(
        ACTOR, RECIPE, tx, clip=clip, temperature=TEMPERATURE, micro_rows=micro_rows
    )


@functools.cache
def score_of(micro_rows=4):
    return steps.make_score(ACTOR, CRITIC, temperature=TEMPERATURE, micro_rows=micro_rows)


def fresh(role, params, optimizer):
    return make_learner(copy(params[role]), OPTIMIZERS[optimizer])


def gradients(role, params, batch, micro_rows=4):
    learner, report = step_of(role, "recorder", micro_rows)(fresh(role, params, "recorder"), batch)
    return learner.opt_state, {name: metric.value() for name, metric in report.items()}


# ---------------------------------------------------------------------------------- score


@pytest.mark.parametrize("micro_rows", [2, 4])
def test_score_oracle(scored, packed, params, micro_rows):
    logp, values = score_of(micro_rows)(params["actor"], params["critic"], packed)
    head = np.asarray(params["critic"]["value_head"], np.float64)
    for n in range(9):
        sequence, at = sequence_of(scored, n), cells(packed, n)
        want = logp_oracle(params["actor"], SPEC, sequence, temperature=TEMPERATURE)
        np.testing.assert_allclose(logp[at], want[PROMPTS[n] - 1 :], **CLOSE)
        _, hidden = decoder_oracle(params["critic"]["backbone"], SPEC, sequence)
        np.testing.assert_allclose(values[at], hidden[PROMPTS[n] - 1 : -1] @ head, **CLOSE)
    visited = micro_rows * -(-5 // micro_rows)
    np.testing.assert_array_equal(logp[visited:], 0.0)  # beyond the last micro-batch in use
    assert np.isfinite(logp).all()


def test_prompt_values_are_v_of_s0(scored, packed, params):
    # The scheduler's V(s_0) is the value at the first response token.
    prompt = scored.rollout.prompt
    got = steps.make_prompt_values(CRITIC)(params["critic"], prompt.tokens, prompt.num_tokens)
    _, values = score_of()(params["actor"], params["critic"], packed)
    head = np.asarray(params["critic"]["value_head"], np.float64)
    for n in range(9):
        row, columns = cells(packed, n)
        np.testing.assert_allclose(got[n], values[row[0], columns[0]], **CLOSE)
        bare = prompt.tokens[n, : PROMPTS[n]]
        _, hidden = decoder_oracle(params["critic"]["backbone"], SPEC, bare)
        np.testing.assert_allclose(got[n], hidden[-1] @ head, **CLOSE)


# -------------------------------------------------------------------------------- prepare


def random_scores(packed, seed=4):
    """log-probs near the sampler's, and values; NaN wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=packed.mask.shape)
    logp = np.where(packed.mask, packed.logp_rollout + 0.6 * noise, np.nan)
    values = np.where(packed.mask, rng.normal(size=packed.mask.shape), np.nan)
    return logp.astype(np.float32), values.astype(np.float32)


def gae_oracle(values, reward, lam):
    advantages, carry = [], 0.0
    for t in reversed(range(len(values))):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        delta = (reward if t + 1 == len(values) else 0.0) + after - values[t]
        carry = delta + lam * carry
        advantages.append(carry)
    return advantages[::-1]


NAN_BAND = np.full(2, np.nan, np.float32)


def test_prepared_batches_are_those_of_single_responses(scored):
    parts = [
        pack(scored, rows, pack_tokens=18, max_rows=4)
        for rows in (np.array([2, 0, 7, 3]), np.array([8, 6, 1, 5, 4]))
    ]
    scores = [random_scores(part, seed) for seed, part in enumerate(parts)]
    recipe = dataclasses.replace(RECIPE, guard=MismatchGuard(low=0.7, high=1.5, veto=2.5))
    prepare = steps.make_prepare(recipe, num_prompts=5)
    batches, band, _ = prepare(parts, scores, NAN_BAND)
    assert np.isnan(band).all()  # no entropy control in this recipe
    kept_total, vetoed = [0, 0], 0
    for k, (part, (logp, values), batch) in enumerate(zip(parts, scores, batches, strict=True)):
        for n in np.unique(part.response[part.mask]):
            at, length = cells(part, n), RESPONSES[n]
            v = values[at].astype(float).tolist()
            reward, lam = float(scored.reward[n]), max(0.0, 1 - 1 / (1.5 * length))
            np.testing.assert_allclose(batch.advantages[at], gae_oracle(v, reward, lam), **CLOSE)
            np.testing.assert_array_equal(batch.returns[at], [reward] * length)
            rho = np.exp(logp[at].astype(float) - scored.rollout.logp[n, :length])
            keep = (rho >= 0.7) & (rho <= 1.5) & ~(rho > 2.5).any()
            np.testing.assert_allclose(batch.weights[at], np.where(keep, rho, 0), **CLOSE)
            kept_total[k] += keep.sum()
            vetoed += (rho > 2.5).any()
        for x in (batch.advantages, batch.returns, batch.weights):
            np.testing.assert_array_equal(np.asarray(x)[~part.mask], 0.0)
        # Denominators of one optimiser batch, not of all.
        assert float(batch.actor_tokens) == kept_total[k]
        assert float(batch.critic_tokens) == part.mask.sum()
    assert 0 < vetoed < 9


def test_packing_has_no_say_in_advantages(scored):
    # One response per row against nine in a few: the same arrays, response by response.
    packings = {
        "padded": pack(scored, np.arange(9), pack_tokens=18, max_rows=9),
        "packed": pack(scored, np.arange(9)[::-1], pack_tokens=40, max_rows=9),
    }
    recipe = dataclasses.replace(RECIPE, advantage=recipes.LengthAdaptiveGae(whiten=True))
    by_response = np.random.default_rng(5).normal(size=(2, 9, 12)).astype(np.float32)
    found, reports = {}, {}
    for name, part in packings.items():
        logp, values = np.full((2, *part.mask.shape), np.nan, np.float32)
        for n in range(9):
            at = cells(part, n)
            logp[at], values[at] = by_response[:, n, : RESPONSES[n]]
        prepare = steps.make_prepare(recipe, num_prompts=5)
        (batch,), _, report = prepare([part], [(logp, values)], NAN_BAND)
        found[name] = [np.asarray(batch.advantages)[cells(part, n)] for n in range(9)]
        reports[name] = {key: metric.value() for key, metric in report.items()}
    for a, b in zip(found["padded"], found["packed"], strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)
    every = np.concatenate(found["packed"])
    np.testing.assert_allclose([every.mean(), every.std()], [0, 1], atol=1e-5)
    assert reports["packed"] == pytest.approx(reports["padded"], rel=1e-4, abs=1e-5)
    values = np.concatenate([by_response[1, n, : RESPONSES[n]] for n in range(9)]).astype(float)
    returns = np.repeat(scored.reward, RESPONSES).astype(float)
    want = 1 - np.var(returns - values) / np.var(returns)
    assert reports["packed"]["explained_variance"] == pytest.approx(want, rel=1e-4)
    assert reports["packed"]["value_mean_error"] == pytest.approx((values - returns).mean())


# ---------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_any_split_gives_the_same_loss_metrics_and_gradients(params, batch, role):
    want, want_report = gradients(role, params, batch, micro_rows=8)
    for micro_rows in (2, 4):
        got, report = gradients(role, params, batch, micro_rows=micro_rows)
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
    got, report = gradients("critic", params, batch)
    head = np.asarray(params["critic"]["value_head"], np.float64)
    gradient, squares, tokens = np.zeros(SPEC.hidden_size), 0.0, 0
    for n in range(9):
        at, sequence = cells(packed, n), sequence_of(scored, n)
        _, hidden = decoder_oracle(params["critic"]["backbone"], SPEC, sequence)
        hidden = hidden[PROMPTS[n] - 1 : -1]
        values = hidden @ head
        old, target = batch.values_old[at].astype(float), batch.returns[at].astype(float)
        _, slope = half_mse((old, target), values, RECIPE.critic.clip)
        gradient += slope @ hidden  # sum of e_t h_t
        squares += ((values - target) ** 2).sum()
        tokens += len(values)
    np.testing.assert_allclose(got["value_head"], gradient / tokens, **CLOSE)
    assert report["value_loss"] == pytest.approx(squares / tokens, rel=1e-5)
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
        got["final_norm"], final_norm / batch.actor_tokens, rtol=1e-4, atol=1e-5
    )
    assert report["policy_loss"] == pytest.approx(loss / batch.actor_tokens, rel=1e-4)
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
    batch = TrainBatch(
        packed, logp, values, advantages, returns, packed.mask.astype(np.float32),
        np.float32(11), np.float32(11),
    )  # fmt: skip
    both = {"actor": params["actor"], "critic": zero_head}
    _, report = gradients("actor", both, batch, micro_rows)
    assert report["policy_loss"] == pytest.approx(12 / 11, rel=1e-5)
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
    prompt = (batch.packed.segment_ids > 0) & ~batch.packed.mask
    for role in ("critic", "actor"):
        want, want_report = gradients(role, params, batch)
        spoiled = dataclasses.replace(
            batch,
            **{
                name: np.where(prompt, np.nan, getattr(batch, name)).astype(np.float32)
                for name in ("logp_old", "values_old", "advantages", "returns")
            },
        )
        got, report = gradients(role, params, spoiled)
        assert report == pytest.approx(want_report, rel=1e-6)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-7)


@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_everything_rejected_moves_nothing(scored, packed, params, denominator):
    recipe = dataclasses.replace(RECIPE, guard=MismatchGuard(denominator=denominator))
    logp, values = score_of()(params["actor"], params["critic"], packed)
    far = dataclasses.replace(packed, logp_rollout=np.asarray(logp) - 10)
    (batch,), _, report = steps.make_prepare(recipe, num_prompts=5)(
        [far], [(logp, values)], NAN_BAND
    )
    assert report["mismatch_kept"].value() == 0
    assert report["mismatch_vetoed"].value() == 1
    assert float(batch.actor_tokens) == (0 if denominator == "kept" else packed.mask.sum())
    learner, report = step_of("actor", "adam")(fresh("actor", params, "adam"), batch)
    assert report["policy_loss"].value() == 0
    assert report["grad_norm"].value() == 0
    assert report["nonfinite"].value() == 0
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
        learner, report = step(learner, batch)
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
    grads, full = gradients("critic", params, batch)
    squares = {name: float(jnp.sum(jnp.square(leaf))) for name, leaf in named_leaves(grads).items()}
    trained = sum(square for name, square in squares.items() if name not in held)
    assert reports[0]["grad_norm"].value() == pytest.approx(trained**0.5, rel=1e-5)
    assert reports[0]["grad_norm"].value() < 0.999 * full["grad_norm"]


@pytest.mark.parametrize(
    ("role", "field", "poison"),
    [("critic", "returns", np.nan), ("actor", "advantages", np.inf), ("actor", "weights", np.nan)],
)
def test_a_nan_loss_leaves_everything_bit_identical(params, batch, role, field, poison):
    step = step_of(role, "adam")
    learner, report = step(fresh(role, params, "adam"), batch)
    assert report["nonfinite"].value() == 0
    saved = jax.tree.map(np.array, learner)
    spoiled = np.array(getattr(batch, field))
    row, columns = cells(batch.packed, 4)
    spoiled[row[2], columns[2]] = poison
    after, report = step(learner, dataclasses.replace(batch, **{field: spoiled}))
    assert report["nonfinite"].value() == 1
    for name, leaf in named_leaves(saved).items():
        np.testing.assert_array_equal(named_leaves(after)[name], leaf, err_msg=name)
    again, report = step(after, batch)  # and the run goes on
    assert report["nonfinite"].value() == 0
    assert int(again.step) == 2


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_the_learner_is_donated(params, batch, role):
    learner = fresh(role, params, "adam")
    after, _ = step_of(role, "adam")(learner, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(learner.trainable))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
