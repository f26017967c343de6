"""Folders of safetensors, read and written one tensor at a time.

A checkpoint is larger than the memory of one host: reading maps one tensor, copies what is asked
for and unmaps it; writing lays down the header first and then each tensor as it comes.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import struct
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from s3ac_jax.io.hf_config import HfError
from s3ac_jax.io.hf_layout import Span

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
Note = Callable[[str], None]
Progress = Callable[[int, int], None]
log_note: Note = logging.getLogger(__name__).warning
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_HEADER_BYTES = 8  # little-endian length of the JSON that follows


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor on disk: its file, dtype as safetensors spells it, shape, and where its bytes are.

    Source: safetensors format.
    """

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def no_float(name: str, entry: Entry) -> str | None:
    """What is wrong with the tensor's dtype, None for a plain float. Source: ours."""
    if entry.dtype in _DTYPES:
        return None
    return (
        f"{name} has dtype {entry.dtype}, only {', '.join(_DTYPES)} can be read; give the folder "
        "of the unquantised weights"
    )


class Folder:
    """A folder with config.json and model.safetensors, or shards and their index. Read only.

    config_text: of config.json, as it stands there. entries: every tensor, by name.

    Raises HfError, in one line, for a folder that isn't there or isn't whole.
    Source: ours: what is wrong with a folder is told before anything is loaded.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        if not self.path.is_dir():
            raise HfError(f"no folder {self.path}; give one with {CONFIG} and {SINGLE}")
        self.config_text = self.text(CONFIG)
        if self.config_text is None:
            raise HfError(f"{self.path} has no {CONFIG}, so it is no Hugging Face model")
        self.config = _json_object(self.path / CONFIG, self.config_text)
        self.entries: dict[str, Entry] = {}
        for file in self._files():
            for name, entry in _entries(file).items():
                if name in self.entries:
                    other = self.entries[name].file.name
                    raise HfError(f"{name} is in both {other} and {file.name} of {self.path}")
                self.entries[name] = entry
        self._compare_with_index()

    def text(self, name: str) -> str | None:
        """What the small file `name` holds; None if there is none. Source: ours."""
        try:
            # Not read_text, which would change the ends of lines.
            return (self.path / name).read_bytes().decode()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise HfError(f"{self.path / name} can't be read: {error}") from error

    def read(self, name: str, spans: Iterable[Span] | None = None) -> np.ndarray:
        """A copy of the tensor's values within one span per axis (None: all of them).

        Raises HfError for a dtype that isn't a plain float. Source: ours.
        """
        entry = self.entries[name]
        if wrong := no_float(name, entry):
            raise HfError(f"{entry.file}: {wrong}")
        if not math.prod(entry.shape):
            return np.empty(entry.shape, _DTYPES[entry.dtype])
        cut = ... if spans is None else tuple(slice(*span) for span in spans)
        try:
            # Mapped for this tensor alone: the pages of a long-lived map would add up.
            mapped = np.memmap(entry.file, _DTYPES[entry.dtype], "r", entry.start, entry.shape)
            return np.array(mapped[cut])
        except (OSError, ValueError) as error:
            raise HfError(f"{entry.file}: {name} can't be read: {error}") from error

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor of whatever dtype. Source: ours: what is only carried along."""
        entry = self.entries[name]
        return np.fromfile(entry.file, np.uint8, entry.num_bytes, offset=entry.start)

    def _files(self) -> list[pathlib.Path]:
        if (self.path / SINGLE).is_file():
            self._index: dict[str, str] = {}
            return [self.path / SINGLE]
        text = self.text(INDEX)
        if text is None:
            other = next(iter(sorted(self.path.glob("*.bin"))), None)
            has = f"; {other.name} is of a format that isn't read here" if other else ""
            raise HfError(f"{self.path} has neither {SINGLE} nor {INDEX}{has}")
        index = _json_object(self.path / INDEX, text).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
            raise HfError(f"{self.path / INDEX} has no weight_map from tensors to files")
        self._index = index
        files = sorted(set(index.values()))
        for name in files:
            if pathlib.PurePath(name).name != name or not (self.path / name).is_file():
                raise HfError(f"{self.path / INDEX} names {name}, which isn't there; fetch it")
        return [self.path / name for name in files]

    def _compare_with_index(self) -> None:
        for name, file in self._index.items():
            if name not in self.entries or self.entries[name].file.name != file:
                raise HfError(f"{self.path / INDEX} says that {name} is in {file}, but it isn't")


