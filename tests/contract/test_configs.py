"""Every config with every preset builds, traces and lowers for cpu, cuda and tpu: no array made."""

import ast
import dataclasses
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.core.types import Packed, TrainBatch
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.rollout.engine import Sampling
from s3ac_jax.train import build as building
from s3ac_jax.train.learner import params_of

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs").glob("*.py"))
MESHES = {"one": MeshSpec(), "data2-tensor2": MeshSpec(data=2, tensor=2)}
PLATFORMS = ("cpu", "cuda", "tpu")


def presets(file):
    """The presets that a config file takes: one per recipe, or none."""
    functions = [node for node in ast.parse(file.read_text()).body if hasattr(node, "args")]
    (get_config,) = [node for node in functions if node.name == "get_config"]
    return list(RECIPES) if get_config.args.args else [None]


CONFIGS = [(file, preset) for file in FILES for preset in presets(file)]


def load(file, preset, mesh=None):
    get_config = runpy.run_path(str(file))["get_config"]
    config = from_config_dict(get_config(preset) if preset else get_config())
    return dataclasses.replace(config, mesh=mesh) if mesh else config


@pytest.fixture(
    params=[(*config, mesh) for config in CONFIGS for mesh in MESHES],
    ids=lambda case: f"{case[0].stem}-{case[1]}-{case[2]}",
)
def parts(request, monkeypatch):
    """The parts of one config on one mesh, without its problem sets (which take seconds)."""
    file, preset, mesh = request.param
    monkeypatch.setattr(building, "_split", lambda config, held_out: None)
    return building.build(load(file, preset, MESHES[mesh]))


def of(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract_packed(config):
    rows = config.rows_for(config.batch_responses // config.train.minibatches)
    shape = rows, config.train.pack_tokens
    kinds = {"mask": bool, "reward": jnp.float32, "logp_rollout": jnp.float32}
    names = [field.name for field in dataclasses.fields(Packed) if field.name != "rows"]
    arrays = {name: of(shape, kinds.get(name, jnp.int32)) for name in names}
    return Packed(**arrays, rows=of((), jnp.int32))


def programs(parts):
    """(jitted function, abstract arguments) of everything that runs on a device in a tick."""
    config, engine = parts.config, parts.rollout.engine
    critic = building.abstract_learner(parts.critic, parts.mesh)
    actor = building.abstract_learner(parts.actor, parts.mesh)
    actor_params, critic_params = params_of(actor), params_of(critic)
    packed = abstract_packed(config)
    shape, scalar = packed.tokens.shape, of(())
    batch = TrainBatch(packed, *[of(shape)] * 5, scalar, scalar)
    number = config.train.minibatches
    prompts = of((config.scheduler.candidates, config.task.max_prompt_tokens), jnp.int32)
    requests = config.rollout.insert_batch
    tokens = of((requests, config.task.max_prompt_tokens), jnp.int32)
    each = of((requests,), jnp.int32)
    state = jax.eval_shape(engine.init_decode_state, actor_params)
    prefix = jax.eval_shape(engine.prefill, actor_params, tokens, each)
    sampling = Sampling(of((requests,), jnp.uint32), of((requests,)), each)
    engine_type = type(engine)
    return {
        "score": (parts.score, (actor_params, critic_params, packed)),
        "prompt_values": (
            parts.prompt_values,
            (critic_params, prompts, of(prompts.shape[:1], jnp.int32)),
        ),
        "prepare": (parts.prepare, ([packed] * number, [(of(shape),) * 2] * number, of((2,)))),
        "critic_step": (parts.critic_step, (critic, batch)),
        "actor_step": (parts.actor_step, (actor, batch)),
        "prefill": (engine_type.prefill, (engine, actor_params, tokens, each)),
        "insert": (engine_type.insert, (engine, prefix, state, each, each, sampling)),
        "generate": (engine_type.generate, (engine, actor_params, state)),
    }


def test_there_are_configs():
    assert {"s3ac_single", "s3ac_group"} <= {preset for _, preset in CONFIGS}


@pytest.mark.parametrize(("file", "preset"), CONFIGS, ids=str)
def test_every_config_builds(file, preset):
    config = load(file, preset)
    assert config.name == file.stem
    if preset:
        assert config.recipe == RECIPES[preset]


def test_every_program_traces_and_lowers(parts):
    with parts.on_mesh():
        for name, (program, arguments) in programs(parts).items():
            traced = program.trace(*arguments)
            for platform in PLATFORMS:
                text = traced.lower(lowering_platforms=(platform,)).as_text()
                assert "stablehlo" in text, (name, platform)


def test_steps_keep_shapes_and_places(parts):
    """What a step hands on is what it takes: the next tick compiles nothing."""
    with parts.on_mesh():
        made = programs(parts)
        for role in ("critic", "actor"):
            step, (learner, batch) = made[f"{role}_step"]
            after, report = jax.eval_shape(step, learner, batch)
            same = jax.tree.map(
                lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), after, learner
            )
            assert all(jax.tree.leaves(same))
            assert {"grad_norm", "nonfinite", "clipped_steps"} <= report.keys()
        prepare, arguments = made["prepare"]
        batches, band, _ = jax.eval_shape(prepare, *arguments)
        assert len(batches) == parts.config.train.minibatches
        want = jax.tree.map(lambda x: (x.shape, x.dtype), made["actor_step"][1][1])
        assert jax.tree.map(lambda x: (x.shape, x.dtype), batches[0]) == want
        assert band.shape == (2,)


def test_weights_are_spread_over_the_mesh(parts):
    learner = building.abstract_learner(parts.actor, parts.mesh)
    gate = learner.trainable["layers"]["mlp"]["gate"]
    share = gate.sharding.shard_shape(gate.shape)
    assert share[-1] == gate.shape[-1] // parts.config.mesh.tensor
