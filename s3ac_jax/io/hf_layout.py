"""Where our stacked weights lie in the tensors of a Hugging Face checkpoint, as data.

A tensor [out, in] is seen as a finer grid, say out as heads x (query | gate) x head_dim; a `Part`
says which of our weights is which piece of that grid and in which order of axes. Loading cuts the
pieces out, one device's share at a time; saving puts them back.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from s3ac_jax.models.spec import DecoderSpec

Experts = Literal["fused", "each"]
Span = tuple[int, int]
Read = Callable[[tuple[Span, ...]], np.ndarray]

# Weights that stay float32 whatever the dtype of the rest: exponents, states, routing, values.
FLOAT32 = frozenset(
    {"layers/linear_attn/A_log", "layers/linear_attn/dt_bias", "layers/linear_attn/norm",
     "layers/moe/router", "value_head"}
)  # fmt: skip
HEAD, VALUE_HEAD = "lm_head.weight", "value_head.weight"
_SKIPPED = re.compile(r"((?:model\.)?(?:visual|mtp|time_series)|time_series_forecaster)\.")
# Older folders store the frequencies of RoPE, which config.json says too.
_COMPUTED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq$")


def skipped_group(name: str) -> str | None:
    """The part of a multimodal model that a tensor belongs to; None if it is text.

    "" if it is no weight but what is computed anew in each run.
    Source: ours: vision, time series and multi-token prediction are not trained here.
    """
    if found := _SKIPPED.match(name):
        return found[1]
    return "" if _COMPUTED.match(name) else None


@dataclasses.dataclass(frozen=True)
class Part:
    """One piece of an HF tensor that is a whole layer's share (or an expert's) of our weight.

    leaf: our weight. place: where in its leading axes: () for all of it, (layer,), (layer, expert).
    grid: for each axis of the tensor, the finer axes that it is seen as. order: those of the finer
    axes, counted through, that ours are, in our order. at: positions on the ones that are left
    out. start: where along the tensor's first axis the grid begins.
    """

    leaf: str
    place: tuple[int, ...]
    grid: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    at: tuple[tuple[int, int], ...] = ()
    start: int = 0

    @property
    def rows(self) -> Span:
        """The stretch of the tensor's first axis that the grid covers. Source: ours."""
        return self.start, self.start + math.prod(self.grid[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of our piece. Source: ours."""
        flat = _flat(self.grid)
        return tuple(flat[axis] for axis in self.order)

    def cut(self, read: Read, wanted: tuple[Span, ...]) -> np.ndarray:
        """Our piece, or the share of it that `wanted` spans along each of our axes.

        read: gives the tensor's values in one span per axis. Only what has to be is read: finer
        axes behind a partly wanted one come along and are dropped here.
        Source: ours.
        """
        at = dict(self.at)
        spans = dict(zip(self.order, wanted, strict=True))
        spans |= {axis: (position, position + 1) for axis, position in at.items()}
        runs, shape, keep, first = [], [], [], 0
        for sizes in self.grid:
            mine = [spans[first + n] for n in range(len(sizes))]
            start, stop, sizes_read, cuts = _cover(sizes, mine)
            runs.append((start, stop))
            shape += sizes_read
            keep += cuts
            first += len(sizes)
        runs[0] = (runs[0][0] + self.start, runs[0][1] + self.start)
        block = read(tuple(runs)).reshape(shape)[tuple(keep)]
        block = block.reshape([n for axis, n in enumerate(block.shape) if axis not in at])
        return block.transpose(np.argsort(np.argsort(self.order)))

    def put(self, tensor: np.ndarray, piece: np.ndarray) -> None:
        """Writes our piece into its place of the whole tensor. Source: ours: inverse of `cut`."""
        start, stop = self.rows
        at = dict(self.at)
        flat = _flat(self.grid)
        index = tuple(at.get(axis, slice(None)) for axis in range(len(flat)))
        tensor[start:stop].reshape(flat)[index] = piece.transpose(np.argsort(self.order))


def _flat(grid: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(size for sizes in grid for size in sizes)


def _cover(sizes: tuple[int, ...], spans: list[Span]) -> tuple[int, int, list[int], list[slice]]:
    """The shortest stretch of one axis that holds `spans` of its finer axes.

    Returns start, stop, the finer sizes of that stretch, and how to cut the spans out of it.
    """
    start, stop = 0, math.prod(sizes)
    shape, cuts, narrow = [], [], True
    for n, (size, (low, high)) in enumerate(zip(sizes, spans, strict=True)):
        if narrow:
            stride = math.prod(sizes[n + 1 :])
            start, stop = start + low * stride, start + high * stride
            shape.append(high - low)
            cuts.append(slice(None))
            narrow = high - low == 1
        else:
            shape.append(size)
            cuts.append(slice(low, high))
    return start, stop, shape, cuts


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint and the parts of ours that fill it."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor. Source: ours."""
        first = self.parts[0]
        rest = tuple(math.prod(sizes) for sizes in first.grid[1:])
        return (max(part.rows[1] for part in self.parts), *rest)


def tensors(
    spec: DecoderSpec, *, prefix: str = "model.", experts: Experts = "each", head: str | None = HEAD
) -> list[Tensor]:
    """Every tensor of a checkpoint of this decoder, in the order of the forward pass.

    prefix: before the names of the decoder. experts: all in one tensor, or three for each. head:
    HEAD for a policy (left out if it is tied), VALUE_HEAD for a critic, None for neither.
    Source: module names of transformers 5.24.
    """
    width, vocab = spec.hidden_size, spec.vocab_size
    found = [Tensor(f"{prefix}embed_tokens.weight", (Part("embed", (), ((vocab,), (width,)),
                                                          (0, 1)),))]  # fmt: skip
    for number, blocks in enumerate(spec.kinds):
        for block, name, parts in _layer(spec, blocks, experts):
            stack = spec.layers_with(block) if block else range(spec.num_layers)
            layer = stack.index(number)
            placed = tuple(
                dataclasses.replace(part, leaf=f"layers/{part.leaf}", place=(layer, *part.place))
                for part in parts
            )
            found.append(Tensor(f"{prefix}layers.{number}.{name}", placed))
    found.append(Tensor(f"{prefix}norm.weight", (_vector("final_norm", width),)))
    if head == HEAD and not spec.tie_embeddings:
        found.append(Tensor(HEAD, (Part("lm_head", (), ((vocab,), (width,)), (1, 0)),)))
    if head == VALUE_HEAD:
        found.append(Tensor(VALUE_HEAD, (_row("value_head", width),)))
    return found


_Named = tuple[str, str, tuple[Part, ...]]


def _layer(spec: DecoderSpec, blocks: tuple[str, str], experts: Experts) -> Iterator[_Named]:
    """(block, name, parts) of one layer; block "" for the norms, which all layers have."""
    mixer, feed_forward = blocks
    yield "", "input_layernorm.weight", (_vector("attn_norm", spec.hidden_size),)
    make = _attention if mixer == "attn" else _linear_attention
    yield from ((mixer, *named) for named in make(spec))
    yield "", "post_attention_layernorm.weight", (_vector("mlp_norm", spec.hidden_size),)
    if feed_forward == "mlp":
        named = _mlp("mlp", "mlp", spec.hidden_size, spec.intermediate_size)
    else:
        named = _moe(spec, experts)
    yield from ((feed_forward, *one) for one in named)


def _vector(leaf: str, *sizes: int) -> Part:
    """A vector, seen as `sizes`."""
    return Part(leaf, (), (sizes,), tuple(range(len(sizes))))


def _row(leaf: str, width: int) -> Part:
    """[1, D]: a linear layer with one output."""
    return Part(leaf, (), ((1,), (width,)), (1,), ((0, 0),))


def _matrix(leaf: str, inward: tuple[int, ...], outward: tuple[int, ...], **more: object) -> Part:
    """A linear layer: [out, in] there, [in..., out...] here."""
    outs, ins = range(len(outward)), range(len(outward), len(outward) + len(inward))
    return Part(leaf, (), (outward, inward), (*ins, *outs), **more)  # pyrefly: ignore


def _attention(spec: DecoderSpec) -> Iterator[tuple[str, tuple[Part, ...]]]:
    width, dim = (spec.hidden_size,), spec.head_dim
    heads, kv = (spec.num_heads, dim), (spec.num_kv_heads, dim)
    if spec.gated_attention:
        # Interleaved per head: rows are head by head (query | gate).
        grid, order = ((spec.num_heads, 2, dim), width), (3, 0, 2)
        pair = (
            Part(f"attn/{leaf}", (), grid, order, ((1, n),)) for n, leaf in enumerate(("q", "gate"))
        )
        yield "self_attn.q_proj.weight", tuple(pair)
    else:
        yield "self_attn.q_proj.weight", (_matrix("attn/q", width, heads),)
    yield "self_attn.k_proj.weight", (_matrix("attn/k", width, kv),)
    yield "self_attn.v_proj.weight", (_matrix("attn/v", width, kv),)
    yield "self_attn.o_proj.weight", (_matrix("attn/o", heads, width),)
    if spec.qkv_bias:
        for leaf, sizes in (("q", heads), ("k", kv), ("v", kv)):
            yield f"self_attn.{leaf}_proj.bias", (_vector(f"attn/{leaf}_bias", *sizes),)
    if spec.qk_norm:
        for leaf in ("q_norm", "k_norm"):
            yield f"self_attn.{leaf}.weight", (_vector(f"attn/{leaf}", dim),)


def _linear_attention(spec: DecoderSpec) -> Iterator[tuple[str, tuple[Part, ...]]]:
    linear, width = spec.linear_attention, (spec.hidden_size,)
    assert linear is not None, "a layer with linear attention"
    keys, values = (linear.key_heads, linear.key_dim), (linear.value_heads, linear.value_dim)
    # Flat: the rows of all queries, then of all keys, then of all values.
    starts = {"q": 0, "k": math.prod(keys), "v": 2 * math.prod(keys)}
    sizes = {"q": keys, "k": keys, "v": values}
    yield (
        "linear_attn.in_proj_qkv.weight",
        tuple(
            _matrix(f"linear_attn/{leaf}", width, sizes[leaf], start=start)
            for leaf, start in starts.items()
        ),
    )
    yield "linear_attn.conv1d.weight", tuple(
        # [channels, 1, taps]; taps first here.
        Part(f"linear_attn/conv_{leaf}", (), (sizes[leaf], (1,), (linear.conv_width,)), (3, 0, 1),
             ((2, 0),), start)
        for leaf, start in starts.items()
    )  # fmt: skip
    yield "linear_attn.in_proj_z.weight", (_matrix("linear_attn/z", width, values),)
    for leaf in ("b", "a"):
        part = _matrix(f"linear_attn/{leaf}", width, (linear.value_heads,))
        yield f"linear_attn.in_proj_{leaf}.weight", (part,)
    for leaf in ("dt_bias", "A_log"):
        yield f"linear_attn.{leaf}", (_vector(f"linear_attn/{leaf}", linear.value_heads),)
    yield "linear_attn.norm.weight", (_vector("linear_attn/norm", linear.value_dim),)
    yield "linear_attn.out_proj.weight", (_matrix("linear_attn/out", values, width),)


def _mlp(
    name: str, leaf: str, width: int, inner: int, place: tuple[int, ...] = ()
) -> Iterator[tuple[str, tuple[Part, ...]]]:
    for which, sizes in (
        ("gate", ((width,), (inner,))), ("up", ((width,), (inner,))), ("down", ((inner,), (width,)))
    ):  # fmt: skip
        part = dataclasses.replace(_matrix(f"{leaf}/{which}", *sizes), place=place)
        yield f"{name}.{which}_proj.weight", (part,)


def _moe(spec: DecoderSpec, experts: Experts) -> Iterator[tuple[str, tuple[Part, ...]]]:
    moe, width = spec.moe, spec.hidden_size
    assert moe is not None, "a layer with experts"
    count, inner = moe.num_experts, moe.width
    yield "mlp.gate.weight", (_matrix("moe/router", (width,), (count,)),)
    if experts == "fused":
        grid = ((count,), (2, inner), (width,))
        yield (
            "mlp.experts.gate_up_proj",
            tuple(
                Part(f"moe/{leaf}", (), grid, (0, 3, 2), ((1, n),))
                for n, leaf in enumerate(("gate", "up"))
            ),
        )
        down = Part("moe/down", (), ((count,), (width,), (inner,)), (0, 2, 1))
        yield "mlp.experts.down_proj", (down,)
    else:
        for expert in range(count):
            yield from _mlp(f"mlp.experts.{expert}", "moe", width, inner, (expert,))
    if moe.shared_width:
        yield from _mlp("mlp.shared_expert", "moe/shared", width, moe.shared_width)
        yield "mlp.shared_expert_gate.weight", (_row("moe/shared_gate", width),)
