"""Low-rank adapters as a whole: which weights they are, and folding them into what they adapt."""

import dataclasses

import jax
import jax.numpy as jnp

from s3ac_jax.core.types import PyTree
from s3ac_jax.models.spec import DecoderSpec

_A, _B = "_lora_a", "_lora_b"


def is_adapter(name: str) -> bool:
    """Whether a weight belongs to an adapter. Source: ours."""
    return name.endswith((_A, _B))


def merge_lora(params: PyTree, spec: DecoderSpec) -> tuple[PyTree, DecoderSpec]:
    """The same model without adapters: W + (alpha / rank) A B in float32, for whoever rounds it.

    params: nested dicts of an actor or a critic. What isn't adapted is handed on uncopied.
    Source: LoRA (2106.09685), section 4.1.
    """
    lora = spec.lora
    if lora is None:
        return params, spec
    scale = lora.alpha / lora.rank

    @jax.jit
    def folded(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        ab = jnp.einsum("lir,lro->lio", a, b, precision=jax.lax.Precision.HIGHEST)
        return w.astype(jnp.float32) + scale * ab.reshape(w.shape)

    def walk(node: PyTree) -> PyTree:
        merged = {}
        for name, child in node.items():
            if is_adapter(name):
                continue
            if isinstance(child, dict):
                merged[name] = walk(child)
            elif name + _A in node:
                merged[name] = folded(child, node[name + _A], node[name + _B])
            else:
                merged[name] = child
        return merged

    return walk(params), dataclasses.replace(spec, lora=None)
