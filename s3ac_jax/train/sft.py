"""The supervised warm start: first the careful habit, then the hasty majority.

Taught together from the start the tables are not learned; so careful demonstrations come first,
and a short second phase makes the hasty habit the usual one. The policy then knows how to be
right and mostly is not, which is what RL can mend within minutes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from s3ac_jax.config.run import OptimizerConfig, RunConfig
from s3ac_jax.core import masked
from s3ac_jax.core.metrics import Mean, finalize
from s3ac_jax.core.trees import combine
from s3ac_jax.core.types import Learner, Packed, PyTree
from s3ac_jax.train import micro
from s3ac_jax.train.build import Parts
from s3ac_jax.train.gather import pack_batches
from s3ac_jax.train.health import check_finite
from s3ac_jax.train.learner import apply_gradients, make_optimizer, params_of
from s3ac_jax.train.programs import Role, fresh_learner
from s3ac_jax.train.score import read_logp


def make_sft_step(role: Role, *, micro_rows: int) -> Callable[..., tuple[Learner, dict[str, Any]]]:
    """step(learner, packed) -> (learner, metrics): token-mean cross entropy of the responses.

    Source: maximum likelihood; ours: the micro-batching.
    """

    def loss(trainable: PyTree, frozen: PyTree, packed: Packed, tokens: jax.Array):
        logp, _ = read_logp(role.network, combine(trainable, frozen), packed, temperature=1.0)
        return -masked.total(logp, packed.mask) / tokens, ({}, None)

    @jax.jit(donate_argnums=0)
    def step(learner: Learner, packed: Packed):
        tokens = jnp.sum(packed.mask, dtype=jnp.float32)
        total, report, _, grads = micro.gradients(
            lambda trainable, part: loss(trainable, learner.frozen, part, tokens),
            learner.trainable, packed, packed.rows, micro_rows,
        )  # fmt: skip
        learner, applied = apply_gradients(learner, grads, total, role.tx, role.clip)
        return learner, report | applied | {"sft_loss": Mean.of(total)}

    return step


def _phase(config: RunConfig, parts: Parts, steps: int, lr: float) -> Role:
    optimizer = OptimizerConfig(lr=lr, clip=1.0, weight_decay=0.01, b2=0.98, warmup_steps=100)
    tx = make_optimizer(optimizer, decay_steps=steps)
    return Role("actor", parts.actor.network, tx, optimizer.clip, None)


def train_policies(
    parts: Parts, update: Callable[[int, dict[str, float]], None]
) -> dict[str, PyTree]:
    """The early, middle and late (base) policies, by name. update: called after each step.

    Only training problems are drawn; held-out ones never appear. Raises ValueError for a task
    without demonstrations.
    Source: ours; S3AC (2610.35518) asks for policies of several strengths.
    """
    config, demonstrate = parts.config, parts.task.demonstrate
    if demonstrate is None:
        raise ValueError("this task has no demonstrations to learn from")
    sft, rng = config.sft, np.random.default_rng([config.seed, 1])
    policies: dict[str, PyTree] = {}
    start: PyTree = None
    done = 0
    phases = (
        (
            sft.careful_steps,
            "sft.careful_lr",
            0.0,
            {sft.early_step: "early", sft.careful_steps: "middle"},
        ),
        (sft.hasty_steps, "sft.hasty_lr", sft.quit_most, {sft.hasty_steps: "late"}),
    )
    for num_steps, setting, quit_most, kept in phases:
        lr = getattr(sft, setting.removeprefix("sft."))
        role = _phase(config, parts, num_steps, lr)
        learner = fresh_learner(role, parts.mesh, jax.random.key(config.seed), start=start)
        step = make_sft_step(role, micro_rows=config.train.micro_rows)
        for number in range(1, num_steps + 1):
            scored = demonstrate(rng, sft.batch_responses, slope=sft.quit_slope, most=quit_most)
            (packed,) = pack_batches(parts, scored, np.arange(sft.batch_responses), 1)
            learner, report = step(learner, packed)
            params = params_of(learner)
            check_finite(
                "policy", role.network, params, report, [], f"warm-start step {number}", setting
            )
            done += 1
            if number % 50 == 0 or number in kept:
                update(done, finalize(report))
            if number in kept:
                policies[kept[number]] = jax.tree.map(jnp.copy, params_of(learner))
        start = params_of(learner)
    return policies
