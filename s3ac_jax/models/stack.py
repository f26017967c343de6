"""Layers of several kinds in one scan: a period of the stack is one turn of the loop.

Weights are stacked by kind of block (`attn` of all layers that attend, `moe` of all that route),
so a model has the same names whatever the order of its layers, and a period of three linear and
one full attention takes three slices of one stack and one of the other per turn.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from s3ac_jax.core.types import PyTree
from s3ac_jax.models.spec import RematPolicy

Kinds = tuple[str, ...]
# The arrays of a layer that remat policies speak of by name: what comes in, and its products with
# weights that every token uses.
LAYER_INPUT, PRODUCT = "layer_input", "product"


@dataclasses.dataclass(frozen=True)
class Stage:
    """`repeats` turns over the layers `pattern`, the first of them layer `first`. Source: ours."""

    first: int
    pattern: tuple[Kinds, ...]
    repeats: int


def _period(kinds: tuple[Kinds, ...]) -> int:
    length = len(kinds)
    return next(
        p
        for p in range(1, length + 1)
        if length % p == 0 and all(kinds[n] == kinds[n % p] for n in range(length))
    )


@functools.lru_cache
def stages(kinds: tuple[Kinds, ...]) -> tuple[Stage, ...]:
    """The stack cut into periodic stages, with as few layers to compile as can be.

    Source: ours: compile time follows the number of different layers in a scan body, and 60 layers
    of Qwen3.5 are 15 turns of 4.
    """
    best: list[tuple[int, int, tuple[Stage, ...]]] = [(0, 0, ())]
    for end in range(1, len(kinds) + 1):
        options = []
        for start in range(end):
            compiled, count, before = best[start]
            period = _period(kinds[start:end])
            stage = Stage(start, kinds[start : start + period], (end - start) // period)
            options.append((compiled + period, count + 1, (*before, stage)))
        best.append(min(options, key=lambda option: option[:2]))
    return best[-1][2]


Step = Callable[[Kinds, Any, dict[str, PyTree], dict[str, Any]], tuple[Any, dict[str, Any]]]


def scan_layers(
    kinds: tuple[Kinds, ...],
    step: Step,
    carry: Any,
    per_block: dict[str, PyTree],
    *,
    remat: RematPolicy | None = None,
    indexed: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """step(kinds of the layer, carry, blocks, numbers) for every layer -> (carry, kept).

    per_block: for each name in `kinds` arrays stacked over the layers that have it, and under
    "layer" those stacked over all layers; step gets one layer's slice of each. numbers: place of
    the layer in each of its stacks. step returns a dict of what to keep, keyed like per_block;
    the results are stacked likewise. remat: what the backward pass finds of each layer, None for
    everything; "offload" is of what step calls LAYER_INPUT, "matmuls" of what it calls PRODUCT.
    indexed: read each layer by its number instead of cutting the stacks into turns. That has no
    good gradient (a sum over whole stacks per turn) but copies nothing, where XLA:CPU copies every
    stack that is reshaped on its way into a loop: 0.4 GB per token for 135M weights.
    Source: ours.
    """
    done = dict.fromkeys(per_block, 0)
    kept: dict[str, list[Any]] = {}
    for stage in stages(kinds):
        turn = _Turn(stage, step, dict(done), per_block, remat, indexed)
        slices = {} if indexed else {name: turn.cut(name) for name in turn.counts}
        carry, results = jax.lax.scan(turn, carry, (jnp.arange(stage.repeats), slices))
        for name, value in results.items():
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), value)
            kept.setdefault(name, []).append(flat)
        for name, count in turn.counts.items():
            done[name] += stage.repeats * count
    joined = {
        name: jax.tree.map(lambda *x: jnp.concatenate(x), *parts) for name, parts in kept.items()
    }
    return carry, joined


@jax.tree_util.register_pytree_node_class
class PerLayer:
    """The arrays of one stack, layer by layer: indexing one copies nothing.

    Source: ours.
    """

    def __init__(self, layers: Sequence[Any]):
        self.layers = tuple(layers)

    def __getitem__(self, place: Any) -> Any:
        # nnx reads the whole of a weight as weight[...].
        return self if place is ... else self.layers[place]

    def replaced(self, place: int, new: Any) -> "PerLayer":
        """With another array for one layer. Source: ours."""
        return PerLayer([*self.layers[:place], new, *self.layers[place + 1 :]])

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """The arrays. Source: JAX pytrees."""
        return self.layers, None

    @classmethod
    def tree_unflatten(cls, _: None, layers: Sequence[Any]) -> "PerLayer":
        """The inverse. Source: JAX pytrees."""
        return cls(layers)


def is_per_layer(tree: Any) -> bool:
    """Whether this is a stack cut into its layers. Source: ours."""
    return isinstance(tree, PerLayer)


def unstack(tree: PyTree) -> PyTree:
    """The stacks of all leaves as PerLayer. Source: ours."""
    return jax.tree.map(lambda x: PerLayer([x[n] for n in range(x.shape[0])]), tree)


def unrolled_layers(
    kinds: tuple[Kinds, ...], step: Step, carry: Any, per_block: dict[str, PyTree]
) -> tuple[Any, dict[str, Any]]:
    """What `scan_layers` gives, as one program without a loop over layers.

    per_block: as there, of PerLayer: every layer's weights are arguments of the program, which
    reads them where they lie. It takes as much longer to compile as there are layers.
    Source: ours: a stack's slice is copied before each product on XLA:CPU, which made sampling with
    135M bfloat16 weights 1.2 times as slow (measured: benchmarks/rollout.py --scanned).
    """
    seen = dict.fromkeys(per_block, 0)
    kept: dict[str, list[Any]] = {}
    for layer in kinds:
        names = ("layer", *layer)
        blocks = {
            name: jax.tree.map(
                lambda x, place=seen[name]: x[place], per_block[name], is_leaf=is_per_layer
            )
            for name in names
        }
        carry, result = step(layer, carry, blocks, {name: seen[name] for name in names})
        for name in names:
            seen[name] += 1
        for name, value in result.items():
            kept.setdefault(name, []).append(value)
    return carry, {
        name: jax.tree.map(lambda *x: jnp.stack(x), *values) for name, values in kept.items()
    }


def _policy(remat: RematPolicy) -> Callable[..., Any] | None:
    policies = jax.checkpoint_policies
    match remat:
        case "nothing":
            return None
        case "matmuls":
            # By name: a product with a gradient of its own is no dot to them.
            return policies.save_only_these_names(PRODUCT)
        case "offload":
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[], names_which_can_be_offloaded=[LAYER_INPUT],
                offload_src="device", offload_dst="pinned_host",
            )  # fmt: skip


class _Turn:
    """One turn of a stage's loop: its layers in order. done: layers of each stack before it."""

    def __init__(
        self,
        stage: Stage,
        step: Step,
        done: dict[str, int],
        per_block: dict[str, PyTree],
        remat: RematPolicy | None,
        indexed: bool,
    ):
        self.stage, self.step, self.done = stage, step, done
        self.per_block, self.remat, self.indexed = per_block, remat, indexed
        self.layers: list[Kinds] = [("layer", *layer) for layer in stage.pattern]
        counts = {name: sum(name in layer for layer in self.layers) for name in per_block}
        self.counts = {name: count for name, count in counts.items() if count}

    def cut(self, name: str) -> PyTree:
        """The stage's part of a stack, a turn per row."""
        start, each = self.done[name], self.counts[name]

        def turns(x: jax.Array) -> jax.Array:
            x = x[start : start + self.stage.repeats * each]
            return x if each == 1 else x.reshape(self.stage.repeats, each, *x.shape[1:])

        return jax.tree.map(turns, self.per_block[name])

    def __call__(self, carry: Any, xs: tuple[jax.Array, dict[str, PyTree]]):
        number, slices = xs
        seen = dict.fromkeys(self.counts, 0)
        out: dict[str, list[Any]] = {name: [] for name in self.counts}
        for layer in self.layers:
            places = {
                name: self.done[name] + number * self.counts[name] + seen[name] for name in layer
            }
            blocks = {name: self._slice(name, slices, places[name], seen[name]) for name in layer}
            one = functools.partial(self.step, layer[1:])
            if self.remat is not None:
                one = jax.checkpoint(one, prevent_cse=False, policy=_policy(self.remat))
            carry, result = one(carry, blocks, places)
            for name in layer:
                seen[name] += 1
            for name, value in result.items():
                out[name].append(value)
        stacked = {
            name: jax.tree.map(lambda *x: jnp.stack(x), *values)
            for name, values in out.items()
            if values
        }
        return carry, stacked

    def _slice(self, name: str, slices: dict[str, PyTree], place: Any, seen: int) -> PyTree:
        if self.indexed:
            return jax.tree.map(lambda x: x[place], self.per_block[name])
        if self.counts[name] == 1:
            return slices[name]
        return jax.tree.map(lambda x: x[seen], slices[name])
