"""How much arithmetic a step is, from the shape of the model alone: two operations per product.

Attention is counted to the diagonal. `model` is what the method asks for, the measure of MFU;
`done` adds what is computed a second time in a backward pass. What a compiler reports is no help:
it counts the body of a loop once.
"""

import dataclasses

from s3ac_jax.models.spec import DecoderSpec


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations of a whole step, on all devices together. Source: ours."""

    model: float
    done: float

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.model + other.model, self.done + other.done)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.model * times, self.done * times)


@dataclasses.dataclass(frozen=True)
class Forward:
    """One token's forward pass, in operations. mixers, feeds: products with weights of the blocks.

    attention: what is not a product with a weight, linear attention's recurrence included. head:
    the LM head. Source: ours.
    """

    mixers: float
    feeds: float
    attention: float
    head: float

    @property
    def layers(self) -> float:
        """All but the head. Source: ours."""
        return self.mixers + self.feeds + self.attention


def forward(spec: DecoderSpec, context: float) -> Forward:
    """One token that sees `context` tokens, itself included, where it attends in full.

    Source: PaLM (2204.02311), appendix B, with causal halves; Gated delta networks (2412.06464),
    section 3.3, for the chunked recurrence.
    """
    width, heads, kv, dim = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
    read = heads * dim * (2 if spec.gated_attention else 1) + 2 * kv * dim
    full = 2 * width * (read + heads * dim)
    mixers = full * len(spec.layers_with("attn"))
    attention = 4 * heads * dim * context * len(spec.layers_with("attn"))
    linear = spec.linear_attention
    if linear is not None:
        keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
        count = len(spec.layers_with("linear_attn"))
        mixers += count * 2 * width * (2 * keys + 3 * values + 2 * linear.value_heads)
        taps = 2 * linear.conv_width * (2 * keys + values)
        state = 6 * linear.key_dim * linear.value_dim
        within = linear.chunk * (5 * linear.key_dim + 3 * linear.value_dim)
        attention += count * (taps + linear.value_heads * (state + within))
    feeds = 6.0 * width * spec.intermediate_size * len(spec.layers_with("mlp"))
    if spec.moe is not None:
        moe = spec.moe
        one = 6 * width * (moe.per_token * moe.width + moe.shared_width)
        feeds += (one + 2 * width * moe.num_experts) * len(spec.layers_with("moe"))
    return Forward(mixers, feeds, attention, 2.0 * width * spec.vocab_size)


def reading(spec: DecoderSpec, tokens: float, context: float, *, head: bool) -> Flops:
    """A forward pass over tokens, with or without the LM head. Source: ours."""
    one = forward(spec, context)
    total = tokens * (one.layers + (one.head if head else 2 * spec.hidden_size))
    return Flops(total, total)


def learning(
    spec: DecoderSpec, tokens: float, context: float, *, head: bool, mixers_frozen: bool
) -> Flops:
    """Forward and backward over tokens; frozen weights get no gradient but hand one on.

    A layer that is not kept is computed again ("matmuls" keeps its products), and so are the
    logits of a long batch.
    Source: PaLM (2204.02311), appendix B; Megatron (2205.05198), section 5, for recomputation.
    """
    one = forward(spec, context)
    trained = one.feeds if mixers_frozen else one.feeds + one.mixers
    if spec.lora is not None:
        trained = 0.0  # adapters are small beside what they adapt
    last = one.head if head else 2.0 * spec.hidden_size
    # With adapters the LM head is frozen as well, a value head is not.
    last_back = last if head and spec.lora is not None else 2 * last
    back = one.layers + one.attention + trained + last_back
    model = one.layers + last + back
    again = last if head else 0.0
    if spec.remat:
        again += one.attention if spec.remat_policy == "matmuls" else one.layers
    return Flops(tokens * model, tokens * (model + again))
