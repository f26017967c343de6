"""Coverage value pretraining, and the two diagnoses of why critics die."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from s3ac_jax.core import metrics
from s3ac_jax.core.types import Learner, Packed, PyTree, Scored, TrainBatch
from s3ac_jax.train import steps
from s3ac_jax.train.build import Parts, Role, fresh_learner, make_critic
from s3ac_jax.train.health import check_finite
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.tick import pack_batches, respond

Update = Callable[[int, dict[str, float]], None]


def coverage_rollouts(
    parts: Parts, policies: dict[str, PyTree], key: jax.Array
) -> tuple[Scored, dict[str, float]]:
    """Graded responses of all policies together, and the success rate of each.

    Source: S3AC (2610.35518): a mixture of rollouts of policies of several strengths, because
    the first policy almost never shows "long and correct".
    """
    config, split = parts.config, parts.train
    parts_scored, rates = [], {}
    for number, (name, wanted) in enumerate(config.value_pretraining.prompts.items()):
        policy_key = jax.random.fold_in(key, number)
        order = jax.random.permutation(policy_key, len(split.prompts))
        index = np.resize(np.asarray(order), wanted)
        parts.rollout.update_weights(policies[name], number)
        sample_key = jax.random.fold_in(policy_key, 1)
        scored = respond(parts, split, index, sample_key)
        parts_scored.append(scored)
        rates[name] = float(scored.success.mean())
    return jax.tree.map(lambda *x: np.concatenate(x), *parts_scored), rates


def value_batches(parts: Parts, scored: Scored, epochs: int, seed: int) -> Iterator[TrainBatch]:
    """Optimiser batches of `epochs` passes in fresh orders; targets are the outcomes.

    Source: S3AC (2610.35518): token-mean MSE to the return.
    """
    config, recipe = parts.config, parts.config.recipe
    num_batches = max(1, len(scored.success) // config.value_pretraining.batch_responses)

    @jax.jit
    def target(packed: Packed) -> TrainBatch:
        zeros = jnp.zeros(packed.mask.shape)
        returns = recipe.critic.returns(zeros, packed.reward, packed.mask, packed.segment_ids)
        tokens = jnp.sum(packed.mask, dtype=jnp.float32)
        return TrainBatch(packed, zeros, zeros, zeros, returns, zeros, tokens, tokens)

    for epoch in range(epochs):
        order = np.random.default_rng([config.seed, seed, epoch]).permutation(len(scored.success))
        for packed in pack_batches(parts, scored, order, num_batches):
            yield target(packed)


def _start(parts: Parts, role: Role, backbone: PyTree) -> Learner:
    key = jax.random.fold_in(jax.random.key(parts.config.seed), 2)
    # A policy with an LM head of its own has one weight more than a backbone.
    kept = {name: backbone[name] for name in role.network.abstract["backbone"]}
    return fresh_learner(role, parts.mesh, key, start={"backbone": kept})


def _plain_step(parts: Parts, role: Role) -> Callable:
    """The critic step of this role on the plain, unclipped error."""
    spec = dataclasses.replace(parts.config.recipe.critic, clip=None)
    return steps.make_critic_step(
        role.network, spec, role.tx, clip=role.clip, micro_rows=parts.config.train.micro_rows
    )


def _watch(parts: Parts, role: Role, backbone: PyTree, batches: Iterator[TrainBatch], num: int):
    """The first `num` critic steps of one arm, folded."""
    step = _plain_step(parts, role)
    learner, folded = _start(parts, role, backbone), {}
    for _, batch in zip(range(num), batches, strict=False):
        learner, report = step(learner, batch)
        folded = metrics.merge(folded, report)
    return metrics.finalize(folded)


def diagnose(parts: Parts, scored: Scored, backbone: PyTree) -> dict[str, dict[str, float]]:
    """The first steps of value pretraining with ordinary settings and with S3AC's.

    ordinary: head std 1/sqrt(H), gradient clip 1. s3ac: head std 1/(H+1), clip 10.
    Of each: head_share of the squared gradient norm, clipped_steps, value_loss. Nothing without
    diagnose_steps.
    Source: S3AC (2610.35518), head domination.
    """
    num = parts.config.value_pretraining.diagnose_steps
    if not num:
        return {}
    lr = parts.config.value_pretraining.lr
    ordinary_std = parts.config.model.hidden_size**-0.5
    arms = {
        "ordinary": make_critic(parts.config, lr=lr, head_std=ordinary_std, clip=1.0),
        "s3ac": make_critic(parts.config, lr=lr, head_std=None, clip=10.0),
    }
    found = {}
    for name, role in arms.items():
        report = _watch(parts, role, backbone, value_batches(parts, scored, 1, 3), num)
        found[name] = {key: report[key] for key in ("head_share", "clipped_steps", "value_loss")}
    return found


def pretrain_critic(parts: Parts, scored: Scored, backbone: PyTree, update: Update) -> PyTree:
    """The critic's weights after the epochs of the config; update: called after each step.

    Starts from the base policy's backbone and a fresh head; attention frozen, plain MSE.
    Source: S3AC (2610.35518), stabilised critic.
    """
    config = parts.config.value_pretraining
    role = make_critic(parts.config, lr=config.lr, warmup_steps=config.warmup_steps)
    step = _plain_step(parts, role)
    learner = _start(parts, role, backbone)
    for number, batch in enumerate(value_batches(parts, scored, config.epochs, 3)):
        learner, report = step(learner, batch)
        check_finite(
            "critic",
            role.network,
            params_of(learner),
            report,
            [batch],
            f"value-pretraining step {number + 1}",
            "value_pretraining.lr",
        )
        named = {
            key if key == "value_loss" else f"critic_{key}": value
            for key, value in metrics.finalize(report).items()
        }
        update(number + 1, named)
    return params_of(learner)


def on_base_policy(
    parts: Parts, policy: PyTree, critic: PyTree, key: jax.Array
) -> dict[str, float]:
    """How well the critic explains fresh rollouts of the base policy on training prompts.

    Source: S3AC (2610.35518): explained variance when online training starts.
    """
    split = parts.train
    sample_key, order_key = jax.random.split(jax.random.fold_in(key, 99))
    order = np.asarray(jax.random.permutation(order_key, len(split.prompts)))
    index = order[: min(len(order), 1024)]
    parts.rollout.update_weights(policy, -1)
    scored = respond(parts, split, index, sample_key)
    batches = pack_batches(parts, scored, np.arange(len(index)), max(1, len(index) // 256))
    scores = [parts.score(policy, critic, batch) for batch in batches]
    _, _, report = parts.prepare(batches, scores, jnp.full(2, jnp.nan))
    found = metrics.finalize(report)
    return {name: found[name] for name in ("explained_variance", "value_mean_error")}
