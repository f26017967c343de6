"""What critic and actor learn from, against loops over single responses."""

import dataclasses

import jax
import numpy as np
import pytest

from s3ac_jax.algos import recipe as recipes
from s3ac_jax.algos.averaging import ConstantLength, ResponseMean, TokenMean
from s3ac_jax.algos.credit import LengthAdaptiveGae
from s3ac_jax.algos.critic import CriticSpec
from s3ac_jax.algos.guards import BinaryKlMask, MismatchGuard, NoGuard
from s3ac_jax.algos.surrogates import Band, PpoClip
from s3ac_jax.data.packing import pack
from s3ac_jax.train.prepare import critic_batch, make_prepare
from tests.unit.train.small import (
    CLOSE,
    NAN_BAND,
    RECIPE,
    RESPONSES,
    cells,
    nine,
    random_scores,
    values_of,
)

GUARD = MismatchGuard(low=0.7, high=1.5, veto=2.5)
HALVES = ([2, 0, 7, 3], [8, 6, 1, 5])  # response 4 is not there
BASELINE = np.linspace(0.1, 0.9, 10).astype(np.float32)
SUCCESS = np.append(np.arange(9) % 3 == 0, False)


def halves():
    return [pack(nine(), np.array(rows), pack_tokens=18, max_rows=4) for rows in HALVES]


def prepared(recipe, parts, scores):
    """(actor batches, critic batches, band, metrics); ten responses there might have been."""
    made = make_prepare(recipe, num_responses=10)(parts, scores, SUCCESS, BASELINE, NAN_BAND)
    return made.actor, made.critic, made.band, made.report


def gae_oracle(values, reward, lam):
    advantages, carry = [], 0.0
    for t in reversed(range(len(values))):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        delta = (reward if t + 1 == len(values) else 0.0) + after - values[t]
        carry = delta + lam * carry
        advantages.append(carry)
    return advantages[::-1]


def rho_of(logp, at, n):
    return np.exp(logp[at].astype(float) - nine().rollout.logp[n, : RESPONSES[n]])


def mismatch_oracle(rho):
    return (rho >= 0.7) & (rho <= 1.5) & ~(rho > 2.5).any()


def test_prepared_batches_are_those_of_single_responses():
    parts = halves()
    scores = [random_scores(part, seed) for seed, part in enumerate(parts)]
    recipe = dataclasses.replace(RECIPE, guard=GUARD)
    actor, critic, band, report = prepared(recipe, parts, scores)
    assert np.isnan(band).all()  # no entropy control in this recipe
    kept_total, vetoed = [0, 0], 0
    for k, (part, (logp, values)) in enumerate(zip(parts, scores, strict=True)):
        assert set(np.unique(part.response[part.mask])) == set(HALVES[k])
        for n in HALVES[k]:
            at, length = cells(part, n), RESPONSES[n]
            v = values[at].astype(float).tolist()
            reward, lam = float(nine().reward[n]), max(0.0, 1 - 1 / (1.5 * length))
            np.testing.assert_allclose(actor[k].advantages[at], gae_oracle(v, reward, lam), **CLOSE)
            np.testing.assert_array_equal(critic[k].returns[at], [reward] * length)
            np.testing.assert_array_equal(critic[k].values_old[at], values[at])
            np.testing.assert_array_equal(actor[k].logp_old[at], logp[at])
            rho = rho_of(logp, at, n)
            keep = mismatch_oracle(rho)
            np.testing.assert_allclose(actor[k].weights[at], np.where(keep, rho, 0), **CLOSE)
            kept_total[k] += keep.sum()
            vetoed += not keep.any()
        for x in (actor[k].advantages, critic[k].returns, actor[k].weights):
            np.testing.assert_array_equal(np.asarray(x)[~part.mask], 0.0)
        # Denominators of one optimiser batch, not of all.
        assert float(actor[k].denominator) == kept_total[k]
        assert float(critic[k].tokens) == part.mask.sum()
        assert not critic[k].first
        np.testing.assert_array_equal(critic[k].learns, part.mask)
        assert actor[k].imitation is None
    assert 0 < vetoed < 8
    found = values_of(report)
    assert found["mismatch_vetoed"] == pytest.approx(vetoed / 8)
    assert found["mismatch_kept"] == pytest.approx(
        sum(kept_total) / sum(p.mask.sum() for p in parts)
    )


def test_packing_has_no_say_in_advantages():
    # One response per row against nine in a few: the same arrays, response by response.
    scored = nine()
    packings = {
        "padded": pack(scored, np.arange(9), pack_tokens=18, max_rows=9),
        "packed": pack(scored, np.arange(9)[::-1], pack_tokens=40, max_rows=9),
    }
    recipe = dataclasses.replace(RECIPE, advantage=LengthAdaptiveGae(whiten=True))
    by_response = np.random.default_rng(5).normal(size=(2, 9, 12)).astype(np.float32)
    found, reports = {}, {}
    for name, part in packings.items():
        logp, values = np.full((2, *part.mask.shape), np.nan, np.float32)
        for n in range(9):
            at = cells(part, n)
            logp[at], values[at] = by_response[:, n, : RESPONSES[n]]
        (batch,), _, _, report = prepared(recipe, [part], [(logp, values)])
        found[name] = [np.asarray(batch.advantages)[cells(part, n)] for n in range(9)]
        reports[name] = values_of(report)
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


