"""What is evaluated: a run's policy, a folder's, or whatever servers have."""

import contextlib
import dataclasses
import json
import urllib.parse
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax

from s3ac_jax.config.boundary import ConfigError, kept_run
from s3ac_jax.config.evaluate import EvaluateConfig, SamplerConfig
from s3ac_jax.config.flags import CommandLineError
from s3ac_jax.config.run import RunConfig
from s3ac_jax.data.chat import ChatTemplate, NoTemplate, load_template
from s3ac_jax.data.hf_tokenizer import HFTokenizer
from s3ac_jax.data.tokenizer import Tokenizer
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.io.hf_weights import load_params, read_spec
from s3ac_jax.models.network import Network, actor_network
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.rollout.backend import RolloutBackend
from s3ac_jax.rollout.engine import Engine
from s3ac_jax.rollout.local import LocalRollout
from s3ac_jax.train.evaluation.suites import EvaluationError
from s3ac_jax.train.programs import make_actor
from s3ac_jax.train.served import LoadedWeights, WeightsSource
from s3ac_jax.train.tasks import HeldOut, Split, held_out_half
from s3ac_jax.train.token_file import read_token


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to evaluate. checkpoint: workdir of a run, or one of its checkpoints. hf: a folder.

    address: of servers, comma-separated; "host:port" for gRPC, "http://..." for HTTP. With it
    checkpoint or hf only says which tokenizer, template and task there are: the weights are the
    servers'.
    Raises CommandLineError on any other combination. Source: ours.
    """

    checkpoint: str | None = None
    hf: str | None = None
    address: str | None = None

    def __post_init__(self):
        for name in ("checkpoint", "hf", "address"):
            if getattr(self, name) == "":
                raise CommandLineError(f"--{name} is empty; give it a value, or leave it out")
        if bool(self.checkpoint) == bool(self.hf):
            why = " beside --address, for the tokenizer" if self.address else ""
            raise CommandLineError(f"give one of --checkpoint=RUN and --hf=FOLDER{why}")


@dataclasses.dataclass(frozen=True)
class Reading:
    """How questions become tokens. run, half: where there is a run, its config and its task's
    held-out half.

    plain: why there is no chat template, None where there is one. Source: ours.
    """

    spec: DecoderSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None
    plain: str | None
    run: RunConfig | None = None
    half: HeldOut | None = None

    @property
    def held_out(self) -> Split | None:
        """The held-out problems of the run's own task. Source: ours."""
        return None if self.half is None else self.half.split

    def close(self) -> None:
        """Ends what the task has begun. Source: ours."""
        if self.half is not None:
            self.half.close()


def read_target(wanted: Wanted) -> Reading:
    """All that can be known without weights. Raises RunError, in one line. Source: ours."""
    if wanted.hf:
        spec, tokenizer = read_spec(wanted.hf), HFTokenizer(wanted.hf)
        try:
            return Reading(spec, tokenizer, load_template(wanted.hf, tokenizer), None)
        except NoTemplate as error:
            # A base model. A template that can't be read is another matter: it raises.
            return Reading(spec, tokenizer, None, str(error))
    assert wanted.checkpoint
    config = run_config(wanted.checkpoint)
    try:
        half = held_out_half(config)
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    _check_questions(half, run_of(wanted.checkpoint))
    plain = None if half.template else "the run's tokenizer has no chat template"
    return Reading(config.model, half.tokenizer, half.template, plain, config, half)


def _check_questions(half: HeldOut, run: Path) -> None:
    """Compares the held-out questions with those that the run was begun with."""
    path = run / "stage_task.json"
    if not path.is_file():  # of an earlier version
        return
    try:
        kept = json.loads(path.read_bytes())["held_out"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"{path} can't be read ({error}); restore that file") from error
    now = half.split.facts()
    if differing := [name for name in {**kept, **now} if kept.get(name) != now.get(name)]:
        half.close()
        raise EvaluationError(
            f"the held-out questions of {run} are others now than when it was trained "
            f"({differing[0]}); restore their files, or evaluate a suite with a source"
        )


