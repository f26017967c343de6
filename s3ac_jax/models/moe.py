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
from s3ac_jax.parallel.experts import over_experts
from s3ac_jax.parallel.layout import gathered
from s3ac_jax.parallel.mesh import platform


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
    *,
    shards: int = 1,
) -> Float[Array, "N D"]:
    """Gated sum of each token's experts; an expert number out of range adds nothing.

    shards: devices that share out the experts, so that one in `shards` numbers is in range. Then
    assignments are worked off in windows of an even share; of all there may be, those that are
    empty are passed over.
    Source: Outrageously large neural networks (1701.06538), eq. 1; ours: the windows, for rows laid
    out for the worst case would take `shards` times the memory.
    """
    if matmul == "dense":
        return mix_dense(x, chosen, gates, weights)
    if shards > 1:
        return _in_windows(x, chosen, gates, weights, matmul, shards)
    outputs = expert_outputs(x, chosen, weights, _swiglu, matmul)
    return jnp.einsum("nkd,nk->nd", outputs, gates.astype(x.dtype))


def _in_windows(
    x: Array, chosen: Array, gates: Array, weights: dict[str, Any], matmul: str, shards: int
) -> Array:
    count, each = jax.tree.leaves(weights)[0].shape[0], chosen.shape[1]
    flat = chosen.reshape(-1)
    size = -(-flat.size // shards)
    mine = (flat >= 0) & (flat < count)
    # Those of experts that are here come first.
    order = jnp.argsort(~mine, stable=True)
    order = jnp.pad(order, (0, shards * size - flat.size), constant_values=flat.size)
    padded = jnp.append(jnp.where(mine, flat, count), count)
    shares = jnp.append(gates.reshape(-1), 0.0)

    def outputs(window: Array) -> Array:
        token = jnp.minimum(window // each, len(x) - 1)
        rows = expert_outputs(x[token], padded[window][:, None], weights, _swiglu, matmul)[:, 0]
        return rows * shares[window][:, None].astype(x.dtype)

    def nothing(window: Array) -> Array:
        return jnp.zeros((size, x.shape[1]), x.dtype)

    def turn(y: Array, xs: tuple[Array, Array]):
        number, window = xs
        left = number * size < jnp.sum(mine)
        # Around the choice, and without the sum: or each turn would keep all tokens, or the sum.
        rows = jax.checkpoint(lambda w: jax.lax.cond(left, outputs, nothing, w))(window)
        token = jnp.minimum(window // each, len(x) - 1)
        return jax.lax.cond(left, lambda y: y.at[token].add(rows), lambda y: y, y), None

    windows = jnp.arange(shards), order.reshape(shards, size)
    return jax.lax.scan(turn, jnp.zeros_like(x), windows)[0]


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
            ("layers", "experts", "expert_embed", "mlp"),
            ("layers", "experts", "mlp", "expert_embed"),
        )
        dtype = base_dtype(spec)
        self.gate = normal(rngs, spec.init_std, up, up_axes, dtype, sums=(2,))
        self.up = normal(rngs, spec.init_std, up, up_axes, dtype, sums=(2,))
        self.down = normal(rngs, spec.init_std, down, down_axes, dtype, sums=(2,))
        if moe.shared_width:
            self.shared = MLP(spec, rngs=rngs, name="moe", hidden=moe.shared_width)
            self.shared_gate = normal(rngs, spec.init_std, (layers, width), ("layers", None))

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
            "nd,de->ne", x.astype(jnp.float32),
            gathered(self.router[...].astype(jnp.float32), ("embed", None)),
            precision=jax.lax.Precision.HIGHEST,
        )  # fmt: skip
        chosen, gates = route(logits, replay, per_token=moe.per_token, renormalise=moe.renormalise)
        sent = jnp.where(real[:, None], chosen, moe.num_experts)
        weights = {name: getattr(self, name)[...] for name in ("gate", "up", "down")}
        axes: dict[str, tuple[str | None, ...]] = {
            name: getattr(self, name).axes[1:] for name in ("gate", "up", "down")
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
    return "megablox" if platform() == "tpu" else "blocked"
