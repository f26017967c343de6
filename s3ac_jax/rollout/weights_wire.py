"""Weights as a stream: a manifest that says what comes, then the bytes of leaf after leaf.

Both sides of PushWeights. Nothing is taken on trust: the receiver compares the manifest with what
its model needs before it reads data, and every leaf with its checksum after.
"""

import json
import math
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from s3ac_jax.core.trees import named_leaves, nest
from s3ac_jax.core.types import PyTree
from s3ac_jax.rollout.backend import RolloutError

# Below gRPC's default limit of 4 MiB for a message, with room for what stands around the data.
CHUNK_BYTES = 3 << 20


class WeightsWireError(RolloutError):
    """Weights that can't be sent, or did not arrive as they should; one line that names the leaf.

    Source: ours.
    """


class Leaf(NamedTuple):
    """One array of the stream. path: its name, such as 'layers/mlp/up'. dtype: numpy's name.

    Source: ours.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    crc32: int


class Manifest(NamedTuple):
    """What a stream of weights holds, in the order of its data.

    version: that tokens are marked with. fingerprint: `fingerprint_of` the whole tree. in_flight:
    whether responses in progress go on under these weights.
    Source: ours.
    """

    version: int
    fingerprint: str
    in_flight: bool
    leaves: tuple[Leaf, ...]

    def to_json(self) -> bytes:
        """The manifest as it travels; `read_manifest` reads it. Source: ours."""
        leaves = [leaf._asdict() for leaf in self.leaves]
        return json.dumps(self._asdict() | {"leaves": leaves}).encode()


def _on_host(name: str, leaf: Any) -> memoryview:
    """The bytes of one leaf on the host; no copy of it where it already lies there."""
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise WeightsWireError(
                f"{name} is spread over several processes: only one process can send weights; "
                "let the servers read a checkpoint instead"
            )
        devices = leaf.devices()
        if len(devices) > 1 or next(iter(devices)).platform != "cpu":
            # A jax array keeps the host copy that numpy asked for as long as it lives; that of a
            # copy dies with it, so the host never holds more than a leaf.
            leaf = leaf.copy()
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data


def make_manifest(params: PyTree, version: int, fingerprint: str, in_flight: bool) -> Manifest:
    """The manifest of these weights; reads each leaf once, for its checksum.

    Source: ours.
    """
    leaves = []
    for name, leaf in named_leaves(params).items():
        data = _on_host(name, leaf)
        dtype = np.dtype(leaf.dtype).name
        leaves.append(Leaf(name, tuple(leaf.shape), dtype, data.nbytes, zlib.crc32(data)))
    return Manifest(version, fingerprint, in_flight, tuple(leaves))


def chunks(params: PyTree, manifest: Manifest, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The data behind the manifest, `size` bytes at a time, the last chunk shorter.

    Leaves are fetched one at a time; small ones share a chunk.
    Source: ours.
    """
    leaves, waiting = named_leaves(params), bytearray()
    for leaf in manifest.leaves:
        data = _on_host(leaf.path, leaves[leaf.path])
        while len(waiting) + len(data) >= size:
            taken = size - len(waiting)
            yield bytes(waiting) + bytes(data[:taken]) if waiting else bytes(data[:taken])
            waiting.clear()
            data = data[taken:]
        waiting += data
    if waiting:
        yield bytes(waiting)


def _number(entry: dict[str, Any], key: str, limit: int, what: str) -> int:
    value = entry.get(key)
    # JSON's true is an int in Python.
    if type(value) is not int or not 0 <= value < limit:
        raise WeightsWireError(f"{what}: {key} must be an integer in 0..{limit - 1}")
    return value


def _read_leaf(number: int, entry: Any) -> Leaf:
    what = f"leaf {number} of the manifest"
    if not isinstance(entry, dict):
        raise WeightsWireError(f"{what} is no JSON object")
    path, shape, dtype = entry.get("path"), entry.get("shape"), entry.get("dtype")
    if not isinstance(path, str) or not path:
        raise WeightsWireError(f"{what} has no path")
    what = f"{path[:200]!r} of the manifest"
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise WeightsWireError(f"{what}: shape must be a list of integers, none negative")
    if not isinstance(dtype, str):
        raise WeightsWireError(f"{what} has no dtype")
    size, crc32 = _number(entry, "bytes", 1 << 63, what), _number(entry, "crc32", 1 << 32, what)
    return Leaf(path, tuple(shape), dtype, size, crc32)


