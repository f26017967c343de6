"""Pieces of tensors: what is cut out and put back, against numpy indexing spelled out."""

import dataclasses

import numpy as np
import pytest

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.hf_layout import HEAD, VALUE_HEAD, Part, skipped_group, tensors
from s3ac_jax.models.network import actor_network, critic_network
from s3ac_jax.models.spec import DecoderSpec, LinearAttentionSpec, MoeSpec

H, d, D = 3, 5, 7
GATED = np.arange(H * 2 * d * D).reshape(H * 2 * d, D)
PARTS = {
    "q": (
        Part("q", (), ((H, 2, d), (D,)), (3, 0, 2), ((1, 0),)),
        GATED,
        GATED.reshape(H, 2, d, D)[:, 0].transpose(2, 0, 1),
    ),
    "gate": (
        Part("gate", (), ((H, 2, d), (D,)), (3, 0, 2), ((1, 1),)),
        GATED,
        GATED.reshape(H, 2, d, D)[:, 1].transpose(2, 0, 1),
    ),
    "o": (
        Part("o", (), ((D,), (2 * H, d)), (1, 2, 0)),
        GATED.reshape(D, -1),
        GATED.reshape(D, 2 * H, d).transpose(1, 2, 0),
    ),
    "rows": (
        Part("k", (), ((H, d), (D,)), (2, 0, 1), start=15),
        GATED,
        GATED[15:].reshape(H, d, D).transpose(2, 0, 1),
    ),
    "conv": (
        Part("conv", (), ((H, d), (1,), (14,)), (3, 0, 1), ((2, 0),)),
        GATED.reshape(15, 1, 14),
        GATED.reshape(15, 14).T.reshape(14, H, d),
    ),
    "experts": (
        Part("up", (), ((H,), (2, D), (d,)), (0, 3, 2), ((1, 1),)),
        GATED.reshape(H, 2 * D, d),
        GATED.reshape(H, 2 * D, d)[:, D:].transpose(0, 2, 1),
    ),
    "row": (Part("row", (), ((1,), (210,)), (1,), ((0, 0),)), GATED.reshape(1, -1), GATED.ravel()),
}


@pytest.mark.parametrize("name", PARTS)
def test_cut_gives_every_share_and_reads_little_more(name):
    part, tensor, ours = PARTS[name]
    assert part.shape == ours.shape
    read = []

    def reader(spans):
        block = tensor[tuple(slice(*span) for span in spans)]
        assert block.shape == tuple(stop - start for start, stop in spans)
        read.append(block.size)
        return block.copy()

    rng = np.random.default_rng(0)
    for _ in range(60):
        wanted = [sorted(rng.choice(size + 1, 2, replace=False)) for size in ours.shape]
        spans = tuple((int(low), int(high)) for low, high in wanted)
        np.testing.assert_array_equal(
            part.cut(reader, spans), ours[tuple(slice(*span) for span in spans)]
        )
    read.clear()
    part.cut(reader, tuple((0, size) for size in ours.shape))
    # The other half of an interleaved tensor comes along, nothing else does.
    assert read[0] <= ours.size * (2 if name in ("q", "gate") else 1)


@pytest.mark.parametrize("name", PARTS)
def test_put_is_the_inverse(name):
    part, tensor, ours = PARTS[name]
    written = np.full_like(tensor, -1)
    part.put(written, ours)
    np.testing.assert_array_equal(written[written >= 0], tensor[written >= 0])
    assert (written >= 0).sum() == ours.size


def test_a_share_of_the_heads_reads_only_its_rows():
    part, tensor, ours = PARTS["q"]
    seen = []

    def reader(spans):
        seen.append(spans)
        return tensor[tuple(slice(*span) for span in spans)]

    # One head alone: its query without its gate. Two heads: the gates between come along.
    for heads, rows in (((1, 2), (10, 15)), ((1, 3), (10, 30))):
        got = part.cut(reader, ((2, 4), heads, (0, d)))
        np.testing.assert_array_equal(got, ours[2:4, slice(*heads)])
        assert seen.pop() == (rows, (2, 4))


SPECS = {
    "tied": DecoderSpec(50, 32, 3, 4, 2, 16, 64),
    "untied": DecoderSpec(50, 32, 3, 4, 2, 16, 64, tie_embeddings=False, qkv_bias=False),
    "moe": DecoderSpec(
        50, 32, 3, 4, 2, 16, 64, qkv_bias=False, qk_norm=True, tie_embeddings=False,
        moe=MoeSpec(8, 3, 16, dense_layers=(1,)),
    ),
    "hybrid": DecoderSpec(
        50, 32, 5, 4, 2, 16, 64, qkv_bias=False, qk_norm=True, gated_attention=True,
        zero_centred_norms=True, rope_fraction=0.5, full_attention=(1, 3),
        linear_attention=LinearAttentionSpec(2, 4, 8, 6, 3),
        moe=MoeSpec(8, 3, 16, shared_width=24, dense_layers=(0, 3)),
    ),
}  # fmt: skip


def leaves_of(found):
    shapes = {}
    for part in (part for tensor in found for part in tensor.parts):
        leading = [place + 1 for place in part.place]
        before = shapes.get(part.leaf, leading)[: len(leading)]
        shapes[part.leaf] = (*map(max, before, leading), *part.shape)
    return shapes


@pytest.mark.parametrize("experts", ["fused", "each"])
@pytest.mark.parametrize("name", SPECS)
def test_the_layout_has_every_weight_of_the_networks(name, experts):
    spec = SPECS[name]
    abstract = {k: v.shape for k, v in named_leaves(actor_network(spec).abstract).items()}
    assert leaves_of(tensors(spec, experts=experts)) == abstract
    critic = named_leaves(critic_network(spec).abstract)
    abstract = {k.removeprefix("backbone/"): v.shape for k, v in critic.items()}
    assert leaves_of(tensors(spec, experts=experts, head=VALUE_HEAD)) == abstract


@pytest.mark.parametrize("experts", ["fused", "each"])
def test_the_parts_of_a_tensor_fill_it_once(experts):
    for tensor in tensors(SPECS["hybrid"], experts=experts):
        written = np.zeros(tensor.shape, int)
        for part in tensor.parts:
            once = np.zeros(tensor.shape, int)
            part.put(once, np.ones(part.shape, int))
            written += once
        assert (written == 1).all(), tensor.name


def test_names_and_prefix():
    names = [t.name for t in tensors(SPECS["tied"], prefix="model.language_model.", head=None)]
    assert names[0] == "model.language_model.embed_tokens.weight"
    assert names[-1] == "model.language_model.norm.weight"
    assert [t.name for t in tensors(SPECS["untied"])][-1] == HEAD
    tied = dataclasses.replace(SPECS["untied"], tie_embeddings=True)
    assert HEAD not in [t.name for t in tensors(tied)]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.visual.blocks.0.attn.proj.bias", "model.visual"),
        ("visual.patch_embed.proj.weight", "visual"),
        ("mtp.layers.0.mlp.experts.3.gate_proj.weight", "mtp"),
        ("model.time_series.encoder.weight", "model.time_series"),
        ("time_series_forecaster.head.weight", "time_series_forecaster"),
        ("model.visual.rotary_emb.inv_freq", "model.visual"),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", ""),
        ("model.rotary_emb.inv_freq", ""),
        ("rotary_emb.inv_freq", ""),
        ("model.layers.3.self_attn.q_proj.weight", None),
        ("model.language_model.layers.0.linear_attn.A_log", None),
        ("model.visuals.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_what_is_no_text(name, group):
    assert skipped_group(name) == group
