"""The base policies on disk: those that ship with the package, and those of a run."""

import dataclasses
import json
from importlib import resources
from pathlib import Path

import jax
import numpy as np

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import PyTree
from s3ac_jax.io.weights import WeightsError, load_weights, save_weights
from s3ac_jax.models.network import Network
from s3ac_jax.parallel import hosts

POLICIES = ("early", "middle", "late")


def embedded_folder() -> Path:
    """Where the package keeps its policies. Source: ours."""
    return Path(str(resources.files("s3ac_jax.data") / "base"))


def save_policies(folder: Path, policies: dict[str, PyTree], facts: dict, dtype: str) -> None:
    """Writes early, middle and late as safetensors of `dtype`, `facts` as their metadata.

    Of several hosts the first one writes. Raises WeightsError when the folder can't be written.
    Source: ours.
    """
    if hosts.is_first():
        folder.mkdir(parents=True, exist_ok=True)
    for name, params in policies.items():
        whole = hosts.to_host(params)
        if not hosts.is_first():
            continue
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), whole)
        save_weights(folder / f"{name}.safetensors", cast, {"made_with": json.dumps(facts)})


def load_policies(folder: Path, network: Network, names: tuple[str, ...]) -> dict[str, PyTree]:
    """The named policies in float32.

    Raises WeightsError, naming file and weight, when one is missing or has another shape than
    the config's model.
    Source: ours.
    """
    policies = {}
    wanted = {name: leaf.shape for name, leaf in named_leaves(network.abstract).items()}
    for name in names:
        path = folder / f"{name}.safetensors"
        params, metadata = load_weights(path)
        _same_numbers(path, network, metadata)
        found = {key: leaf.shape for key, leaf in named_leaves(params).items()}
        for key in sorted(wanted.keys() | found.keys()):
            if wanted.get(key) != found.get(key):
                raise WeightsError(
                    f"{path}: {key} has shape {found.get(key, 'none')}, the config's model needs "
                    f"{wanted.get(key, 'none')}; set sft.embedded=False to train policies of "
                    "this shape, or use the model they were made for"
                )
        policies[name] = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    return policies


def _same_numbers(path: Path, network: Network, metadata: dict[str, str]) -> None:
    """What shapes can't show: the numbers of the model that the weights were trained under."""
    made = json.loads(metadata.get("made_with", "{}")).get("model", {})
    for key in ("rope_theta", "rms_norm_eps"):
        if made.get(key) != getattr(network.spec, key):
            raise WeightsError(
                f"{path} was made with model.{key} = {made.get(key)}, the config has "
                f"{getattr(network.spec, key)}; use that value or set sft.embedded=False"
            )


def policy_facts(config: RunConfig) -> dict:
    """What a policy file says of its making. Source: ours."""
    sections = {
        name: dataclasses.asdict(getattr(config, name)) for name in ("sft", "task", "model")
    }
    return {**sections, "seed": config.seed}
