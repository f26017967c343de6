"""From a scored rollout batch to what the critic and the actor learn from."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.algos import offpolicy, value
from s3ac_jax.algos.critic import CriticSpec
from s3ac_jax.algos.entropy import group_surprisal
from s3ac_jax.algos.recipe import Recipe
from s3ac_jax.core import masked, segments
from s3ac_jax.core.metrics import Mean
from s3ac_jax.core.types import ActorBatch, CriticBatch, Episodes, Packed, record

Scores = tuple[Array, Array | None]


@record
class Prepared:
    """What one rollout batch becomes: an entry per optimiser batch in `actor` and `critic`.

    critic: None for a method without one. band: as in `RunState`. report: metrics. v0, advantage:
    V(s_0) and the mean raw advantage of each response, reward units, NaN for one that is not in
    the batch; None where nobody looks, v0 also where no values are read.
    """

    actor: list[ActorBatch]
    critic: list[CriticBatch] | None
    band: Float[Array, "2"]
    report: dict[str, Any]
    v0: Float[Array, "N"] | None = None
    advantage: Float[Array, "N"] | None = None


def critic_batch(spec: CriticSpec, packed: Packed, values_old: Array | None) -> CriticBatch:
    """Targets of one optimiser batch. values_old None: the step is the first and reads it itself.

    Source: S3AC (2610.35518): the Monte-Carlo return at lambda 1.
    """
    learns = spec.learns(packed.mask, packed.segment_ids)
    old = jnp.zeros(packed.mask.shape) if values_old is None else values_old
    return CriticBatch(
        packed=packed,
        learns=learns,
        values_old=old if spec.clip is not None else None,
        returns=spec.returns(values_old, packed.reward, packed.mask, packed.segment_ids),
        tokens=jnp.sum(learns, dtype=jnp.float32),
        first=jnp.array(values_old is None),
    )


def make_prepare(
    recipe: Recipe, *, num_responses: int, health: bool = True
) -> Callable[..., Prepared]:
    """prepare(packed list, [(logp_old, values_old)], success, baseline, band) -> Prepared.

    success, baseline [N]: the verifier's word on each response and what its prompt's history
    expected. Advantages, whitening and explained variance span the whole rollout batch; each
    denominator spans one optimiser batch. health: whether anything is measured that nobody learns
    from.
    Source: S3AC (2610.35518), order of one step.
    """
    num_prompts = -(-num_responses // recipe.responses_per_prompt)

    @jax.named_scope("advantages")
    def credit(one: Packed, logp_old: Array, episodes: Episodes, band: Array):
        raw = recipe.advantage.advantages(
            episodes, responses_per_prompt=recipe.responses_per_prompt
        )
        advantages = recipe.advantage.scaled(raw, one.mask)
        if recipe.entropy is not None:
            group = jnp.maximum(one.response, 0) // recipe.responses_per_prompt
            surprisal = group_surprisal(logp_old, one.mask, group, num_prompts)
            band = jnp.stack(recipe.entropy.update(band[0], band[1], surprisal))
            advantages = recipe.entropy.scale(advantages, surprisal[group], band[0], band[1])
        return raw, advantages, band

    @jax.jit
    def prepare(
        packed: Sequence[Packed],
        scores: Sequence[Scores],
        success: Bool[Array, "N"],
        baseline: Float[Array, "N"],
        band: Float[Array, "2"],
    ):
        one = jax.tree.map(
            lambda *x: jnp.concatenate(x) if x[0].ndim else jnp.sum(jnp.stack(x)), *packed
        )
        logp_old = jnp.concatenate([logp for logp, _ in scores])
        each = [values for _, values in scores]
        values = None if any(x is None for x in each) else jnp.concatenate(each)
        episodes = Episodes(
            values, one.reward, one.mask, one.num_trainable, one.segment_ids, one.response, baseline
        )
        raw, advantages, band = credit(one, logp_old, episodes, band)
        with jax.named_scope("mismatch"):
            weights, keep = recipe.guard.weigh(
                logp_old, one.logp_rollout, one.mask, one.segment_ids
            )
        report, critic = {}, None
        if health:
            report = _rollout_report(one, logp_old, weights, keep)
            report["advantage_std"] = Mean.of(jnp.sqrt(masked.var(advantages, one.mask)))
        if recipe.critic is not None:
            critic = [
                critic_batch(recipe.critic, part, values)
                for part, values in zip(packed, each, strict=True)
            ]
            if values is not None and health:
                returns = jnp.concatenate([batch.returns for batch in critic])
                report |= _value_report(one, values, raw, returns)

        scaled = weights * recipe.average.token_scale(one.num_trainable)
        counted = recipe.guard.counted(keep, one.mask)
        share = jnp.where(counted, recipe.average.token_share(one.num_trainable), 0.0)
        behind = one.logp_rollout if recipe.surrogate.against_sampler else logp_old
        won = one.mask & jnp.append(success, False)[one.response]

        batches, start = [], 0
        for part in packed:
            rows = slice(start, start + part.tokens.shape[0])
            start += part.tokens.shape[0]
            batch = ActorBatch(
                packed=part,
                logp_old=behind[rows],
                advantages=advantages[rows],
                weights=scaled[rows],
                imitation=_imitation(recipe.surrogate.imitation, won[rows]),
                denominator=jnp.sum(share[rows]),
            )
            batches.append(batch)
        if not health:
            return Prepared(batches, critic, band, report)
        first = segments.first_masked(one.mask, one.segment_ids)
        v0 = None if values is None else _by_response(values, first, one.response, num_responses)
        return Prepared(
            batches, critic, band, report, v0,
            _by_response(raw, one.mask, one.response, num_responses),
        )  # fmt: skip

    return prepare


def _by_response(
    x: Float[Array, "B T"], mask: Bool[Array, "B T"], response: Int[Array, "B T"], count: int
) -> Float[Array, "N"]:
    """Mean of x over the masked tokens of each response; NaN for one without any."""
    owner = jnp.where(mask, response, count)
    total = jnp.zeros(count + 1).at[owner].add(jnp.where(mask, x, 0.0))
    tokens = jnp.zeros(count + 1).at[owner].add(1.0)
    return (total / jnp.where(tokens > 0, tokens, jnp.nan))[:count]


def _imitation(weight: float, won: Bool[Array, "B T"]) -> Float[Array, "B T"] | None:
    """Coefficient of -log pi: weight times the token mean over successful responses, or None."""
    if not weight:
        return None
    count = jnp.maximum(jnp.sum(won, dtype=jnp.float32), 1.0)
    return jnp.where(won, weight / count, 0.0)


def _rollout_report(packed: Packed, logp_old: Array, weights: Array, keep: Array) -> dict[str, Any]:
    mask = packed.mask
    # The last trainable token of each response: the next one belongs elsewhere.
    ends = packed.segment_ids[:, :-1] != packed.segment_ids[:, 1:]
    last = mask & jnp.pad(ends, ((0, 0), (0, 1)), constant_values=True)
    any_kept = segments.segment_any(keep, packed.segment_ids, mask)
    tokens = jnp.maximum(jnp.sum(keep, dtype=jnp.float32), 1.0)
    return {
        "mismatch_abs_log": Mean.of(jnp.abs(logp_old - packed.logp_rollout), mask),
        "mismatch_kept": Mean.of(keep, mask),
        "mismatch_ess": Mean.of(offpolicy.effective_sample_size(weights, keep) / tokens),
        "mismatch_vetoed": Mean.of(~any_kept, last),
    }


def _value_report(
    packed: Packed, values: Array, advantages: Array, returns: Array
) -> dict[str, Any]:
    mask = packed.mask
    return {
        "explained_variance": Mean.of(value.explained_variance(values, returns, mask)),
        "value_r2": Mean.of(value.r_squared(values, returns, mask)),
        "value_mean_error": Mean.of(value.mean_error(values, returns, mask)),
        "actor_target_ev": Mean.of(value.actor_target_ev(advantages, values, mask)),
    }
