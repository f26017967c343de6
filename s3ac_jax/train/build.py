"""From a RunConfig to everything that a run is made of: its programs, its task, its mesh."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from s3ac_jax.algos.selection import Ranking
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import PyTree
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.parallel.hosts import from_host
from s3ac_jax.rollout.backend import RolloutBackend
from s3ac_jax.scheduler.select import Scheduler
from s3ac_jax.train.evaluation.suites import Prepared, prepare_suites
from s3ac_jax.train.programs import Programs, dispatched_in_order, make_programs, taken_over
from s3ac_jax.train.rollouts import make_rollout
from s3ac_jax.train.tasks import Split, Task, make_task


@dataclasses.dataclass(frozen=True)
class Parts(Programs):
    """What a run is made of, apart from its state.

    suites: what is evaluated inside training beside the held-out problems, None for nothing.
    reference: success rate of the base policy on each training prompt, None when not measured.
    Source: ours: everything that compiles or reads files is made once, here.
    """

    mesh: Mesh
    task: Task
    rollout: RolloutBackend
    scheduler: Scheduler
    suites: Prepared | None
    reference: np.ndarray | None

    @property
    def train(self) -> Split:
        """Prompts to learn from. Source: ours."""
        return self.task.train

    @property
    def held_out(self) -> Split:
        """Prompts to evaluate on. Source: ours."""
        return self.task.held_out

    def close(self, kept: "Parts | None" = None) -> None:
        """Ends threads, connections and processes, but not those that `kept` goes on with.

        Source: ours.
        """
        if kept is None or kept.rollout is not self.rollout:
            self.rollout.close()
        if kept is None or kept.task is not self.task:
            self.task.close()
        if self.suites is not None and (kept is None or kept.suites is not self.suites):
            self.suites.close()

    def place(self, tree: PyTree) -> PyTree:
        """Host arrays onto the mesh: [R, T] by rows, all else everywhere. Source: ours."""

        def put(x: Any) -> jax.Array:
            axes = ("rows",) + (None,) * (x.ndim - 1) if x.ndim >= 2 else (None,) * x.ndim
            spec = parallel.spec_of(axes, x.shape, self.mesh)
            return from_host(x, jax.sharding.NamedSharding(self.mesh, spec))

        return jax.tree.map(put, tree)

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """The mesh as context, so that logical axes find it. Source: ours."""
        return jax.set_mesh(self.mesh)


def build(config: RunConfig, like: Parts | None = None) -> Parts:
    """Makes all parts. Raises ValueError when the task or the mesh can't be had.

    like: parts of another run, whose compiled programs are taken over as far as they are the same:
    all of them when the configs differ in the seed alone.
    Source: ours.
    """
    same, programs = taken_over(config, like), make_programs(config, like)
    if config.rollout.ahead and not config.rollout.apart and config.mesh.num_devices > 1:
        # A thread asks the critic on the trainer's own devices.
        programs = dispatched_in_order(programs)
    # "model": the task compares its tokenizer with it. The others: demonstrations have to fit, and
    # what suites ask is nothing to train on.
    task = same(
        "task", make_task, "task", "start", "model", "rollout.max_response_tokens", "evaluation"
    )
    mesh = same("mesh", lambda config: parallel.make_mesh(config.mesh), "mesh")
    return Parts(
        **vars(programs),
        mesh=mesh,
        task=task,
        rollout=same(
            "rollout",
            lambda config: make_rollout(
                config, programs.actor.network, task.tokenizer.stop_ids, mesh
            ),
            "model", "rollout", "task", "start", "mesh", "records_routing",
        ),
        scheduler=Scheduler(
            config.recipe.select,
            num_prompts=len(task.train.prompts),
            stream=task.stream(config.seed, ranked=isinstance(config.recipe.select, Ranking)),
            batch_prompts=config.train.batch_prompts,
            candidates=config.scheduler.candidates,
            max_rounds=config.scheduler.max_rounds,
        ),
        # With another task there is another grader.
        suites=like.suites if like and like.task is task else _suites(config, task),
        reference=None,
    )  # fmt: skip


def _suites(config: RunConfig, task: Task) -> Prepared | None:
    if not config.evaluation.every:
        return None
    return prepare_suites(
        config.evaluation.of_run(config.rollout.max_response_tokens), task.tokenizer,
        task.template, held_out=task.held_out, grader=task.grader,
    )  # fmt: skip
