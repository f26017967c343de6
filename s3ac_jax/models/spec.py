"""What a decoder looks like, as a value."""

import dataclasses
import functools
import math
from typing import Literal

Mixer = Literal["full", "linear"]
RematPolicy = Literal["nothing", "matmuls", "offload"]
AttentionKind = Literal["auto", "dense", "chunked", "splash", "cudnn"]
# Of keys and values while sampling; auto is the model's own.
KVDtype = Literal["auto", "float32", "bfloat16", "int8"]


def _at_least_one(section: str, config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{section}.{name} must be at least 1, got {getattr(config, name)}")


@dataclasses.dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts in place of the MLP.

    per_token: experts that a token is sent to. width: of each expert. renormalise: divide the
    chosen gates by their sum. shared_width: of an expert that every token passes, times a gate of
    its own; 0 for none. dense_layers: layers that keep a plain MLP. matmul: "megablox" is JAX's
    kernel for TPU, "ragged" jax.lax.ragged_dot (native on TPU but for the weights' gradient, the
    dense work of all experts elsewhere), "blocked" a grouped product in blocks of rows, "dense"
    every expert on every token (the oracle of tests); "auto" is megablox on TPU, else blocked.

    Raises ValueError on shapes that can't work.
    Source: Qwen3 technical report (2505.09388), section 2; names of the public configs in
    io/hf_config.py.
    """

    num_experts: int
    per_token: int
    width: int
    renormalise: bool = True
    shared_width: int = 0
    dense_layers: tuple[int, ...] = ()
    matmul: Literal["auto", "megablox", "ragged", "blocked", "dense"] = "auto"

    def __post_init__(self):
        _at_least_one("model.moe", self, "num_experts", "per_token", "width")
        if self.per_token > self.num_experts:
            raise ValueError(
                f"model.moe.per_token ({self.per_token}) must not exceed model.moe.num_experts "
                f"({self.num_experts})"
            )
        if self.shared_width < 0:
            raise ValueError(f"model.moe.shared_width must be 0 or more, got {self.shared_width}")


@dataclasses.dataclass(frozen=True)
class LinearAttentionSpec:
    """A gated DeltaNet in place of attention.

    key_heads, value_heads: consecutive value heads share a key head. conv_width: taps of the
    causal convolution before it. chunk: tokens per step of the training form, rounded up to a power
    of two.

    Raises ValueError on shapes that can't work.
    Source: Gated delta networks (2412.06464).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    chunk: int = 64

    def __post_init__(self):
        _at_least_one(
            "model.linear_attention", self,
            "key_heads", "value_heads", "key_dim", "value_dim", "conv_width", "chunk",
        )  # fmt: skip
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"model.linear_attention.value_heads ({self.value_heads}) must be a multiple of "
                f"key_heads ({self.key_heads})"
            )


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Low-rank adapters beside frozen weights: y = x W + (alpha / rank) x A B.

    targets: which blocks have them. base_dtype: of the frozen weights.

    Raises ValueError on a rank below 1, an alpha that isn't positive, or no target.
    Source: LoRA (2106.09685), section 4.1.
    """

    rank: int
    alpha: float
    targets: tuple[Literal["attn", "linear_attn", "mlp"], ...] = ("attn", "linear_attn", "mlp")
    base_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self):
        _at_least_one("model.lora", self, "rank")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"model.lora.alpha must be positive and finite, got {self.alpha}")
        known = ("attn", "linear_attn", "mlp")
        if not self.targets or not set(self.targets) <= set(known):
            raise ValueError(
                f"model.lora.targets must be of {', '.join(known)}, got {list(self.targets)}"
            )


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """Shape of a decoder of the Qwen families (pre-norm, GQA, RoPE, SwiGLU).

    rope_fraction: leading share of each head that is rotated. gated_attention: attention's output
    times sigmoid of a gate from the same input. zero_centred_norms: norms multiply by 1 + w.
    moe, linear_attention: None for a model without. full_attention: layers of a model with linear
    attention that attend in full; None for all others.
    dtype: of activations and matmuls; norms, softmax, routers and both heads work in float32.
    remat: recompute each layer in the backward pass instead of keeping its activations.
    remat_policy: what is kept nevertheless: the layer's input ("nothing" else), also the results of
    its products with weights, but not of experts ("matmuls"), or its input in the host's memory
    ("offload").
    attention: of whole rows; see `models/attention.py`.
    onehot_embedding: look tokens up by a matmul with one-hot rows. On XLA:CPU the scatter-add
    that is the gradient of a gather costs more than this matmul up to a few hundred tokens.

    Raises ValueError on shapes that can't work.
    Source: Qwen2 technical report (2407.10671), section 2.2.1; Qwen3 (2505.09388) for qk_norm.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = True
    qk_norm: bool = False
    gated_attention: bool = False
    zero_centred_norms: bool = False
    moe: MoeSpec | None = None
    linear_attention: LinearAttentionSpec | None = None
    full_attention: tuple[int, ...] = ()
    lora: LoraSpec | None = None
    init_std: float = 0.02
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    remat_policy: RematPolicy = "nothing"
    attention: AttentionKind = "auto"
    onehot_embedding: bool = False

    @property
    def rotary_dim(self) -> int:
        """Leading numbers of each head that are rotated. Source: partial_rotary_factor of HF."""
        return int(self.head_dim * self.rope_fraction)

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """(mixer, feed-forward) of each layer: "attn" or "linear_attn", "mlp" or "moe".

        Source: ours: the names of the blocks that hold the layer's weights.
        """
        return _kinds(self)

    def first_difference(self, other: "DecoderSpec") -> str | None:
        """Name of the first field of what was trained in which the two differ, or None.

        How it is computed (dtype, remat, adapters, ...) doesn't count.
        Source: ours: weights of one model don't fit another, whatever the shapes say.
        """
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name not in _COMPUTED and _trained(mine) != _trained(theirs):
                return field.name
        return None

    def layers_with(self, block: str) -> tuple[int, ...]:
        """Numbers of the layers that have this block. Source: ours."""
        return tuple(n for n, kinds in enumerate(self.kinds) if block in kinds)

    @property
    def routing_shape(self) -> tuple[int, int] | None:
        """Layers with experts, experts per token; None without any. Source: ours."""
        return None if self.moe is None else (len(self.layers_with("moe")), self.moe.per_token)

    def __post_init__(self):
        _at_least_one("model", self, "vocab_size", "hidden_size", "num_layers", "num_heads",
                      "num_kv_heads", "head_dim", "intermediate_size")  # fmt: skip
        for name in ("rope_theta", "rms_norm_eps", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"model.{name} must be positive and finite, got {getattr(self, name)}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads ({self.num_heads}) must be a multiple of "
                f"model.num_kv_heads ({self.num_kv_heads})"
            )
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"model.rope_fraction must be in 0..1, got {self.rope_fraction}")
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError(
                f"model.head_dim x model.rope_fraction must be even for RoPE, got {self.rotary_dim}"
            )
        dense = () if self.moe is None else self.moe.dense_layers
        for name, layers in (("full_attention", self.full_attention), ("moe.dense_layers", dense)):
            if bad := [n for n in layers if not 0 <= n < self.num_layers]:
                raise ValueError(
                    f"model.{name} names layer {bad[0]}, there are 0..{self.num_layers - 1}"
                )
        if self.remat_policy != "nothing" and not self.remat:
            raise ValueError(
                f"model.remat_policy={self.remat_policy} is for model.remat=True; without, all is "
                "kept"
            )
        if self.full_attention and self.linear_attention is None:
            raise ValueError(
                "model.full_attention is for models with linear_attention; without, every layer "
                "attends in full"
            )
        if self.moe is not None and not self.layers_with("moe"):
            raise ValueError("model.moe.dense_layers names every layer: leave model.moe out")
        if self.lora is not None and not any(map(self.layers_with, self.lora.targets)):
            raise ValueError(
                f"model.lora.targets ({', '.join(self.lora.targets)}) names no block of this "
                "model: nothing would be trained"
            )


_COMPUTED = (
    "attention", "dtype", "init_std", "lora", "onehot_embedding", "remat", "remat_policy"
)  # fmt: skip


def _trained(value: object) -> object:
    """A field without what only says how to compute it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: x for name, x in vars(value).items() if name not in ("chunk", "matmul")}
    return value


@functools.lru_cache
def _kinds(spec: DecoderSpec) -> tuple[tuple[str, str], ...]:
    full = range(spec.num_layers) if spec.linear_attention is None else spec.full_attention
    dense = range(spec.num_layers) if spec.moe is None else spec.moe.dense_layers
    return tuple(
        ("attn" if n in full else "linear_attn", "mlp" if n in dense else "moe")
        for n in range(spec.num_layers)
    )
