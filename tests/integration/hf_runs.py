"""Small runs that start from a Hugging Face folder: a random Qwen2 with the tiny tokenizer."""

import dataclasses
import runpy
import sys

import jax

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.io.hf_weights import save_params
from s3ac_jax.models.network import actor_network
from s3ac_jax.models.spec import DecoderSpec
from tests.integration import runs
from tests.unit.data import hf_folder

CONFIG = runs.ROOT / "configs" / "smollm2_135m.py"
SIZES = {
    "vocab_size": 320, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "num_kv_heads": 1,
    "head_dim": 8, "intermediate_size": 40,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {
    **{f"model.{name}": size for name, size in SIZES.items()},
    "model.dtype": "float32",
    "model.remat": False,
    "task.system": "",
    "task.max_prompt_tokens": 30,
    "task.num_train": 64,
    "task.num_held_out": 32,
    "rollout.slots": 16,
    "rollout.insert_batch": 8,
    "rollout.max_response_tokens": 12,
    "value_pretraining.late_prompts": 32,
    "value_pretraining.batch_responses": 16,
    "train.num_ticks": 3,
    "train.batch_prompts": 8,
    "train.pack_tokens": 84,
    "train.micro_rows": 2,
    "train.minibatches": 2,
    "scheduler.candidates": 16,
    "cadence.save_every": 1,
    "cadence.evaluate_every": 2,
    "cadence.keep_checkpoints": 3,
}


def make_folder(path, **changes):
    """The folder; changes: of config.json's model."""
    spec = DecoderSpec(**{**SIZES, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, **changes})
    network = actor_network(dataclasses.replace(spec, init_std=0.3))
    save_params(network.init(jax.random.key(3)), spec, None, path)
    hf_folder.folder(path, generation_config={"eos_token_id": [hf_folder.END_OF_TEXT]})
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def config_dict(folder, changes=None):
    """configs/smollm2_135m.py with SMALL and `changes`, by dotted name."""
    config = runpy.run_path(str(CONFIG))["get_config"]()
    config.update_from_flattened_dict(SMALL | {"start.hf": str(folder)} | (changes or {}))
    return config


def small_config(folder, changes=None):
    """The RunConfig of it."""
    return from_config_dict(config_dict(folder, changes))


def command(folder, workdir, changes=None):
    """The command line of it."""
    flags = SMALL | {"start.hf": str(folder)} | (changes or {})
    return [
        sys.executable, "-W", "error", runs.APP, f"--config={CONFIG}",
        *[f"--config.{name}={value}" for name, value in flags.items()], f"--workdir={workdir}",
    ]  # fmt: skip
