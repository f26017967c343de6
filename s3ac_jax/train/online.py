"""The online loop: ticks, metrics one tick late, evaluation, checkpoints, exact resume."""

import dataclasses
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from s3ac_jax.config.boundary import ConfigError
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.metrics import finalize
from s3ac_jax.core.types import PromptStats, PyTree, RunState
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.parallel import hosts
from s3ac_jax.parallel.mesh import replicated
from s3ac_jax.report.live import Progress
from s3ac_jax.report.log import MetricLog, read
from s3ac_jax.report.tripwires import Coverage, Trip
from s3ac_jax.rollout.backend import fingerprint_of
from s3ac_jax.scheduler.select import empty_stats, start_cursor
from s3ac_jax.train import keys
from s3ac_jax.train.ahead import Ahead, Made
from s3ac_jax.train.build import Parts
from s3ac_jax.train.evaluation.harness import evaluate_suites
from s3ac_jax.train.interrupt import Interrupted, StopRequest
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.offload import Parking
from s3ac_jax.train.phases import PhaseTimes
from s3ac_jax.train.profile import Profile
from s3ac_jax.train.programs import abstract_learner, fresh_learner
from s3ac_jax.train.tick import evaluate, gather_for_tick, learn_from, readable, run_tick
from s3ac_jax.train.watch import Tripped, Watcher, told

STAGE = "online"


def fresh_state(parts: Parts, policy: PyTree, critic: PyTree | None) -> RunState:
    """The state before tick 0: base policy, pretrained critic (or none), no history.

    The learners lie where they do between two ticks.
    Source: ours; SPO (2509.13232) starts its history from reference rollouts.
    """
    key, parking = jax.random.key(parts.config.seed), Parking(parts.config.train.offload)
    band = hosts.from_host(np.full(2, np.nan, np.float32), replicated(parts.mesh))
    # One after the other, so that each has the devices for itself.
    learner = parking.asleep(fresh_learner(parts.actor, parts.mesh, key, start=policy))
    judge = critic and fresh_learner(parts.critic, parts.mesh, key, start=critic)
    return RunState(
        actor=parking.readable(learner),
        critic=judge and parking.asleep(judge),
        stats=start_stats(parts),
        cursor=start_cursor(),
        entropy_band=band,
        tick=np.int32(0),
    )


def start_stats(parts: Parts) -> PromptStats:
    """No history, or the one that the recipe's selection starts from. Source: ours."""
    select, num_prompts = parts.config.recipe.select, len(parts.train.prompts)
    remembered = parts.config.rollout.max_response_tokens if select.tracks_drift else 0
    samples, rate = parts.config.reference.samples, parts.reference
    known = np.zeros(num_prompts, np.float32) if rate is None else rate * samples
    successes, attempts = select.start(known, np.full(num_prompts, samples))
    return dataclasses.replace(
        empty_stats(num_prompts, last_tokens=remembered),
        successes=np.asarray(successes), attempts=np.asarray(attempts),
    )  # fmt: skip


def abstract_state(parts: Parts) -> RunState:
    """Shapes and shardings of the state between two ticks, to restore a checkpoint into.

    Source: ours.
    """
    parking = Parking(parts.config.train.offload)
    band = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=replicated(parts.mesh))
    has_critic = parts.config.recipe.critic is not None
    return RunState(
        actor=parking.readable(abstract_learner(parts.actor, parts.mesh)),
        critic=parking.asleep(abstract_learner(parts.critic, parts.mesh)) if has_critic else None,
        stats=start_stats(parts),
        cursor=start_cursor(),
        entropy_band=band,
        tick=np.int32(0),
    )


def check_history(state: RunState, command: str) -> None:
    """Raises HostError when hosts remember different outcomes of the prompts before this tick.

    Source: ours: all draw the same prompts as long as this is so, and a host that went another way
    would wait for the others forever.
    """
    stats, tick = state.stats, int(state.tick)
    told = {
        "successes": stats.successes, "attempts": stats.attempts, "updated": stats.updated,
        "epoch": state.cursor.epoch, "offset": state.cursor.offset,
    }  # fmt: skip
    facts = {name: zlib.crc32(np.ascontiguousarray(x).tobytes()) for name, x in told.items()}
    hosts.check_same(
        "history", f"the history before tick {tick}", facts,
        f"hosts with different versions or faulty memory? go on from what is saved with: {command}",
    )  # fmt: skip


