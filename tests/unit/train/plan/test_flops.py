"""Operations of small models, against sums made by hand."""

import pytest

from s3ac_jax.models.spec import DecoderSpec, LinearAttentionSpec, LoraSpec, MoeSpec
from s3ac_jax.train.plan import flops

# Products with weights of one token: q 4 x 4, k and v 4 x 2 each, o 4 x 4, three of 4 x 5.
SPEC = DecoderSpec(
    vocab_size=10, hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2,
    intermediate_size=5,
)  # fmt: skip
MIXERS = 2 * 2 * (16 + 16 + 16)
FEEDS = 2 * 2 * 60
# Scores and sums over 7 tokens, 2 heads of 2.
ATTENTION = 2 * 2 * 2 * (2 * 2 * 7)
HEAD = 2 * 40


def test_a_forward_pass():
    one = flops.forward(SPEC, 7)
    assert (one.mixers, one.feeds, one.attention, one.head) == (MIXERS, FEEDS, ATTENTION, HEAD)
    assert flops.reading(SPEC, 5, 7, head=True).done == 5 * (MIXERS + FEEDS + ATTENTION + HEAD)
    # A value head is one product with a vector.
    assert flops.reading(SPEC, 5, 7, head=False).done == 5 * (MIXERS + FEEDS + ATTENTION + 8)


def test_a_step_of_the_actor_is_three_passes():
    got = flops.learning(SPEC, 5, 7, head=True, mixers_frozen=False)
    assert got.model == 3 * 5 * (MIXERS + FEEDS + ATTENTION + HEAD)
    assert got.done == got.model + 5 * HEAD


@pytest.mark.parametrize(
    ("policy", "again"),
    [("nothing", MIXERS + FEEDS + ATTENTION), ("matmuls", ATTENTION),
     ("offload", MIXERS + FEEDS + ATTENTION)],
)  # fmt: skip
def test_what_is_not_kept_is_done_again(policy, again):
    spec = DecoderSpec(**{**vars(SPEC), "remat": True, "remat_policy": policy})
    got = flops.learning(spec, 5, 7, head=True, mixers_frozen=False)
    assert got.done == got.model + 5 * (HEAD + again)


def test_frozen_attention_has_no_gradient_but_hands_one_on():
    got = flops.learning(SPEC, 1, 7, head=False, mixers_frozen=True)
    assert got.model == 3 * (FEEDS + ATTENTION + 8) + 2 * MIXERS
    assert got.done == got.model


def test_with_adapters_the_lm_head_gets_no_gradient():
    """It is frozen as the layers are, a value head is not; the adapters themselves are small."""
    spec = DecoderSpec(**{**vars(SPEC), "lora": LoraSpec(rank=2, alpha=2.0)})
    layers = 2 * (MIXERS + FEEDS) + 3 * ATTENTION
    actor = flops.learning(spec, 5, 7, head=True, mixers_frozen=False)
    assert actor.model == 5 * (layers + 2 * HEAD)
    critic = flops.learning(spec, 5, 7, head=False, mixers_frozen=False)
    assert critic.model == 5 * (layers + 3 * 8)


def test_experts_and_linear_attention():
    spec = DecoderSpec(
        vocab_size=10, hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
        intermediate_size=5, qkv_bias=False, gated_attention=True, full_attention=(1,),
        moe=MoeSpec(num_experts=6, per_token=2, width=3, shared_width=7),
        linear_attention=LinearAttentionSpec(
            key_heads=1, value_heads=2, key_dim=4, value_dim=8, conv_width=4, chunk=16
        ),
    )  # fmt: skip
    one = flops.forward(spec, 7)
    # Full: q and gate 4 x 8 each, k and v 4 x 4 each, o 8 x 4. Linear: q and k 4 x 4 each, v, z
    # and out 4 x 16 each, b and a 4 x 2 each.
    assert one.mixers == 2 * (64 + 32 + 32) + 2 * (32 + 192 + 16)
    # In each layer 2 of 6 experts of width 3, one of width 7, the router.
    assert one.feeds == 2 * (2 * 3 * 4 * (2 * 3 + 7) + 2 * 24)
    full = 2 * 2 * (2 * 4 * 7)
    convolution, state, chunk = 2 * 4 * (8 + 16), 2 * 6 * 4 * 8, 2 * 16 * (5 * 4 + 3 * 8)
    assert one.attention == full + convolution + state + chunk


def test_the_weights_of_real_models():
    """Two operations per weight and token: the known sizes of two models, embedding left out."""
    qwen = DecoderSpec(
        vocab_size=151936, hidden_size=1536, num_layers=28, num_heads=12, num_kv_heads=2,
        head_dim=128, intermediate_size=8960,
    )  # fmt: skip
    one = flops.forward(qwen, 0)
    assert (one.layers + one.head) / 2 == pytest.approx(1_543_714_304, rel=1e-3)
