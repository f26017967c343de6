"""Runs a study, or goes on with it: recipes, seeds and changes; tables and figures at the end.

  python launch/study.py --config=configs/study_tiny.py --workdir=runs/study

Presets of that config say which part: --config=configs/study_tiny.py:main
"""

from absl import flags

from s3ac_jax.config.flags import run_app
from s3ac_jax.config.study import study_from_config_dict

FLAGS = flags.FLAGS


def main(_: list[str]) -> None:
    config = study_from_config_dict(FLAGS.config)
    # Not above: a typo in the config is told before flax and orbax are loaded.
    from s3ac_jax.train.study import run_study

    run_study(config, FLAGS.workdir)


if __name__ == "__main__":
    run_app(main)