@pytest.mark.parametrize("whiten", [True, False])
def test_v0_and_the_raw_advantage_of_each_response(whiten):
    """As told to people: neither whitened nor weighted, NaN for whoever is not in the batch."""
    parts = halves()
    scores = [random_scores(part, seed) for seed, part in enumerate(parts)]
    recipe = dataclasses.replace(RECIPE, advantage=LengthAdaptiveGae(whiten=whiten), guard=GUARD)
    made = make_prepare(recipe, num_responses=10)(parts, scores, SUCCESS, BASELINE, NAN_BAND)
    v0, advantage = np.full((2, 10), np.nan)
    for k, (part, (_, values)) in enumerate(zip(parts, scores, strict=True)):
        for n in HALVES[k]:
            row, columns = cells(part, n)
            v = [float(values[row[0], column]) for column in sorted(columns)]
            lam = max(0.0, 1 - 1 / (1.5 * len(v)))
            each = gae_oracle(v, float(nine().reward[n]), lam)
            v0[n], advantage[n] = v[0], sum(each) / len(each)
    assert np.isnan(v0).tolist() == [n in (4, 9) for n in range(10)]
    np.testing.assert_array_equal(made.v0, v0.astype(np.float32))
    np.testing.assert_allclose(made.advantage, advantage, **CLOSE)


def test_a_method_without_values_has_no_v0():
    parts = halves()
    scores = [(random_scores(part)[0], None) for part in parts]
    made = make_prepare(recipes.reinforce_pp, num_responses=10)(
        parts, scores, SUCCESS, BASELINE, NAN_BAND
    )
    assert made.v0 is None
    # Raw: not yet against the batch's mean.
    want = [np.nan if n in (4, 9) else float(nine().reward[n]) for n in range(10)]
    np.testing.assert_allclose(made.advantage, want, **CLOSE)


@pytest.mark.parametrize("name", ["s3ac_group", "spo"])
def test_nobody_looks_and_all_is_the_same_to_those_who_learn(name):
    recipe, parts = recipes.RECIPES[name], halves()
    if recipe.responses_per_prompt > 1:
        recipe = dataclasses.replace(recipe, responses_per_prompt=2)
    scores = [random_scores(part, seed) for seed, part in enumerate(parts)]
    if not recipe.reads_values:
        scores = [(logp, None) for logp, _ in scores]
    seen, unseen = (
        make_prepare(recipe, num_responses=10, health=health)(
            parts, scores, SUCCESS, BASELINE, NAN_BAND
        )
        for health in (True, False)
    )
    assert seen.report
    assert unseen.report == {}
    assert unseen.v0 is None
    assert unseen.advantage is None
    for field in ("actor", "critic", "band"):
        want, got = getattr(seen, field), getattr(unseen, field)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def kept_by(guard, rho, logp, mu):
    if isinstance(guard, MismatchGuard):
        return mismatch_oracle(rho), rho
    if isinstance(guard, BinaryKlMask):
        p, q = np.exp(mu), np.exp(logp)
        p, q = (np.clip(x, 1e-6, 1 - 1e-6) for x in (p, q))
        mean = np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
        return np.full(len(rho), mean <= guard.delta), rho
    return np.full(len(rho), True), np.ones(len(rho))


@pytest.mark.parametrize("average", [TokenMean(), ResponseMean(), ConstantLength(7)], ids=repr)
@pytest.mark.parametrize(
    "guard",
    [GUARD, dataclasses.replace(GUARD, denominator="all"), NoGuard(), BinaryKlMask(0.05),
     BinaryKlMask(0.05, denominator="kept")],
    ids=repr,
)  # fmt: skip
def test_denominators_and_weights_of_each_average_and_guard(average, guard):
    parts = halves()
    # log-probs below 0: the binary KL takes them for probabilities.
    scores = [
        (np.minimum(logp, -0.05), values) for logp, values in map(random_scores, parts, (0, 1))
    ]
    recipe = dataclasses.replace(recipes.reinforce_pp, guard=guard, average=average)
    actor, *_ = prepared(recipe, parts, scores)
    rejected = 0
    for k, (part, (logp, _)) in enumerate(zip(parts, scores, strict=True)):
        denominator = 0.0
        for n in HALVES[k]:
            at, length = cells(part, n), RESPONSES[n]
            mu = nine().rollout.logp[n, :length].astype(float)
            rho = np.exp(logp[at].astype(float) - mu)
            keep, weight = kept_by(guard, rho, logp[at].astype(float), mu)
            rejected += (~keep).sum()
            scale = {TokenMean: 1.0, ResponseMean: 1 / length, ConstantLength: 1 / 7}[type(average)]
            want = [w * scale if kept else 0.0 for w, kept in zip(weight, keep, strict=True)]
            np.testing.assert_allclose(actor[k].weights[at], want, **CLOSE)
            counted = keep.sum() if guard.denominator == "kept" else length
            denominator += counted if isinstance(average, TokenMean) else counted / length
        np.testing.assert_allclose(actor[k].denominator, denominator, rtol=1e-6)
    assert (rejected > 0) == (not isinstance(guard, NoGuard))


