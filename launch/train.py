"""Trains one run, or goes on with it: warm start, value pretraining, then S3AC tick by tick.

  python launch/train.py --config=configs/tiny.py:s3ac_single --workdir=runs/tiny

Any number of the config can be set beside it: --config.critic.lr=1e-3
"""

from absl import flags

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.config.flags import run_app

FLAGS = flags.FLAGS


def main(_: list[str]) -> None:
    config = from_config_dict(FLAGS.config)
    # Not above: a typo in the config is told before flax and orbax are loaded.
    from s3ac_jax.train.run import run

    run(config, FLAGS.workdir)


if __name__ == "__main__":
    run_app(main)
