"""The processes of one run, one per host: what they tell each other, and what a host can read.

Decisions are made on every host alike; what only one host can know goes through here. It does not
touch the devices: jax's coordination service keeps keys and values, which any thread may ask for,
while collectives of devices would have to come in one order on all hosts.
"""

import collections
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the public module has no way to the coordination service
from jax.experimental import multihost_utils

from s3ac_jax.core.errors import RunError
from s3ac_jax.core.types import PyTree

# Hosts come to a meeting at different times: one compiles or grades longer than the others.
PATIENCE_SECONDS = 1800
_ROOT = "s3ac"
_T = TypeVar("_T")
_lock = threading.Lock()
_meetings: collections.Counter[str] = collections.Counter()


class HostError(RunError):
    """Something between the processes of a run; the message is one line for the user.

    Source: ours.
    """


def service() -> Any:
    """jax's coordination client, None in a run of one process. Source: ours."""
    return distributed.global_state.client


def count() -> int:
    """How many processes the run has. Unlike jax.process_count it starts no backend.

    Source: ours.
    """
    return distributed.global_state.num_processes if service() else 1


def index() -> int:
    """The number of this process. Process 0 writes files and draws progress. Source: ours."""
    return distributed.global_state.process_id if service() else 0


def is_first() -> bool:
    """Whether this is process 0. Source: ours."""
    return index() == 0


def exchange(channel: str, told: bytes) -> list[bytes]:
    """What every process told, by its number. All have to come, and come in the same order.

    channel: who meets; calls of one channel never overlap in a process, those of several may.
    Raises HostError when the others don't come within PATIENCE_SECONDS.
    Source: ours.
    """
    client = service()
    if client is None:
        return [told]
    with _lock:
        number = _meetings[channel]
        _meetings[channel] += 1
    place = f"{_ROOT}/meet/{channel}/"
    client.key_value_set_bytes(f"{place}{number}/{index()}", told)
    try:
        client.wait_at_barrier(f"{_ROOT}/{channel}", PATIENCE_SECONDS * 1000)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error).upper():
            raise
        raise HostError(
            f"process {index()} waited {PATIENCE_SECONDS} s for the others ({channel}); look at "
            "what they print"
        ) from error
    said = dict(client.key_value_dir_get_bytes(f"{place}{number}/"))
    if number and is_first():
        # All have come here, so nobody reads the meeting before any more.
        client.key_value_delete(f"{place}{number - 1}/")
    return [said[f"{place}{number}/{process}"] for process in range(count())]


def from_first(channel: str, make: Callable[[], Any]) -> Any:
    """What `make()` gives on process 0 (JSON), on every process; only there it is called.

    Source: ours: a folder may look different to another host for a while.
    """
    if count() == 1:
        return make()
    told = json.dumps(make()).encode() if is_first() else b""
    return json.loads(exchange(channel, told)[0])


def agreed(channel: str, wish: bool) -> bool:
    """Whether any process wishes it. Source: ours: all stop at the same tick."""
    return any(told == b"1" for told in exchange(channel, b"1" if wish else b"0"))


def check_same(channel: str, what: str, facts: Mapping[str, Any], advice: str) -> None:
    """Raises HostError on every process, naming the first of the `facts` (JSON) that differs.

    what: whose facts these are, for the message. Source: ours: told by all, with both values.
    """
    if count() == 1:
        return
    every = [json.loads(told) for told in exchange(channel, json.dumps(facts).encode())]
    for process, other in enumerate(every):
        for name in dict.fromkeys([*every[0], *other]):
            first, here = every[0].get(name, "absent"), other.get(name, "absent")
            if first != here:
                raise HostError(
                    f"{what} of process {process} differs from process 0's: {name} is "
                    f"{json.dumps(here)[:80]}, there {json.dumps(first)[:80]}; {advice}"
                )


def to_host(tree: PyTree) -> PyTree:
    """Every array as numpy, whole, on every host, wherever its parts lie.

    Of arrays that hosts share out, all hosts have to ask at the same time. Source: ours.
    """

    def read(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        return np.asarray(x)

    return jax.tree.map(read, tree)


def keep_pace(tree: _T) -> _T:
    """`tree`, and on CPU in a run of several processes not before it is there.

    For loops that hand step after step to the devices. A CPU device takes 32 programs; when one is
    full and another in the same process already waits in a collective, all processes wait forever.
    Source: ours: seen with JAX 0.10 and gloo; accelerators keep queues of their own.
    """
    if count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(tree)
    return tree


def from_host(x: Any, place: jax.sharding.Sharding) -> jax.Array:
    """A host array that every host has, laid out; each device is given its own part.

    Source: ours.
    """
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, place, lambda part: x[part])