def test_imitation_is_the_token_mean_over_successful_responses():
    parts = halves()
    scores = [random_scores(part, seed) for seed, part in enumerate(parts)]
    recipe = dataclasses.replace(RECIPE, surrogate=PpoClip(imitation=0.3), guard=GUARD)
    actor, *_ = prepared(recipe, parts, scores)
    for k, part in enumerate(parts):
        right = [n for n in HALVES[k] if SUCCESS[n]]
        assert right
        number, want = sum(RESPONSES[n] for n in right), np.zeros(part.mask.shape)
        for n in right:  # whatever the guard says of them
            want[cells(part, n)] = 0.3 / number
        np.testing.assert_allclose(actor[k].imitation, want, rtol=1e-6)


def test_imitation_of_nobody():
    part = pack(nine(), np.array([1, 2]), pack_tokens=18, max_rows=4)
    assert not SUCCESS[[1, 2]].any()
    recipe = dataclasses.replace(RECIPE, surrogate=PpoClip(imitation=0.3))
    (actor,), *_ = prepared(recipe, [part], [random_scores(part)])
    np.testing.assert_array_equal(actor.imitation, 0.0)


def test_the_band_is_against_the_sampler():
    parts = halves()
    scores = [random_scores(part, seed) for seed, part in enumerate(parts)]
    recipe = dataclasses.replace(RECIPE, surrogate=Band(), guard=NoGuard())
    actor, *_ = prepared(recipe, parts, scores)
    for k, part in enumerate(parts):
        for n in HALVES[k]:
            want = nine().rollout.logp[n, : RESPONSES[n]]
            np.testing.assert_array_equal(actor[k].logp_old[cells(part, n)], want)


def test_the_baseline_is_that_of_the_response():
    parts = halves()
    scores = [(random_scores(part)[0], None) for part in parts]
    actor, critic, *_ = prepared(recipes.spo, parts, scores)
    assert critic is None
    present = sorted(HALVES[0] + HALVES[1])
    surprise = {n: (float(nine().reward[n]) + 1) / 2 - float(BASELINE[n]) for n in present}
    mean = sum(surprise.values()) / 8
    std = (sum((x - mean) ** 2 for x in surprise.values()) / 8) ** 0.5
    for k, part in enumerate(parts):
        for n in HALVES[k]:
            want = [(surprise[n] - mean) / std] * RESPONSES[n]
            np.testing.assert_allclose(actor[k].advantages[cells(part, n)], want, **CLOSE)


def test_a_value_of_the_prompt_alone():
    parts = halves()
    recipe = dataclasses.replace(recipes.pcl, responses_per_prompt=2)
    _, critic, _, report = prepared(recipe, parts, [(random_scores(p)[0], None) for p in parts])
    assert "explained_variance" not in values_of(report)
    for k, part in enumerate(parts):
        want = np.zeros(part.mask.shape, bool)
        for n in HALVES[k]:
            row, columns = cells(part, n)
            want[row[0], columns.min()] = True
        np.testing.assert_array_equal(critic[k].learns, want)
        assert float(critic[k].tokens) == 4
        assert critic[k].values_old is None
        assert critic[k].first  # no V_old: what the step finds itself would be it


def test_targets_below_lambda_one_read_v_old():
    part, spec = halves()[0], CriticSpec(lam=0.6, clip=None)
    _, values = random_scores(part)
    batch = critic_batch(spec, part, values)
    assert batch.values_old is None  # no clip, no use for it in the loss
    for n in HALVES[0]:
        at = cells(part, n)
        v = values[at].astype(float)
        want = np.add(gae_oracle(v.tolist(), float(nine().reward[n]), 0.6), v)
        np.testing.assert_allclose(batch.returns[at], want, **CLOSE)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_an_empty_batch_has_no_say(name):
    """All groups were dropped, or no grading came: zeros throughout, and no NaN."""
    recipe = recipes.RECIPES[name]
    if recipe.responses_per_prompt > 1:
        recipe = dataclasses.replace(recipe, responses_per_prompt=2)
    parts = [pack(nine(), np.array([], int), pack_tokens=18, max_rows=4)]
    values = np.zeros((4, 18), np.float32) if recipe.reads_values else None
    scores = [(np.zeros((4, 18), np.float32), values)]
    band = np.array([0.4, 0.7], np.float32)
    made = make_prepare(recipe, num_responses=10)(parts, scores, SUCCESS & False, BASELINE, band)
    np.testing.assert_array_equal(made.band, band)  # nothing was seen
    assert np.isnan(made.advantage).all()
    for batch in [*made.actor, *(made.critic or [])]:
        for leaf in jax.tree.leaves(dataclasses.replace(batch, packed=None)):
            if leaf.dtype != bool:
                np.testing.assert_array_equal(leaf, 0.0)
