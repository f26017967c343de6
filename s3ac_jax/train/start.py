"""A run that starts from a pretrained model: its folder looked at, its weights as base policy."""

from pathlib import Path

from s3ac_jax.config.boundary import ConfigError
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import PyTree
from s3ac_jax.io.hf_weights import check_params, load_params, read_origin, read_spec
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.train import keys
from s3ac_jax.train.build import Parts
from s3ac_jax.train.convert import ORIGIN
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.programs import fresh_learner


def check_model(config: RunConfig) -> None:
    """Compares the config's model with the folder's config.json.

    Raises ConfigError naming the first field that differs, HfError when the folder holds no policy
    that can be read. Source: ours: before anything is claimed or compiled.
    """
    found = read_spec(config.start.hf)
    name = found.first_difference(config.model)
    if name is not None:
        raise ConfigError(
            f"model.{name} is {getattr(config.model, name)}, but {config.start.hf}/config.json "
            f"says {getattr(found, name)}; use that value, or another start.hf"
        )
    check_params(config.start.hf, found)


def base_policy(parts: Parts) -> dict[str, PyTree]:
    """The folder's weights as the late policy, on the mesh; there are no earlier ones.

    With adapters the policy has fresh ones, which change nothing yet.
    Raises HfError naming the file and the weight. Source: ours.
    """
    network, spec = parts.actor.network, parts.config.model
    places = parallel.shardings(network.axes, network.abstract, parts.mesh)
    params = load_params(parts.config.start.hf, network, shardings=places, dtype=None)
    if spec.lora is not None:
        key = keys.stage_key(parts.config.seed, keys.ADAPTERS)
        params = params_of(fresh_learner(parts.actor, parts.mesh, key, start=params))
    return {"late": params}


def remember_origin(config: RunConfig, workdir: Path) -> None:
    """Keeps in the workdir how the folder was laid out: an export needs no other copy of it.

    Raises HfError, OSError. Source: ours.
    """
    path = workdir / ORIGIN
    if not path.exists():
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(read_origin(config.start.hf).to_json() + "\n")
        temporary.replace(path)
