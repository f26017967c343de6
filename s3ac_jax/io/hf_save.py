"""From stacked weights on their devices to a folder of tensors, one tensor at a time."""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import numpy as np

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import PyTree
from s3ac_jax.io import hf_files
from s3ac_jax.io.hf_config import HfError
from s3ac_jax.io.hf_files import CONFIG, Folder, Note, Planned, Progress, log_note
from s3ac_jax.io.hf_layout import HEAD, VALUE_HEAD, Tensor, skipped_group
from s3ac_jax.io.hf_origin import Origin, layout_of
from s3ac_jax.models.spec import DecoderSpec

Path = str | os.PathLike[str]
# Beside the weights: what makes text of token ids, and how to sample.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip
SHARD_BYTES = 5_000_000_000


def save_params(
    params: PyTree,
    spec: DecoderSpec,
    origin: Origin | None,
    path: Path,
    *,
    base: Path | None = None,
    carry_from: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    note: Note = log_note,
    progress: Progress | None = None,
) -> None:
    """Writes weights, of a policy or a critic, as a new Hugging Face folder.

    With an origin: names, layout, dtypes, config.json and tokenizer are the source's, so that what
    was loaded comes back bit for bit; base: a folder to take the tokenizer's files from instead.
    Without one: config.json describes `spec`, dtypes are those of the weights. carry_from: the
    folder whose vision and other skipped tensors are copied unchanged; else they are left out.
    A critic's folder has no lm_head but value_head.weight [1, D], and config.json says so.

    Raises HfError, in one line; what it had begun to write is removed.
    Source: ours: one tensor at a time comes from the device.
    """
    critic = "backbone" in params
    leaves = {name.removeprefix("backbone/"): leaf for name, leaf in named_leaves(params).items()}
    dtype = str(leaves["embed"].dtype) if "embed" in leaves else "float32"
    text, wanted = layout_of(spec, origin, dtype, critic=critic)
    _check_leaves(leaves, wanted)
    plan = [_plan(tensor, leaves, origin) for tensor in wanted]
    if origin and origin.tied_head and not critic:
        plan.append(_plan(dataclasses.replace(wanted[0], name=HEAD), leaves, origin))
    plan += _carried(carry_from)
    companions = _companions(base or (origin.folder if origin else None), base is not None)
    folder, fresh = hf_files.new_folder(path)
    try:
        hf_files.write_text(folder / CONFIG, text)
        for source in companions or ():
            hf_files.copy_file(source, folder / source.name)
        hf_files.write_model(folder, plan, max_shard_bytes=shard_bytes, progress=progress)
    except BaseException:
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        if fresh:
            folder.rmdir()
        raise
    if companions is None and origin:
        note(
            f"{origin.folder} is gone, so the tokenizer's files are not copied; base=FOLDER names "
            "another"
        )
    if origin and origin.skipped and carry_from is None and not critic:
        note(f"left out {origin.skipped_tensors}; carry_from=FOLDER copies them from there")


def _check_leaves(leaves: dict[str, Any], wanted: list[Tensor]) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    counts: dict[str, tuple[int, ...]] = {}
    for tensor in wanted:
        for part in tensor.parts:
            shapes[part.leaf] = part.shape
            counts[part.leaf] = tuple(place + 1 for place in part.place)  # the last is the largest
    for name in {**shapes, **leaves}:
        has = tuple(leaves[name].shape) if name in leaves else "absent"
        needs = (*counts[name], *shapes[name]) if name in shapes else "absent"
        if has != needs:
            hint = "; merge LoRA's weights first" if "_lora_" in name else ""
            raise HfError(f"{name} is {has}, to be saved it must be {needs}{hint}")
        leaf = leaves[name]
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise HfError(
                f"{name} lies on other hosts too; save a checkpoint and convert it on one host"
            )


def _plan(tensor: Tensor, leaves: dict[str, Any], origin: Origin | None) -> Planned:
    first = leaves[tensor.parts[0].leaf]
    dtype = origin.dtype_of(tensor.name) if origin else hf_files.dtype_name(first.dtype)
    if tensor.name == VALUE_HEAD:
        dtype = "F32"

    def make() -> np.ndarray:
        values = np.empty(tensor.shape, hf_files.numpy_dtype(dtype))
        for part in tensor.parts:
            part.put(values, _fetched(leaves[part.leaf], part.place, values.dtype))
        return values

    return hf_files.planned(tensor.name, dtype, tensor.shape, make)


def _fetched(leaf: Any, place: tuple[int, ...], dtype: Any) -> np.ndarray:
    if isinstance(leaf, np.ndarray):
        return leaf[place].astype(dtype)
    return np.asarray(_picked(leaf, place, dtype))


@functools.partial(jax.jit, static_argnums=2)
def _picked(leaf: jax.Array, place: tuple[Any, ...], dtype: Any) -> jax.Array:
    return leaf[place].astype(dtype)


def _carried(carry_from: Path | None) -> list[Planned]:
    if carry_from is None:
        return []
    folder = Folder(carry_from)
    if not any(map(skipped_group, folder.entries)):
        raise HfError(f"{carry_from} has no tensors to carry along, it is text only")
    return [
        Planned(
            name, entry.dtype, entry.shape, entry.num_bytes, functools.partial(folder.raw, name)
        )
        for name, entry in folder.entries.items()
        if skipped_group(name)
    ]


def _companions(folder: Path | None, asked: bool) -> list[pathlib.Path] | None:
    """The files of the folder that go with any weights; None if it is gone."""
    if folder is None:
        return []
    if not pathlib.Path(folder).is_dir():
        if asked:
            raise HfError(f"no folder {folder} to take the tokenizer's files from")
        return None
    files = (pathlib.Path(folder) / name for name in COMPANIONS)
    return [file for file in files if file.is_file()]
