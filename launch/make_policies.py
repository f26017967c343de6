"""Remakes the base policies that ship with the package: early, middle and late.

  python launch/make_policies.py --config=configs/tiny.py --workdir=s3ac_jax/data/base

Writes one float16 safetensors file of each into --workdir; about two minutes on two CPU cores.
"""

from pathlib import Path

import jax
from absl import flags

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.config.flags import run_app

FLAGS = flags.FLAGS


def main(_: list[str]) -> None:
    config = from_config_dict(FLAGS.config)
    from s3ac_jax.report.live import make_progress
    from s3ac_jax.train.build import build
    from s3ac_jax.train.policies import policy_facts, save_policies
    from s3ac_jax.train.sft import train_policies
    from s3ac_jax.train.tick import evaluate

    parts = build(config)
    with make_progress(["policies"]) as progress, parts.on_mesh():
        progress.stage("policies", config.sft.careful_steps + config.sft.hasty_steps)
        policies = train_policies(parts, progress.update)
        save_policies(Path(FLAGS.workdir), policies, policy_facts(config), "float16")
        lines = []
        for name, params in policies.items():
            outcome = evaluate(parts, params, jax.random.key(config.seed), samples=4)
            lines.append(f"{name}: held-out accuracy {100 * outcome['held_out/accuracy']:.1f} %")
        progress.finish("\n".join(lines))


if __name__ == "__main__":
    run_app(main)
