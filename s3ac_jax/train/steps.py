"""Step factories of the critic and the actor. Devices are never named here."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from s3ac_jax.algos import value
from s3ac_jax.algos.critic import CriticSpec
from s3ac_jax.algos.surrogates import Surrogate
from s3ac_jax.core import masked
from s3ac_jax.core.metrics import Mean
from s3ac_jax.core.trees import combine, squared_norm
from s3ac_jax.core.types import ActorBatch, CriticBatch, Learner, PyTree
from s3ac_jax.models.network import Network
from s3ac_jax.train import micro
from s3ac_jax.train.learner import apply_gradients
from s3ac_jax.train.score import read_logp, read_values


def make_critic_step(
    critic: Network,
    spec: CriticSpec,
    tx: optax.GradientTransformation,
    *,
    clip: float,
    micro_rows: int,
    health: bool = True,
) -> Callable[[Learner, CriticBatch], tuple[Learner, dict[str, Any], Float[Array, "B T"]]]:
    """step(critic, batch) -> (critic, metrics, V from before the step); the critic is donated.

    Half the (clipped) squared error is optimised, the plain one is logged. health: whether more is
    measured than a run needs in order to go on.
    Source: S3AC (2610.35518), stabilised critic; head and backbone norms before clipping.
    """

    @jax.named_scope("critic_loss")
    def loss(trainable: PyTree, frozen: PyTree, batch: CriticBatch):
        values = read_values(critic, combine(trainable, frozen), batch.packed)
        old = batch.values_old
        if old is not None:
            old = jnp.where(batch.first, jax.lax.stop_gradient(values), old)
        per_token = spec.token_loss(values, old, batch.returns, batch.learns)
        error = jnp.square(values - batch.returns)
        total = masked.total(per_token, batch.learns) / jnp.maximum(batch.tokens, 1.0)
        report = {"value_loss": Mean.of(error, batch.learns)}
        if old is not None:
            binds = value.clip_binds(values, old, batch.returns, clip=spec.clip)
            report["value_clipped"] = Mean.of(binds, batch.learns)
        return total, (report, values)

    @jax.jit(donate_argnums=0)
    def step(learner: Learner, batch: CriticBatch):
        total, report, values, grads = micro.gradients(
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
        return learner, report if health else _needed(report), values

    return step


def _needed(report: dict[str, Any]) -> dict[str, Any]:
    """What a run can't do without. The compiler leaves out whatever only the rest is made of."""
    wanted = ("value_loss", "policy_loss", "nonfinite")
    return {name: metric for name, metric in report.items() if name in wanted}


def make_actor_step(
    actor: Network,
    surrogate: Surrogate,
    tx: optax.GradientTransformation,
    *,
    clip: float,
    temperature: float,
    micro_rows: int,
    health: bool = True,
) -> Callable[[Learner, ActorBatch], tuple[Learner, dict[str, Any]]]:
    """step(actor, batch) -> (actor, metrics); the actor is donated.

    Weighted token losses over `batch.denominator`, plus the batch's imitation; with everything
    rejected, that mean and its gradient are 0. policy_loss is the sum of both. health: as for
    `make_critic_step`.
    Source: the recipe's surrogate; S3AC (2610.35518): CISPO, one epoch, clip 1.
    """

    @jax.named_scope("actor_loss")
    def loss(trainable: PyTree, frozen: PyTree, batch: ActorBatch):
        packed = batch.packed
        params = combine(trainable, frozen)
        logp, entropy = read_logp(actor, params, packed, temperature=temperature)
        per_token = surrogate.token_loss(logp, batch.logp_old, batch.advantages, packed.mask)
        weighted = batch.weights * per_token
        total = masked.total(weighted, packed.mask) / jnp.maximum(batch.denominator, 1e-30)
        low, high = surrogate.interval
        ratio = jnp.exp(jnp.where(packed.mask, logp - batch.logp_old, 0.0))
        report = {
            "entropy": Mean.of(entropy, packed.mask),
            "ratio_clipped": Mean.of((ratio < low) | (ratio > high), packed.mask),
        }
        if batch.imitation is not None:
            safe = jnp.where(packed.mask, logp, 0.0)
            imitation = -jnp.sum(batch.imitation * safe)
            total += imitation
            # A sum over micro-batches in the guise of a mean: the weight is given once, below.
            report["imitation_loss"] = Mean(imitation, jnp.zeros(()))
        return total, (report, None)

    @jax.jit(donate_argnums=0)
    def step(learner: Learner, batch: ActorBatch):
        total, report, _, grads = micro.gradients(
            lambda trainable, part: loss(trainable, learner.frozen, part),
            learner.trainable, batch, batch.packed.rows, micro_rows,
        )  # fmt: skip
        if "imitation_loss" in report:
            report["imitation_loss"] = Mean(report["imitation_loss"].total, jnp.ones(()))
        learner, applied = apply_gradients(learner, grads, total, tx, clip)
        weight = jnp.maximum(batch.denominator, 1e-30)
        report |= applied | {"policy_loss": Mean(total * weight, weight)}
        return learner, report if health else _needed(report)

    return step
