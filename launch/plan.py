"""Plans a run on a machine that is not there: memory, time and wires of every step, chip-hours.

  python launch/plan.py --config=configs/qwen1_5b.py --topology=v5e:4x4
  python launch/plan.py --config=configs/tiny.py:s3ac_single --topology=cpu:4 --config.mesh.fsdp=4

Nothing is run and no accelerator is needed: XLA compiles each program for the machine named.
Exit code 1 when a step does not fit. docs/plan.md says more.
"""

from absl import flags

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.config.flags import run_app

FLAGS = flags.FLAGS
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "The machine: v5e:4x4, v5e:1x1, 2*v5p:4x4x4 (two slices), h100:2x8, cpu:4."
)
_FULL = flags.DEFINE_bool("full", False, "Compile with XLA's default effort, 2 to 4 times as long.")
_SEARCH = flags.DEFINE_bool("search", False, "Look for the largest micro_rows and pack_tokens too.")
_TICKS = flags.DEFINE_integer("ticks", None, "Ticks to add up, train.num_ticks if left out.")
_USD = flags.DEFINE_float("usd_per_chip_hour", None, "What an hour of a chip costs.")


def main(_: list[str]) -> None:
    config = from_config_dict(FLAGS.config)
    # Not above: a typo in the config is told before flax and orbax are loaded.
    from s3ac_jax.train.plan.console import plan
    from s3ac_jax.train.plan.watching import watched

    if watched():
        return
    plan(
        config, _TOPOLOGY.value or "", full=_FULL.value, search=_SEARCH.value, ticks=_TICKS.value,
        usd_per_chip_hour=_USD.value,
    )  # fmt: skip


if __name__ == "__main__":
    run_app(main, ("config", "topology"))
