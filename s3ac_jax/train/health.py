"""When a loss is not finite: whose, where it begins, and what to do."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from s3ac_jax.core.errors import RunError
from s3ac_jax.core.trees import first_nonfinite, named_leaves
from s3ac_jax.core.types import ActorBatch, CriticBatch, PyTree
from s3ac_jax.models.network import Network
from s3ac_jax.parallel.hosts import to_host


class NonfiniteError(RunError):
    """NaN or infinity in a loss or gradient; the message is one line.

    Source: ours: the step that met it changed nothing, saved checkpoints stay.
    """


def check_finite(
    role: str,
    network: Network,
    params: PyTree,
    report: dict[str, Any],
    batches: Sequence[ActorBatch | CriticBatch],
    where: str,
    setting: str,
) -> None:
    """Raises NonfiniteError if a step of `role` met NaN or infinity and therefore did nothing.

    setting: the learning rate to look at, as in --config.<setting>.
    Source: ours: the step has already left weights and moments as they were.
    """
    if float(jax.device_get(report["nonfinite"].peak)) <= 0:
        return
    raise NonfiniteError(
        f"{role} loss or gradient is not finite at {where}: {_origin(network, params, batches)}; "
        "that update was not applied and the last checkpoint is good, but going on from it repeats "
        f"this: lower --config.{setting}, with another --workdir, or look for the fault there"
    )


def _origin(network: Network, params: PyTree, batches: Sequence[ActorBatch | CriticBatch]) -> str:
    bad_weight = first_nonfinite(params)
    if bad_weight is not None:
        return f"weight {bad_weight}{_layer_of(params, bad_weight)} holds NaN or infinity"
    for batch in batches:
        layer = first_bad_layer(network, params, batch)
        if layer is not None:
            return f"activations become NaN or infinite in {layer}"
        # In the order in which they come about: a bad reward makes bad advantages.
        inputs = {
            "rewards": batch.packed.reward,
            "sampler log-probs": batch.packed.logp_rollout,
            "old log-probs": getattr(batch, "logp_old", None),
            "old values": getattr(batch, "values_old", None),
            "advantages": getattr(batch, "advantages", None),
            "returns": getattr(batch, "returns", None),
            "mismatch weights": getattr(batch, "weights", None),
        }
        bad_input = next(
            (name for name, x in inputs.items() if first_nonfinite(x) is not None), None
        )
        if bad_input is not None:
            return f"weights and layers are fine, the batch's {bad_input} are not"
    return "weights, layers and batch are finite, so the gradient itself overflowed"


def _layer_of(params: PyTree, name: str) -> str:
    """Which layer of a weight stacked over layers is bad, in words; empty for other weights."""
    if "layers/" not in name:
        return ""
    leaf = named_leaves(params)[name]
    fine = to_host(jnp.isfinite(leaf).reshape(len(leaf), -1).all(axis=1))
    return f" of layer {int(np.argmin(fine))} of {len(leaf)}"


def first_bad_layer(
    network: Network, params: PyTree, batch: ActorBatch | CriticBatch
) -> str | None:
    """Name of the first part of the network whose output is not finite on this batch, or None.

    Source: ours: a name is what a person needs to look.
    """
    packed = jax.tree.map(lambda x: x[:8] if x.ndim >= 2 else x, batch.packed)

    @jax.jit
    def outputs(params: PyTree):
        model = network.bind(params)
        decoder = getattr(model, "backbone", model)
        hidden, kept = decoder(
            packed.tokens, packed.positions, packed.segment_ids, keep=("layers",)
        )
        real = packed.segment_ids > 0
        embedded = decoder.embed[...][packed.tokens]

        def fine(x: jax.Array) -> jax.Array:
            return jnp.all(jnp.isfinite(jnp.where(real[..., None], x, 0.0)), axis=(-3, -2, -1))

        return fine(embedded), fine(kept.layers), fine(hidden)

    embedded, layers, hidden = to_host(outputs(params))
    if not embedded:
        return "the embedding"
    if not layers.all():
        return f"layer {int(np.argmin(layers))} of {len(layers)}"
    return None if hidden else "the final norm"
