"""What a decoder looks like, as a value."""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """Shape of a Qwen2-architecture decoder (pre-norm, GQA, RoPE, SwiGLU).

    dtype: of activations and matmuls; weights, norms, softmax and both heads stay float32.
    remat: recompute each layer in the backward pass instead of keeping its activations.
    onehot_embedding: look tokens up by a matmul with one-hot rows. On XLA:CPU the scatter-add
    that is the gradient of a gather costs more than this matmul up to a few hundred tokens.

    Raises ValueError on shapes that can't work.
    Source: Qwen2 technical report (2407.10671), section 2.2.1; names as in its public config.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = True
    init_std: float = 0.02
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    onehot_embedding: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "intermediate_size"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
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
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim must be even for RoPE, got {self.head_dim}")
