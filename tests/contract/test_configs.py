"""Every config with every preset builds, traces and lowers for cpu, cuda and tpu: no array made."""

import ast
import dataclasses
import runpy
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.core.types import ActorBatch, CriticBatch, Packed
from s3ac_jax.data.stream import Epochs
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.rollout.backend import MAX_STOP_IDS, Sampling
from s3ac_jax.train import build as building
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.programs import abstract_learner

ROOT = Path(__file__).resolve().parents[2]
# Studies are grids of runs, and evaluations no runs: with tests of their own.
FILES = [
    path
    for path in sorted((ROOT / "configs").glob("*.py"))
    if not path.stem.startswith(("study_", "evaluate"))
]
# Lowered on their own meshes by test_lowering.py.
LARGE = ("qwen1_5b", "r1_distill_1_5b", "intern_s2_35b", "intern_s2_397b")
MESHES = {"one": MeshSpec(), "data2-tensor2": MeshSpec(data=2, tensor=2)}
PLATFORMS = ("cpu", "cuda", "tpu")


def presets(file):
    """The presets that a config file takes: those that it names, one per recipe, or none."""
    body = ast.parse(file.read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PRESETS":
            return list(ast.literal_eval(node.value))
    functions = [node for node in body if hasattr(node, "args")]
    (get_config,) = [node for node in functions if node.name == "get_config"]
    return list(RECIPES) if get_config.args.args else [None]


CONFIGS = [(file, preset) for file in FILES for preset in presets(file)]


def load(file, preset, mesh=None):
    get_config = runpy.run_path(str(file))["get_config"]
    config = from_config_dict(get_config(preset) if preset else get_config())
    return dataclasses.replace(config, mesh=mesh) if mesh else config


def cases():
    """Each small config on both meshes; of recipes of the same shapes only one on the second."""
    for file, preset in CONFIGS:
        if file.stem in LARGE:
            continue
        spread = preset in (None, "s3ac_single", "s3ac_group", "vapo", "spo")
        yield from ((file, preset, mesh) for mesh in list(MESHES)[: 2 if spread else 1])


@pytest.fixture(params=cases(), ids=lambda case: f"{case[0].stem}-{case[1]}-{case[2]}")
def parts(request, monkeypatch):
    """The parts of one config on one mesh, without its task: no problem sets, no model's folder."""
    file, preset, mesh = request.param
    task = types.SimpleNamespace(
        tokenizer=types.SimpleNamespace(stop_ids=(1, 2)),
        train=types.SimpleNamespace(prompts=range(4096)),
        stream=lambda seed, **_: Epochs(4096, seed),
    )
    monkeypatch.setattr(building, "_suites", lambda config, task: None)
    monkeypatch.setattr(building, "make_task", lambda config: task)
    return building.build(load(file, preset, MESHES[mesh]))


def of(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract_packed(config):
    rows = config.rows_for(config.batch_responses // config.minibatches)
    shape = rows, config.train.pack_tokens
    kinds = {"mask": bool, "reward": jnp.float32, "logp_rollout": jnp.float32}
    names = [field.name for field in dataclasses.fields(Packed) if field.name != "rows"]
    arrays = {name: of(shape, kinds.get(name, jnp.int32)) for name in names}
    return Packed(**arrays, rows=of((), jnp.int32))


def programs(parts):
    """(jitted function, abstract arguments) of everything that runs on a device in a tick."""
    config, engine, spec = parts.config, parts.rollout.engine, parts.config.recipe.critic
    actor = abstract_learner(parts.actor, parts.mesh)
    actor_params = params_of(actor)
    packed = abstract_packed(config)
    per_token, scalar = of(packed.tokens.shape), of(())
    imitation = per_token if config.recipe.surrogate.imitation else None
    batch = ActorBatch(packed, *[per_token] * 3, imitation, scalar)
    number, rows = config.minibatches, config.batch_responses
    values = per_token if config.recipe.reads_values else None
    requests = config.rollout.insert_batch
    tokens = of((requests, config.task.max_prompt_tokens), jnp.int32)
    each = of((requests,), jnp.int32)
    state = jax.eval_shape(engine.init_decode_state, actor_params)
    prefix = jax.eval_shape(engine.prefill, actor_params, tokens, each)
    floats = of((requests,))
    sampling = Sampling(
        of((requests,), jnp.uint32), floats, each, floats, each,
        of((requests, MAX_STOP_IDS), jnp.int32),
    )  # fmt: skip
    engine_type = type(engine)
    made = {
        "score_actor": (parts.score_actor, (actor_params, None, packed)),
        "prepare": (
            parts.prepare,
            ([packed] * number, [(per_token, values)] * number, of((rows,), bool), of((rows,)),
             of((2,))),
        ),
        "actor_step": (parts.actor_step, (actor, batch)),
        "prefill": (engine_type.prefill, (engine, actor_params, tokens, each)),
        "insert": (engine_type.insert, (engine, prefix, state, each, each, sampling)),
        "generate": (engine_type.generate, (engine, actor_params, state)),
    }  # fmt: skip
    if config.recipe.select.tracks_drift:
        made["drift"] = (parts.drift, (actor_params, [packed] * number))
    if spec is None:
        return made
    critic = abstract_learner(parts.critic, parts.mesh)
    critic_params = params_of(critic)
    learns, first = of(packed.tokens.shape, bool), of((), bool)
    old = per_token if spec.clip is not None else None
    critic_batch = CriticBatch(packed, learns, old, per_token, scalar, first)
    prompts = of((config.scheduler.candidates, config.task.max_prompt_tokens), jnp.int32)
    lengths = of(prompts.shape[:1], jnp.int32)
    made |= {
        "score": (parts.score, (actor_params, critic_params, packed)),
        "prompt_values": (parts.prompt_values, (critic_params, prompts, lengths)),
        "critic_step": (parts.critic_step, (critic, critic_batch)),
    }
    if config.recipe.first_step_reads:
        made["first_targets"] = (parts.first_targets, (packed,))
    return made


def test_there_are_configs():
    assert set(RECIPES) <= {preset for _, preset in CONFIGS}


@pytest.mark.parametrize(("file", "preset"), CONFIGS, ids=str)
def test_every_config_builds(file, preset):
    config = load(file, preset)
    assert config.name == file.stem
    if preset:
        want = RECIPES[preset]
        # These go by the limit of a response, and large models have smaller groups.
        for column in ("average", "shaping", "responses_per_prompt"):
            assert type(getattr(config.recipe, column)) is type(getattr(want, column))
            want = dataclasses.replace(want, **{column: getattr(config.recipe, column)})
        assert config.recipe == want


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


# What a program is made from, apart from the model, the mesh and the shapes of its arguments.
MADE_FROM = {
    "prepare": lambda recipe: recipe,
    "actor_step": lambda recipe: recipe.surrogate,
    "critic_step": lambda recipe: recipe.critic,
    "first_targets": lambda recipe: recipe.critic,
}
_LOWERED = set()


def test_every_program_traces_and_lowers(parts):
    config, engine = parts.config, parts.rollout.engine
    with parts.on_mesh():
        for name, (program, arguments) in programs(parts).items():
            own = MADE_FROM.get(name, lambda recipe: None)(config.recipe)
            shapes = [
                (x.shape, str(x.dtype)) for x in jax.tree.leaves(arguments) if x is not engine
            ]
            which = name, config.model, config.mesh, own, str(shapes)
            if which in _LOWERED:  # another preset has the same
                continue
            _LOWERED.add(which)
            traced = program.trace(*arguments)
            for platform in PLATFORMS:
                text = traced.lower(lowering_platforms=(platform,)).as_text()
                assert "stablehlo" in text, (name, platform)


def test_steps_keep_shapes_and_places(parts):
    """What a step hands on is what it takes: the next tick compiles nothing."""
    recipe = parts.config.recipe
    with parts.on_mesh():
        made = programs(parts)
        roles = ("actor", "critic") if recipe.critic else ("actor",)
        for role in roles:
            step, (learner, batch) = made[f"{role}_step"]
            after, report, *_ = jax.eval_shape(step, learner, batch)
            assert kinds(after) == kinds(learner)
            assert {"grad_norm", "nonfinite", "clipped_steps"} <= report.keys()
        prepare, arguments = made["prepare"]
        prepared = jax.eval_shape(prepare, *arguments)
        assert len(prepared.actor) == parts.config.minibatches
        assert kinds(prepared.actor[0]) == kinds(made["actor_step"][1][1])
        assert (prepared.critic is None) == (recipe.critic is None)
        if prepared.critic:
            assert kinds(prepared.critic[0]) == kinds(made["critic_step"][1][1])
        assert prepared.advantage.shape == (parts.config.batch_responses,)
        assert (prepared.v0 is None) == (not recipe.reads_values)
        if recipe.first_step_reads:
            # What the first step learns from, and the values that it hands on for V_old.
            targets = jax.eval_shape(parts.first_targets, *made["first_targets"][1])
            assert kinds(targets) == kinds(made["critic_step"][1][1])
            *_, values = jax.eval_shape(parts.critic_step, *made["critic_step"][1])
            assert kinds(values) == kinds(arguments[1][0][1])
        assert prepared.band.shape == (2,)


def test_weights_are_spread_over_the_mesh(parts):
    learner = abstract_learner(parts.actor, parts.mesh)
    gate = learner.trainable["layers"]["mlp"]["gate"]
    share = gate.sharding.shard_shape(gate.shape)
    assert share[-1] == gate.shape[-1] // parts.config.mesh.tensor
