"""A machine by its name, as compile-only devices: v5e:4x4, 2*v5p:4x4x4, h100:2x8, cpu:4."""

import collections
import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from s3ac_jax.core.errors import RunError
from s3ac_jax.train.plan import hardware
from s3ac_jax.train.plan.gpu_targets import target_config
from s3ac_jax.train.plan.hardware import Chip
from s3ac_jax.train.plan.logs import stderr_lines

_NAME = re.compile(r"(?:(\d+)\*)?([a-z][a-z0-9]*):(\d+(?:x\d+)*)")
# More than any machine has, and about as many as a compiler can still describe.
_MOST = 2**16
_EXAMPLES = "v5e:4x4, v5p:4x4x4, 2*v5e:4x4 (two slices), h100:2x8 (2 hosts of 8), cpu:4"


class PlanError(RunError):
    """A plan that can't be made. Source: ours."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Compile-only devices of one kind. island: of each device, its TPU slice or GPU host.

    Source: ours.
    """

    name: str
    chip: Chip
    devices: Sequence[Any]
    island: tuple[int, ...]

    @property
    def chips(self) -> int:
        """What is paid for; virtual devices of a CPU are one. Source: ours."""
        return max(1, len(self.devices) // self.chip.per_chip)

    @property
    def per_host(self) -> int:
        """Devices of one host, as libtpu describes it; of GPUs, as the name says. Source: ours."""
        by_process = self.chip.platform == "tpu"
        hosts = [device.process_index for device in self.devices] if by_process else self.island
        return max(collections.Counter(hosts).values())

    def islands(self, mesh: Mesh) -> tuple[int, ...]:
        """The island of each device of a mesh, in the order that its programs number them.

        Source: ours.
        """
        of = dict(zip(self.devices, self.island, strict=True))
        return tuple(of[device] for device in mesh.devices.flat)


def make_target(name: str) -> Target:
    """The machine of this name. Raises PlanError when nobody knows it, or a package lacks.

    To be called before anything has used JAX's backend: it is set to CPU.
    Source: ours.
    """
    match = _NAME.fullmatch(name)
    kind = match[2] if match else ""
    if match is None or (kind != "cpu" and kind not in hardware.CHIPS):
        known = ", ".join(["cpu", *hardware.CHIPS])
        raise PlanError(f"--topology={name}: known are {known}; say {_EXAMPLES}")
    jax.config.update("jax_platforms", "cpu")
    slices, sizes = int(match[1] or 1), [int(size) for size in match[3].split("x")]
    if not 1 <= slices * math.prod(sizes) <= _MOST:
        raise PlanError(f"--topology={name}: say 1 to {_MOST} devices")
    if kind == "cpu":
        if slices != 1 or len(sizes) != 1:
            raise PlanError(f"--topology={name}: of CPUs say how many devices, cpu:4")
        devices = _virtual(sizes[0])
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Target(name, hardware.cpu(memory, len(devices)), devices, (0,) * len(devices))
    chip = hardware.CHIPS[kind]
    if chip.platform == "tpu":
        devices = _tpu_devices(name, kind, sizes, slices)
        island = [getattr(device, "slice_index", None) or 0 for device in devices]
        return Target(name, chip, devices, tuple(island))
    if slices != 1 or len(sizes) > 3:
        raise PlanError(f"--topology={name}: of GPUs say hosts x GPUs of one, {kind}:2x8")
    per_host = sizes[-1]
    devices = _gpu_devices(name, kind, math.prod(sizes) // per_host, per_host)
    return Target(name, chip, devices, tuple(n // per_host for n in range(len(devices))))


def _virtual(count: int) -> list[Any]:
    """CPU devices; a process that has begun to use them has as many as it has."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise PlanError(
            f"--topology=cpu:{count}: this process has {len(devices)} CPU devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]


def _tpu_devices(name: str, kind: str, sizes: list[int], slices: int) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            f"--topology={name} needs XLA's compiler for TPUs: pip install 's3ac-jax[plan]' "
            "(Linux on x86-64)"
        )
    # It looks for a chip, a metadata server and other users of the chip; here is none of them.
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    }.items():
        os.environ.setdefault(variable, value)
    more: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if math.prod(sizes) == 1:
        # By default a host has four chips.
        more["chips_per_host_bounds"] = (1, 1, 1)
    shape = "x".join(map(str, sizes))
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{kind}:{shape}", **more
        )
    except jax.errors.JaxRuntimeError as error:
        why = str(error).splitlines()[0][:200]
        raise PlanError(f"--topology={name}: libtpu has no such machine: {why}") from error
    return list(found.devices)


def _gpu_devices(name: str, kind: str, hosts: int, per_host: int) -> list[Any]:
    try:
        with stderr_lines([]):
            found = topologies.get_topology_desc(
                platform="cuda", topology_name=kind, target_config=target_config(kind),
                topology=f"1x{hosts}x{per_host}",
            )  # fmt: skip
    except Exception as error:
        # Of many kinds, by what of CUDA is not there.
        why = str(error).splitlines()[0][:200]
        raise PlanError(
            f"--topology={name} needs XLA's compiler for CUDA, no GPU: pip install --no-deps "
            f"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__} "
            f"({type(error).__name__}: {why})"
        ) from error
    return list(found.devices)
