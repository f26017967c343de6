"""From a RunConfig to every jitted program of a run: no task, no files, no devices."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from s3ac_jax.algos.critic import CriticSpec
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import Learner, PyTree
from s3ac_jax.models import freeze
from s3ac_jax.models.network import Network, actor_network, critic_network
from s3ac_jax.parallel.dispatch import in_order
from s3ac_jax.train import score, steps
from s3ac_jax.train.learner import learner_shardings, make_learner, make_optimizer
from s3ac_jax.train.prepare import critic_batch, make_prepare


@dataclasses.dataclass(frozen=True)
class Role:
    """One network with its optimiser and its clip. Source: ours."""

    name: str
    network: Network
    tx: optax.GradientTransformation
    clip: float
    frozen: Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """What value pretraining is made of: the critic with its own optimiser, targets, step, values.

    Source: S3AC (2610.35518), stabilised critic.
    """

    role: Role
    targets: Callable[..., Any]
    step: Callable[..., Any]
    values: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The two networks and whatever is compiled for them; nothing is compiled yet.

    Source: ours: a run calls them with arrays, a plan compiles them for shapes.
    """

    config: RunConfig
    actor: Role
    critic: Role
    pretraining: Pretraining | None
    score: Callable[..., Any]
    score_actor: Callable[..., Any]
    first_targets: Callable[..., Any]
    prompt_values: Callable[..., Any]
    drift: Callable[..., Any]
    prepare: Callable[..., Any]
    actor_step: Callable[..., Any]
    critic_step: Callable[..., Any]


def make_actor(config: RunConfig) -> Role:
    """The policy and its optimiser; routers stay as they are.

    Source: S3AC (2610.35518), method defaults: routers frozen.
    """
    network, tx = actor_network(config.model), make_optimizer(config.actor)
    return Role("actor", network, tx, config.actor.clip, _frozen(config, freeze.router))


def make_critic(config: RunConfig, **changes: Any) -> Role:
    """The critic and its optimiser, for `config.critic` with `changes` (head_std, clip, ...).

    Source: S3AC (2610.35518), stabilised critic.
    """
    critic, spec = dataclasses.replace(config.critic, **changes), config.recipe.critic
    return Role(
        "critic",
        critic_network(config.model, head_std=critic.head_std),
        make_optimizer(critic),
        critic.clip,
        _frozen(
            config, freeze.frozen_in_critic if spec and spec.freeze_attention else freeze.router
        ),
    )


def _frozen(config: RunConfig, frozen: Callable[[str], bool]) -> Callable[[str], bool]:
    """What a role keeps as it is; with adapters, all else but the value head too."""
    return freeze.all_but_adapters(frozen) if config.model.lora else frozen


def make_pretraining(config: RunConfig, **changes: Any) -> Pretraining:
    """Value pretraining for `config.critic` with `changes`. Raises ValueError without a critic.

    On Monte-Carlo returns and the plain error: there is no V_old yet, and no V to bootstrap from.
    Source: S3AC (2610.35518); VC-PPO (2503.01491) for lambda 1.
    """
    if config.recipe.critic is None:
        raise ValueError("this recipe has no critic to pretrain")
    role = make_critic(config, **{"lr": config.value_pretraining.lr} | changes)
    spec = dataclasses.replace(config.recipe.critic, clip=None, lam=1.0)
    micro_rows = config.train.micro_rows
    return Pretraining(
        role=role,
        targets=_targets(spec),
        step=steps.make_critic_step(
            role.network, spec, role.tx, clip=role.clip, micro_rows=micro_rows
        ),
        values=score.make_values(role.network, micro_rows=micro_rows),
    )


def _targets(spec: CriticSpec) -> Callable[..., Any]:
    """Packed -> critic batch whose V_old nobody has read yet."""
    return jax.jit(functools.partial(critic_batch, spec, values_old=None))


