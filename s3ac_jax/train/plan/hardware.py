"""What chips can do, per device as JAX counts them. All numbers are the makers' own, peak.

Memory is what a program may use of it: of TPUs the limit that XLA's compiler names when a program
exceeds it, of GPUs 92 % (a context and libraries take some; XLA_PYTHON_CLIENT_MEM_FRACTION=.92).
Wires are in one direction. TPU: a torus has two links along each of its axes, and a collective is
taken to use one axis; a chip's interconnect is 4 links (2D) or 6 (3D) of the bidirectional figure.
GPU: NVLink within a host, the network card between hosts.
"""

import dataclasses
from typing import Literal

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator. per_chip: JAX devices on one of them, what follows is of a device.

    memory: bytes. flops: bf16 with float32 sums, per second. bandwidth: of its memory, bytes/s.
    link, network: bytes/s to the others of its island (a TPU slice, a GPU host), and beyond it.
    Source: ours.
    """

    name: str
    platform: Literal["tpu", "cuda", "cpu"]
    per_chip: int
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float


def _tpu(
    name: str, memory: float, teraflops: float, bandwidth: float, ici: float, links: int,
    per_chip: int = 1, network: float = 6.25,
) -> Chip:  # fmt: skip
    """Of one chip: GiB, bf16 Tflop/s, GB/s of memory, bidirectional GB/s of interconnect."""
    each = 1e9 / per_chip
    return Chip(
        name, "tpu", per_chip, memory * GIB / per_chip, teraflops * 1e12 / per_chip,
        bandwidth * each, ici / links * each, network * each,
    )  # fmt: skip


def _gpu(
    name: str, memory: float, teraflops: float, bandwidth: float, nvlink: float, network: float
) -> Chip:
    """GiB in all, dense bf16 Tflop/s, GB/s of memory, NVLink and network one way."""
    return Chip(
        name, "cuda", 1, 0.92 * memory * GIB, teraflops * 1e12, bandwidth * 1e9, nvlink * 1e9,
        network * 1e9,
    )  # fmt: skip


# TPUs: pages "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x" of cloud.google.com/tpu/docs;
# between slices 50 Gbit/s a chip (v5p's page). GPUs: NVIDIA's data sheets of A100 80GB SXM, H100
# SXM, H200 SXM and HGX B200; network: one card of 200 (A100) or 400 Gbit/s per GPU.
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v5e", 15.75, 197, 819, 400, 4),
        _tpu("v5p", 95.74, 459, 2765, 1200, 6),
        _tpu("v6e", 31.25, 918, 1638, 800, 4),
        _tpu("tpu7x", 189.5, 2307, 7380, 1200, 6, per_chip=2),
        _gpu("a100", 79.2, 312, 2039, 300, 25),
        _gpu("h100", 79.2, 989, 3352, 450, 50),
        _gpu("h200", 139.8, 989, 4800, 450, 50),
        _gpu("b200", 178.4, 2250, 7700, 900, 50),
    )
}
# A core of a server, to try a plan out: 100 Gflop/s, 10 GB/s, memory shared with its neighbours.
CPU_FLOPS, CPU_BANDWIDTH = 1e11, 1e10


def cpu(memory: float, devices: int) -> Chip:
    """A virtual device of this machine, which has `memory` bytes in all. Source: ours, nominal."""
    return Chip(
        "cpu", "cpu", devices, memory / devices, CPU_FLOPS, CPU_BANDWIDTH, CPU_BANDWIDTH,
        CPU_BANDWIDTH,
    )  # fmt: skip


# A part of the name by which JAX calls a device, the more special first.
_KINDS = {
    "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v6": "v6e",
    "TPU7x": "tpu7x", "A100": "a100", "H100": "h100", "H200": "h200", "B200": "b200",
}  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device of this kind (`jax.Device.device_kind`), None if it is not known.

    Source: names as PJRT's plugins give them: "TPU v5 lite", "NVIDIA H200".
    """
    named = (CHIPS[name] for part, name in _KINDS.items() if part in device_kind)
    return next(named, None)
