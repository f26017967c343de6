"""What every block of weights is made of: stacked parameters, matmuls with adapters, norms."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from s3ac_jax.models.int8 import Int8Matrix
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.models.stack import PRODUCT
from s3ac_jax.parallel.layout import Axes, gathered, stored


def base_dtype(spec: DecoderSpec) -> jnp.dtype:
    """Of weights that adapters leave as they are; float32 in a model without. Source: ours."""
    return jnp.dtype("float32" if spec.lora is None else spec.lora.base_dtype)


def normal(
    rngs: nnx.Rngs,
    std: float,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: Any = jnp.float32,
    sums: tuple[int, ...] = (),
):
    """A parameter drawn from Normal(0, std), with its logical axes.

    sums: axes that a product sums over, of a matrix that a sampler may round to int8.
    Source: ours.
    """
    drawn = std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(drawn.astype(dtype), axes=axes, sums=sums)


def filled(value: float, shape: tuple[int, ...], axes: tuple[str | None, ...]):
    """A float32 parameter of one value, with its logical axes. Source: ours."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float, *, zero_centred: bool = False
) -> Float[Array, "... D"]:
    """Root-mean-square norm in float32.

    Cast back before the weight is applied as Qwen2 and Qwen3 do, after it (and with 1 + w) when
    zero_centred, as Qwen3.5 does.
    Source: Root mean square layer normalization (1910.07467), eq. 4.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if zero_centred:
        return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight.astype(x.dtype) * normed.astype(x.dtype)


def matmul(
    x: Float[Array, "N I"], w: Float[Array, "*inner_outer"], axes: Axes
) -> Float[Array, "N O"]:
    """x w in the dtype of x, inner and outer axes of w flattened. axes: their logical names.

    Product and gradients accumulate in float32; w's has the dtype of w. The result is a PRODUCT to
    the remat policies.
    Source: ours: asked for a bfloat16 result, XLA:CPU widens both operands first, and a decode step
    took 3 times as long (measured).
    """
    product = x @ _read(x, w, axes) if x.dtype == jnp.float32 else _low_matmul(x, w, axes)
    return checkpoint_name(product, PRODUCT)


def _read(x: Array, w: Array, axes: Axes) -> Array:
    return gathered(w.astype(x.dtype), axes).reshape(x.shape[-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _low_matmul(x: Array, w: Array, axes: Axes) -> Array:
    flat = _read(x, w, axes)
    return jnp.matmul(x, flat, preferred_element_type=jnp.float32).astype(x.dtype)


def _low_forward(x: Array, w: Array, axes: Axes):
    return _low_matmul(x, w, axes), (x, w)


def _low_backward(axes: Axes, saved: tuple[Array, Array], dy: Array):
    x, w = saved
    exact = {"preferred_element_type": jnp.float32}
    dx = jnp.einsum("no,io->ni", dy, _read(x, w, axes), **exact)
    dw = jnp.einsum("ni,no->io", x, dy, **exact).reshape(w.shape)
    return dx.astype(x.dtype), stored(dw, axes).astype(w.dtype)


_low_matmul.defvjp(_low_forward, _low_backward)


class Block(nnx.Module):
    """Weights of one kind for all layers that have it, stacked on a leading axis.

    Called with the weights of one layer (see `models/stack.py`).
    """

    def __init__(self, spec: DecoderSpec, name: str):
        self.spec = spec
        self.layers = len(spec.layers_with(name))
        adapters = spec.lora is not None and name in spec.lora.targets
        self.lora = spec.lora if adapters else None

    def matrix(
        self,
        rngs: nnx.Rngs,
        name: str,
        inner: dict[str, int],
        outer: dict[str, int],
        *,
        exact: bool = False,
    ) -> None:
        """Adds weight `name`, [layers, inner..., outer...], and its adapters if there are any.

        inner, outer: logical axis -> size. A starts at Normal(0, 1/sqrt(inner)), B at 0, so that
        an adapted layer begins as the one it adapts. exact: no sampler rounds it to int8.
        Source: LoRA (2106.09685), section 4.1.
        """
        shape = (self.layers, *inner.values(), *outer.values())
        axes = ("layers", *inner, *outer)
        sums = () if exact else tuple(range(1, 1 + len(inner)))
        weight = normal(rngs, self.spec.init_std, shape, axes, base_dtype(self.spec), sums)
        setattr(self, name, weight)
        if self.lora is not None:
            fan_in, fan_out = math.prod(inner.values()), math.prod(outer.values())
            rank = self.lora.rank
            a = normal(
                rngs, fan_in**-0.5, (self.layers, fan_in, rank), ("layers", next(iter(inner)), None)
            )
            b = filled(0.0, (self.layers, rank, fan_out), ("layers", None, next(iter(outer))))
            setattr(self, f"{name}_lora_a", a)
            setattr(self, f"{name}_lora_b", b)

    def times(self, name: str, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        """x W, plus (alpha / rank) x A B when adapted; inner and outer axes flattened.

        Source: LoRA (2106.09685), eq. 3.
        """
        y = self._product(name, x)
        if self.lora is not None:
            inner = self._product(f"{name}_lora_a", x)
            y = y + self._product(f"{name}_lora_b", inner) * (self.lora.alpha / self.lora.rank)
        return y

    def _product(self, name: str, x: Array) -> Array:
        weight = getattr(self, name)
        w = weight[...]
        # The axes were named for the stack.
        return w.times(x) if isinstance(w, Int8Matrix) else matmul(x, w, weight.axes[1:])


class MLP(Block):
    """SwiGLU weights of all layers that have the block `name`, by default those with a plain MLP.

    hidden: inner width, None for the spec's.
    """

    def __init__(
        self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str = "mlp", hidden: int | None = None
    ):
        super().__init__(spec, name)
        inner = {"mlp": spec.intermediate_size if hidden is None else hidden}
        width = {"embed": spec.hidden_size}
        self.matrix(rngs, "gate", width, inner)
        self.matrix(rngs, "up", width, inner)
        self.matrix(rngs, "down", inner, width)

    def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        """down(silu(gate x) * up x).

        Source: GLU variants improve Transformer (2002.05202), eq. 6.
        """
        return self.times("down", jax.nn.silu(self.times("gate", x)) * self.times("up", x))
