"""Four devices give what one gives, and each holds only its share."""

import dataclasses
import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import ActorBatch
from s3ac_jax.data.packing import pack
from s3ac_jax.models.moe import mix
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import LinearAttentionSpec, MoeSpec
from s3ac_jax.parallel.experts import over_experts
from s3ac_jax.parallel.mesh import MeshSpec, make_mesh, shardings, spec_of
from s3ac_jax.rollout.backend import make_sampling
from s3ac_jax.train import steps
from s3ac_jax.train.build import build
from s3ac_jax.train.gather import pack_batches
from s3ac_jax.train.learner import make_learner, params_of
from s3ac_jax.train.programs import abstract_learner, fresh_learner
from tests.helpers import gradient_recorder, make_scored, random_params, run_config, tiny_spec

MESHES = (
    MeshSpec(data=2, tensor=2), MeshSpec(data=2, fsdp=2), MeshSpec(data=2, context=2),
    MeshSpec(tensor=2, context=2),
)  # fmt: skip
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Compilations(list):
    """Compilations and traces since it was made, as jax reports them."""

    def __init__(self):
        super().__init__()
        jax.monitoring.register_event_duration_secs_listener(self.hear)

    def hear(self, event, seconds, fun_name="", **_):
        if event.endswith(("backend_compile_duration", "jaxpr_trace_duration")):
            self.append((event, fun_name))


def one_tick(mesh):
    """Rollout, score, prepare, both steps: everything as numpy, and where the weights lie.

    The optimiser is plain descent with momentum: its state after one step is the gradient, and
    unlike Adam it does not divide a gradient of rounding noise by its own size.
    """
    config = run_config(mesh=mesh)
    parts = build(config)
    tx = optax.sgd(0.05, momentum=0.9)
    roles = {"actor": parts.actor, "critic": parts.critic}
    roles = {name: dataclasses.replace(role, tx=tx) for name, role in roles.items()}
    with parts.on_mesh():
        learners = {
            name: fresh_learner(
                role, parts.mesh, jax.random.key(0),
                start=random_params(role.network, seed, std=0.3),
            )
            for seed, (name, role) in enumerate(roles.items())
        }  # fmt: skip
        places = {
            name: {key: leaf.sharding for key, leaf in named_leaves(learner).items()}
            for name, learner in learners.items()
        }
        prompt = parts.train.prompts.take(np.repeat(np.arange(4), 2))
        sampling = make_sampling(
            jax.random.key(1),
            8,
            temperature=1.0,
            max_tokens=11,
            stop_ids=parts.rollout.engine.stop_ids,
        )
        parts.rollout.update_weights(params_of(learners["actor"]), 0)
        rollout = parts.rollout.generate(prompt, sampling)
        scored = parts.train.verifier.grade(rollout)
        scored = dataclasses.replace(  # a random policy earns nothing: spread the rewards
            scored, reward=np.where(np.arange(8) % 3, -1.0, 1.0).astype(np.float32)
        )
        packed = pack_batches(parts, scored, np.arange(8), 2)
        params = params_of(learners["actor"]), params_of(learners["critic"])
        scores = [parts.score(*params, batch) for batch in packed]
        values = parts.prompt_values(params[1], prompt.tokens, prompt.num_tokens)
        prepared = parts.prepare(
            packed, scores, scored.success, np.full(8, 0.5, np.float32),
            np.full(2, np.nan, np.float32),
        )  # fmt: skip
        batches = {"actor": prepared.actor, "critic": prepared.critic}
        reports = {"prepare": prepared.report}
        micro_rows = config.train.micro_rows
        made = {
            "actor": steps.make_actor_step(
                roles["actor"].network, config.recipe.surrogate, tx, clip=1.0, temperature=1.0,
                micro_rows=micro_rows,
            ),
            "critic": steps.make_critic_step(
                roles["critic"].network, config.recipe.critic, tx, clip=10.0,
                micro_rows=micro_rows,
            ),
        }  # fmt: skip
        compiled = None
        for number in range(2):
            compiled = Compilations() if number == 1 else compiled
            for name, step in made.items():
                learners[name], reports[f"{name}{number}"], *_ = step(
                    learners[name], batches[name][number]
                )
        parts.rollout.update_weights(params_of(learners["actor"]), 1)
        second = parts.rollout.generate(prompt, sampling)
        recompiled = list(compiled)
        for name, learner in learners.items():
            for key, leaf in named_leaves(learner).items():
                assert leaf.sharding.is_equivalent_to(places[name][key], leaf.ndim), (name, key)
    return {
        "tokens": (rollout.tokens, second.tokens),
        "stopped": rollout.stopped,
        "logp": rollout.logp,
        "scores": jax.device_get(scores),
        "values": np.asarray(values),
        "batches": jax.device_get(batches),
        "learners": jax.device_get(learners),
        "reports": {
            name: {key: metric.value() for key, metric in report.items()}
            for name, report in reports.items()
        },
        "recompiled": recompiled,
        "places": places,
        "parts": parts,
    }


