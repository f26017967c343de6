"""Evaluates a policy on suites of questions: avg@k, pass@k, maj@k, and every answer on record.

  python launch/evaluate.py --config=configs/evaluate.py:held_out --checkpoint=runs/quickstart
  python launch/evaluate.py --config=configs/evaluate.py:gsm8k --hf=Qwen3-0.6B --workdir=runs/gsm8k
  python launch/evaluate.py --config=configs/evaluate.py:gsm8k --hf=Qwen3-0.6B \\
    --address=localhost:9000 --workdir=runs/gsm8k      # a server answers, the folder has the words

The same command goes on after a kill. docs/evaluation.md says more.
"""

from absl import flags

from s3ac_jax.config.evaluate import evaluate_from_config_dict
from s3ac_jax.config.flags import run_app

FLAGS = flags.FLAGS
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Workdir of a run (its newest actor), or one of its checkpoints."
)
_HF = flags.DEFINE_string("hf", None, "Hugging Face folder, its tokenizer included.")
_ADDRESS = flags.DEFINE_string(
    "address", None, "Servers that answer, host:port (gRPC) or http://host:port; comma-separated."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the evaluation; with --checkpoint: RUN/evaluated/tick_N."
)


def main(_: list[str]) -> None:
    config = evaluate_from_config_dict(FLAGS.config)
    # Not above: a typo is told before flax and orbax are loaded.
    from s3ac_jax.train.evaluation.app import evaluate
    from s3ac_jax.train.evaluation.target import Wanted

    wanted = Wanted(checkpoint=_CHECKPOINT.value, hf=_HF.value, address=_ADDRESS.value)
    evaluate(config, wanted, _WORKDIR.value)


if __name__ == "__main__":
    run_app(main, ("config",))