def _json_object(path: pathlib.Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise HfError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise HfError(f"{path} holds no JSON object")
    return value


def _entries(path: pathlib.Path) -> dict[str, Entry]:
    try:
        # The library checks the header, the offsets and the file's length.
        with safetensors.safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_HEADER_BYTES))
            header = json.loads(file.read(length))
    except (safetensors.SafetensorError, OSError, ValueError, struct.error) as error:
        reason = str(error).splitlines()[0]
        raise HfError(
            f"{path} is no whole safetensors file ({reason}); fetch or save it again"
        ) from error
    begin = _HEADER_BYTES + length
    return {
        name: Entry(path, one["dtype"], tuple(one["shape"]), begin + start, stop - start)
        for name, one in header.items()
        if name != "__metadata__"
        for start, stop in [one["data_offsets"]]
    }


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor to be written. make: called when its turn has come, returns its values.

    Source: ours: a header needs shapes only, so values are made one at a time.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    make: Callable[[], np.ndarray]


def planned(
    name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], np.ndarray]
) -> Planned:
    """A tensor of floats to be written. Source: ours."""
    size = np.dtype(_DTYPES[dtype]).itemsize * math.prod(shape)
    return Planned(name, dtype, shape, size, make)


def numpy_dtype(dtype: str) -> Any:
    """numpy's name of a dtype that safetensors spells F32, F16 or BF16. Source: safetensors."""
    return _DTYPES[dtype]


def dtype_name(dtype: Any) -> str:
    """How safetensors spells a dtype. Raises HfError for one that isn't written here.

    Source: safetensors format.
    """
    for name, known in _DTYPES.items():
        if np.dtype(dtype) == known:
            return name
    raise HfError(f"{np.dtype(dtype)} weights can't be saved, only float32, float16 and bfloat16")


def new_folder(path: str | os.PathLike[str]) -> tuple[pathlib.Path, bool]:
    """Makes the folder that a model is saved to; also whether it wasn't there before.

    Raises HfError if it can't be made or holds something already.
    Source: ours: a model is never mixed with the files of another.
    """
    folder = pathlib.Path(path)
    try:
        fresh = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise HfError(f"{folder} isn't empty; name a new folder, or delete it first")
    except (FileExistsError, NotADirectoryError) as error:
        raise HfError(f"{folder} is or lies below a file; name a new folder") from error
    except OSError as error:
        raise HfError(f"can't make {folder}: {error.strerror}") from error
    return folder, fresh


def write_model(
    folder: pathlib.Path,
    wanted: list[Planned],
    *,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Writes the tensors as model.safetensors, or as shards and, last of all, their index.

    Every file appears whole or not at all. progress: called with bytes done and bytes in all.

    Raises HfError if the disk refuses.
    Source: safetensors format; names of shards and index as transformers has them.
    """
    shards: list[list[Planned]] = [[]]
    filled = 0
    for one in wanted:
        if shards[-1] and filled + one.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += one.num_bytes
    total, done, index = sum(one.num_bytes for one in wanted), 0, {}

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress:
            progress(done, total)

    for number, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / name, shard, count)
        index |= {one.name: name for one in shard}
    if len(shards) > 1:
        text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        write_text(folder / INDEX, json.dumps(text, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a small file, whole or not at all. Raises HfError. Source: ours."""
    _write(path, [text.encode()])


def copy_file(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file, whole or not at all. Raises HfError. Source: ours."""
    try:
        content = source.read_bytes()
    except OSError as error:
        raise HfError(f"{source} can't be read: {error.strerror}") from error
    _write(target, [content])


def _write_shard(path: pathlib.Path, shard: list[Planned], count: Callable[[int], None]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Wide numbers first, as the library does, so that every tensor is aligned.
    shard = sorted(shard, key=lambda one: (-_item_bytes(one), one.name))
    offset = 0
    for one in shard:
        stop = offset + one.num_bytes
        header[one.name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_BYTES)

    def blocks() -> Iterable[Any]:
        yield struct.pack("<Q", len(text)) + text
        for one in shard:
            values = np.ascontiguousarray(one.make())
            yield values.reshape(-1).view(np.uint8).data
            count(one.num_bytes)

    _write(path, blocks())


def _item_bytes(one: Planned) -> int:
    return one.num_bytes // max(1, math.prod(one.shape))


def _write(path: pathlib.Path, blocks: Iterable[Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise HfError(f"can't write {path}: {error.strerror or error}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