def same_rollouts(one_device, four_devices):
    for a, b in zip(one_device["tokens"], four_devices["tokens"], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one_device["stopped"], four_devices["stopped"])
    np.testing.assert_allclose(one_device["logp"], four_devices["logp"], **CLOSE)


def same_scores_and_targets(one_device, four_devices):
    for name in ("scores", "values", "batches"):
        a, b = (jax.tree.leaves(run[name]) for run in (one_device, four_devices))
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, **CLOSE)


def same_losses_and_metrics(one_device, four_devices):
    for name, want in one_device["reports"].items():
        got = four_devices["reports"][name]
        assert got == pytest.approx(want, rel=1e-5, abs=1e-5, nan_ok=True)
    assert one_device["reports"]["critic0"]["grad_norm"] > 0.01
    assert one_device["reports"]["actor0"]["grad_norm"] > 0.01


def same_weights_and_gradients(one_device, four_devices):
    # The momentum after two steps is the sum of their gradients, the first decayed.
    want = named_leaves(one_device["learners"])
    got = named_leaves(four_devices["learners"])
    assert want.keys() == got.keys()
    for name, leaf in want.items():
        np.testing.assert_allclose(got[name], leaf, err_msg=name, **CLOSE)


def keys_and_values_are_spread_by_rows_and_heads(four_devices):
    # After two rollouts: a compiled step gives them back where it found them.
    parts = four_devices["parts"]
    mesh, cache = parts.config.decode_mesh, parts.rollout._state.cache.kv
    for leaf in jax.tree.leaves(cache):
        rows, heads, *rest = leaf.shape
        share = (rows // mesh.row_shards, heads // mesh.tensor, *rest)
        assert leaf.sharding.shard_shape(leaf.shape) == share


def weights_are_spread_and_moments_lie_beside_them(four_devices):
    parts = four_devices["parts"]
    mesh = parts.config.mesh
    places = four_devices["places"]["critic"]
    shape = {name: leaf.shape for name, leaf in named_leaves(parts.critic.network.abstract).items()}
    gate = places["trainable/backbone/layers/mlp/gate"]
    layers, width, mlp = shape["backbone/layers/mlp/gate"]
    share = (layers, width // (mesh.fsdp * mesh.context), mlp // mesh.tensor)
    assert gate.shard_shape((layers, width, mlp)) == share
    moments = [key for key in places if key.startswith("opt_state") and key.endswith("mlp/gate")]
    assert moments
    assert all(places[key] == gate for key in moments)
    # So it is for the optimiser of the run, AdamW with its two moments.
    abstract = named_leaves(abstract_learner(parts.critic, parts.mesh))
    moments = [key for key in abstract if key.startswith("opt_state") and key.endswith("mlp/gate")]
    assert len(moments) == 2
    assert all(abstract[key].sharding == gate for key in moments)


def test_four_devices_give_what_one_gives():
    # One test, because two workers with a half each would both compile the one device.
    one_device = one_tick(MeshSpec())
    assert one_device["recompiled"] == []
    for mesh in MESHES:
        four_devices = one_tick(mesh)
        same_rollouts(one_device, four_devices)
        same_scores_and_targets(one_device, four_devices)
        same_losses_and_metrics(one_device, four_devices)
        same_weights_and_gradients(one_device, four_devices)
        weights_are_spread_and_moments_lie_beside_them(four_devices)
        keys_and_values_are_spread_by_rows_and_heads(four_devices)
        assert four_devices["recompiled"] == []


EXPERT_MESHES = (MeshSpec(expert=2), MeshSpec(tensor=2, expert=2), MeshSpec(data=2, expert=2))
WITH_EXPERTS = tiny_spec(  # dense: the shortest to compile
    num_layers=2, moe=MoeSpec(num_experts=4, per_token=2, width=6, shared_width=8, matmul="dense")
)
TX = gradient_recorder()


@functools.cache
def experts_batch():
    """Twelve responses with experts to replay, some not recorded."""
    rng = np.random.default_rng(0)
    scored = make_scored(0, rng.integers(1, 6, size=12), rng.integers(1, 10, size=12))
    experts = np.stack([rng.permutation(4)[:2] for _ in range(12 * 14 * 2)])
    routing = experts.reshape(12, 14, 2, 2).astype(np.int16)
    routing[::5] = -1
    rollout = dataclasses.replace(scored.rollout, routing=routing)
    packed = pack(
        dataclasses.replace(scored, rollout=rollout), np.arange(12), pack_tokens=16, max_rows=12
    )
    normal = rng.normal(size=packed.mask.shape).astype(np.float32)
    return ActorBatch(
        packed=packed, logp_old=packed.logp_rollout, advantages=np.where(packed.mask, normal, 0.0),
        weights=packed.mask.astype(np.float32), imitation=None,
        denominator=np.float32(packed.mask.sum()),
    )  # fmt: skip


def experts_step(spec, model=WITH_EXPERTS):
    """(metrics, gradients) of an actor step on this mesh, and the weights before it."""
    mesh, network = make_mesh(spec), actor_network(model)
    step = steps.make_actor_step(
        network, run_config().recipe.surrogate, TX, clip=1e9, temperature=1.0, micro_rows=4
    )

    def place(x):
        axes = ("rows", *(None,) * (x.ndim - 1)) if x.ndim > 1 else (None,) * x.ndim
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec_of(axes, x.shape, mesh)))

    params = random_params(network, 1, std=0.4)
    params = jax.device_put(params, shardings(network.axes, network.abstract, mesh))
    with jax.set_mesh(mesh):
        learner, report = step(
            make_learner(jax.tree.map(jnp.copy, params), TX), jax.tree.map(place, experts_batch())
        )
        grads = jax.device_get(learner.opt_state)
    return {name: metric.value() for name, metric in report.items()}, grads, params


