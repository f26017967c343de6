"""One process of a run of several: ticks of a very small run, what it drew and graded on record.

python hosts_worker.py '{"kind": "dense", "workdir": ..., "wanted": {...}, ...}'
"""

import collections
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from s3ac_jax.algos.recipe import s3ac_group
from s3ac_jax.config.evaluation import SuiteConfig, TrainingEvaluationConfig
from s3ac_jax.core.errors import RunError
from s3ac_jax.core.trees import named_leaves, nest
from s3ac_jax.core.types import Scored
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.io.workdir import Workdir
from s3ac_jax.models.spec import MoeSpec
from s3ac_jax.parallel import hosts
from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.report.live import make_progress
from s3ac_jax.report.log import MetricLog
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.scheduler.select import Scheduler
from s3ac_jax.train import online
from s3ac_jax.train.build import build
from s3ac_jax.train.hosts import Wanted, run_on_hosts
from s3ac_jax.train.interrupt import StopRequest
from tests.helpers import run_config, tiny_spec

TICKS, SAVE_EVERY = 5, 2
# Sums of two parts only: those of more may differ in their order between processes.
MESHES = {"dense": MeshSpec(data=2, tensor=2), "moe": MeshSpec(data=2, expert=2)}


def config_of(kind):
    """Five ticks of eight responses, saved every second one."""
    moe = None
    if kind == "moe":
        moe = MoeSpec(num_experts=4, per_token=2, width=6, shared_width=8, matmul="dense")
    recipe = dataclasses.replace(s3ac_group, responses_per_prompt=2, replay_routing=kind == "moe")
    # More programs in a tick than a CPU device takes at a time.
    config = run_config(
        mesh=MESHES[kind], model=tiny_spec(num_layers=2, moe=moe), recipe=recipe, num_ticks=TICKS,
        minibatches=4 if kind == "dense" else 1,
    )  # fmt: skip
    cadence = dataclasses.replace(
        config.cadence, save_every=SAVE_EVERY, evaluate_every=TICKS, keep_checkpoints=TICKS
    )
    config = dataclasses.replace(config, cadence=cadence)
    if kind == "dense":
        suite = SuiteConfig(samples=2, max_response_tokens=0)
        evaluation = TrainingEvaluationConfig(suites={"held_out": suite}, every=TICKS, chunk_rows=6)
        config = dataclasses.replace(config, evaluation=evaluation)
    return config


def weights(network, seed):
    """Random ones, the same everywhere, as a run reads them from a file."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, leaf in named_leaves(network.abstract).items():
        # A critic that is sure of itself, so that the selection passes some prompts over.
        std = 3.0 if name == "value_head" else 0.3
        made[name] = (std * rng.normal(size=leaf.shape) + 0.05).astype(np.float32)
    return nest(made)


class Watched:
    """While entered: what was drawn and graded, kept; a verifier that a random policy pleases.

    A response is right where its tokens say so, whoever grades it. A process that is to die does so
    when it draws.
    """

    def __init__(self, dies=False):
        self.draws, self.graded, self._dies = [], collections.Counter(), dies
        self._draw, self._grade = Scheduler.draw, ArithmeticVerifier.grade

    def __enter__(self):
        def draw(scheduler, key, stats, cursor, tick, values, count):
            if self._dies:
                os.kill(os.getpid(), signal.SIGKILL)
            made = self._draw(scheduler, key, stats, cursor, tick, values, count)
            self.draws.append([tick, made.index.tolist(), made.seen.tolist()])
            return made

        def grade(verifier, rollout):
            for tokens in rollout.tokens:
                self.graded[tokens.tobytes().hex()] += 1
            success = rollout.tokens.sum(axis=1) % 3 == 0
            reward = np.where(success, 1.0, -1.0).astype(np.float32)
            found = self._grade(verifier, rollout)
            return Scored(rollout, reward, success, found.valid, found.reasons)

        Scheduler.draw, ArithmeticVerifier.grade = draw, grade
        return self

    def __exit__(self, *_):
        Scheduler.draw, ArithmeticVerifier.grade = self._draw, self._grade


def train(kind, workdir, dies=False, told_to_stop=False):
    """The run, or what is left of it; leaves drawn_<process>.json in the workdir."""
    config = config_of(kind)
    parts = build(config)
    folder = Workdir(workdir)
    folder.claim({"kind": kind}, set())
    log = MetricLog(folder.path, writes=hosts.is_first())
    checkpoints = Checkpoints(folder.path / "checkpoints", TICKS)
    try:
        with (
            Watched(dies) as watched,
            make_progress(["online"], shown=False) as progress,
            StopRequest() as stop,
            parts.on_mesh(),
        ):
            loop = online.OnlineLoop(parts, log, checkpoints, progress)
            start = (weights(role.network, n) for n, role in enumerate((parts.actor, parts.critic)))
            begun = loop.begin(*start)
            if told_to_stop:
                os.kill(os.getpid(), signal.SIGTERM)
            loop.go_on(*begun, stop, "COMMAND")
        told = {"draws": watched.draws, "graded": watched.graded}
        (folder.path / f"drawn_{hosts.index()}.json").write_text(json.dumps(told))
    finally:
        log.close()
        checkpoints.close()
        parts.close()
        folder.close()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    workdir = Path(asked["workdir"])
    try:
        run_on_hosts(
            Wanted(**asked["wanted"]),
            str(workdir),
            lambda: train(asked["kind"], workdir, **asked["extra"]),
        )
    except RunError as error:  # as the launch apps do
        print(f"{error.prefix}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
