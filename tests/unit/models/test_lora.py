"""Adapters: a model with them against the dense one that it stands for, and what is trained."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.hf_weights import load, save_params
from s3ac_jax.io.orbax_weights import save_orbax
from s3ac_jax.models.causal_lm import CausalLM
from s3ac_jax.models.lora import is_adapter, merge_lora
from s3ac_jax.models.network import actor_network, critic_network
from s3ac_jax.models.spec import LinearAttentionSpec, LoraSpec, MoeSpec
from s3ac_jax.models.token_logp import before, token_logp
from s3ac_jax.parallel.mesh import make_mesh
from s3ac_jax.train.convert import Wanted, run
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.programs import abstract_learner, fresh_learner, make_actor, make_critic
from s3ac_jax.train.steps import make_actor_step
from tests.helpers import random_params, run_config, tiny_spec
from tests.unit.train.small import TEMPERATURE, copy
from tests.unit.train.small_steps import batches

RANK, ALPHA = 2, 6.0
SCALE = 3.0
LORA = LoraSpec(RANK, ALPHA, base_dtype="float32")
# Every kind of block, and every kind of weight in them.
RICH = tiny_spec(
    num_layers=4, tie_embeddings=False, qk_norm=True, gated_attention=True, full_attention=(1, 3),
    linear_attention=LinearAttentionSpec(2, 4, 3, 5, chunk=4),
    moe=MoeSpec(4, 2, 7, shared_width=6, dense_layers=(0, 1)), lora=LORA,
)  # fmt: skip
DENSE = dataclasses.replace(RICH, lora=None)
# Without what takes long to compile.
SHORT = tiny_spec(num_layers=2, gated_attention=True, lora=LORA)
# Input and output axes of each adapted weight, behind the layers.
ADAPTED = {
    **{f"layers/attn/{name}": (1, 2) for name in ("q", "k", "v", "gate")}, "layers/attn/o": (2, 1),
    **{f"layers/linear_attn/{name}": (1, 2) for name in ("q", "k", "v", "z")},
    **{f"layers/linear_attn/{name}": (1, 1) for name in ("a", "b")},
    "layers/linear_attn/out": (2, 1), **{f"layers/mlp/{n}": (1, 1) for n in ("gate", "up", "down")},
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(17, size=(2, 9)).astype(np.int32)
IDS = np.array([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2], np.int32)
PLACES = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]], np.int32)


def test_every_matrix_of_the_targets_is_adapted_and_no_other_weight():
    names = set(named_leaves(actor_network(RICH).abstract))
    adapters = {name for name in names if is_adapter(name)}
    assert adapters == {f"{name}_lora_{side}" for name in ADAPTED for side in "ab"}
    assert names - adapters == set(named_leaves(actor_network(DENSE).abstract))
    shapes = {name: leaf.shape for name, leaf in named_leaves(actor_network(RICH).abstract).items()}
    for name, (inner, _) in ADAPTED.items():
        layers, *rest = shapes[name]
        fan_in, fan_out = np.prod(rest[:inner]), np.prod(rest[inner:])
        assert shapes[f"{name}_lora_a"] == (layers, fan_in, RANK)
        assert shapes[f"{name}_lora_b"] == (layers, RANK, fan_out)


@pytest.mark.parametrize("targets", [("attn",), ("linear_attn",), ("mlp",), ("mlp", "attn")])
def test_targets_restrict(targets):
    spec = dataclasses.replace(RICH, lora=dataclasses.replace(LORA, targets=targets))
    names = {name for name in named_leaves(actor_network(spec).abstract) if is_adapter(name)}
    assert {name.split("/")[1] for name in names} == set(targets)
    want = [name for name in ADAPTED if name.split("/")[1] in targets]
    assert names == {f"{name}_lora_{side}" for name in want for side in "ab"}


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=1)
def logp_of(spec, params):
    """Each token's log-prob times a weight of its own."""
    weights = np.random.default_rng(3).normal(size=TOKENS.size) * (IDS.reshape(-1) > 0)
    model = actor_network(spec).bind(params)
    hidden = before(model(TOKENS, PLACES, IDS)[0]).reshape(TOKENS.size, -1)
    logp, _ = token_logp(hidden, model.head(), TOKENS.reshape(-1))
    return jnp.vdot(weights, logp)


def with_leaves(params, end, change):
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: change(leaf) if path[-1].key.endswith(end) else leaf, params
    )


