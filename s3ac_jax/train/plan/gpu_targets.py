"""GPUs as XLA's compiler wants them described, in place of one that it could ask.

Fields of xla's GpuTargetConfigProto; the numbers are of NVIDIA's tuning guides and data sheets.
"""

_LIMITS = """
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
"""

# Compute capability; SMs; FP32 lanes of one; shared memory of one and of a block, bytes; L2, bytes;
# clock, GHz; memory, bytes; its bandwidth, bytes/s; name.
_GPUS = {
    "a100": (8, 0, 108, 64, 167936, 166912, 41943040, 1.41, 85 * 10**9, 2039 * 10**9,
             "NVIDIA A100-SXM4-80GB"),
    "h100": (9, 0, 132, 128, 233472, 232448, 52428800, 1.98, 85 * 10**9, 3352 * 10**9,
             "NVIDIA H100 80GB HBM3"),
    "h200": (9, 0, 132, 128, 233472, 232448, 62914560, 1.98, 150 * 10**9, 4800 * 10**9,
             "NVIDIA H200"),
    "b200": (10, 0, 148, 128, 233472, 232448, 132644864, 1.965, 191 * 10**9, 7700 * 10**9,
             "NVIDIA B200"),
}  # fmt: skip


def target_config(kind: str) -> str:
    """The text form of the description of this GPU. Source: xla, gpu target_config specs."""
    major, minor, cores, lanes, shared, optin, cache, clock, memory, bandwidth, name = _GPUS[kind]
    return f"""gpu_device_info {{{_LIMITS}  core_count: {cores}
  fpus_per_core: {lanes}
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {optin}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