def test_experts_on_several_devices_give_what_one_gives():
    want_report, want, _ = experts_step(MeshSpec())
    assert want_report["grad_norm"] > 0.1
    for mesh in EXPERT_MESHES:
        report, grads, params = experts_step(mesh)
        assert report == pytest.approx(want_report, rel=1e-5, abs=1e-6)
        for name, leaf in named_leaves(grads).items():
            wanted = named_leaves(want)[name]
            atol = 1e-5 * np.abs(wanted).max()
            np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=atol, err_msg=f"{name} {mesh}")
        # Each device holds its experts and, of those, its part of the width; of all else a share.
        moe, layers, width = params["layers"]["moe"], 2, WITH_EXPERTS.hidden_size
        held = (layers, 2, width, 6 // mesh.tensor)
        assert {shard.data.shape for shard in moe["gate"].addressable_shards} == {held}
        held = (layers, 2, 6 // mesh.tensor, width)
        assert {shard.data.shape for shard in moe["down"].addressable_shards} == {held}
        assert moe["router"].sharding.shard_shape(moe["router"].shape) == (layers, width // 2, 4)


# Both mixers, and experts that are worked off in windows.
HYBRID = tiny_spec(
    num_layers=2, full_attention=(1,), qkv_bias=False, gated_attention=True, qk_norm=True,
    linear_attention=LinearAttentionSpec(
        key_heads=2, value_heads=4, key_dim=4, value_dim=5, conv_width=3, chunk=4
    ),
    moe=MoeSpec(num_experts=4, per_token=2, width=6, shared_width=8, matmul="blocked"),
)  # fmt: skip
HYBRID_MESHES = (
    MeshSpec(tensor=2, context=2), MeshSpec(expert=2, context=2), MeshSpec(fsdp=2, expert=2)
)  # fmt: skip


def test_a_hybrid_model_on_several_devices_gives_what_one_gives():
    want_report, want, _ = experts_step(MeshSpec(), HYBRID)
    assert want_report["grad_norm"] > 0.1
    for mesh in HYBRID_MESHES:
        report, grads, _ = experts_step(mesh, HYBRID)
        assert report == pytest.approx(want_report, rel=1e-5, abs=1e-6)
        for name, leaf in named_leaves(grads).items():
            wanted = named_leaves(want)[name]
            atol = 1e-5 * np.abs(wanted).max()
            np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=atol, err_msg=f"{name} {mesh}")


def test_experts_that_devices_can_and_cannot_share_out():
    """Three experts or a width of five on two devices: each does all of it, once in the sum."""

    def run(mesh, num_experts, width):
        draw = np.random.default_rng(3)
        shapes = {"gate": (num_experts, 4, width), "up": (num_experts, 4, width),
                  "down": (num_experts, width, 4)}  # fmt: skip
        weights = {
            name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
        }
        x, upstream = draw.normal(size=(2, 8, 4)).astype(np.float32)
        gates = draw.random((8, 2)).astype(np.float32)
        chosen = draw.integers(num_experts + 1, size=(8, 2))
        axes = {"gate": ("experts", None, "mlp"), "up": ("experts", None, "mlp"),
                "down": ("experts", "mlp", None)}  # fmt: skip

        @jax.jit
        def both(x, gates, weights):
            def out(x, gates, weights):
                return over_experts(
                    functools.partial(mix, matmul="blocked"), x, chosen, gates, weights, axes,
                    num_experts=num_experts,
                )  # fmt: skip

            y, pullback = jax.vjp(out, x, gates, weights)
            return y, pullback(upstream)

        with jax.set_mesh(make_mesh(mesh)):
            return jax.device_get(both(x, gates, weights))

    for num_experts, width in ((4, 6), (3, 6), (4, 5)):
        want = run(MeshSpec(), num_experts, width)
        got = run(MeshSpec(tensor=2, expert=2), num_experts, width)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", [MeshSpec(data=4), MeshSpec(fsdp=4), MeshSpec(context=4)])
def test_gradients_of_experts_are_summed_in_float32(mesh):
    """256 + 1 is 256 in bfloat16."""
    x = jnp.array([[256.0], [1.0], [1.0], [1.0]], jnp.bfloat16)
    one = jnp.ones((4, 1), jnp.int32)

    def first(x, experts, gates, weights, *, shards):
        return x @ weights["w"][0]

    def total(w):
        axes = {"w": ("experts", None, "expert_embed")}
        y = over_experts(first, x, one, one, {"w": w}, axes, num_experts=1)
        return jnp.sum(y.astype(jnp.float32))

    with jax.set_mesh(make_mesh(mesh)):
        gradient = jax.jit(jax.grad(total))(jnp.ones((1, 1, 4), jnp.float32))
    np.testing.assert_array_equal(gradient, np.full((1, 1, 4), 259.0))
