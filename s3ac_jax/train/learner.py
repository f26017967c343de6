"""One role's weights and optimiser: made sharded, updated in place, guarded against NaN."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from s3ac_jax.config.run import OptimizerConfig
from s3ac_jax.core.metrics import Max, Mean
from s3ac_jax.core.trees import combine, partition, squared_norm
from s3ac_jax.core.types import Learner, PyTree
from s3ac_jax.parallel import mesh as parallel


def make_optimizer(
    config: OptimizerConfig, *, decay_steps: int = 0
) -> optax.GradientTransformation:
    """AdamW, clipping excluded (the step needs the norm anyway).

    decay_steps: cosine to 2 % of lr at that step, 0 for constant after the warm-up.
    Source: Loshchilov & Hutter (1711.05101), by optax.
    """
    warmup = config.warmup_steps
    if decay_steps:
        rate = optax.warmup_cosine_decay_schedule(
            0.0, config.lr, warmup, max(decay_steps, warmup + 1), 0.02 * config.lr
        )
    elif warmup:
        rate = optax.linear_schedule(config.lr / warmup, config.lr, warmup - 1)
    else:
        rate = config.lr
    return optax.adamw(rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay)


def make_learner(
    params: PyTree, tx: optax.GradientTransformation, frozen: Callable[[str], bool] | None = None
) -> Learner:
    """A learner at step 0; frozen weights get no moments, no decay and no gradient.

    Source: S3AC (2610.35518), frozen attention of the critic.
    """
    held, trainable = partition(params, frozen or (lambda name: False))
    return Learner(trainable, held, tx.init(trainable), jnp.zeros((), jnp.int32))


def learner_shardings(
    abstract: Learner, axes: PyTree, tx: optax.GradientTransformation, mesh: Mesh
) -> Learner:
    """Where each array of a learner goes: moments beside their weights, counters everywhere.

    abstract: from `jax.eval_shape` over `make_learner`. axes: the network's logical axes.
    Source: ours: shapes first, shardings second, arrays last.
    """
    held_axes, trainable_axes = (
        _split_like(axes, abstract.frozen),
        _split_like(axes, abstract.trainable),
    )
    everywhere = parallel.replicated(mesh)
    trainable = parallel.shardings(trainable_axes, abstract.trainable, mesh)
    opt_state = optax.tree_map_params(
        tx.init,
        lambda _, place: place,
        abstract.opt_state,
        trainable,
        transform_non_params=lambda _: everywhere,
    )
    frozen = parallel.shardings(held_axes, abstract.frozen, mesh)
    return Learner(trainable, frozen, opt_state, everywhere)


def _split_like(axes: PyTree, part: PyTree) -> PyTree:
    return {
        name: _split_like(axes[name], child) if isinstance(child, dict) else axes[name]
        for name, child in part.items()
    }


def params_of(learner: Learner) -> PyTree:
    """All weights, trained and frozen. Source: ours."""
    return combine(learner.trainable, learner.frozen)


@jax.named_scope("optimizer")
def apply_gradients(
    learner: Learner, grads: PyTree, loss: Array, tx: optax.GradientTransformation, clip: float
) -> tuple[Learner, dict[str, Any]]:
    """Clips by global norm, steps, and reports; a non-finite loss or norm leaves all as it was.

    The norm is of the fully reduced gradient, before clipping.
    Source: Pascanu et al. (1211.5063) for clipping; ours: the guard, so that a NaN never reaches
    a weight and the last good state can still be saved.
    """
    squared = squared_norm(grads)
    norm = jnp.sqrt(squared)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    scale = jnp.minimum(1.0, clip / (norm + 1e-6))
    clipped = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = tx.update(clipped, learner.opt_state, learner.trainable)
    stepped = Learner(
        optax.apply_updates(learner.trainable, updates),
        learner.frozen,
        opt_state,
        learner.step + 1,
    )
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), stepped, learner)
    report = {
        "grad_norm": Mean.of(norm),
        "clipped_steps": Mean.of(norm > clip),
        "nonfinite": Max.of(~finite),
    }
    return kept, report
