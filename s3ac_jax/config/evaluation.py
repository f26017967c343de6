"""What is evaluated and how it is sampled: suites of questions, apart from any run."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Self

from s3ac_jax.config.checks import at_least
from s3ac_jax.config.sources import SourceConfig

# No dot: configs and metrics read it as a section of its own.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@dataclasses.dataclass(frozen=True)
class SuiteConfig:
    """A set of questions, and how each of them is answered `samples` times.

    source: where the questions come from; None: the held-out problems of the run's own task, with
    their own verifier. pass_at, maj_at: the k of pass@k and maj@k beside `samples` itself, which is
    reported where it is more than one. temperature: 0 is greedy. top_p: 1 for all tokens; top_k: 0
    for all. max_prompt_tokens: longer prompts are left out and counted. max_response_tokens: 0, for
    a run's own problems alone, is the limit of its rollouts. instruction: added to each question;
    system: message before it, the template's own default when empty; thinking: what the template is
    told of it.
    Source: ours; several samples at a temperature as DeepSeek-R1 (2501.12948) evaluates.
    """

    source: SourceConfig | None = None
    samples: int = 1
    pass_at: tuple[int, ...] = ()
    maj_at: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 4096
    instruction: str = "Put your final answer within \\boxed{}."
    system: str = ""
    thinking: bool = False

    def __post_init__(self):
        at_least("suite", self, samples=1, temperature=0, top_k=0, max_prompt_tokens=1,
                 max_response_tokens=0 if self.source is None else 1)  # fmt: skip
        if self.source is not None and self.source.weight != 1:
            raise ValueError(
                f"suite.source.weight ({self.source.weight}) is of no use: all questions of a "
                "suite are asked; leave it out"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"suite.top_p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"suite.temperature 0 gives the same answer {self.samples} times; set samples to "
                "1, or a temperature"
            )
        for name in ("pass_at", "maj_at"):
            for k in getattr(self, name):
                if not 1 <= k <= self.samples:
                    raise ValueError(
                        f"suite.{name} must be in 1..samples ({self.samples}), got {k}"
                    )

    @property
    def reported(self) -> dict[str, tuple[int, ...]]:
        """The k of "pass" and of "maj". Source: ours."""
        every = {self.samples} if self.samples > 1 else set()
        return {
            name: tuple(sorted({*given, *every}))
            for name, given in (("pass", self.pass_at), ("maj", self.maj_at))
        }


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Suites by name; the name is what the table, the records and the seeds call them.

    seed: with the suite's name, the problem's id and the number of the sample it decides a
    response. chunk_rows: responses between two times that records are written; at the end of each
    chunk some slots of the sampler wait for its longest responses. bootstrap: resamples of an
    interval.
    Source: ours.
    """

    suites: Mapping[str, SuiteConfig] = dataclasses.field(default_factory=dict)
    seed: int = 0
    chunk_rows: int = 1024
    bootstrap: int = 1000

    def __post_init__(self):
        at_least("evaluation", self, seed=0, chunk_rows=1, bootstrap=1)
        for name in self.suites:
            # They name files, and metrics.
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"suites.{name}: names of suites have letters, digits and _ - only"
                )

    def of_run(self, max_response_tokens: int) -> Self:
        """The same with the limit of a run's rollouts where a suite takes that. Source: ours."""
        suites = {
            name: suite
            if suite.max_response_tokens
            else dataclasses.replace(suite, max_response_tokens=max_response_tokens)
            for name, suite in self.suites.items()
        }
        return dataclasses.replace(self, suites=suites)

    @property
    def max_response_tokens(self) -> int:
        """Of the suite with the longest responses; 0 without suites. Source: ours."""
        return max((suite.max_response_tokens for suite in self.suites.values()), default=0)


@dataclasses.dataclass(frozen=True)
class TrainingEvaluationConfig(EvaluationConfig):
    """Suites inside training. every: ticks from one evaluation to the next, 0 for none.

    Who grades is the task's affair: its grader is shared.
    Source: ours.
    """

    every: int = 0

    def __post_init__(self):
        super().__post_init__()
        at_least("evaluation", self, every=0)
        if self.every and not self.suites:
            raise ValueError(
                f"evaluation.every ({self.every}) needs evaluation.suites to evaluate, or 0"
            )
