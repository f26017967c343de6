"""Weights of Hugging Face folders, in and out, one tensor at a time.

`load` and `save` are for a model in the hand:

    model = load("Qwen2.5-0.5B")
    save(model, "out")

Training uses the lower half on sharded trees: `read_spec`, `read_origin`, `load_params` and
`save_params`.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import PyTree
from s3ac_jax.io.hf_config import HfError, spec_from_hf
from s3ac_jax.io.hf_files import CONFIG, Folder, Note, Progress, log_note
from s3ac_jax.io.hf_layout import FLOAT32, VALUE_HEAD
from s3ac_jax.io.hf_load import load_tree
from s3ac_jax.io.hf_origin import Origin, survey
from s3ac_jax.io.hf_save import save_params
from s3ac_jax.models.causal_lm import CausalLM
from s3ac_jax.models.network import Network
from s3ac_jax.models.spec import DecoderSpec

__all__ = [
    "HfError", "Origin", "check_params", "critic_start", "load", "load_params", "read_origin",
    "read_spec", "save", "save_params", "stored_dtype",
]  # fmt: skip

Path = str | os.PathLike[str]


def load(
    path: Path,
    *,
    dtype: Any = None,
    note: Note = log_note,
    progress: Progress | None = None,
) -> CausalLM:
    """The language model in the folder `path`, on the default device.

    dtype: float32 (also if None) or bfloat16, of weights and activations; what needs float32 keeps
    it. note:
    called with one line on tensors that are skipped (vision, multi-token prediction). progress:
    called with how much is done, and of how much.

    Raises HfError, in one line, for a folder that can't be read or a model that isn't known.
    Source: ours.
    """
    name = _dtype(dtype).name
    if name not in ("float32", "bfloat16"):
        raise HfError(f"dtype must be float32 or bfloat16, got {name}")
    folder = Folder(path)
    spec = dataclasses.replace(_spec(folder), dtype=name)
    params, origin = _load(folder, spec, None, _but_float32(name), False, note, progress)
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


def stored_dtype(path: Path) -> jnp.dtype:
    """The smaller dtype that holds the folder's weights exactly: bfloat16 if all are, else float32.

    Those in `hf_layout.FLOAT32`, which keep float32 anyway, have no say.

    Raises HfError if the folder isn't whole. Source: ours: half the memory of a conversion.
    """
    folder = Folder(path)
    wanted, _ = survey(folder, _spec(folder), critic=VALUE_HEAD in folder.entries)
    stored = {
        folder.entries[tensor.name].dtype
        for tensor in wanted
        if any(part.leaf not in FLOAT32 for part in tensor.parts)
    }
    return jnp.dtype("bfloat16" if stored == {"BF16"} else "float32")


def load_params(
    path: Path,
    model: Network | DecoderSpec,
    *,
    shardings: PyTree | None = None,
    dtype: Any = None,
    note: Note = log_note,
    progress: Progress | None = None,
) -> PyTree:
    """The folder's weights as nested dicts, stacked over layers.

    model: a network, or a spec for whatever the folder holds. A critic's folder, which
    `save_params` wrote, gives {"backbone", "value_head"}. shardings: beside every weight, as
    `parallel.mesh` makes them; each device then gets its share from disk, and no more is read.
    None: the default device. dtype: of the weights; those in `hf_layout.FLOAT32` keep float32.
    None: each weight's own in the network, float32 for a spec. LoRA's weights are not in such
    folders.

    Raises HfError, in one line, before anything is loaded.
    Source: ours: beside the weights themselves, one layer's piece of one of them is in memory.
    """
    folder = Folder(path)
    if isinstance(model, DecoderSpec):
        spec, critic = model, VALUE_HEAD in folder.entries
    else:
        spec, critic = model.spec, "value_head" in model.abstract
    if dtype is None and isinstance(model, Network):
        own = {name: leaf.dtype for name, leaf in named_leaves(model.abstract).items()}
        dtype_of = own.__getitem__
    else:
        dtype_of = _but_float32(_dtype(dtype))
    return _load(folder, spec, shardings, dtype_of, critic, note, progress)[0]


def check_params(path: Path, spec: DecoderSpec) -> None:
    """Looks whether the folder has every weight of a policy, in its shape, and no other.

    Raises HfError, in one line, naming what is wrong. Source: ours: before an hour, not after it.
    """
    survey(Folder(path), spec, critic=False)


def critic_start(params: PyTree) -> PyTree:
    """What a critic starts from, {"backbone": ...}: a policy's weights copied, LM head left out.

    Source: S3AC (2610.35518): actor and critic share the architecture; the value head is fresh.
    """
    backbone = {name: child for name, child in params.items() if name != "lm_head"}
    return {"backbone": jax.tree.map(jnp.copy, backbone)}


def _dtype(dtype: Any) -> jnp.dtype:
    try:
        return jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError as error:
        raise HfError(f"dtype must be float32 or bfloat16, got {dtype!r}") from error


def _but_float32(dtype: Any) -> Callable[[str], Any]:
    """dtype for every weight, except for those that keep float32."""
    return lambda name: jnp.float32 if name.removeprefix("backbone/") in FLOAT32 else dtype


def _spec(folder: Folder) -> DecoderSpec:
    return spec_from_hf(folder.config, str(folder.path / CONFIG))


def _load(
    folder: Folder,
    spec: DecoderSpec,
    shardings: PyTree | None,
    dtype_of: Callable[[str], Any],
    critic: bool,
    note: Note,
    progress: Progress | None,
) -> tuple[PyTree, Origin]:
    tensors, origin = survey(folder, spec, critic=critic)
    params = load_tree(
        folder, tensors, shardings=shardings, dtype_of=dtype_of, critic=critic, progress=progress
    )
    if origin.skipped:
        note(f"skipped {origin.skipped_tensors}: text only")
    return params, origin
