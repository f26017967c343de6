"""Whatever makes a run's responses: the sampler in this process, or servers elsewhere."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import PyTree
from s3ac_jax.io.hf_weights import read_origin, save_params
from s3ac_jax.io.orbax_weights import save_orbax
from s3ac_jax.models.lora import merge_lora
from s3ac_jax.models.network import Network
from s3ac_jax.parallel.mesh import make_mesh
from s3ac_jax.parallel.regrid import regrid
from s3ac_jax.rollout.backend import RolloutBackend
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout, Mover, sender
from s3ac_jax.train.token_file import read_token

# The servers may still read the last but one when the next is written.
_KEPT_SETS = 2


def make_engine(config: RunConfig, network: Network, stop_ids: tuple[int, ...]) -> Engine:
    """The rollout engine for this task. stop_ids: what ends a response. Source: ours."""
    rollout = config.rollout
    return Engine(
        network=network,
        slots=rollout.slots,
        cache_tokens=config.longest,
        steps_per_dispatch=rollout.steps_per_dispatch,
        stop_ids=stop_ids,
        record_routing=config.records_routing,
        kv_dtype=rollout.kv_dtype,
        weights=rollout.weights,
        prefill_chunk=rollout.prefill_chunk,
        scan_layers=rollout.scan_layers,
    )


def make_rollout(
    config: RunConfig, network: Network, stop_ids: tuple[int, ...], mesh: Mesh
) -> RolloutBackend:
    """What the config asks for; servers are not called yet. mesh: of the training.

    Raises ValueError on a token that can't be read, a missing package, or what a server can't do.
    Source: ours.
    """
    rollout = config.rollout
    limits = {
        "max_prompt_tokens": config.task.max_prompt_tokens,
        "max_response_tokens": rollout.max_response_tokens,
    }
    if rollout.backend == "local":
        engine = make_engine(config, network, stop_ids)
        there, move = _there(config, network, mesh)
        return LocalRollout(
            engine, insert_batch=rollout.insert_batch, mesh=there, move=move, **limits
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"rollout.backend={rollout.backend} works with one trainer process, here: "
            f"{jax.process_count()}; use local"
        )
    try:
        # Not above: training alone needs neither gRPC nor an HTTP client.
        from s3ac_jax.rollout.client.fleet_server import Timing
        from s3ac_jax.rollout.client.openai import OpenAIRollout
        from s3ac_jax.rollout.client.remote import RemoteRollout
    except ModuleNotFoundError as error:
        raise ValueError(
            f"rollout.backend={rollout.backend} needs more packages ({error}): "
            "pip install 's3ac-jax[serve]'"
        ) from error
    token = read_token(rollout.token_file, "rollout.token_file") if rollout.token_file else None
    common = {
        **limits,
        "token": token,
        "max_in_flight": rollout.max_in_flight,
        "in_flight": rollout.in_flight_updates,
        "timing": Timing(patience=rollout.server_patience_s),
    }
    if rollout.backend == "remote":
        save = None
        if rollout.weights_folder:
            save = _Sets(
                rollout.weights_folder,
                lambda params, folder: save_orbax(params, config.model, None, folder),
            )
        return RemoteRollout(
            rollout.servers, network=network, record_routing=config.records_routing,
            tls_ca=rollout.tls_ca or None, save=save, copies=bool(rollout.ahead), **common,
        )  # fmt: skip
    if config.records_routing:
        raise ValueError(
            f"rollout.backend={rollout.backend} doesn't say which experts it chose: "
            "recipe.replay_routing must be False with it"
        )
    if not config.start.hf:
        raise ValueError(
            f"rollout.backend={rollout.backend} needs start.hf, the folder of the pretrained model "
            "that it serves: its layout and tokenizer go with every export"
        )
    return OpenAIRollout(
        rollout.servers, rollout.backend, vocab_size=config.model.vocab_size,
        export=_Sets(rollout.weights_folder, _exporter(config)), **common,
    )  # fmt: skip


def _there(
    config: RunConfig, network: Network, mesh: Mesh
) -> tuple[Mesh | None, Callable[[PyTree], PyTree] | None]:
    """Where responses are made and what brings weights there, None for the training's own mesh."""
    spec = config.decode_mesh
    if not config.rollout.apart:
        if config.samples_in_place:
            return None, None
        grids = regrid(mesh, spec)
        return grids.target, Mover(network, mesh, grids)
    if jax.process_count() > 1:
        raise ValueError(
            f"rollout.apart works with one process, here: {jax.process_count()}; sample on servers "
            "instead (rollout.backend=remote)"
        )
    others = [device for device in jax.devices() if device not in set(mesh.devices.flat)]
    if len(others) < spec.num_devices:
        raise ValueError(
            f"rollout.mesh needs {spec.num_devices} devices beside the {mesh.size} of mesh, here "
            f"are {len(others)}"
        )
    apart = make_mesh(spec, others)
    return apart, sender(network, apart)


def _exporter(config: RunConfig) -> Callable[[PyTree, Path], None]:
    base = config.start.hf

    def export(params: PyTree, folder: Path) -> None:
        whole, spec = merge_lora(params, config.model)
        origin = read_origin(base)
        carry = base if origin.skipped else None
        save_params(whole, spec, origin, folder, base=base, carry_from=carry)

    return export


class _Sets:
    """Numbered sets of weights in one folder, the newest kept: (params, version) -> path."""

    def __init__(self, folder: str, write: Callable[[PyTree, Path], None]):
        self._folder, self._write = Path(folder).absolute(), write
        self._numbers = itertools.count()
        self._made: list[Path] = []

    def __call__(self, params: PyTree, version: int) -> str:
        path = self._folder / f"weights-{next(self._numbers)}"
        # Of an earlier process, which servers have no more use for.
        shutil.rmtree(path, ignore_errors=True)
        self._write(params, path)
        self._made.append(path)
        while len(self._made) > _KEPT_SETS:
            shutil.rmtree(self._made.pop(0), ignore_errors=True)
        return str(path)
