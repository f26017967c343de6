"""A network as a value: structure apart from weights, so that steps are functions of arrays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PRNGKeyArray

from s3ac_jax.core.trees import path_name
from s3ac_jax.core.types import PyTree
from s3ac_jax.models.critic import Critic
from s3ac_jax.models.decoder import Decoder
from s3ac_jax.models.int8 import round_matrices
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.models.stack import is_per_layer, unstack


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """An NNX module split from its weights, which are plain nested dicts everywhere else.

    spec: what it looks like. abstract: ShapeDtypeStructs of the weights. axes: logical axis names
    of each weight. sums: axes of a matrix that its products sum over, () where it isn't rounded.
    """

    spec: DecoderSpec
    graphdef: Any
    abstract: PyTree
    axes: PyTree
    sums: PyTree
    _build: Callable[[PRNGKeyArray | Array], nnx.Module]

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Fresh weights; jit it with out_shardings so that no array ever exists unsharded.

        Source: ours: shapes first, shardings second, arrays last.
        """
        return nnx.to_pure_dict(nnx.state(self._build(key)))

    def bind(self, params: PyTree) -> Any:
        """The module with these weights, for use inside a traced function.

        Source: ours: flax NNX functional API.
        """
        return nnx.merge(self.graphdef, nnx.State(params))

    def in_compute_dtype(self, params: PyTree) -> PyTree:
        """The weights as a forward pass reads them, so that a loop over tokens casts none of them.

        Norms, routers and decay rates stay float32; so does everything in a float32 model, which
        is handed back as it is.
        Source: ours: decoding is bound by the bytes of the weights.
        """
        dtype = jnp.dtype(self.spec.dtype)
        return params if dtype == jnp.float32 else _cast(params, dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def in_int8(self, params: PyTree) -> PyTree:
        """The matrices of the layers rounded, for programs without a gradient: `bind` takes both.

        Embedding and head stay as they are, and so do norms, biases, routers, adapters,
        convolutions and what decay rates are made of.
        Source: ours: decoding is bound by the bytes of the weights.
        """
        return round_matrices(params, self.sums)

    def unstacked(self, params: PyTree) -> PyTree:
        """The weights layer by layer, for programs without a gradient: `bind` takes both.

        Source: ours: decoding reads each layer's weights where they lie (`models/stack.py`).
        """
        return _unstack(params)


def is_unstacked(params: PyTree) -> bool:
    """Whether the weights are as `Network.unstacked` gives them. Source: ours."""
    return is_per_layer(params["layers"]["attn_norm"])


@jax.jit
def _unstack(params: PyTree) -> PyTree:
    return {**params, "layers": unstack(params["layers"])}


@functools.partial(jax.jit, static_argnums=1)
def _cast(params: PyTree, dtype: jnp.dtype) -> PyTree:
    def cast(path: Any, leaf: Array) -> Array:
        last = path_name(path).rsplit("/", 1)[-1]
        exact = "norm" in last or last in ("router", "A_log", "dt_bias")
        return leaf if exact else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def _network(spec: DecoderSpec, build: Callable[[PRNGKeyArray | Array], nnx.Module]) -> Network:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(jax.random.key(0))))

    def told(name: str) -> PyTree:
        found = jax.tree.map(
            lambda leaf: leaf.get_metadata().get(name, ()),
            state, is_leaf=lambda x: isinstance(x, nnx.Param),
        )  # fmt: skip
        return nnx.to_pure_dict(found)

    return Network(spec, graphdef, nnx.to_pure_dict(state), told("axes"), told("sums"), build)


def actor_network(spec: DecoderSpec) -> Network:
    """The policy: a decoder with its LM head.

    Source: ours.
    """
    return _network(spec, lambda key: Decoder(spec, rngs=nnx.Rngs(params=key)))


def critic_network(spec: DecoderSpec, *, head_std: float | None = None) -> Network:
    """The critic; under `backbone` it has the actor's names and shapes, an LM head excepted.

    Source: S3AC (2610.35518): actor and critic share the architecture.
    """
    return _network(spec, lambda key: Critic(spec, head_std=head_std, rngs=nnx.Rngs(params=key)))