def run_of(checkpoint: str) -> Path:
    """The workdir of a run, from itself, its checkpoints folder, or one step in there.

    Source: ours.
    """
    folder = Path(checkpoint)
    above = folder.parent if folder.name.isdigit() else folder
    return above.parent if above.name == "checkpoints" else folder


def checkpoint_of(checkpoint: str) -> tuple[Path, int]:
    """The folder of one checkpoint, the newest where no step is named, and its tick.

    Raises EvaluationError where there is none. Source: ours.
    """
    folder = run_of(checkpoint) / "checkpoints"
    steps, name = Checkpoints(folder).steps(), Path(checkpoint).name
    if name.isdigit() and int(name) not in steps:
        kept = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
        raise EvaluationError(
            f"{folder} has no checkpoint {name} that was written to the end; {kept}"
        )
    if not steps:
        raise EvaluationError(f"{folder} has no checkpoint that was written to the end")
    tick = int(name) if name.isdigit() else steps[-1]
    return folder / str(tick), tick


def run_config(checkpoint: str) -> RunConfig:
    """The config that a run's workdir keeps. Raises EvaluationError, ConfigError. Source: ours."""
    path = run_of(checkpoint) / "config.json"
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EvaluationError(
            f"{path} can't be read ({error}); --checkpoint is the workdir of a run, say runs/tiny"
        ) from error
    try:
        return kept_run(kept)
    except (ConfigError, TypeError) as error:
        raise EvaluationError(f"{path}: {error}") from error


