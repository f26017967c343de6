"""Four virtual CPU devices and a compilation cache, set before anything imports jax."""

import gc
import os
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "jax"

os.environ["JAX_PLATFORMS"] = "cpu"
# Appended: XLA reads the last of repeated flags, and a caller's other flags stay. Most of the
# suite's time is LLVM's: without its expensive passes programs are the same and compile in two
# thirds of the time (test_devices.py: 145 s of CPU for 218).
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4",
        "--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true",
    ]
).strip()  # fmt: skip
# Environment variables, not jax.config: subprocesses of the tests share the cache too. Every
# entry is kept, because the suite is made of many compilations of well under a second.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# A process may map 65,530 areas of memory on Linux, every compiled program takes some, and the
# compiler dies with a segmentation fault when there are no more.
MOST_MAPS = 30_000


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs():
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()
