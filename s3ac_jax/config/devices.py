"""Whether a run's sizes can be shared out over its devices."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from s3ac_jax.config.run import RunConfig


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