class Target:
    """The policy that answers, on its mesh; a context.

    config: of the evaluation. max_prompt_tokens, max_response_tokens: the longest there will be.
    backend: has the weights. version, told: of them, as for `LoadedWeights`. weights: their
    fingerprint, or where nobody says it, who answers.
    Raises RunError, in one line. Source: ours.
    """

    backend: RolloutBackend
    version: int
    told: str
    weights: str

    def __init__(
        self, wanted: Wanted, reading: Reading, config: EvaluateConfig, *,
        max_prompt_tokens: int, max_response_tokens: int,
    ):  # fmt: skip
        limits = {
            "max_prompt_tokens": max_prompt_tokens, "max_response_tokens": max_response_tokens
        }  # fmt: skip
        self._memory = f"sampler.slots ({config.sampler.slots}) x {sum(limits.values())} tokens"
        with contextlib.ExitStack() as ends:
            self._ends = ends
            if wanted.address:
                self._servers(wanted.address, reading, config, limits)
            else:
                self._local(wanted, reading, config, limits)
            # All went well: what is open stays so until the end of this context.
            self._ends = ends.pop_all()

    def _local(
        self, wanted: Wanted, reading: Reading, config: EvaluateConfig, limits: dict[str, int]
    ) -> None:
        try:
            mesh = parallel.make_mesh(config.mesh)
        except ValueError as error:
            raise EvaluationError(str(error)) from error
        network = actor_network(reading.spec)
        self._ends.enter_context(jax.set_mesh(mesh))
        loaded = _load(wanted, reading, network, mesh)
        sampler = config.sampler
        engine = Engine(
            network=network,
            slots=sampler.slots,
            cache_tokens=sum(limits.values()),
            steps_per_dispatch=sampler.steps_per_dispatch,
            stop_ids=reading.tokenizer.stop_ids,
            kv_dtype=sampler.kv_dtype,
            weights=sampler.weights,
            prefill_chunk=sampler.prefill_chunk,
            scan_layers=sampler.scan_layers,
        )
        self.backend = LocalRollout(
            engine, insert_batch=sampler.insert_batch,
            max_prompt_tokens=limits["max_prompt_tokens"],
            max_response_tokens=limits["max_response_tokens"],
        )  # fmt: skip
        self._ends.callback(self.backend.close)
        self.backend.update_weights(loaded.params, loaded.version)
        self.version, self.told = loaded.version, loaded.told
        self.weights = self.backend.stats()["fingerprint"]

    def _servers(
        self, address: str, reading: Reading, config: EvaluateConfig, limits: dict[str, int]
    ) -> None:
        for name in ("kv_dtype", "weights"):
            if getattr(config.sampler, name) != getattr(SamplerConfig(), name):
                raise CommandLineError(
                    f"sampler.{name} is for a sampler in this process: leave it out with --address "
                    "and say it where the servers are started"
                )
        addresses = sorted({one for part in address.split(",") if (one := part.strip())})
        over_http = [one.lower().startswith(("http://", "https://")) for one in addresses]
        if not addresses or len(set(over_http)) > 1:
            raise CommandLineError(
                f"--address={address} must be like host:9000,... or like http://host:8000,..."
            )
        try:
            # Not above: an evaluation here needs neither gRPC nor an HTTP client.
            from s3ac_jax.rollout.client.fleet_server import Timing
            from s3ac_jax.rollout.client.openai import OpenAIRollout
            from s3ac_jax.rollout.client.remote import RemoteRollout
        except ModuleNotFoundError as error:
            raise EvaluationError(
                f"--address needs more packages ({error}): pip install 's3ac-jax[serve]'"
            ) from error
        sampler = config.sampler
        try:
            token = None
            if sampler.token_file:
                token = read_token(sampler.token_file, "sampler.token_file")
        except ValueError as error:
            raise EvaluationError(str(error)) from error
        common: dict[str, Any] = {
            **limits, "token": token, "max_in_flight": sampler.max_in_flight,
            "timing": Timing(patience=sampler.server_patience_s),
        }  # fmt: skip
        if over_http[0]:
            flavour = {"openai": "s3ac"}.get(sampler.flavour, sampler.flavour)
            roots = sorted({_root(one) for one in addresses})
            client = OpenAIRollout(
                roots, flavour, vocab_size=reading.spec.vocab_size, model=sampler.model or None,
                **common,
            )  # fmt: skip
            self.backend = client
            self._ends.callback(client.close)
            said = client.adopt_weights()
            self.version, self.told = said.version, f"{said.name or 'the model'} of {_all(roots)}"
            # Others than our own don't say which weights answer.
            self.weights = said.fingerprint or self.told
            return
        remote = RemoteRollout(
            addresses, network=actor_network(reading.spec), tls_ca=sampler.tls_ca or None, **common
        )
        self.backend = remote
        self._ends.callback(remote.close)
        self.version = remote.adopt_weights()
        self.told, self.weights = f"the weights of {_all(addresses)}", remote.stats()["fingerprint"]

    @contextlib.contextmanager
    def memory(self) -> Generator[None]:
        """Says in one line what to lower where the sampler finds no memory. Source: ours."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise EvaluationError(
                f"there is no memory for {self._memory} of prompt and response; lower "
                "sampler.slots, or max_response_tokens of the suite with the longest"
            ) from error

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()


def _root(address: str) -> str:
    """Without the "/v1" that OpenAI's clients want: the paths here have it. Spelled as one."""
    scheme, host, path, *_ = urllib.parse.urlsplit(address)
    return f"{scheme}://{host.lower()}{path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def _all(addresses: list[str]) -> str:
    return ", ".join(addresses)


def _load(wanted: Wanted, reading: Reading, network: Network, mesh: jax.sharding.Mesh):
    if reading.run is not None and wanted.checkpoint:
        source = WeightsSource(reading.run, make_actor(reading.run), mesh)
        return source.checkpoint(wanted.checkpoint)
    assert wanted.hf
    places = parallel.shardings(network.axes, network.abstract, mesh)
    return LoadedWeights(
        load_params(wanted.hf, network, shardings=places, dtype=None), 0, wanted.hf
    )
