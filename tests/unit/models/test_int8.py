"""Rounded weights against a numpy loop: which, to what, and that the sampler is that model."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core.trees import named_leaves, nest
from s3ac_jax.models.int8 import Int8Error, Int8Matrix, rounded
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import LinearAttentionSpec, LoraSpec, MoeSpec
from s3ac_jax.models.token_logp import before, token_logp
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh, shardings
from s3ac_jax.rollout.backend import fingerprint_of
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout
from tests.helpers import logp_oracle, random_params, tiny_spec
from tests.unit.rollout.rollouts import PROMPTS, full, responses, same_rollout, settings

pytest.importorskip("qwix", reason="needs the extra int8")

# Axes that a product sums over, counted behind the layers.
SUMS = {
    "attn": {"q": (0,), "k": (0,), "v": (0,), "gate": (0,), "o": (0, 1)},
    "linear_attn": {"q": (0,), "k": (0,), "v": (0,), "z": (0,), "out": (0, 1)},
    "mlp": {"gate": (0,), "up": (0,), "down": (0,)},
    "moe": {"gate": (1,), "up": (1,), "down": (1,)},
    "shared": {"gate": (0,), "up": (0,), "down": (0,)},
}
LINEAR = LinearAttentionSpec(key_heads=2, value_heads=4, key_dim=5, value_dim=3)
EXPERTS = MoeSpec(num_experts=6, per_token=2, width=9, shared_width=7)
HYBRID = tiny_spec(
    num_layers=4, full_attention=(1, 3), linear_attention=LINEAR, moe=EXPERTS,
    gated_attention=True, qk_norm=True, qkv_bias=False, tie_embeddings=False,
)  # fmt: skip
SPECS = {
    "qwen2": tiny_spec(num_layers=2),
    "hybrid": HYBRID,  # whose products of experts are blocked on CPU
    "ragged": tiny_spec(num_layers=2, moe=dataclasses.replace(EXPERTS, matmul="ragged")),
    "dense": tiny_spec(num_layers=2, moe=dataclasses.replace(EXPERTS, matmul="dense")),
    "adapted": tiny_spec(
        num_layers=3, lora=LoraSpec(rank=2, alpha=6.0, targets=("attn", "mlp"))
    ),
}  # fmt: skip


def nearest(w, sums):
    """One output at a time: the nearest of 255 steps up to its largest weight."""
    w = np.asarray(w, np.float64)
    steps, out = np.zeros(w.shape, int), np.zeros(w.shape)
    kept = [axis for axis in range(w.ndim) if axis not in sums]
    for place in np.ndindex(*(w.shape[axis] for axis in kept)):
        at = [slice(None)] * w.ndim
        for axis, index in zip(kept, place, strict=True):
            at[axis] = index
        at = tuple(at)
        unit = np.abs(w[at]).max() / 127
        steps[at] = np.round(w[at] / unit) if unit else 0
        out[at] = steps[at] * unit
    return steps, out


def summed(name):
    """Axes of a stacked weight that its product sums over, None if it stays as it is."""
    *_, block, last = ["", *name.split("/")]
    axes = SUMS.get(block, {}).get(last)
    return None if axes is None else tuple(axis + 1 for axis in axes)


def rounded_by_hand(params):
    return nest({
        name: leaf if summed(name) is None else jnp.asarray(nearest(leaf, summed(name))[1], "f4")
        for name, leaf in named_leaves(params).items()
    })  # fmt: skip


def sampler(spec, params, **changes):
    engine = Engine(
        actor_network(spec), slots=4, cache_tokens=16, steps_per_dispatch=3, stop_ids=(1, 5),
        **changes,
    )  # fmt: skip
    room = LocalRollout(engine, insert_batch=2, max_prompt_tokens=6, max_response_tokens=10)
    room.update_weights(params, 7)
    return room


def teacher(spec, params, rollout):
    """What the training forward says of each response's tokens."""
    tokens, ids = np.zeros((2, len(rollout.tokens), 16), np.int32)
    for n in range(len(tokens)):
        sequence = full(rollout, n)
        tokens[n, : len(sequence)], ids[n, : len(sequence)] = sequence, 1

    @jax.jit
    def read(params):
        model = actor_network(spec).bind(params)
        hidden, _ = model(tokens, np.broadcast_to(np.arange(16), ids.shape), ids)
        flat = before(hidden).reshape(-1, hidden.shape[-1])
        return token_logp(flat, model.head(), tokens.reshape(-1), temperature=1.0)[0]

    logp = np.asarray(read(params)).reshape(tokens.shape)
    starts, lengths = rollout.prompt.num_tokens, rollout.num_tokens
    return [
        logp[n, start : start + length]
        for n, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def said(rollout):
    return [row[:n] for row, n in zip(rollout.logp, rollout.num_tokens, strict=True)]


@pytest.mark.parametrize(("shape", "sums"), [
    ((3, 16, 7), (1,)), ((2, 4, 6, 12), (1, 2)), ((2, 12, 4, 6), (1,)), ((2, 5, 9, 4), (2,)),
])  # fmt: skip
def test_integers_are_the_nearest(shape, sums):
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    w[..., 1] = 0.0  # an output that nothing leads to
    w[..., 2] *= 1e-10
    steps, want = nearest(w, sums)
    got = rounded(jnp.asarray(w), sums)
    assert got.values.dtype == jnp.int8
    assert got.scale.dtype == jnp.float32
    assert got.scale.shape == tuple(1 if n in sums else size for n, size in enumerate(shape))
    np.testing.assert_array_equal(got.values, steps)
    np.testing.assert_allclose(got.values * got.scale, want, rtol=1e-6)
    used = np.abs(np.delete(steps, 1, axis=-1)).max(axis=sums)
    assert (used == 127).all()


def test_bfloat16_weights_are_rounded_as_what_they_are():
    w = jnp.asarray(np.random.default_rng(1).normal(size=(2, 64, 5)), jnp.bfloat16)
    np.testing.assert_array_equal(rounded(w, (1,)).values, nearest(w.astype("f4"), (1,))[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_have_the_dtype_of_the_rows(dtype):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(7, 24)), dtype)
    w = rng.normal(size=(4, 6, 3, 5)).astype(np.float32)
    want = np.asarray(x, np.float64) @ nearest(w, (0, 1))[1].reshape(24, 15)
    got = jax.jit(lambda w, x: w.times(x))(rounded(jnp.asarray(w), (0, 1)), x)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(got.astype("f4"), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["qwen2", "hybrid", "adapted"])
def test_which_weights_are_rounded(name):
    network = actor_network(SPECS[name])
    params = random_params(network, 0)
    got = named_leaves(network.in_int8(params))
    leaves = named_leaves(params)
    want = {key for key in leaves if summed(key) is not None}
    assert {key.rsplit("/", 1)[0] for key in got if key.endswith("/values")} == want
    for key, leaf in leaves.items():
        if key not in want:
            np.testing.assert_array_equal(got[key], leaf, err_msg=key)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, {}) for name in SPECS), ("qwen2", {"scan_layers": True, "prefill_chunk": 2})],
    ids=str,
)
def test_the_sampler_is_the_model_of_the_rounded_weights(name, sizes):
    spec = SPECS[name]
    params = random_params(actor_network(spec), 3, std=0.3)
    if spec.linear_attention is not None:
        assert {kind for layer in spec.kinds for kind in layer} == {"attn", "linear_attn", "moe"}
    rollout = sampler(spec, params, weights="int8", **sizes).generate(PROMPTS, settings(11))
    by_hand = rounded_by_hand(params)
    got = np.concatenate(said(rollout))
    want = np.concatenate(teacher(spec, by_hand, rollout))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    # And not that of the others.
    assert np.abs(got - np.concatenate(teacher(spec, params, rollout))).max() > 1e-3
    if name == "qwen2":
        for n in range(3):
            want = logp_oracle(by_hand, spec, full(rollout, n))[PROMPTS.num_tokens[n] - 1 :]
            np.testing.assert_allclose(said(rollout)[n], want, rtol=0, atol=1e-5)


