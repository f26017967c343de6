"""One-step-off: the rollouts of the next tick are made while this one trains."""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from s3ac_jax.core.types import PyTree, RunState
from s3ac_jax.parallel.mesh import shardings
from s3ac_jax.rollout.local import LocalRollout
from s3ac_jax.train.build import Parts
from s3ac_jax.train.gather import Gathered
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.phases import PhaseTimes
from s3ac_jax.train.tick import gather_batch, judge_of

# How often a call in progress is told to end: the first time may come before it has begun.
_ABORT_AGAIN_S = 0.1


@dataclasses.dataclass(frozen=True)
class Made:
    """A batch that was made ahead. host: how long its phases took, and how much of that while the
    trainer did something else. Source: ours."""

    batch: Gathered
    host: dict[str, float]

    @property
    def waited(self) -> float:
        """Seconds that the trainer waited for it. Source: ours."""
        return self.host.get("time/wait", 0.0)


class Ahead:
    """Makes at most one batch at a time, in a thread of its own.

    The weights that sample and judge are copied before the trainer donates them. What a batch is
    follows from them, the history and the tick's key alone, as in a run without this.
    Source: PipelineRL and AReaL run ahead without a bound; one step off as in Asynchronous RLHF
    (2410.18252), section 3.
    """

    def __init__(self, parts: Parts, run_key: PRNGKeyArray):
        # As numbers: an array of the trainer's mesh is none of the sampler's.
        self._parts, self._key = parts, np.asarray(jax.random.key_data(run_key))
        rollout = parts.rollout
        apart = rollout.mesh if isinstance(rollout, LocalRollout) else None
        self._mesh = parts.mesh if apart is None else apart
        self._copied = _copier(parts, apart)
        self._given_up = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._future: concurrent.futures.Future[tuple[Gathered, PhaseTimes, float]] | None = None

    def start(self, state: RunState, judge: PyTree) -> None:
        """Begins the batch of the state's tick with the state's present weights.

        judge: weights of the critic that selects prompts, the state's own when None. Raises
        RolloutError when the weights don't arrive. Source: ours.
        """
        # The tick before has brought forth no other weights yet.
        self._parts.rollout.update_weights(params_of(state.actor), int(state.tick) - 1)
        # Of the state, the thread looks at history, cursor and tick alone.
        self._future = self._pool.submit(self._make, state, self._copied(judge_of(state, judge)))

    def _make(self, state: RunState, judge: PyTree) -> tuple[Gathered, PhaseTimes, float]:
        times = PhaseTimes()
        # A thread has a context of its own.
        with jax.set_mesh(self._mesh):
            key = jax.random.wrap_key_data(self._key)
            batch = gather_batch(self._parts, state, key, judge, times, wanted=self._is_wanted)
        return batch, times, time.perf_counter()

    def _is_wanted(self) -> bool:
        return not self._given_up.is_set()

    def take(self) -> Made | None:
        """The batch that was begun, once it is there; None if none was.

        Raises what making it raised. Source: ours.
        """
        if self._future is None:
            return None
        future, self._future = self._future, None
        asked = time.perf_counter()
        batch, times, ended = future.result()
        took = times.since_start(ended)
        waited = max(0.0, ended - asked)
        host = times.seconds | {
            "time/gather": took, "time/wait": waited, "overlap": max(0.0, took - waited) / took
        }  # fmt: skip
        return Made(batch, host)

    def close(self) -> None:
        """Gives up a batch that is being made; it would be another by the time it is wanted.

        Source: ours.
        """
        self._given_up.set()
        while self._future is not None:
            # Again: the thread may have been about to ask for responses.
            self._parts.rollout.abort()
            if concurrent.futures.wait([self._future], _ABORT_AGAIN_S).done:
                self._future = None
        self._pool.shutdown()


def _copier(parts: Parts, apart: Mesh | None) -> Callable[[PyTree], Any]:
    """weights of a critic -> a copy where selection reads them."""
    network = parts.critic.network
    if apart is None:
        return lambda judge: jax.tree.map(jnp.copy, judge)
    places = shardings(network.axes, network.abstract, apart, whole=True)
    return lambda judge: judge if judge is None else jax.device_put(judge, places)
