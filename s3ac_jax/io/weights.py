"""Weights alone, as a safetensors file: for policies small enough to travel with the package."""

import os
import pathlib
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from s3ac_jax.core.errors import RunError

_DTYPES = ("float16", "bfloat16", "float32")


class WeightsError(RunError):
    """A weight file that can't be written or read; the message is one line for the user.

    Source: ours: one line instead of a parser's traceback.
    """


def save_weights(
    path: str | os.PathLike[str], params: dict[str, Any], metadata: dict[str, str]
) -> None:
    """Writes nested `params` as tensors named "layers/mlp/up", and `metadata`, to `path`.

    dtypes: float16, bfloat16 or float32, kept as they are. The file appears whole or not at all.

    Raises WeightsError for another dtype, a key that isn't a plain word, metadata that isn't
    text, or a path that can't be written.
    Source: ours: safetensors opens without running code from the file.
    """
    tensors = {name: np.ascontiguousarray(leaf) for name, leaf in _flatten(params, "").items()}
    for name, array in tensors.items():
        if str(array.dtype) not in _DTYPES:
            raise WeightsError(f"{name}: {array.dtype} weights can't be saved, only {_DTYPES}")
    if bad := [key for key, value in metadata.items() if not isinstance(value, str)]:
        raise WeightsError(f"metadata {bad[0]!r} must be text")
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(safetensors.numpy.save(tensors, metadata=metadata))
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WeightsError(f"can't write weights to {path}: {error.strerror}") from error


def load_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads what `save_weights` wrote: nested dict of numpy arrays, and the metadata.

    Raises WeightsError if the file is missing, cut short or no safetensors file.
    Source: ours: safetensors opens without running code from the file.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise WeightsError(f"no weights at {path}")
    params: dict[str, Any] = {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            for name in file.keys():  # noqa: SIM118, the file is no mapping
                *parents, last = name.split("/")
                node = params
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[last] = file.get_tensor(name)
    except (safetensors.SafetensorError, OSError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(
            f"{path} is no whole safetensors file ({reason}); fetch or save it again"
        ) from error
    return params, metadata


def _flatten(node: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise WeightsError(f"{prefix}{key!r}: keys of weights are words without '/'")
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat
