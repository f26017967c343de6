"""Weights of Hugging Face folders, in and out, one tensor at a time.

`load` and `save` are for a model in the hand:

    model = load("Qwen2.5-0.5B")
    save(model, "out")

Training uses the lower half on sharded trees: `read_spec`, `read_origin`, `load_params` and
`save_params`.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from s3ac_jax.core.types import PyTree
from s3ac_jax.io.hf_config import HfError, spec_from_hf
from s3ac_jax.io.hf_files import CONFIG, Folder, Note, Progress, log_note
from s3ac_jax.io.hf_layout import VALUE_HEAD
from s3ac_jax.io.hf_load import load_tree
from s3ac_jax.io.hf_origin import Origin, survey
from s3ac_jax.io.hf_save import save_params
from s3ac_jax.models.causal_lm import CausalLM
from s3ac_jax.models.network import Network
from s3ac_jax.models.spec import DecoderSpec

__all__ = [
    "HfError", "Origin", "critic_start", "load", "load_params", "read_origin", "read_spec", "save",
    "save_params",
]  # fmt: skip

Path = str | os.PathLike[str]


def load(
    path: Path,
    *,
    dtype: Any = jnp.float32,
    note: Note = log_note,
    progress: Progress | None = None,
) -> CausalLM:
    """The language model in the folder `path`, on the default device.

    dtype: float32 or bfloat16, of weights and activations; what needs float32 keeps it. note:
    called with one line on tensors that are skipped (vision, multi-token prediction). progress:
    called with how much is done, and of how much.

    Raises HfError, in one line, for a folder that can't be read or a model that isn't known.
    Source: ours.
    """
    name = np.dtype(dtype).name
    if name not in ("float32", "bfloat16"):
        raise HfError(f"dtype must be float32 or bfloat16, got {name}")
    folder = Folder(path)
    spec = dataclasses.replace(_spec(folder), dtype=name)
    params, origin = _load(folder, spec, None, dtype, False, note, progress)
    return CausalLM.from_params(spec, params, origin=origin)


def save(
    model: CausalLM,
    path: Path,
    *,
    carry_from: Path | None = None,
    note: Note = log_note,
    progress: Progress | None = None,
) -> None:
    """Writes the model as a folder like the one it came from; `save_params` says how.

    Raises HfError, in one line. Source: ours.
    """
    params = nnx.to_pure_dict(nnx.state(model.decoder))
    save_params(
        params, model.spec, model.origin, path,
        carry_from=carry_from, note=note, progress=progress,
    )  # fmt: skip


def read_spec(path: Path) -> DecoderSpec:
    """What the decoder in the folder looks like. Raises HfError. Source: ours."""
    return _spec(Folder(path))


def read_origin(path: Path) -> Origin:
    """What to keep of the folder so that weights can be saved as they were there.

    Raises HfError if the folder isn't whole. Source: ours.
    """
    folder = Folder(path)
    return survey(folder, _spec(folder), critic=VALUE_HEAD in folder.entries)[1]


def load_params(
    path: Path,
    model: Network | DecoderSpec,
    *,
    shardings: PyTree | None = None,
    dtype: Any = jnp.float32,
    note: Note = log_note,
    progress: Progress | None = None,
) -> PyTree:
    """The folder's weights as nested dicts, stacked over layers.

    model: a network, or a spec for whatever the folder holds. A critic's folder, which
    `save_params` wrote, gives {"backbone", "value_head"}. shardings: beside every weight, as
    `parallel.mesh` makes them; each device then gets its share from disk, and no more is read.
    None: the default device. dtype: of the weights; those in `hf_layout.FLOAT32` keep float32.
    LoRA's weights are not in such folders.

    Raises HfError, in one line, before anything is loaded.
    Source: ours: beside the weights themselves, one layer's piece of one of them is in memory.
    """
    folder = Folder(path)
    if isinstance(model, DecoderSpec):
        spec, critic = model, VALUE_HEAD in folder.entries
    else:
        spec, critic = model.spec, "value_head" in model.abstract
    return _load(folder, spec, shardings, dtype, critic, note, progress)[0]


def critic_start(params: PyTree) -> PyTree:
    """What a critic starts from, {"backbone": ...}: a policy's weights copied, LM head left out.

    Source: S3AC (2610.35518): actor and critic share the architecture; the value head is fresh.
    """
    backbone = {name: child for name, child in params.items() if name != "lm_head"}
    return {"backbone": jax.tree.map(jnp.copy, backbone)}


def _spec(folder: Folder) -> DecoderSpec:
    return spec_from_hf(folder.config, str(folder.path / CONFIG))


def _load(
    folder: Folder,
    spec: DecoderSpec,
    shardings: PyTree | None,
    dtype: Any,
    critic: bool,
    note: Note,
    progress: Progress | None,
) -> tuple[PyTree, Origin]:
    tensors, origin = survey(folder, spec, critic=critic)
    params = load_tree(
        folder, tensors, shardings=shardings, dtype=dtype, critic=critic, progress=progress
    )
    if origin.skipped:
        note(f"skipped {origin.num_skipped} tensors of {origin.skipped_groups}: text only")
    return params, origin
