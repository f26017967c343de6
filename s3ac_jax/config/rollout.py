"""How responses are made, and by whom."""

import dataclasses
import re
from typing import Literal

from s3ac_jax.config.checks import at_least, positive
from s3ac_jax.models.int8 import WeightsDtype
from s3ac_jax.models.spec import KVDtype
from s3ac_jax.parallel.mesh import MeshSpec


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """slots: responses in flight. steps_per_dispatch: tokens per slot between two host looks.

    temperature: of sampling and of every log-prob in training. insert_batch: requests prefilled
    per call. prefill_chunk: tokens of a prompt read at a time, 0 for all. kv_dtype: of keys and
    values in the slots, "auto" is the model's. weights: "int8" samples from rounded weights.
    scan_layers: keep the layers' weights stacked: compiles faster, samples slower; int8 weights
    always are. mesh: how the devices share out the work while they sample, as many as train; None
    for what `MeshSpec.for_decoding` makes of the training's.

    apart: the devices of `mesh` are others than the training's, those behind them. ahead: ticks
    that sampling may run ahead of the training, 0 or 1; with 1 the weights that sample are a tick
    old.

    backend: "local" in the trainer's process; "remote" by rollout servers over gRPC; "vllm" and
    "sglang" by theirs over HTTP. addresses: of the servers, comma-separated. token_file: with the
    token that they ask for. tls_ca: certificate that signed theirs. weights_folder: new weights go
    by files in this folder, which the servers see under the same path; empty: they are sent.
    in_flight_updates: responses in progress go on under new weights. max_in_flight: requests that a
    server has at a time. server_patience_s: how long none of them may be there.
    Source: ours.
    """

    slots: int
    max_response_tokens: int
    steps_per_dispatch: int = 8
    insert_batch: int = 32
    temperature: float = 1.0
    prefill_chunk: int = 0
    kv_dtype: KVDtype = "auto"
    weights: WeightsDtype = "model"
    scan_layers: bool = False
    mesh: MeshSpec | None = None
    apart: bool = False
    ahead: int = 0
    backend: Literal["local", "remote", "vllm", "sglang"] = "local"
    addresses: str = ""
    token_file: str = ""
    tls_ca: str = ""
    weights_folder: str = ""
    in_flight_updates: bool = False
    max_in_flight: int = 512
    server_patience_s: float = 300.0

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses one by one. Source: ours."""
        return tuple(one for part in self.addresses.split(",") if (one := part.strip()))

    def __post_init__(self):
        at_least("rollout", self, slots=1, max_response_tokens=1, steps_per_dispatch=1,
                 insert_batch=1, prefill_chunk=0, max_in_flight=1)  # fmt: skip
        # A greedy sampler has no log-probs to learn from.
        positive("rollout", self, "temperature", "server_patience_s")
        if self.ahead not in (0, 1):
            raise ValueError(f"rollout.ahead must be 0 or 1, got {self.ahead}")
        if self.apart and (self.mesh is None or self.backend != "local"):
            raise ValueError(
                "rollout.apart is for rollout.backend=local, and needs rollout.mesh: how many "
                "devices sample beside those of mesh"
            )
        if self.backend == "local":
            if self.ahead and not self.apart:
                raise ValueError(
                    "rollout.ahead=1 needs devices or servers of its own to sample on: set "
                    "rollout.apart and rollout.mesh, or rollout.backend=remote"
                )
            if self.servers:
                raise ValueError(
                    f"rollout.addresses ({self.addresses}) are for rollout.backend=remote, vllm or "
                    "sglang; local has no server"
                )
            return
        example = "host:9000" if self.backend == "remote" else "http://host:8000"
        if not self.servers:
            raise ValueError(
                f"rollout.backend={self.backend} needs rollout.addresses, say {example},..."
            )
        wanted = r"[^/\s:]+:\d+|\[[^\]/\s]+\]:\d+" if self.backend == "remote" else r"https?://\S+"
        for address in self.servers:
            if not re.fullmatch(wanted, address):
                raise ValueError(f"rollout.addresses: {address!r} must be like {example}")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError(f"rollout.addresses ({self.addresses}) name a server twice")
        if self.backend != "remote" and not self.weights_folder:
            raise ValueError(
                f"rollout.backend={self.backend} needs rollout.weights_folder: it reads new "
                "weights from files, in a folder that it and the trainer see under one path"
            )