def has_suites(config: RunConfig, tick: int) -> bool:
    """Whether the suites are answered before this tick. Source: ours."""
    every = config.evaluation.every
    return every > 0 and tick % every == 0


def is_saved(config: RunConfig, tick: int) -> bool:
    """Whether the config has the state saved before this tick, on its own or for the suites.

    Source: ours: where a run that was killed goes on.
    """
    return tick % config.cadence.save_every == 0 or has_suites(config, tick)


def judge_params(parts: Parts, critic: PyTree | None) -> PyTree:
    """The weights that selection asks instead of the learning critic's; None for those.

    critic: what training starts from. Source: ours: to see what selection owes to the critic.
    """
    kind = parts.config.scheduler.judge
    if kind == "learning":
        return None
    key = keys.stage_key(parts.config.seed, keys.JUDGE)
    start = critic if kind == "stale" else None
    return params_of(fresh_learner(parts.critic, parts.mesh, key, start=start))


class OnlineLoop:
    """Runs ticks from the latest checkpoint, or from `start` when there is none.

    coverage: of what the critic was pretrained on, None where that is not known. profile: of one
    tick, None for none.
    Source: ours: everything that a tick reads is in RunState or follows from (seed, tick).
    """

    def __init__(
        self, parts: Parts, log: MetricLog, checkpoints: Checkpoints, progress: Progress,
        coverage: Coverage | None = None, profile: Profile | None = None,
    ):  # fmt: skip
        self.parts, self.log = parts, log
        self.checkpoints, self.progress = checkpoints, progress
        self.coverage, self.profile = coverage, profile or Profile(None)
        self._pending: tuple[int, dict[str, Any], dict[str, float]] | None = None
        self._trips: list[tuple[int, Trip]] = []
        self._saved: int | None = None
        self._warned = False

    def _restore(self, policy: PyTree, critic: PyTree | None) -> RunState:
        latest = self.checkpoints.latest()
        if latest is None:
            self.log.rewind(STAGE, 0)
            return fresh_state(self.parts, policy, critic)
        if latest > self.parts.config.train.num_ticks:
            raise ConfigError(
                f"train.num_ticks is {self.parts.config.train.num_ticks}, but this run is already "
                f"at tick {latest}; raise it or use another --workdir"
            )
        state, _ = self.checkpoints.restore(latest, abstract_state(self.parts))
        self.log.rewind(STAGE, latest)
        self.progress.note(f"resumed at tick {latest}")
        self._saved = latest
        return state

    def run(
        self, policy: PyTree, critic: PyTree | None, stop: StopRequest, command: str
    ) -> RunState:
        """The state after the last tick of the config, from these weights or a checkpoint.

        Raises as `go_on`. Source: ours.
        """
        return self.go_on(*self.begin(policy, critic), stop, command)

    def begin(self, policy: PyTree, critic: PyTree | None) -> tuple[RunState, PyTree]:
        """The latest checkpoint's state, or one of these weights, and the weights that judge.

        Both are copies: the caller may let go of what it gave. Source: ours.
        """
        return self._restore(policy, critic), judge_params(self.parts, critic)

    def go_on(self, state: RunState, judge: PyTree, stop: StopRequest, command: str) -> RunState:
        """The state after the last tick of the config; the one given is donated.

        Raises Interrupted, after saving, when `stop` was asked for, and Tripped when a trip wire
        ends the run. Source: ours.
        """
        config = self.parts.config
        run_key = jax.random.key(config.seed)
        ahead = Ahead(self.parts, run_key) if config.rollout.ahead else None
        try:
            with self._watcher(int(state.tick)) as watcher:
                return self._ticks(state, judge, run_key, ahead, watcher, stop, command)
        finally:
            if ahead is not None:
                ahead.close()

    def _watcher(self, start: int) -> Watcher:
        lines = read(self.log.path) if hosts.is_first() else []
        history = [line for line in lines if line["stage"] == STAGE]
        return Watcher(self.parts, self._folder, STAGE, start, history, self.coverage)

    @property
    def _folder(self) -> Path:
        return self.log.path.parent

    def _ticks(
        self, state: RunState, judge: PyTree, run_key: PRNGKeyArray, ahead: Ahead | None,
        watcher: Watcher, stop: StopRequest, command: str,
    ) -> RunState:  # fmt: skip
        config = self.parts.config
        evaluation_key = keys.stage_key(config.seed, keys.EVALUATION)
        self.progress.stage(STAGE, config.train.num_ticks)
        while (tick := int(state.tick)) < config.train.num_ticks:
            check_history(state, command)
            asked = stop.asked
            due = asked or is_saved(config, tick)
            if due:
                self._flush(watcher)
            # Before anything is saved: a resumed run must not find that it has been told.
            state = self._react(state, watcher, command)
            if due:
                self._save(state, watcher)
            if asked:
                raise Interrupted(f"stopped; tick {tick} is saved, go on with: {command}")
            # Before anything else asks for responses.
            made = None if ahead is None else ahead.take()
            held_out: dict[str, float] = {}
            if tick % config.cadence.evaluate_every == 0:
                held_out = evaluate(self.parts, params_of(state.actor), evaluation_key)
            if has_suites(config, tick):
                held_out |= self._suites(state, watcher, stop, command)
            with self.profile.of(tick):
                if ahead is None:
                    state, report, host = run_tick(self.parts, state, run_key, judge, watcher.see)
                else:
                    state, report, host = self._overlapped(
                        state, judge, run_key, ahead, made, watcher
                    )
            self._flush(watcher)
            self._pending = (tick, report, host | held_out)
        self._save(state, watcher)
        self._tell(watcher, int(state.tick))
        if self.profile.told:
            self.progress.note(self.profile.told)
        # The curve's last point: the policy after the last update.
        held_out = evaluate(self.parts, params_of(state.actor), evaluation_key)
        held_out |= self._suites(state, watcher, stop, command)
        self.log.write(int(state.tick), held_out, STAGE)
        self.progress.update(int(state.tick), held_out)
        return state

    def _overlapped(
        self, state: RunState, judge: PyTree, run_key: PRNGKeyArray, ahead: Ahead,
        made: Made | None, watcher: Watcher,
    ) -> tuple[RunState, dict[str, Any], dict[str, float]]:  # fmt: skip
        """A tick on a batch that was made ahead, if there is one, while the next one is made.

        None is made ahead for a tick that is saved before: a run that goes on from there has none.
        """
        config, times = self.parts.config, PhaseTimes(0.0 if made is None else made.waited)
        state = readable(self.parts, state)
        if made is None:
            made = Made(gather_for_tick(self.parts, state, run_key, judge, times), {})
        batch, after = made.batch, int(state.tick) + 1
        if after < config.train.num_ticks and not is_saved(config, after):
            following = dataclasses.replace(
                state, stats=batch.stats, cursor=batch.cursor, tick=np.int32(after)
            )
            ahead.start(following, judge)
        state, report, host = learn_from(self.parts, state, batch, run_key, times, watcher.see)
        return state, report, host | made.host

    def _suites(
        self, state: RunState, watcher: Watcher, stop: StopRequest, command: str
    ) -> dict[str, float]:
        """The main numbers of the run's suites, none without suites.

        Records of every sample stay in the workdir; those of other weights are made anew.
        """
        suites, tick, params = self.parts.suites, int(state.tick), params_of(state.actor)
        if suites is None:
            return {}
        # Many long responses may take hours, and what a stop leaves open is made when it goes on.
        self._save(state, watcher)
        self.parts.rollout.update_weights(params, 0)
        weights = fingerprint_of(self.parts.actor.network.in_compute_dtype(params))

        def on_progress(suite: str, done: int, total: int, numbers: dict[str, float]) -> None:
            if done < total and not numbers:
                self.progress.note(f"tick {tick}: {suite}, {total} responses")
            if stop.asked:
                raise Interrupted(
                    f"stopped; tick {tick} and {done} of {total} responses to {suite} are saved, "
                    f"go on with: {command}"
                )

        folder = self._folder / "evaluations" / f"tick_{tick:06d}"
        found = evaluate_suites(
            suites, self.parts.rollout, folder, tick, on_progress, weights=weights
        )
        averages = [(name.split("/")[1], found[name]) for name in found if name.endswith("/avg")]
        told = ", ".join(f"{suite} {100 * value:.1f} %" for suite, value in averages)
        self.progress.note(f"tick {tick}: {told}")
        return found

    def _flush(self, watcher: Watcher) -> None:
        """Writes the metrics of the tick before, and asks the trip wires."""
        if self._pending is None:
            return
        tick, report, host = self._pending
        self._pending = None
        metrics = finalize(report) | watcher.told() | host
        self.log.write(tick, metrics, STAGE)
        self.progress.update(tick + 1, metrics)
        self._trips += [(tick, trip) for trip in watcher.judge({"tick": tick, **metrics})]
        if metrics["missing_prompts"] and not self._warned:
            self._warned = True
            self.progress.note(
                f"tick {tick}: after {self.parts.config.recipe.keep.max_rounds} rounds "
                f"{metrics['missing_prompts']:.0f} of {self.parts.config.train.batch_prompts} "
                "prompts were still missing, for no group with different outcomes was found; "
                "trained on the others (from here on see missing_prompts in metrics.jsonl)"
            )

    def _tell(self, watcher: Watcher, before: int, action: str = "tell") -> list[str]:
        """Says and records what tripped; the lines said."""
        trips, self._trips = self._trips, []
        for tick, trip in trips:
            watcher.record(tick, trip, action, before)
            self.progress.note(told(tick, trip))
        return [f"{trip.wire} at tick {tick}: {trip.verdict}" for tick, trip in trips]

    def _react(self, state: RunState, watcher: Watcher, command: str) -> RunState:
        """Does about trip wires what the config says; the state given is donated."""
        wires = self.parts.config.watch.tripwires
        if not self._trips:
            return state
        tick, action, target = int(state.tick), wires.action, None
        if action != "tell":
            # The last tick of these weights belongs to them.
            self._flush(watcher)
        if action == "rollback":
            target = self._last_good(min(tick for tick, _ in self._trips) - wires.window)
            if target is None or watcher.rollbacks >= wires.max_rollbacks:
                action = "stop"
        said = self._tell(watcher, tick, action)
        if action == "tell":
            return state
        if action == "rollback" and target is not None:
            state = self._back_to(target, state)
            watcher.begin_anew()
            self.progress.note(
                f"went back to the weights of tick {target}; goes on with the prompts of tick "
                f"{tick} (rollback {watcher.rollbacks} of {wires.max_rollbacks})"
            )
            self._save(state, watcher)
            return state
        self._save(state, watcher)
        why = "" if wires.action == "stop" else " (nothing to go back to, or went back too often)"
        raise Tripped(
            f"stopped by a trip wire{why}, {'; '.join(said)}; tick {tick} is saved, go on with: "
            f"{command} (--config.watch.tripwires.action=tell goes on whatever trips)"
        )

    def _last_good(self, tick: int) -> int | None:
        """The newest checkpoint of before what the wires looked at, or else the oldest there is."""
        steps = hosts.from_first("tripwires", self.checkpoints.steps)
        return max((step for step in steps if step <= tick), default=min(steps, default=None))

    def _back_to(self, target: int, state: RunState) -> RunState:
        """Learners and history of that checkpoint; its prompts are not asked again.

        Source: PaLM (2204.02311), section 5.1: what led to a spike is skipped.
        """
        cursor, tick = state.cursor, state.tick
        # Two states at a time may not fit.
        for leaf in jax.tree.leaves((state.actor, state.critic)):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        restored, _ = self.checkpoints.restore(target, abstract_state(self.parts))
        return dataclasses.replace(restored, cursor=cursor, tick=tick)

    def _save(self, state: RunState, watcher: Watcher) -> None:
        # First the metrics: what a checkpoint has behind it must be in the log.
        self._flush(watcher)
        tick = int(state.tick)
        if tick != self._saved:
            self.checkpoints.save(tick, state, {"tick": tick})
            self._saved = tick
