"""Coverage value pretraining, and the two diagnoses of why critics die."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from s3ac_jax.algos import value
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core import metrics
from s3ac_jax.core.types import CriticBatch, Learner, PyTree, Scored
from s3ac_jax.parallel.hosts import keep_pace
from s3ac_jax.report.critic_health import coverage_of
from s3ac_jax.report.tripwires import Coverage
from s3ac_jax.train import keys
from s3ac_jax.train.build import Parts
from s3ac_jax.train.gather import pack_batches
from s3ac_jax.train.health import check_finite
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.programs import Pretraining, Role, fresh_learner, make_pretraining
from s3ac_jax.train.tick import respond

Update = Callable[[int, dict[str, float]], None]


def wanted_prompts(config: RunConfig) -> dict[str, int]:
    """Responses by policy that the recipe's critic is pretrained on; none without pretraining.

    Source: S3AC (2610.35518), coverage; VC-PPO (2503.01491), the base policy alone.
    """
    spec = config.recipe.critic
    if spec is None or spec.pretraining == "none":
        return {}
    return config.value_pretraining.prompts(spec.pretraining)


def coverage_rollouts(
    parts: Parts, policies: dict[str, PyTree], key: jax.Array
) -> tuple[Scored, dict[str, float], dict[str, Coverage]]:
    """Graded responses of all policies together; of each its success rate, and that by length.

    With on-policy pretraining all responses are the base policy's.
    Source: S3AC (2610.35518): a mixture of rollouts of policies of several strengths, because
    the first policy almost never shows "long and correct".
    """
    config, split = parts.config, parts.train
    parts_scored, rates, coverage = [], {}, {}
    for number, (name, wanted) in enumerate(wanted_prompts(config).items()):
        policy_key = jax.random.fold_in(key, number)
        order = jax.random.permutation(policy_key, len(split.prompts))
        index = np.resize(np.asarray(order), wanted)
        parts.rollout.update_weights(policies[name], number)
        sample_key = jax.random.fold_in(policy_key, 1)
        scored = respond(parts, split, index, sample_key)
        parts_scored.append(scored)
        rates[name] = float(scored.success.mean())
        coverage[name] = coverage_of(
            scored.rollout.num_tokens, scored.success, config.rollout.max_response_tokens
        )
    parts.rollout.rest()
    return jax.tree.map(lambda *x: np.concatenate(x), *parts_scored), rates, coverage


def _pretraining(parts: Parts) -> Pretraining:
    if parts.pretraining is None:
        raise ValueError("this recipe has no critic to pretrain")
    return parts.pretraining


def value_batches(parts: Parts, scored: Scored, epochs: int, seed: int) -> Iterator[CriticBatch]:
    """Optimiser batches of `epochs` passes in fresh orders; targets are the outcomes.

    Source: S3AC (2610.35518): token-mean MSE to the return.
    """
    config = parts.config
    num_batches = max(1, len(scored.success) // config.value_pretraining.batch_responses)
    for epoch in range(epochs):
        order = np.random.default_rng([config.seed, seed, epoch]).permutation(len(scored.success))
        for packed in pack_batches(parts, scored, order, num_batches):
            yield _pretraining(parts).targets(packed)


def fresh_critic(parts: Parts, role: Role, backbone: PyTree) -> Learner:
    """A critic with this backbone and a fresh head. Source: S3AC (2610.35518), head init."""
    key = keys.stage_key(parts.config.seed, keys.CRITIC_START)
    # A policy with an LM head of its own has one weight more than a backbone.
    kept = {name: backbone[name] for name in role.network.abstract["backbone"]}
    return fresh_learner(role, parts.mesh, key, start={"backbone": kept})


def _watch(parts: Parts, arm: Pretraining, backbone: PyTree, batches: Iterator[CriticBatch]):
    """The first critic steps of one arm, folded."""
    learner, folded = fresh_critic(parts, arm.role, backbone), {}
    num = parts.config.value_pretraining.diagnose_steps
    for _, batch in zip(range(num), batches, strict=False):
        learner, report, _ = arm.step(learner, batch)
        folded = keep_pace(metrics.merge(folded, report))
    return metrics.finalize(folded)


def diagnose(parts: Parts, scored: Scored, backbone: PyTree) -> dict[str, dict[str, float]]:
    """The first steps of value pretraining with ordinary settings and with S3AC's.

    ordinary: head std 1/sqrt(H), gradient clip 1. s3ac: head std 1/(H+1), clip 10.
    Of each: head_share of the squared gradient norm, clipped_steps, value_loss. Nothing without
    diagnose_steps.
    Source: S3AC (2610.35518), head domination.
    """
    if not parts.config.value_pretraining.diagnose_steps:
        return {}
    ordinary_std = parts.config.model.hidden_size**-0.5
    arms = {
        "ordinary": make_pretraining(parts.config, head_std=ordinary_std, clip=1.0),
        "s3ac": make_pretraining(parts.config, head_std=None, clip=10.0),
    }
    found = {}
    for name, arm in arms.items():
        report = _watch(parts, arm, backbone, value_batches(parts, scored, 1, 3))
        found[name] = {key: report[key] for key in ("head_share", "clipped_steps", "value_loss")}
    return found


def pretrain_critic(parts: Parts, scored: Scored, backbone: PyTree, update: Update) -> PyTree:
    """The critic's weights after the epochs of the config; update: called after each step.

    Starts from the base policy's backbone and a fresh head; attention frozen, plain MSE.
    Source: S3AC (2610.35518), stabilised critic.
    """
    config = parts.config.value_pretraining
    role, step = _pretraining(parts).role, _pretraining(parts).step
    learner = fresh_critic(parts, role, backbone)
    for number, batch in enumerate(value_batches(parts, scored, config.epochs, 3)):
        learner, report, _ = step(learner, batch)
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


def compared_prompts(parts: Parts) -> int:
    """How many fresh responses the pretrained critic is compared with.

    Source: ours: as many as it has learnt from, for with a large model they cost as much; 1024 at
    most, which is enough for two digits.
    """
    return min(len(parts.train.prompts), sum(wanted_prompts(parts.config).values()), 1024)


def on_base_policy(
    parts: Parts, policy: PyTree, critic: PyTree, key: jax.Array
) -> dict[str, float]:
    """How well the critic explains fresh rollouts of the base policy on training prompts.

    As many as `compared_prompts` says.
    Source: S3AC (2610.35518): explained variance when online training starts.
    """
    split = parts.train
    sample_key, order_key = jax.random.split(jax.random.fold_in(key, 99))
    order = np.asarray(jax.random.permutation(order_key, len(split.prompts)))
    index = order[: compared_prompts(parts)]
    parts.rollout.update_weights(policy, 0)
    scored = respond(parts, split, index, sample_key)
    parts.rollout.rest()
    batches = pack_batches(parts, scored, np.arange(len(index)), max(1, len(index) // 256))
    read = [keep_pace(_pretraining(parts).values(critic, batch)) for batch in batches]
    values = jnp.concatenate(read)
    mask = jnp.concatenate([batch.mask for batch in batches])
    returns = jnp.concatenate([_pretraining(parts).targets(batch).returns for batch in batches])
    return {
        "explained_variance": float(value.explained_variance(values, returns, mask)),
        "value_mean_error": float(value.mean_error(values, returns, mask)),
    }
