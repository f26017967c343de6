"""Mixture of experts: a float32 router, replayable, and experts that may live on other devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from s3ac_jax.models.block import MLP, Block, base_dtype, normal
from s3ac_jax.models.grouped import expert_outputs
from s3ac_jax.models.int8 import Int8Matrix
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel.mesh import over_experts


def route(
    logits: Float[Array, "N E"],
    replay: Int[Array, "N k"] | None,
    *,
    per_token: int,
    renormalise: bool,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Experts of each token and their gates, float32.

    replay: experts that the sampler chose; a row with a negative number was not recorded and is
    routed anew. Gates are always those of the live logits, so that they have a gradient: of the
    softmax over all experts, renormalise divides them by their sum.
    Source: Rollout routing replay (2510.11370), eq. 5-7; Qwen3 technical report (2505.09388).
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    _, chosen = jax.lax.top_k(probabilities, per_token)
    if replay is not None:
        recorded = jnp.all(replay >= 0, axis=-1, keepdims=True)
        chosen = jnp.where(recorded, replay, chosen).astype(chosen.dtype)
    if renormalise:
        # The same as dividing by the sum, which is 0 when all of them are far behind the best.
        return chosen, jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1), axis=-1)
    return chosen, jnp.take_along_axis(probabilities, chosen, axis=-1)


def _swiglu(rows: Array, weights: dict[str, Any], product) -> Array:
    hidden = jax.nn.silu(product(rows, weights["gate"])) * product(rows, weights["up"])
    return product(hidden, weights["down"])


def mix_dense(
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    gates: Float[Array, "N k"],
    weights: dict[str, Any],
) -> Float[Array, "N D"]:
    """Every expert on every token, then the chosen ones: the oracle of the other two.

    Source: ours.
    """
    num_experts = weights["gate"].shape[0]
    hidden = jax.nn.silu(_each("nd,edf->nef", x, weights["gate"]))
    hidden = hidden * _each("nd,edf->nef", x, weights["up"])
    outputs = _each("nef,efd->ned", hidden, weights["down"])
    share = jnp.sum(jax.nn.one_hot(chosen, num_experts) * gates[..., None], axis=1)
    return jnp.einsum("ned,ne->nd", outputs, share.astype(x.dtype))


def _each(equation: str, x: Array, w: Any) -> Array:
    if isinstance(w, Int8Matrix):
        return w.by_output(equation, x, w.values)
    return jnp.einsum(equation, x, w)


def mix(
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    gates: Float[Array, "N k"],
    weights: dict[str, Any],
    matmul: str,
) -> Float[Array, "N D"]:
    """Gated sum of each token's experts; an expert number out of range adds nothing.

    Source: Outrageously large neural networks (1701.06538), eq. 1.
    """
    if matmul == "dense":
        return mix_dense(x, chosen, gates, weights)
    outputs = expert_outputs(x, chosen, weights, _swiglu, matmul)
    return jnp.einsum("nkd,nk->nd", outputs, gates.astype(x.dtype))


class MoE(Block):
    """Router, experts and shared expert of all MoE layers, stacked."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        super().__init__(spec, "moe")
        moe = spec.moe
        assert moe is not None
        self.moe = moe
        layers, width = self.layers, spec.hidden_size
        router = (layers, width, moe.num_experts)
        self.router = normal(rngs, spec.init_std, router, ("layers", "embed", None))
        up = (layers, moe.num_experts, width, moe.width)
        down = (layers, moe.num_experts, moe.width, width)
        up_axes, down_axes = (
            ("layers", "experts", "embed", "mlp"),
            ("layers", "experts", "mlp", "embed"),
        )
        dtype = base_dtype(spec)
        self.gate = normal(rngs, spec.init_std, up, up_axes, dtype, sums=(2,))
        self.up = normal(rngs, spec.init_std, up, up_axes, dtype, sums=(2,))
        self.down = normal(rngs, spec.init_std, down, down_axes, dtype, sums=(2,))
        if moe.shared_width:
            self.shared = MLP(spec, rngs=rngs, name="moe", hidden=moe.shared_width)
            self.shared_gate = normal(rngs, spec.init_std, (layers, width), ("layers", "embed"))

    def __call__(
        self,
        x: Float[Array, "N D"],
        real: Bool[Array, "N"],
        replay: Int[Array, "N k"] | None,
    ) -> tuple[Float[Array, "N D"], Int[Array, "N k"]]:
        """The layer's output and the experts of each token; padding is sent to none.

        Source: Qwen3 technical report (2505.09388), section 2; the shared expert as in Qwen2-MoE.
        """
        moe = self.moe
        logits = jnp.einsum(
            "nd,de->ne", x.astype(jnp.float32), self.router[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )  # fmt: skip
        chosen, gates = route(logits, replay, per_token=moe.per_token, renormalise=moe.renormalise)
        sent = jnp.where(real[:, None], chosen, moe.num_experts)
        weights = {name: getattr(self, name)[...] for name in ("gate", "up", "down")}
        weights = {
            name: w if isinstance(w, Int8Matrix) else w.astype(x.dtype)
            for name, w in weights.items()
        }
        axes: dict[str, tuple[str | None, ...]] = {
            "gate": ("experts", None, "mlp"), "up": ("experts", None, "mlp"),
            "down": ("experts", "mlp", None),
        }  # fmt: skip
        y = over_experts(
            functools.partial(mix, matmul=_resolved(moe.matmul)),
            x, sent, gates, weights, axes, num_experts=moe.num_experts,
        )  # fmt: skip
        if moe.shared_width:
            share = jax.nn.sigmoid(jnp.sum(x * self.shared_gate[...].astype(x.dtype), axis=-1))
            y = y + share[:, None] * self.shared(x)
        return y, chosen


def _resolved(matmul: str) -> str:
    if matmul != "auto":
        return matmul
    return "ragged" if jax.default_backend() == "tpu" else "blocked"
