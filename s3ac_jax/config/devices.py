"""Whether a run's sizes can be shared out over its devices."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from s3ac_jax.config.run import RunConfig

# Tokens of a block of splash attention, and numbers of a head that cuDNN takes.
_SPLASH_TOKENS = 128
_CUDNN_WIDTH = 128


def check_meshes(run: "RunConfig") -> None:
    """Raises ValueError, naming the fields, on meshes that the run can't use. Source: ours."""
    experts = 1 if run.model.moe is None else run.model.moe.num_experts
    for name, mesh in (("mesh", run.mesh), ("rollout.mesh", run.decode_mesh)):
        if experts % mesh.expert:
            raise ValueError(
                f"{name}.expert ({mesh.expert}) must divide the experts of the model ({experts})"
            )
    if run.rollout.ahead and run.recipe.select.tracks_drift:
        raise ValueError(
            f"{type(run.recipe.select).__name__} asks how far the policy has moved: "
            "rollout.ahead must be 0 with it"
        )
    if not run.rollout.apart and run.decode_mesh.num_devices != run.mesh.num_devices:
        raise ValueError(
            f"rollout.mesh has {run.decode_mesh.num_devices} devices, mesh "
            f"{run.mesh.num_devices}: they must be the same, or rollout.apart set"
        )
    if run.train.pack_tokens % run.mesh.context:
        raise ValueError(
            f"train.pack_tokens ({run.train.pack_tokens}) must be a multiple of mesh.context "
            f"({run.mesh.context})"
        )
    if run.train.micro_rows % run.mesh.row_shards:
        raise ValueError(
            f"train.micro_rows ({run.train.micro_rows}) must be a multiple of mesh.data x "
            f"mesh.fsdp x mesh.expert ({run.mesh.row_shards})"
        )
    shards = run.decode_mesh.row_shards
    if run.rollout.backend == "local" and run.rollout.slots % shards:
        # Else each of them would hold, and compute, all slots.
        raise ValueError(
            f"rollout.slots ({run.rollout.slots}) must be a multiple of the {shards} devices that "
            "share them out (data x fsdp x expert of rollout.mesh, or of mesh with fsdp and "
            "context taken for data)"
        )
    _check_attention(run)


def _check_attention(run: "RunConfig") -> None:
    """The rows that training reads, against what the kernels take."""
    model, rows = run.model, {"train.pack_tokens": run.train.pack_tokens}
    if model.attention not in ("splash", "cudnn"):
        return
    if run.recipe.select.reads_values:
        rows["task.max_prompt_tokens"] = run.task.max_prompt_tokens
    for name, tokens in rows.items():
        # A row that doesn't divide is left whole.
        parts = run.mesh.context if tokens % run.mesh.context == 0 else 1
        if model.attention == "splash" and tokens // parts % _SPLASH_TOKENS:
            shared = f" x mesh.context ({parts})" if parts > 1 else ""
            raise ValueError(
                f"model.attention=splash: {name} ({tokens}) must be a multiple of "
                f"{_SPLASH_TOKENS}{shared}; change it, or take model.attention=auto"
            )
        if model.attention == "cudnn" and tokens % 2:
            raise ValueError(f"model.attention=cudnn: {name} ({tokens}) must be even")
    if model.attention == "cudnn":
        if model.dtype != "bfloat16":
            raise ValueError(f"model.attention=cudnn needs model.dtype=bfloat16, got {model.dtype}")
        if model.head_dim > _CUDNN_WIDTH or model.head_dim % 8:
            raise ValueError(
                f"model.attention=cudnn: model.head_dim ({model.head_dim}) must be a multiple of 8 "
                f"up to {_CUDNN_WIDTH}; take model.attention=auto"
            )


def check_platform(run: "RunConfig", platform: str) -> None:
    """Raises ValueError on what devices of this platform ("cpu", "tpu", "cuda") don't have.

    Splash attention is for TPUs, and elsewhere interpreted. Source: ours.
    """
    if run.model.attention == "cudnn" and platform != "cuda":
        raise ValueError(
            f"model.attention=cudnn is for platform cuda, here: {platform}; take "
            "model.attention=auto"
        )
