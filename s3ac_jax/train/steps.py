"""Step factories: score, prepare, critic step, actor step. Devices are never named here."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from s3ac_jax.algos import offpolicy, value
from s3ac_jax.algos.entropy import group_surprisal
from s3ac_jax.algos.recipe import CriticSpec, Recipe
from s3ac_jax.core import masked, segments
from s3ac_jax.core.metrics import Mean
from s3ac_jax.core.trees import combine, squared_norm
from s3ac_jax.core.types import Learner, Packed, PyTree, TrainBatch
from s3ac_jax.models.network import Network
from s3ac_jax.models.token_logp import before, token_logp
from s3ac_jax.train import micro
from s3ac_jax.train.learner import apply_gradients


def read_logp(
    actor: Network, params: PyTree, packed: Packed, *, temperature: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log pi(token | tokens before it) and the entropy there, aligned to the token, in nats.

    Source: S3AC (2610.35518), value convention, applied to the policy as well.
    """
    model = actor.bind(params)
    hidden, _ = model(packed.tokens, packed.positions, packed.segment_ids)
    flat = before(hidden).reshape(-1, hidden.shape[-1])
    logp, entropy = token_logp(
        flat, model.head(), packed.tokens.reshape(-1), temperature=temperature
    )
    return logp.reshape(packed.tokens.shape), entropy.reshape(packed.tokens.shape)


def read_values(critic: Network, params: PyTree, packed: Packed) -> Float[Array, "B T"]:
    """V(s_t), read before token t, aligned to the token.

    Source: S3AC (2610.35518), value convention.
    """
    model = critic.bind(params)
    return before(model(packed.tokens, packed.positions, packed.segment_ids))


def make_score(
    actor: Network, critic: Network, *, temperature: float, micro_rows: int
) -> Callable[[PyTree, PyTree, Packed], tuple[Array, Array]]:
    """score(actor params, critic params, packed) -> (logp_old, values_old), both [R, T].

    Source: S3AC (2610.35518), order of one step: pi_old and V_old before any update.
    """

    @jax.jit
    def score(actor_params: PyTree, critic_params: PyTree, packed: Packed):
        def read(part: Packed):
            logp, _ = read_logp(actor, actor_params, part, temperature=temperature)
            return logp, read_values(critic, critic_params, part)

        return micro.per_token(read, packed, packed.rows, micro_rows)

    return score


def make_prompt_values(
    critic: Network,
) -> Callable[[PyTree, Int[Array, "P T"], Int[Array, "P"]], Float[Array, "P"]]:
    """values(critic params, prompt tokens, lengths) -> V(s_0) of right-padded prompts.

    Source: S3AC (2610.35518), DAPS: V(s_0) at the last prompt token, before anything is sampled.
    """

    @jax.jit
    def values(params: PyTree, tokens: Int[Array, "P T"], lengths: Int[Array, "P"]):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segment_ids = (places < lengths[:, None]).astype(jnp.int32)
        read = critic.bind(params)(tokens, places, segment_ids)
        return jnp.take_along_axis(read, lengths[:, None] - 1, axis=1)[:, 0]

    return values


def make_prepare(
    recipe: Recipe, *, num_prompts: int
) -> Callable[..., tuple[list[TrainBatch], Float[Array, "2"], dict[str, Any]]]:
    """prepare(packed list, [(logp_old, values_old)], band) -> (train batches, band, metrics).

    One entry per optimiser batch. Advantages, whitening and explained variance span the whole
    rollout batch; each denominator spans one optimiser batch.
    Source: S3AC (2610.35518), order of one step.
    """

    @jax.jit
    def prepare(
        packed: Sequence[Packed], scores: Sequence[tuple[Array, Array]], band: Float[Array, "2"]
    ):
        one = jax.tree.map(
            lambda *x: jnp.concatenate(x) if x[0].ndim else jnp.sum(jnp.stack(x)), *packed
        )
        logp_old, values_old = (jnp.concatenate(x) for x in zip(*scores, strict=True))
        mask, segment_ids = one.mask, one.segment_ids
        raw = recipe.advantage.advantages(
            values_old, one.reward, mask, one.num_trainable, segment_ids
        )
        advantages = recipe.advantage.scaled(raw, mask)
        returns = recipe.critic.returns(values_old, one.reward, mask, segment_ids)
        if recipe.entropy is not None:
            group = jnp.maximum(one.response, 0) // recipe.responses_per_prompt
            surprisal = group_surprisal(logp_old, mask, group, num_prompts)
            band = jnp.stack(recipe.entropy.update(band[0], band[1], surprisal))
            advantages = recipe.entropy.scale(advantages, surprisal[group], band[0], band[1])
        weights, keep = recipe.guard.weigh(logp_old, one.logp_rollout, mask, segment_ids)
        report = _rollout_report(one, logp_old, values_old, raw, returns, weights, keep)
        report["advantage_std"] = Mean.of(jnp.sqrt(masked.var(advantages, mask)))

        batches, start = [], 0
        for part in packed:
            rows = slice(start, start + part.tokens.shape[0])
            start += part.tokens.shape[0]
            batch = TrainBatch(
                packed=part,
                logp_old=logp_old[rows],
                values_old=values_old[rows],
                advantages=advantages[rows],
                returns=returns[rows],
                weights=weights[rows],
                actor_tokens=recipe.guard.num_tokens(keep[rows], part.mask),
                critic_tokens=jnp.sum(part.mask, dtype=jnp.float32),
            )
            batches.append(batch)
        return batches, band, report

    return prepare


