"""Where a tick's time goes, for several packings, interleaved in one run.

  python benchmarks/tick.py --config=configs/tiny.py --workdir=/tmp/unused

Prints the median seconds of each phase over the rounds, and each packing's tick as a ratio to the
config's own. Every packing trains a learner of its own from the embedded base policy; the first
two ticks of each (compilation) are left out.
"""

import dataclasses
import statistics

import jax
from absl import flags

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.config.flags import run_app
from s3ac_jax.train import policies
from s3ac_jax.train.build import build
from s3ac_jax.train.online import fresh_state
from s3ac_jax.train.tick import run_tick

FLAGS = flags.FLAGS
ROUNDS = 8
PACKINGS = ((64, 4), (64, 16), (128, 4), (128, 8), (128, 16), (256, 4))


def main(_: list[str]) -> None:
    own = from_config_dict(FLAGS.config)
    key = jax.random.key(own.seed)
    arms, seconds = [], {}
    for pack_tokens, micro_rows in ((own.train.pack_tokens, own.train.micro_rows), *PACKINGS):
        train = dataclasses.replace(own.train, pack_tokens=pack_tokens, micro_rows=micro_rows)
        parts = build(dataclasses.replace(own, train=train))
        if (pack_tokens, micro_rows) not in seconds:
            arms.append((pack_tokens, micro_rows, parts))
            seconds[pack_tokens, micro_rows] = []
    network = arms[0][2].actor.network
    base = policies.load_policies(policies.embedded_folder(), network, ("late",))["late"]
    states = [fresh_state(parts, base, {"backbone": base}) for _, _, parts in arms]
    for number in range(ROUNDS + 2):
        for arm, (pack_tokens, micro_rows, parts) in enumerate(arms):
            with parts.on_mesh():
                states[arm], _, host = run_tick(parts, states[arm], key)
            if number >= 2:
                seconds[pack_tokens, micro_rows].append(host)
    reference = None
    for (pack_tokens, micro_rows), ticks in seconds.items():
        median = {
            name: statistics.median(tick[name] for tick in ticks)
            for name in ticks[0]
            if name.startswith("time/")
        }
        reference = reference or median["time/tick"]
        phases = "  ".join(f"{name[5:]} {value:.3f}" for name, value in median.items())
        ratio = median["time/tick"] / reference
        print(f"pack {pack_tokens:4d} rows {micro_rows:3d}  {phases}  ratio {ratio:.2f}")


if __name__ == "__main__":
    run_app(main)
