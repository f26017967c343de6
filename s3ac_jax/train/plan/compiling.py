"""One program compiled for devices that are not there: its memory, collectives and complaints."""

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from s3ac_jax.train.plan.hlo import Collective, collectives
from s3ac_jax.train.plan.logs import stderr_lines
from s3ac_jax.train.plan.target import PlanError, Target

_REMATERIALISED = "Involuntary full rematerialization"
# Arguments and results are in the figure (checked with a program that has nothing else).
_OOM = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device, as XLA's compiler counts them. given_up: arguments that are reused.

    host: in the host's memory. Source: ours.
    """

    arguments: float
    outputs: float
    given_up: float
    temporaries: float
    code: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """What the program needs while it runs. Source: ours."""
        fresh = max(0.0, self.outputs - self.given_up)
        return self.arguments + fresh + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program. memory: None where it gave up for lack of it, and then
    needed: bytes, None where it doesn't say.

    regathered: how often the partitioner said that it gathers an array whole to lay it out anew.
    places: shardings of the results.
    Source: ours.
    """

    memory: Memory | None
    collectives: Sequence[Collective]
    seconds: float
    regathered: int
    places: Any = None
    needed: float | None = None


def compile_program(
    program: Any, arguments: tuple[Any, ...], mesh: Mesh, target: Target, *,
    turns: float = 1.0,
) -> Compiled:  # fmt: skip
    """The program traced and lowered for the target, and compiled. turns: see `hlo.collectives`.

    Raises PlanError on an error that is no lack of memory, and on what can't be traced there.
    Source: ours.
    """
    start = time.perf_counter()
    try:
        with jax.set_mesh(mesh):
            lowered = program.trace(*arguments).lower(lowering_platforms=(target.chip.platform,))
    except (ValueError, RuntimeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise PlanError(f"this config has no program for {target.name}: {why}") from error
    told: list[str] = []
    try:
        with stderr_lines(told):
            made = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        seconds = time.perf_counter() - start
        text = str(error)
        if "Oom" not in text and "RESOURCE_EXHAUSTED" not in text:
            why = " ".join(text.split())[:400]
            raise PlanError(f"XLA can't compile this for {target.name}: {why}") from error
        return Compiled(None, (), seconds, _count(told), needed=_needed(text))
    kept = made.memory_analysis()
    memory = Memory(
        kept.argument_size_in_bytes, kept.output_size_in_bytes, kept.alias_size_in_bytes,
        kept.temp_size_in_bytes, kept.generated_code_size_in_bytes,
        kept.host_temp_size_in_bytes + kept.host_argument_size_in_bytes,
    )  # fmt: skip
    found = collectives(made.as_text() or "", devices=mesh.size, turns=turns)
    seconds = time.perf_counter() - start
    return Compiled(memory, tuple(found), seconds, _count(told), made.output_shardings)


def _count(lines: list[str]) -> int:
    return sum(_REMATERIALISED in line for line in lines)


def _needed(text: str) -> float | None:
    """Bytes that the compiler says it would have used."""
    match = _OOM.search(text)
    return float(match[1]) * _UNITS[match[2]] if match else None
