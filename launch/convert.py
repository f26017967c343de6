"""Converts weights: Hugging Face folders, orbax folders, checkpoints of a run.

  python launch/convert.py --hf=Qwen2.5-0.5B --to_orbax=weights
  python launch/convert.py --orbax=weights --to_hf=Qwen2.5-0.5B-again
  python launch/convert.py --workdir=runs/tiny --to_hf=trained
  python launch/convert.py --workdir=runs/tiny --role=critic --step=40 --to_hf=critic

What came from a Hugging Face folder goes back under the same names, in the same layout and dtypes.
"""

from absl import flags

from s3ac_jax.config.flags import run_app

_HF = flags.DEFINE_string("hf", None, "Hugging Face folder to read.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run to read.")
_ORBAX = flags.DEFINE_string("orbax", None, "Orbax folder of weights to read.")
_TO_HF = flags.DEFINE_string("to_hf", None, "Hugging Face folder to write, new or empty.")
_TO_ORBAX = flags.DEFINE_string("to_orbax", None, "Orbax folder to write, new or empty.")
_ROLE = flags.DEFINE_enum("role", None, ["actor", "critic"], "Whose weights of a run.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of a run; the latest by default.")
_BASE = flags.DEFINE_string(
    "base", None, "Hugging Face folder for what weights alone lack: tokenizer, vision, layout."
)


def main(_: list[str]) -> None:
    # Not above: a typo is told before flax and orbax are loaded.
    from s3ac_jax.train.convert import Wanted, run

    run(
        Wanted(
            hf=_HF.value, workdir=_WORKDIR.value, orbax=_ORBAX.value,
            to_hf=_TO_HF.value, to_orbax=_TO_ORBAX.value,
            role=_ROLE.value, step=_STEP.value, base=_BASE.value,
        )
    )  # fmt: skip


if __name__ == "__main__":
    run_app(main, ())