def read_manifest(data: bytes) -> Manifest:
    """The manifest in these bytes; any fault in them is a WeightsWireError.

    Source: ours.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WeightsWireError(f"the manifest is no JSON: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise WeightsWireError("the manifest is no JSON object")
    version = _number(found, "version", 1 << 31, "the manifest")
    fingerprint, in_flight = found.get("fingerprint"), found.get("in_flight")
    if not isinstance(fingerprint, str) or not fingerprint:
        raise WeightsWireError("the manifest has no fingerprint")
    if not isinstance(in_flight, bool):
        raise WeightsWireError("the manifest: in_flight must be true or false")
    if not isinstance(found.get("leaves"), list):
        raise WeightsWireError("the manifest has no list of leaves")
    leaves = tuple(_read_leaf(number, entry) for number, entry in enumerate(found["leaves"]))
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.path in seen:
            raise WeightsWireError(f"{leaf.path[:200]!r} stands twice in the manifest")
        seen.add(leaf.path)
    return Manifest(version, fingerprint, in_flight, leaves)


def _check(manifest: Manifest, abstract: dict[str, Any]) -> None:
    """Whether these are the leaves that the model needs. Sizes follow, so none is the sender's."""
    names = {leaf.path for leaf in manifest.leaves}
    for name in abstract:
        if name not in names:
            raise WeightsWireError(f"{name} is missing: the model needs it")
    for leaf in manifest.leaves:
        if leaf.path not in abstract:
            raise WeightsWireError(f"{leaf.path[:200]!r} is unknown to the model")
        want = abstract[leaf.path]
        if leaf.shape != tuple(want.shape):
            raise WeightsWireError(
                f"{leaf.path} has shape {list(leaf.shape)}, the model needs {list(want.shape)}"
            )
        if leaf.dtype != np.dtype(want.dtype).name:
            raise WeightsWireError(
                f"{leaf.path} is {leaf.dtype[:40]}, the model needs {np.dtype(want.dtype).name}"
            )
        size = math.prod(want.shape) * np.dtype(want.dtype).itemsize
        if leaf.bytes != size:
            raise WeightsWireError(
                f"{leaf.path} is announced with {leaf.bytes} bytes, its shape and dtype take {size}"
            )


class Receiver:
    """Takes a stream of weights in, aside from those that are in use.

    abstract: what the model needs, shapes and dtypes as it decodes with them; the manifest is
    held against it at once.
    Raises WeightsWireError, here and in every method, on the first thing that is not as it should
    be; nothing of the stream can be used then.
    Source: ours.
    """

    def __init__(self, manifest: Manifest, abstract: PyTree):
        self.manifest = manifest
        self._want = named_leaves(abstract)
        _check(manifest, self._want)
        self._done: dict[str, np.ndarray] = {}
        self._open()

    def _open(self) -> None:
        """Makes room for the next leaf; closes those that have no bytes."""
        while len(self._done) < len(self.manifest.leaves):
            self._leaf = self.manifest.leaves[len(self._done)]
            want = self._want[self._leaf.path]
            self._array = np.empty(want.shape, want.dtype)
            self._room = self._array.reshape(-1).view(np.uint8).data
            self._crc32 = 0
            if self._room:
                return
            self._close()

    def _close(self) -> None:
        if self._crc32 != self._leaf.crc32:
            raise WeightsWireError(
                f"{self._leaf.path} did not arrive as it was sent: its checksum is "
                f"{self._crc32:08x}, the manifest says {self._leaf.crc32:08x}"
            )
        self._done[self._leaf.path] = self._array

    def feed(self, data: bytes) -> None:
        """The next bytes of the stream, of any length. Source: ours."""
        rest = memoryview(data)
        while rest:
            if len(self._done) == len(self.manifest.leaves):
                raise WeightsWireError(f"{len(rest)} bytes more than the manifest announced")
            part, rest = rest[: len(self._room)], rest[len(self._room) :]
            self._room[: len(part)] = part
            self._crc32 = zlib.crc32(part, self._crc32)
            self._room = self._room[len(part) :]
            if not self._room:
                self._close()
                self._open()

    def finish(self) -> dict[str, Any]:
        """The weights as nested dicts of numpy arrays, once all of them are here. Source: ours."""
        if len(self._done) < len(self.manifest.leaves):
            raise WeightsWireError(
                f"the stream ended in {self._leaf.path}: {len(self._room)} bytes of it and "
                f"{len(self.manifest.leaves) - len(self._done) - 1} whole leaves are missing"
            )
        return nest(self._done)