def test_with_b_at_zero_it_is_the_model_that_it_adapts():
    params = random_params(actor_network(SHORT), 7, std=0.25)
    fresh = with_leaves(params, "_lora_b", jnp.zeros_like)
    value, grads = logp_of(SHORT, fresh)
    # One program, so bit for bit: whatever A is, B takes it away.
    assert logp_of(SHORT, with_leaves(fresh, "_lora_a", lambda leaf: leaf + 7))[0] == value
    bare, dense = merge_lora(fresh, SHORT)
    for name, leaf in named_leaves(bare).items():
        np.testing.assert_array_equal(leaf, named_leaves(params)[name], err_msg=name)
    np.testing.assert_allclose(value, logp_of(dense, bare)[0], rtol=1e-5)
    # And yet it can learn: B has a gradient.
    for name, leaf in named_leaves(grads).items():
        if is_adapter(name):
            assert (np.abs(leaf).max() > 0) == name.endswith("_lora_b"), name


def test_what_stays_as_it_is_may_be_narrow():
    """What is trained is not, nor what must be exact: norms, routers, rates."""
    spec = dataclasses.replace(RICH, lora=dataclasses.replace(LORA, base_dtype="bfloat16"))
    leaves = named_leaves(actor_network(spec).abstract)
    experts = {f"layers/moe/{name}" for name in ("gate", "up", "down")}
    shared = {f"layers/moe/shared/{name}" for name in ("gate", "up", "down")}
    narrow = {name for name, leaf in leaves.items() if leaf.dtype == jnp.bfloat16}
    assert narrow == {*ADAPTED, *experts, *shared, "embed", "lm_head"}
    wide = {str(leaf.dtype) for name, leaf in leaves.items() if name not in narrow}
    assert wide == {"float32"}


def test_merged_weights_are_w_plus_scaled_ab():
    for network in (actor_network(RICH), critic_network(RICH)):
        params = random_params(network, 1)
        merged, spec = merge_lora(params, RICH)
        assert spec == DENSE
        got, leaves = named_leaves(merged), named_leaves(params)
        prefix = "backbone/" if "backbone" in params else ""
        assert set(got) == {name for name in leaves if not is_adapter(name)}
        for name, leaf in got.items():
            if name.removeprefix(prefix) not in ADAPTED:
                assert leaf is leaves[name], name  # no copy
                continue
            w, a, b = (np.asarray(leaves[name + end], float) for end in ("", "_lora_a", "_lora_b"))
            for layer in range(len(w)):
                want = w[layer] + SCALE * (a[layer] @ b[layer]).reshape(w.shape[1:])
                np.testing.assert_allclose(leaf[layer], want, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_sum_of_bfloat16_is_made_in_float32():
    spec = tiny_spec(num_layers=1, lora=dataclasses.replace(LORA, base_dtype="bfloat16"))
    rng = np.random.default_rng(2)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
        actor_network(spec).abstract,
    )
    merged, _ = merge_lora(params, spec)
    attn = params["layers"]["attn"]
    w, a, b = (np.asarray(attn[name], np.float64) for name in ("o", "o_lora_a", "o_lora_b"))
    got = merged["layers"]["attn"]["o"]
    assert got.dtype == jnp.float32  # what a small adapter adds would be lost in bfloat16
    want = w + SCALE * (a @ b).reshape(w.shape)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert merged["embed"].dtype == jnp.bfloat16  # not adapted, as it was


def test_values_and_gradients_are_those_of_the_merged_model():
    params = random_params(actor_network(SHORT), 4, std=0.25)
    merged, plain = merge_lora(params, SHORT)
    (value, grads), (want, dense) = logp_of(SHORT, params), logp_of(plain, merged)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    grads, dense, leaves = (named_leaves(tree) for tree in (grads, dense, params))
    for name, got in grads.items():
        if not is_adapter(name):
            wanted = np.asarray(dense[name], np.float64)
        else:
            w, side = name[: -len("_lora_a")], name[-1]
            a, b = (np.asarray(leaves[f"{w}_lora_{one}"], np.float64) for one in "ab")
            dw = np.asarray(dense[w], np.float64).reshape(len(a), a.shape[1], b.shape[2])
            wanted = SCALE * (dw @ b.swapaxes(1, 2) if side == "a" else a.swapaxes(1, 2) @ dw)
        size = np.abs(wanted).max()
        assert size > 1e-4, name
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4 * size, err_msg=name)


def test_linear_attention_says_the_same_merged():
    spec = dataclasses.replace(RICH, num_layers=1, full_attention=(), moe=None)
    params = random_params(actor_network(spec), 8, std=0.25)
    merged, plain = merge_lora(params, spec)

    @functools.partial(jax.jit, static_argnums=0)
    def hidden_of(spec, params):
        return actor_network(spec).bind(params)(TOKENS, PLACES, IDS)[0]

    want = hidden_of(plain, merged)
    np.testing.assert_allclose(hidden_of(spec, params), want, rtol=1e-4, atol=1e-4)


