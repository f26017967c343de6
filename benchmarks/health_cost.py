"""What watching a run costs: a tick with the critic's health, kept responses, trajectories and trip
wires against one without, interleaved in one run.

  python benchmarks/health_cost.py --config=configs/tiny.py --workdir=/tmp/health_cost

Both arms train on the same responses, for what is measured changes nothing. A tick's seconds are
those of all that a run does in it: the tick itself, reading its metrics, writing the files. Prints
the median of the ratios, round by round, and the middle half of them. The first two ticks of each
arm (compilation) are left out.
"""

import contextlib
import dataclasses
import statistics
import time
from pathlib import Path

import jax
from absl import flags

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.config.flags import run_app
from s3ac_jax.config.watch import WatchConfig
from s3ac_jax.core.metrics import finalize
from s3ac_jax.report.log import MetricLog
from s3ac_jax.train import policies
from s3ac_jax.train.build import build
from s3ac_jax.train.online import STAGE, fresh_state
from s3ac_jax.train.tick import run_tick
from s3ac_jax.train.watch import Watcher

FLAGS = flags.FLAGS
ROUNDS = 60


def main(_: list[str]) -> None:
    own = from_config_dict(FLAGS.config)
    off = WatchConfig(health=False)
    arms = {
        "off": dataclasses.replace(own, watch=off),
        "on": dataclasses.replace(own, watch=dataclasses.replace(own.watch, trajectories=0)),
        "on, 4 trajectories": dataclasses.replace(
            own, watch=dataclasses.replace(own.watch, trajectories=4)
        ),
    }
    key, like = jax.random.key(own.seed), None
    parts, states, logs, watchers, seconds = {}, {}, {}, {}, {}
    with contextlib.ExitStack() as opened:
        for name, config in arms.items():
            like = parts[name] = build(config, like)
            folder = Path(FLAGS.workdir) / name.replace(", ", "_").replace(" ", "_")
            folder.mkdir(parents=True, exist_ok=True)
            base = policies.load_policies(
                policies.embedded_folder(), like.actor.network, ("late",)
            )["late"]
            states[name] = fresh_state(like, base, {"backbone": base})
            logs[name] = opened.enter_context(contextlib.closing(MetricLog(folder)))
            watchers[name] = opened.enter_context(Watcher(like, folder, STAGE, 0, [], None))
            seconds[name] = []
        for number in range(ROUNDS + 2):
            # Now one comes first, now another.
            for name in [*arms][:: 1 if number % 2 else -1]:
                start = time.perf_counter()
                with parts[name].on_mesh():
                    states[name], report, host = run_tick(
                        parts[name], states[name], key, None, watchers[name].see
                    )
                metrics = finalize(report) | watchers[name].told() | host
                logs[name].write(number, metrics, STAGE)
                watchers[name].judge({"tick": number, **metrics})
                if number >= 2:
                    seconds[name].append(time.perf_counter() - start)
    for name, ticks in seconds.items():
        ratios = [a / b for a, b in zip(ticks, seconds["off"], strict=True)]
        low, mid, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:20s} {1000 * statistics.median(ticks):7.1f} ms a tick  "
            f"ratio {mid:.3f} ({low:.3f}-{high:.3f})  least {min(ticks) / min(seconds['off']):.3f}"
        )


if __name__ == "__main__":
    run_app(main)