def make_programs(config: RunConfig, like: Programs | None = None) -> Programs:
    """The programs of this config. like: others, taken over as far as they are the same.

    All of them are when the configs differ in the seed alone. Source: ours.
    """
    same = taken_over(config, like)
    actor = same("actor", make_actor, "model", "actor")
    critic = same("critic", make_critic, "model", "critic", "recipe.critic")
    pretraining = same(
        "pretraining",
        lambda config: config.recipe.critic and make_pretraining(
            config, warmup_steps=config.value_pretraining.warmup_steps
        ),
        "model", "critic", "recipe.critic", "value_pretraining", "train.micro_rows", "mesh",
    )  # fmt: skip
    recipe, temperature = config.recipe, config.rollout.temperature
    reading = {"temperature": temperature, "micro_rows": config.train.micro_rows}
    read = ("model", "rollout.temperature", "train.micro_rows", "mesh")
    return Programs(
        config=config,
        actor=actor,
        critic=critic,
        pretraining=pretraining,
        score=same(
            "score",
            lambda config: score.make_score(
                actor.network, critic.network if recipe.reads_values else None, **reading
            ),
            *read, "recipe.reads_values",
        ),
        score_actor=same(
            "score_actor", lambda _: score.make_score(actor.network, None, **reading), *read
        ),
        first_targets=same(
            "first_targets",
            lambda _: recipe.critic and _targets(recipe.critic),
            "recipe.critic", "mesh",
        ),
        prompt_values=same(
            "prompt_values", lambda _: score.make_prompt_values(critic.network), "model", "mesh"
        ),
        drift=same(
            "drift",
            lambda config: score.make_drift(
                actor.network, num_responses=config.train.batch_prompts, **reading
            ),
            *read, "train.batch_prompts",
        ),
        prepare=same(
            "prepare",
            lambda config: make_prepare(
                recipe, num_responses=config.batch_responses, health=config.watch.health
            ),
            "recipe", "batch_responses", "mesh", "watch.health",
        ),
        actor_step=same(
            "actor_step",
            lambda config: steps.make_actor_step(
                actor.network, recipe.surrogate, actor.tx, clip=actor.clip,
                health=config.watch.health, **reading,
            ),
            *read, "actor", "recipe.surrogate", "watch.health",
        ),
        critic_step=same(
            "critic_step",
            lambda config: recipe.critic and steps.make_critic_step(
                critic.network, recipe.critic, critic.tx, clip=critic.clip,
                micro_rows=config.train.micro_rows, health=config.watch.health,
            ),
            *read, "critic", "recipe.critic", "watch.health",
        ),
    )  # fmt: skip


def dispatched_in_order(programs: Programs) -> Programs:
    """The same for several threads, none of whose programs get mixed up on the devices.

    Source: ours: what a run calls while a thread makes the next tick's batch.
    """
    called = (
        "score", "score_actor", "first_targets", "prompt_values", "prepare", "actor_step",
        "critic_step",
    )  # fmt: skip
    return dataclasses.replace(
        programs, **{name: in_order(getattr(programs, name)) for name in called}
    )


def taken_over(config: RunConfig, like: Programs | None) -> Callable[..., Any]:
    """part(name, make, *fields): that of `like` when these config fields agree, or make(config).

    Source: ours.
    """

    def part(name: str, make: Callable[[RunConfig], Any], *fields: str) -> Any:
        agree = like is not None and all(
            operator.attrgetter(field)(config) == operator.attrgetter(field)(like.config)
            for field in fields
        )
        return getattr(like, name) if agree else make(config)

    return part


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
    return learner_maker(role, mesh)(key, start or {})


@functools.lru_cache(maxsize=16)
def learner_maker(role: Role, mesh: Mesh) -> Callable[[PRNGKeyArray, PyTree], Learner]:
    """make(key, start): what `fresh_learner` compiles. Source: ours."""
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_learner(role, mesh))

    def make(key: PRNGKeyArray, start: PyTree) -> Learner:
        params = _replace(role.network.init(key), start)
        return make_learner(params, role.tx, role.frozen)

    return jax.jit(make, out_shardings=places)


def _replace(params: PyTree, start: PyTree) -> PyTree:
    replaced = dict(params)
    for name, child in start.items():
        if isinstance(child, dict):
            replaced[name] = _replace(params[name], child)
        else:
            replaced[name] = jnp.asarray(child, params[name].dtype)
    return replaced
