"""Matrices in eight bits, for sampling: integers, and what one of them is worth per output.

A product multiplies the integers, in the dtype of what they are multiplied with, and applies the
scale to its result, which is smaller than the matrix. Nothing here has a gradient.
"""

import dataclasses
import importlib.util
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from s3ac_jax.core.errors import RunError
from s3ac_jax.core.types import PyTree

WeightsDtype = Literal["model", "int8"]

# qwix spreads a range over -127.5..127.5, whose ends round beyond int8: this makes it -127..127.
_RANGE = 127.5 / 127


class Int8Error(RunError):
    """Weights can't be rounded here. Source: ours."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Int8Matrix:
    """values * scale. scale: size 1 along the axes that a product sums over.

    Both have the same leading axes (layers, experts), so that they are indexed, cut and scanned
    together like one array.
    Source: ours, with the two arrays of a qwix QArray.
    """

    values: Int8[Array, "..."]
    scale: Float[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that this stands for. Source: ours."""
        return self.values.shape

    def __getitem__(self, place: Any) -> "Int8Matrix":
        return jax.tree.map(lambda x: x[place], self)

    def times(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        """x W in the dtype of x, accumulated in float32; inner and outer axes flattened.

        Source: LLM.int8() (2208.07339), section 2.1, with the rows left as they are.
        """
        return self.by_output("ni,io->no", x, self.values.reshape(x.shape[-1], -1))

    def by_output(self, equation: str, x: Array, values: Array) -> Array:
        """The product of that equation, whose result ends in the axes of the scale. Source: ours.

        values: those of self, in the shape that the equation names.
        """
        y = jnp.einsum(equation, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * self._outer(values.ndim - 2)).astype(x.dtype)

    def _outer(self, leading: int) -> Array:
        """The scale with `leading` axes before its flattened outer ones."""
        return self.scale.reshape(*self.scale.shape[:leading], -1)


def check_available() -> None:
    """Raises Int8Error when qwix, which rounds the weights, isn't installed. Source: ours."""
    if importlib.util.find_spec("qwix") is None:
        raise Int8Error(
            "rollout.weights = int8 needs the package qwix: pip install 's3ac-jax[int8]'"
        )


def rounded(weight: Float[Array, "..."], sums: tuple[int, ...]) -> Int8Matrix:
    """The nearest of 255 evenly spaced values, the outermost of them the output's largest weight.

    sums: axes that a product sums over; each place on the others has a scale of its own.
    Source: LLM.int8() (2208.07339), section 2.1, vector-wise; the rounding is that of qwix.
    """
    # Imported here: it takes most of a second, and only samplers of rounded weights need it.
    import qwix

    kept = [axis for axis in range(weight.ndim) if axis not in sums]
    found = qwix.quantize(
        weight.astype(jnp.float32), jnp.int8, channelwise_axes=kept,
        calibration_method=f"absmax,{_RANGE}",
    )  # fmt: skip
    return Int8Matrix(found.qvalue, found.scale)


def round_matrices(params: PyTree, sums: PyTree) -> PyTree:
    """The tree with each weight rounded for which `sums` names axes, the others as they are.

    Source: ours.
    """
    return jax.tree.map(lambda leaf, axes: rounded(leaf, axes) if axes else leaf, params, sums)