def test_the_fingerprint_is_that_of_the_weights_as_they_were_given():
    spec = dataclasses.replace(SPECS["qwen2"], dtype="bfloat16")
    params = random_params(actor_network(spec), 3)
    cast = actor_network(spec).in_compute_dtype(params)
    room = sampler(spec, params, weights="int8")
    assert room.stats()["fingerprint"] == fingerprint_of(cast)
    # Given cast, as a server gets them, they are rounded to the same.
    again = room.engine.load_params(cast)
    for a, b in zip(*map(jax.tree.leaves, (room.engine.load_params(params), again)), strict=True):
        np.testing.assert_array_equal(a, b)


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_half_of_the_bytes_and_none_of_them_widened_for_long():
    spec = tiny_spec(
        num_layers=6, hidden_size=128, num_heads=8, head_dim=16, intermediate_size=256,
        dtype="bfloat16",
    )  # fmt: skip
    params = actor_network(spec).init(jax.random.key(0))
    sizes = {}
    for weights in ("model", "int8"):
        engine = Engine(
            actor_network(spec), slots=4, cache_tokens=16, steps_per_dispatch=3, stop_ids=(),
            weights=weights,
        )  # fmt: skip
        loaded = engine.load_params(params)
        sizes[weights] = sum(
            bytes_of(loaded["layers"][block][name]) for block in ("attn", "mlp")
            for name in SUMS[block].keys() & loaded["layers"][block].keys()
        )  # fmt: skip
    # A scale of four bytes for 128 or 256 weights.
    assert 0.5 < sizes["int8"] / sizes["model"] < 0.52
    compiled = Engine.generate.lower(engine, loaded, engine.init_decode_state(loaded)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < sizes["int8"]


@pytest.mark.parametrize("name", ["qwen2", "hybrid", "ragged"])
def test_over_a_mesh(name):
    spec = SPECS[name]
    network = actor_network(spec)
    params = random_params(network, 3, std=0.3)
    want = sampler(spec, params, weights="int8").generate(PROMPTS, settings(11))
    second = {"fsdp": 2} if spec.moe is None else {"expert": 2}
    mesh = make_mesh(MeshSpec(tensor=2, **second))
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, shardings(network.axes, network.abstract, mesh))
        room = sampler(spec, spread, weights="int8")
        loaded = room.engine.load_params(spread)
        for block, names in SUMS.items():
            for one in names.keys() & spread["layers"].get(block, {}).keys():
                got = loaded["layers"][block][one]
                assert isinstance(got, Int8Matrix)
                place = spread["layers"][block][one].sharding
                assert not place.is_fully_replicated
                assert got.values.sharding.is_equivalent_to(place, got.values.ndim)
        got = room.generate(PROMPTS, settings(11))
    assert responses(got) == responses(want)
    np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=1e-5)


def test_new_weights_compile_nothing_new_and_count():
    params, other = (random_params(actor_network(SPECS["qwen2"]), seed, std=0.3) for seed in (3, 4))
    room = sampler(SPECS["qwen2"], params, weights="int8")
    first = room.generate(PROMPTS, settings(11))
    programs = Engine.generate._cache_size()
    room.update_weights(other, 8)
    assert responses(room.generate(PROMPTS, settings(11))) != responses(first)
    assert Engine.generate._cache_size() == programs
    room.update_weights(params, 7)
    same_rollout(room.generate(PROMPTS, settings(11)), first)


def test_without_qwix(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Int8Error, match=r"rollout.weights = int8 needs.*'s3ac-jax\[int8\]'"):
        sampler(SPECS["qwen2"], None, weights="int8")
