"""Whether a config suits the processes and the devices that are there, before anything waits."""

import jax

from s3ac_jax.config.boundary import ConfigError, to_dict
from s3ac_jax.config.devices import check_platform
from s3ac_jax.config.run import RunConfig
from s3ac_jax.io.workdir import flatten
from s3ac_jax.parallel import hosts
from s3ac_jax.parallel.mesh import platform

# What one host may have otherwise than another.
HOSTS_OWN = {"task.graders"}


def check_machine(config: RunConfig) -> None:
    """The processes have to want the same, on all devices, which have to have what is asked for.

    Raises ConfigError, HostError. Source: ours: before anything compiles or is claimed.
    """
    if hosts.count() > 1:
        _check_hosts(config)
    try:
        check_platform(config, platform())
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_hosts(config: RunConfig) -> None:
    facts = flatten(to_dict(config)) | {"jax": jax.__version__}
    facts = {name: value for name, value in facts.items() if name not in HOSTS_OWN}
    hosts.check_same("config", "the config", facts, "give all hosts the same command and files")
    if config.mesh.num_devices != jax.device_count():
        raise ConfigError(
            f"the mesh has {config.mesh.num_devices} devices, the {hosts.count()} processes have "
            f"{jax.device_count()}; of several processes all devices are used: set mesh.data, "
            "mesh.fsdp, ... so that their product is that"
        )