def _rollout_report(
    packed: Packed, logp_old: Array, values_old: Array, advantages: Array, returns: Array,
    weights: Array, keep: Array,
) -> dict[str, Any]:  # fmt: skip
    mask = packed.mask
    last = mask & (packed.reward != 0)
    any_kept = segments.segment_any(keep, packed.segment_ids, mask)
    tokens = jnp.maximum(jnp.sum(keep, dtype=jnp.float32), 1.0)
    return {
        "explained_variance": Mean.of(value.explained_variance(values_old, returns, mask)),
        "value_mean_error": Mean.of(value.mean_error(values_old, returns, mask)),
        "actor_target_ev": Mean.of(value.actor_target_ev(advantages, values_old, mask)),
        "mismatch_abs_log": Mean.of(jnp.abs(logp_old - packed.logp_rollout), mask),
        "mismatch_kept": Mean.of(keep, mask),
        "mismatch_ess": Mean.of(offpolicy.effective_sample_size(weights, keep) / tokens),
        "mismatch_vetoed": Mean.of(~any_kept, last),
    }


def make_critic_step(
    critic: Network,
    spec: CriticSpec,
    tx: optax.GradientTransformation,
    *,
    clip: float,
    micro_rows: int,
) -> Callable[[Learner, TrainBatch], tuple[Learner, dict[str, Any]]]:
    """step(critic, batch) -> (critic, metrics); the critic is donated.

    Half the (clipped) squared error is optimised, the plain one is logged.
    Source: S3AC (2610.35518), stabilised critic; head and backbone norms before clipping.
    """

    def loss(trainable: PyTree, frozen: PyTree, batch: TrainBatch):
        packed = batch.packed
        values = read_values(critic, combine(trainable, frozen), packed)
        per_token = spec.token_loss(values, batch.values_old, batch.returns, packed.mask)
        error = jnp.square(values - batch.returns)
        total = masked.total(per_token, packed.mask) / jnp.maximum(batch.critic_tokens, 1.0)
        return total, {"value_loss": Mean.of(error, packed.mask)}

    @jax.jit(donate_argnums=0)
    def step(learner: Learner, batch: TrainBatch):
        total, report, grads = micro.gradients(
            lambda trainable, part: loss(trainable, learner.frozen, part),
            learner.trainable, batch, batch.packed.rows, micro_rows,
        )  # fmt: skip
        head = squared_norm(grads["value_head"])
        backbone = squared_norm(grads["backbone"])
        learner, applied = apply_gradients(learner, grads, total, tx, clip)
        report |= applied | {
            "head_grad_norm": Mean.of(jnp.sqrt(head)),
            "backbone_grad_norm": Mean.of(jnp.sqrt(backbone)),
            "head_share": Mean.of(head / jnp.maximum(head + backbone, 1e-30)),
        }
        return learner, report

    return step


def make_actor_step(
    actor: Network,
    recipe: Recipe,
    tx: optax.GradientTransformation,
    *,
    clip: float,
    temperature: float,
    micro_rows: int,
) -> Callable[[Learner, TrainBatch], tuple[Learner, dict[str, Any]]]:
    """step(actor, batch) -> (actor, metrics); the actor is donated.

    The token mean divides by `batch.actor_tokens`; with everything rejected, loss and gradient
    are 0.
    Source: the recipe's surrogate; S3AC (2610.35518): CISPO, one epoch, clip 1.
    """

    def loss(trainable: PyTree, frozen: PyTree, batch: TrainBatch):
        packed = batch.packed
        params = combine(trainable, frozen)
        logp, entropy = read_logp(actor, params, packed, temperature=temperature)
        per_token = recipe.surrogate.token_loss(logp, batch.logp_old, batch.advantages, packed.mask)
        weighted = batch.weights * per_token
        total = masked.total(weighted, packed.mask) / jnp.maximum(batch.actor_tokens, 1.0)
        low, high = recipe.surrogate.interval
        ratio = jnp.exp(jnp.where(packed.mask, logp - batch.logp_old, 0.0))
        return total, {
            "entropy": Mean.of(entropy, packed.mask),
            "ratio_clipped": Mean.of((ratio < low) | (ratio > high), packed.mask),
        }

    @jax.jit(donate_argnums=0)
    def step(learner: Learner, batch: TrainBatch):
        total, report, grads = micro.gradients(
            lambda trainable, part: loss(trainable, learner.frozen, part),
            learner.trainable, batch, batch.packed.rows, micro_rows,
        )  # fmt: skip
        learner, applied = apply_gradients(learner, grads, total, tx, clip)
        tokens = jnp.maximum(batch.actor_tokens, 1.0)
        return learner, report | applied | {"policy_loss": Mean(total * tokens, tokens)}

    return step
