"""Damage to a checkpoint's files, found before anything reads them, and errors in one line."""

import errno
import json
import os
import pathlib
import zlib

_FILES = "files.json"


def _file_crc(path: pathlib.Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def write_file_table(target: pathlib.Path) -> None:
    """Lists every file below `target` with size and CRC-32, in `target`/files.json.

    A process killed between a checkpoint's commit and this line leaves no table; the checksums of
    the arrays still stand then.
    Source: ours: orbax prints a traceback per array when a read fails half-way.
    """
    table = {}
    for path in sorted(target.rglob("*")):
        # Orbax syncs the arrays but neither its JSON files nor the folders.
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        if path.is_file():
            table[str(path.relative_to(target))] = [path.stat().st_size, _file_crc(path)]
    temporary = target / (_FILES + ".tmp")
    with temporary.open("w") as file:
        json.dump(table, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target / _FILES)


def damaged_file(target: pathlib.Path) -> str | None:
    """What is wrong with the first file that differs from the table; None if all are whole.

    Source: ours: the table is compared before orbax reads anything.
    """
    listing = target / _FILES
    if not listing.exists():
        return None
    try:
        table = json.loads(listing.read_bytes())
        for name, (size, crc) in table.items():
            path = target / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if _file_crc(path) != crc:
                return f"{name} has changed since it was written"
    except (ValueError, TypeError, AttributeError):
        return f"{_FILES} can't be read"
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
