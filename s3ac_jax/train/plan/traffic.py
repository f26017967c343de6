"""Bytes that a step moves through the memory of one device, at least: a bound, no measurement.

Weights are read once per pass over a micro-batch, and written where they were gathered first;
every input and output of a product with weights is touched once; what an optimiser keeps is read
and written once per step.
"""

import math

import jax.numpy as jnp

from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import MeshSpec


def computed_bytes(spec: DecoderSpec, mesh: MeshSpec, *, itemsize: float | None = None) -> float:
    """Weights of the layers and the head as one device multiplies with them.

    itemsize: bytes of one, those of the model's dtype if None. Source: ours.
    """
    each = jnp.dtype(spec.dtype).itemsize if itemsize is None else itemsize
    width, dim = spec.hidden_size, spec.head_dim
    read = spec.num_heads * dim * (3 if spec.gated_attention else 2) + 2 * spec.num_kv_heads * dim
    dense = float(width * read * len(spec.layers_with("attn")))
    if (linear := spec.linear_attention) is not None:
        keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
        dense += width * (2 * keys + 3 * values) * len(spec.layers_with("linear_attn"))
    dense += 3 * width * spec.intermediate_size * len(spec.layers_with("mlp"))
    dense += width * spec.vocab_size
    total = dense / mesh.tensor
    if (moe := spec.moe) is not None:
        layers = len(spec.layers_with("moe"))
        experts = 3 * width * moe.width * moe.num_experts / mesh.expert
        total += layers * (experts + 3 * width * moe.shared_width) / mesh.tensor
    return each * total


def activation_bytes(spec: DecoderSpec, mesh: MeshSpec, *, head: bool) -> float:
    """Inputs and outputs of all products with weights, of one token on one of its devices.

    Source: ours.
    """
    each, width = jnp.dtype(spec.dtype).itemsize, spec.hidden_size
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inner = (2 * heads + 2 * kv) * len(spec.layers_with("attn"))
    if (linear := spec.linear_attention) is not None:
        keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
        inner += (2 * keys + 3 * values) * len(spec.layers_with("linear_attn"))
    inner += 3 * spec.intermediate_size * len(spec.layers_with("mlp"))
    outer = 4 * width * spec.num_layers
    if (moe := spec.moe) is not None:
        layers = len(spec.layers_with("moe"))
        inner += 3 * (moe.per_token * moe.width + moe.shared_width) * layers
        outer += 2 * width * moe.per_token * layers
    logits = 4.0 * 2 * spec.vocab_size / mesh.tensor if head else 0.0
    return each * (inner / mesh.tensor + outer) + logits


def local_tokens(tokens: float, mesh: MeshSpec) -> float:
    """Tokens of a micro-batch that one device works on. Source: ours."""
    return tokens / (mesh.row_shards * mesh.context)


def gathers(mesh: MeshSpec) -> bool:
    """Whether weights are put together before they are used. Source: ours."""
    return mesh.fsdp > 1 or mesh.expert > 1


def reading(spec: DecoderSpec, mesh: MeshSpec, tokens: float, turns: float, *, head: bool) -> float:
    """A forward pass over `turns` micro-batches, `tokens` in all. Source: ours."""
    weights = computed_bytes(spec, mesh) * (2 if gathers(mesh) else 1)
    return weights * turns + activation_bytes(spec, mesh, head=head) * local_tokens(tokens, mesh)


def learning(
    spec: DecoderSpec, mesh: MeshSpec, tokens: float, turns: float, *, head: bool,
    trainable: float, optimizer: float,
) -> float:  # fmt: skip
    """A step: forward, backward in two products, what is computed again, and the update.

    trainable, optimizer: bytes of the learner on one device. Source: ours.
    """
    passes = 3 + (1 if spec.remat else 0)
    forward = reading(spec, mesh, tokens, turns, head=head)
    gradients = 2 * trainable * turns
    return passes * forward + gradients + 2 * (trainable + optimizer) + trainable


def decoding(weights: float, cache: float, spec: DecoderSpec, mesh: MeshSpec, slots: int) -> float:
    """One token of every slot: all weights and the whole cache are read.

    weights, cache: bytes on one device. Source: ours: the cache is read to its full length.
    """
    rows = math.ceil(slots / mesh.row_shards)
    return weights + cache + 4.0 * 4 * rows * spec.vocab_size / mesh.tensor
