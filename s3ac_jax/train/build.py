"""From a RunConfig to everything static that a run is made of."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import Learner, PyTree
from s3ac_jax.data import arithmetic
from s3ac_jax.data.prompts import PromptSet, arithmetic_prompts
from s3ac_jax.models import freeze
from s3ac_jax.models.network import Network, actor_network, critic_network
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout
from s3ac_jax.scheduler.select import Scheduler
from s3ac_jax.train import steps
from s3ac_jax.train.learner import learner_shardings, make_learner, make_optimizer


@dataclasses.dataclass(frozen=True)
class Role:
    """One network with its optimiser and its clip. Source: ours."""

    network: Network
    tx: optax.GradientTransformation
    clip: float
    frozen: Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True)
class Split:
    """One half of the task: problems, their prompts, their verifier. Source: ours."""

    prompts: PromptSet
    verifier: ArithmeticVerifier


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of, apart from its state.

    Source: ours: everything that compiles or reads files is made once, here.
    """

    config: RunConfig
    mesh: Mesh
    train: Split
    held_out: Split
    actor: Role
    critic: Role
    rollout: LocalRollout
    scheduler: Scheduler
    score: Callable[..., Any]
    prompt_values: Callable[..., Any]
    prepare: Callable[..., Any]
    actor_step: Callable[..., Any]
    critic_step: Callable[..., Any]

    def place(self, tree: PyTree) -> PyTree:
        """Host arrays onto the mesh: [R, T] by rows, all else everywhere. Source: ours."""

        def put(x: Any) -> jax.Array:
            axes = ("rows",) + (None,) * (x.ndim - 1) if x.ndim >= 2 else (None,) * x.ndim
            spec = parallel.spec_of(axes, x.shape, self.mesh)
            return jax.device_put(x, jax.sharding.NamedSharding(self.mesh, spec))

        return jax.tree.map(put, tree)

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """The mesh as context, so that logical axes find it. Source: ours."""
        return jax.set_mesh(self.mesh)


def _split(config: RunConfig, *, held_out: bool) -> Split:
    task = config.task
    problems = arithmetic.make_problems(
        task.seed,
        task.num_held_out if held_out else task.num_train,
        max_steps=task.max_steps,
        held_out=held_out,
    )
    return Split(arithmetic_prompts(problems), ArithmeticVerifier(problems))


def make_actor(config: RunConfig) -> Role:
    """The policy and its optimiser. Source: ours."""
    return Role(actor_network(config.model), make_optimizer(config.actor), config.actor.clip, None)


def make_critic(config: RunConfig, **changes: Any) -> Role:
    """The critic and its optimiser, for `config.critic` with `changes` (head_std, clip, ...).

    Source: S3AC (2610.35518), stabilised critic.
    """
    critic = dataclasses.replace(config.critic, **changes)
    return Role(
        critic_network(config.model, head_std=critic.head_std),
        make_optimizer(critic),
        critic.clip,
        freeze.frozen_in_critic if critic.freeze_attention else freeze.router,
    )


def make_engine(config: RunConfig, network: Network) -> Engine:
    """The rollout engine for this task. Source: ours."""
    return Engine(
        network=network,
        slots=config.rollout.slots,
        cache_tokens=config.longest,
        steps_per_dispatch=config.rollout.steps_per_dispatch,
        stop_ids=arithmetic.TOKENIZER.stop_ids,
    )


def build(config: RunConfig) -> Parts:
    """Makes all parts. Raises ValueError when the task or the mesh can't be had. Source: ours."""
    actor, critic = make_actor(config), make_critic(config)
    temperature, micro_rows = config.rollout.temperature, config.train.micro_rows
    recipe = config.recipe
    return Parts(
        config=config,
        mesh=parallel.make_mesh(config.mesh),
        train=_split(config, held_out=False),
        held_out=_split(config, held_out=True),
        actor=actor,
        critic=critic,
        rollout=LocalRollout(
            make_engine(config, actor.network),
            insert_batch=config.rollout.insert_batch,
            max_prompt_tokens=config.task.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        ),
        scheduler=Scheduler(
            recipe.select,
            num_prompts=config.task.num_train,
            seed=config.seed,
            batch_prompts=config.train.batch_prompts,
            candidates=config.scheduler.candidates,
            max_rounds=config.scheduler.max_rounds,
        ),
        score=steps.make_score(
            actor.network, critic.network, temperature=temperature, micro_rows=micro_rows
        ),
        prompt_values=steps.make_prompt_values(critic.network),
        prepare=steps.make_prepare(recipe, num_prompts=config.train.batch_prompts),
        actor_step=steps.make_actor_step(
            actor.network, recipe, actor.tx, clip=actor.clip, temperature=temperature,
            micro_rows=micro_rows,
        ),
        critic_step=steps.make_critic_step(
            critic.network, recipe.critic, critic.tx, clip=critic.clip, micro_rows=micro_rows
        ),
    )  # fmt: skip


def abstract_learner(role: Role, mesh: Mesh) -> Learner:
    """Shapes and shardings of a learner of this role, no arrays.

    Source: ours: shapes first, shardings second, arrays last.
    """
    abstract = jax.eval_shape(
        lambda params: make_learner(params, role.tx, role.frozen), role.network.abstract
    )
    places = learner_shardings(abstract, role.network.axes, role.tx, mesh)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        places,
    )


def fresh_learner(
    role: Role, mesh: Mesh, key: PRNGKeyArray, *, start: PyTree | None = None
) -> Learner:
    """A learner on the mesh: fresh weights, replaced by those of `start` where it has the name.

    start: nested dicts, a part of the network's names (a critic starts from the base policy
    under `backbone` and a fresh value head). Source: ours.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_learner(role, mesh))

    def make(key: PRNGKeyArray, start: PyTree) -> Learner:
        params = _replace(role.network.init(key), start)
        return make_learner(params, role.tx, role.frozen)

    return jax.jit(make, out_shardings=places)(key, start or {})


def _replace(params: PyTree, start: PyTree) -> PyTree:
    replaced = dict(params)
    for name, child in start.items():
        if isinstance(child, dict):
            replaced[name] = _replace(params[name], child)
        else:
            replaced[name] = jnp.asarray(child, params[name].dtype)
    return replaced
