"""Weights without an optimiser, as an orbax checkpoint that says what they are."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from s3ac_jax.core.trees import nest
from s3ac_jax.core.types import PyTree
from s3ac_jax.io.checkpoint import CheckpointError, Checkpoints
from s3ac_jax.io.hf_origin import Origin
from s3ac_jax.models.spec import DecoderSpec, LinearAttentionSpec, LoraSpec, MoeSpec

_SECTIONS = {"moe": MoeSpec, "linear_attention": LinearAttentionSpec, "lora": LoraSpec}
_STEP = 0
_FORMAT = "weights"


def spec_from_dict(fields: Mapping[str, Any], where: str) -> DecoderSpec:
    """The spec whose `dataclasses.asdict` is `fields`, by way of JSON.

    where: the file, for messages. Raises CheckpointError if it is something else.
    Source: ours: config.json of a run and the note of a checkpoint hold it so.
    """

    def tuples(section: Mapping[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in section.items()}

    try:
        fields = tuples(fields)
        for name, section in _SECTIONS.items():
            if fields.get(name) is not None:
                fields[name] = section(**tuples(fields[name]))
        return DecoderSpec(**fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} doesn't describe a model: {error}") from error


def save_orbax(
    params: PyTree, spec: DecoderSpec, origin: Origin | None, path: str | os.PathLike[str]
) -> None:
    """Writes the weights, what they look like and where they came from.

    Raises CheckpointError if the folder holds something already or can't be written.
    Source: ours: one door to orbax, checksums included.
    """
    folder = pathlib.Path(path)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError(f"{folder} isn't an empty folder; name a new one, or delete it first")
    note = {
        "format": _FORMAT,
        "spec": dataclasses.asdict(spec),
        "origin": origin and origin.to_json(),
    }
    checkpoints = Checkpoints(folder, keep=1)
    try:
        checkpoints.save(_STEP, params, note)
    finally:
        checkpoints.close()


def load_orbax(path: str | os.PathLike[str]) -> tuple[PyTree, DecoderSpec, Origin | None]:
    """What `save_orbax` wrote; the weights as numpy arrays.

    Raises CheckpointError if the folder holds something else or is damaged. Source: ours.
    """
    checkpoints = Checkpoints(path)
    try:
        found = checkpoints.latest()
        if found is None:
            raise CheckpointError(f"{path} holds no weights that launch/convert.py wrote")
        leaves, note = checkpoints.restore_part(found, "")
        if note.get("format") != _FORMAT:
            raise CheckpointError(f"{path} holds a run's checkpoints; name the run with --workdir")
        spec = spec_from_dict(note["spec"], f"the note in {path}")
        return nest(leaves), spec, note["origin"] and Origin.from_json(note["origin"])
    finally:
        checkpoints.close()


def load_role(
    folder: str | os.PathLike[str], role: str, step: int | None = None
) -> tuple[PyTree, int]:
    """Weights of one role of a run's checkpoint, numpy arrays, and the step they are of.

    folder: that of the checkpoints. role: "actor" or "critic". step: the latest when None.

    Raises CheckpointError if there is no such checkpoint, or no such role in it.
    Source: ours: the optimiser, twice as large as the weights, is not read.
    """
    checkpoints = Checkpoints(folder)
    try:
        found = checkpoints.latest() if step is None else step
        if found is None:
            raise CheckpointError(f"{folder} has no checkpoint that was written to the end")
        parts, _ = checkpoints.restore_part(found, f"{role}/trainable/", f"{role}/frozen/")
        return nest({name.split("/", 2)[2]: leaf for name, leaf in parts.items()}), found
    finally:
        checkpoints.close()