def test_the_merged_model_answers_as_the_adapted_one_also_from_a_folder(tmp_path):
    """The way of launch/convert.py: adapters are in no Hugging Face file, what they do is."""
    spec = tiny_spec(num_layers=2, lora=LORA)
    params = random_params(actor_network(spec), 5)
    merged, plain = merge_lora(params, spec)
    logits = jax.jit(lambda model: model(TOKENS, segment_ids=IDS))
    want = logits(CausalLM.from_params(spec, params))
    np.testing.assert_allclose(
        logits(CausalLM.from_params(plain, merged)), want, rtol=1e-4, atol=1e-4
    )
    save_params(merged, plain, None, tmp_path / "merged")
    np.testing.assert_allclose(logits(load(tmp_path / "merged")), want, rtol=1e-4, atol=1e-4)
    save_orbax(params, spec, None, tmp_path / "weights")
    run(Wanted(orbax=str(tmp_path / "weights"), to_hf=str(tmp_path / "out")))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("merged", "out")]
    assert files[0] == files[1]


BFLOAT16 = dataclasses.replace(LORA, base_dtype="bfloat16")
SMALL = run_config(model=tiny_spec(num_layers=2, lora=BFLOAT16))
ATTN, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")


def adapters(block, names, prefix=""):
    return {f"{prefix}layers/{block}/{name}_lora_{side}" for name in names for side in "ab"}


def test_only_adapters_and_the_value_head_are_trained():
    mesh = make_mesh(SMALL.mesh)
    critic = make_critic(SMALL)
    assert SMALL.recipe.critic.freeze_attention
    free = dataclasses.replace(SMALL.recipe.critic, freeze_attention=False)
    free = make_critic(
        dataclasses.replace(SMALL, recipe=dataclasses.replace(SMALL.recipe, critic=free))
    )
    both = adapters("attn", ATTN) | adapters("mlp", MLP)
    in_critic = adapters("mlp", MLP, "backbone/") | {"value_head"}
    for role, want in (
        (make_actor(SMALL), both),
        (critic, in_critic),
        (free, in_critic | adapters("attn", ATTN, "backbone/")),
    ):
        learner = abstract_learner(role, mesh)
        assert set(named_leaves(learner.trainable)) == want
        moments = [
            {leaf.partition(f"/{kind}/")[2] for leaf in named_leaves(learner.opt_state)
             if f"/{kind}/" in leaf}
            for kind in ("mu", "nu")
        ]  # fmt: skip
        assert moments == [want, want]
        dtypes = {str(leaf.dtype) for leaf in named_leaves(learner.trainable).values()}
        assert dtypes == {"float32"}
        frozen = named_leaves(learner.frozen)
        prefix = "backbone/" if role.name == "critic" else ""
        assert frozen[f"{prefix}layers/attn/q"].dtype == jnp.bfloat16
        assert frozen[f"{prefix}layers/attn_norm"].dtype == jnp.float32


def test_steps_move_the_adapters_and_nothing_else():
    role = make_actor(SMALL)
    base = random_params(actor_network(tiny_spec(num_layers=2)), 6, std=0.3)
    learner = fresh_learner(role, make_mesh(SMALL.mesh), jax.random.key(0), start=base)
    start = copy(params_of(learner))
    for name, leaf in named_leaves(start).items():
        if name.endswith("_lora_a"):
            np.testing.assert_allclose(np.std(leaf), leaf.shape[1] ** -0.5, rtol=0.5, err_msg=name)
        elif name.endswith("_lora_b"):
            np.testing.assert_array_equal(leaf, 0.0, err_msg=name)
        else:
            want = named_leaves(base)[name].astype(leaf.dtype)
            np.testing.assert_array_equal(leaf, want, err_msg=name)
    step = make_actor_step(
        role.network, SMALL.recipe.surrogate, role.tx, clip=1.0, temperature=TEMPERATURE,
        micro_rows=4,
    )  # fmt: skip
    for _ in range(3):
        learner, report = step(learner, batches()["actor"])
    assert report["grad_norm"].value() > 1e-3
    before_them = named_leaves(start)
    moved = {
        name for name, leaf in named_leaves(params_of(learner)).items()
        if not np.array_equal(leaf, before_them[name])
    }  # fmt: skip
    assert moved == adapters("attn", ATTN) | adapters("mlp", MLP)
