"""Checksums of arrays, of whole ones and of the parts that a host holds of a shared one."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from s3ac_jax.parallel import hosts

_CHANNEL = "checksums"


def crc(array: Any) -> int | None:
    """CRC-32 of the values in row-major order; None if other hosts hold some of them.

    Source: ours: orbax returns flipped bytes of array data without a word.
    """
    return None if _is_shared(array) else _crc(array)


def parts(arrays: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """{name: {which part: CRC-32}} of arrays that hosts share out, the parts of all hosts.

    Each part is counted once, by the host that holds its first copy. All hosts have to call it.
    Source: ours.
    """
    mine = {
        name: {
            _place(shard): _crc(shard.data)
            for shard in array.addressable_shards
            if shard.replica_id == 0
        }
        for name, array in arrays.items()
        if _is_shared(array)
    }
    found: dict[str, dict[str, int]] = {}
    for told in hosts.exchange(_CHANNEL, json.dumps(mine).encode()):
        for name, some in json.loads(told).items():
            found.setdefault(name, {}).update(some)
    return found


def same_parts(array: Any, table: Mapping[str, int]) -> bool:
    """Whether the parts on this host are those of the table, as far as it knows parts like them.

    Laid out otherwise than it was saved, an array has other parts, of which the table says
    nothing. Source: ours.
    """
    if not isinstance(array, jax.Array):
        return True
    known = [shard for shard in array.addressable_shards if _place(shard) in table]
    return all(table[_place(shard)] == _crc(shard.data) for shard in known)


def _is_shared(array: Any) -> bool:
    """Whether only all hosts together have the whole array."""
    return isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    )


def _place(shard: Any) -> str:
    return ",".join(f"{one.start or 0}:{one.stop or ''}" for one in shard.index)


def _crc(array: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
