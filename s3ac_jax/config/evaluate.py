"""EvaluateConfig: the suites of one evaluation, and who makes the responses."""

import dataclasses
from typing import Literal

from ml_collections.config_dict import ConfigDict

from s3ac_jax.config.boundary import ConfigError, section
from s3ac_jax.config.checks import at_least, positive
from s3ac_jax.config.evaluation import EvaluationConfig
from s3ac_jax.models.int8 import WeightsDtype
from s3ac_jax.models.spec import KVDtype
from s3ac_jax.parallel.mesh import MeshSpec

# What the same folder may go on with: how fast, by whom and what is said of it, never what is made.
# The suites are compared one by one, with what their records say that they were made with. Not
# here: sampler.kv_dtype and sampler.weights, which round what the policy computes.
FREE_KEYS = {
    "bootstrap",
    "chunk_rows",
    "graders",
    "sampler.flavour",
    "sampler.insert_batch",
    "sampler.max_in_flight",
    "sampler.model",
    "sampler.prefill_chunk",
    "sampler.scan_layers",
    "sampler.server_patience_s",
    "sampler.slots",
    "sampler.steps_per_dispatch",
    "sampler.tls_ca",
    "sampler.token_file",
    "suites",
}


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """The sampler in this process, as in `RolloutConfig`; or servers elsewhere, by --address.

    flavour: of HTTP servers: "openai" for our own and vLLM, "sglang" for SGLang's native API.
    model: name that an HTTP server knows it by; empty: its only one. token_file: with the token
    that servers ask for. tls_ca: certificate that signed theirs. max_in_flight: requests that a
    server has at a time. server_patience_s: how long none of them may be there.
    Source: ours.
    """

    slots: int = 64
    steps_per_dispatch: int = 8
    insert_batch: int = 16
    prefill_chunk: int = 0
    kv_dtype: KVDtype = "auto"
    weights: WeightsDtype = "model"
    scan_layers: bool = False
    flavour: Literal["openai", "sglang"] = "openai"
    model: str = ""
    token_file: str = ""
    tls_ca: str = ""
    max_in_flight: int = 256
    server_patience_s: float = 300.0

    def __post_init__(self):
        at_least("sampler", self, slots=1, steps_per_dispatch=1, insert_batch=1, prefill_chunk=0,
                 max_in_flight=1)  # fmt: skip
        positive("sampler", self, "server_patience_s")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(EvaluationConfig):
    """What launch/evaluate.py is given.

    graders: worker processes. deadline_s: seconds of work on one answer. Source: ours.
    """

    graders: int = 2
    deadline_s: float = 2.0
    sampler: SamplerConfig = SamplerConfig()
    mesh: MeshSpec = dataclasses.field(default_factory=MeshSpec)

    def __post_init__(self):
        super().__post_init__()
        at_least("config", self, graders=1)
        positive("config", self, "deadline_s")
        if not self.suites:
            raise ValueError("suites is empty; name at least one, as configs/evaluate.py does")


def evaluate_from_config_dict(cd: ConfigDict) -> EvaluateConfig:
    """The validated evaluation that `cd` describes.

    Raises ConfigError: one line that says what is wrong and where. Source: ours.
    """
    config = section(EvaluateConfig, cd)
    for name, suite in config.suites.items():
        if getattr(suite.source, "path", None) == "":
            path = f"suites.{name}.source.path"
            raise ConfigError(f"{path} has no value; set it: --config.{path}=FILE")
    return config
