"""Attention by the kernels that TPUs and CUDA devices have: splash attention and cuDNN."""

import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention
from jaxtyping import Array, Bool, Float, Int

_LANES = 128
# Queries per call of cuDNN, whose mask is an array of its own.
_CUDNN_QUERIES = 2048
_CUDNN_WIDTH = 128


def readable(
    q_ids_BT: Int[Array, "B T"], k_ids_BS: Int[Array, "B S"], offset: Int[Array, ""] | int = 0
) -> Bool[Array, "B T S"]:
    """True where query t, at place offset + t, may read key s: same segment, not behind it.

    Padding reads itself, so that no query is left with nothing.
    Source: ours: one mask serves packed, left-padded and right-padded rows.
    """
    same = q_ids_BT[:, :, None] == k_ids_BS[:, None, :]
    places = offset + jnp.arange(q_ids_BT.shape[1])
    return same & (jnp.arange(k_ids_BS.shape[1]) <= places[:, None])


def splash_takes(q: Float[Array, "B H T d"], k: Float[Array, "B K S d"]) -> bool:
    """Whether splash attention has blocks for so many queries and keys. Source: JAX's kernel."""
    return q.shape[2] % _LANES == 0 and k.shape[2] % q.shape[2] == 0


def splash(
    q_BHTd: Float[Array, "B H T d"],
    k_BKSd: Float[Array, "B K S d"],
    v_BKSd: Float[Array, "B K S d"],
    q_ids_BT: Int[Array, "B T"],
    k_ids_BS: Int[Array, "B S"],
    offset: Int[Array, ""] | int = 0,
    *,
    interpret: bool = False,
) -> Float[Array, "B H T d"]:
    """Causal attention within segments by the TPU kernel; offset must be a multiple of T.

    It skips blocks above the diagonal, but none for being of another segment. interpret: run by
    any platform, slowly. Raises ValueError where `splash_takes` is False.
    Source: FlashAttention-2 (2307.08691), algorithms 1 and 2, as JAX ships it for TPUs.
    """
    if not splash_takes(q_BHTd, k_BKSd):
        raise ValueError(
            f"splash attention takes rows of a multiple of {_LANES} tokens (for each part of a row "
            f"that is shared out), got {q_BHTd.shape[2]} of {k_BKSd.shape[2]}; use another "
            "model.attention, or pad the rows"
        )
    heads, queries, dim = q_BHTd.shape[1:]
    keys = k_BKSd.shape[2]
    # The kernel itself doesn't scale.
    inputs = (q_BHTd * dim**-0.5, k_BKSd, v_BKSd)
    width = -(-dim // _LANES) * _LANES
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - dim))) for x in inputs)
    kernel = _splash_kernel(heads, queries, keys, interpret)
    if queries != keys:
        kernel = _part_of(kernel, offset // queries, keys // queries)
    segments = splash_attention.SegmentIds(q_ids_BT, k_ids_BS)
    return jax.vmap(kernel)(q, k, v, segments)[..., :dim]


def _block(tokens: int) -> int:
    """Tokens per block of a row, or of a part of one: the largest that divides it."""
    return next(size for size in (512, 256, 128) if tokens % size == 0)


@functools.lru_cache(maxsize=8)
def _splash_kernel(heads: int, queries: int, keys: int, interpret: bool) -> Any:
    """The kernel for whole rows of `keys` tokens, in as many parts as `queries` goes into them.

    In numpy, since the arrays of one trace must not reach another; and made by a thread, which
    knows neither the trace nor a mesh of devices that are only compiled for.
    """
    q, kv = _block(queries), _block(keys)
    sizes = splash_attention.BlockSizes(
        block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_q_dq=q, block_kv_dq=kv
    )
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((keys, keys))] * heads)
    make = functools.partial(
        splash_attention.make_splash_mha, mask, block_sizes=sizes, head_shards=1,
        q_seq_shards=keys // queries, interpret=interpret,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as apart:
        return jax.tree.map(np.asarray, apart.submit(make).result())


def _part_of(kernel: Any, part: Int[Array, ""] | int, parts: int) -> Any:
    """The kernel for the queries of one part of the row.

    Block tables are [heads, blocks of queries, ...], and there is a list of the queries' places.
    """

    def cut(x: np.ndarray) -> Array:
        axis = 1 if x.ndim > 1 else 0
        size = x.shape[axis] // parts
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), part * size, size, axis)

    return jax.tree.map(cut, kernel)


def cudnn_takes(q: Float[Array, "B H T d"], k: Float[Array, "B K S d"]) -> bool:
    """Whether cuDNN has a kernel for these types and sizes, and is installed.

    Source: the conditions of `jax.nn.dot_product_attention`, for every generation of GPUs.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return False
    dim, tokens = q.shape[3], q.shape[2] * k.shape[2]
    low = q.dtype in (jnp.bfloat16, jnp.float16)
    return low and dim <= _CUDNN_WIDTH and dim % 8 == 0 and tokens % 2 == 0


def cudnn(
    q_BHTd: Float[Array, "B H T d"],
    k_BKSd: Float[Array, "B K S d"],
    v_BKSd: Float[Array, "B K S d"],
    q_ids_BT: Int[Array, "B T"],
    k_ids_BS: Int[Array, "B S"],
    offset: Int[Array, ""] | int = 0,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B H T d"]:
    """Causal attention within segments by cuDNN, some queries at a time.

    The mask of those queries is an array; keys behind them are left out where the queries are the
    whole row. implementation: what computes each piece.
    Source: FlashAttention-2 (2307.08691), as cuDNN has it; ours: the pieces, since a mask of a row
    of 32K tokens takes 2 GiB.
    """
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q_BHTd, k_BKSd, v_BKSd))
    queries, keys = q.shape[1], k.shape[1]

    # The mask is not worth keeping for the gradient, the kernel's results are.
    @functools.partial(jax.checkpoint, policy=_of_kernel, prevent_cse=False)
    def piece(q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array, place: Array | int):
        mask = readable(q_ids, k_ids, place)[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    pieces = []
    for start in range(0, queries, _CUDNN_QUERIES):
        mine = slice(start, min(start + _CUDNN_QUERIES, queries))
        read = slice(0, mine.stop if queries == keys else keys)
        ids = q_ids_BT[:, mine], k_ids_BS[:, read]
        pieces.append(piece(q[:, mine], k[:, read], v[:, read], *ids, offset + start))
    return jnp.concatenate(pieces, axis=1).transpose(0, 2, 1, 3)


def _of_kernel(primitive: Any, *_, **__) -> bool:
    return primitive.name.startswith("dot_product_attention")
