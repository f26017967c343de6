"""Damage to a checkpoint's files, found before anything reads them, and errors in one line."""

import errno
import json
import os
import pathlib
import zlib
from typing import Any

from s3ac_jax.parallel import hosts

_FILES = "files.json"
_CHANNEL = "files"
_COMMITTED = "commit_success.txt"  # orbax writes it last, before the rename that commits a step


def committed_steps(folder: pathlib.Path) -> list[int]:
    """Steps below `folder` that were written to the end, oldest first.

    Source: ours: orbax also lists a bare folder with a number for a name.
    """
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.name.isdigit() and path.is_dir())
    return sorted(int(path.name) for path in found if is_committed(path))


def is_committed(target: pathlib.Path) -> bool:
    """Whether this checkpoint was written to the end. Source: ours."""
    return (target / _COMMITTED).exists()


def _file_crc(path: pathlib.Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def write_file_table(target: pathlib.Path) -> None:
    """Lists every file below `target` with size and CRC-32, in `target`/files.json.

    A process killed between a checkpoint's commit and this line leaves no table; the checksums of
    the arrays still stand then. Several hosts share out the reading, and process 0 writes.
    Source: ours: orbax prints a traceback per array when a read fails half-way.
    """
    names = hosts.from_first(_CHANNEL, lambda: _synced(target))
    mine = {name: _size_and_crc(target / name) for name in _share(names)}
    table: dict[str, tuple[int, int]] = {}
    for told in hosts.exchange(_CHANNEL, json.dumps(mine).encode()):
        table |= json.loads(told)
    if hosts.is_first():
        temporary = target / (_FILES + ".tmp")
        with temporary.open("w") as file:
            json.dump(dict(sorted(table.items())), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target / _FILES)


def _synced(target: pathlib.Path) -> list[str]:
    """Names of all files below, which are on disk now."""
    names = []
    for path in sorted(target.rglob("*")):
        # Orbax syncs the arrays but neither its JSON files nor the folders.
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        if path.is_file():
            names.append(str(path.relative_to(target)))
    return names


def _share(names: list[str]) -> list[str]:
    """What this host reads of what all read together."""
    return names[hosts.index() :: hosts.count()]


def _size_and_crc(path: pathlib.Path) -> tuple[int, int]:
    return path.stat().st_size, _file_crc(path)


def damaged_file(target: pathlib.Path) -> str | None:
    """What is wrong with the first file that differs from the table; None if all are whole.

    Source: ours: the table is compared before orbax reads anything; hosts share out the reading.
    """
    table = hosts.from_first(_CHANNEL, lambda: _table(target / _FILES))
    try:
        found = _damage(target, {name: table[name] for name in _share(list(table))})
    except (ValueError, TypeError, AttributeError):
        found = f"{_FILES} can't be read"
    every = hosts.exchange(_CHANNEL, (found or "").encode())
    return next((told.decode() for told in every if told), None)


def _table(listing: pathlib.Path) -> Any:
    """The table, empty without one, None for one that is no JSON."""
    try:
        return json.loads(listing.read_bytes()) if listing.exists() else {}
    except ValueError:
        return None


def _damage(target: pathlib.Path, table: dict[str, tuple[int, int]]) -> str | None:
    for name, (size, crc) in table.items():
        path = target / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if _file_crc(path) != crc:
            return f"{name} has changed since it was written"
    return None


def is_disk_full(error: BaseException) -> bool:
    """Whether the error, or one that led to it, says that there was no room left.

    Source: ours: of all that can go wrong with a disk, the one that a person can mend at once.
    """
    full = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in full:
            return True
        if any(os.strerror(code) in str(seen) for code in full):  # tensorstore raises ValueError
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def first_line(error: BaseException) -> str:
    """The error's first line, or its class if it says nothing. Source: ours."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
