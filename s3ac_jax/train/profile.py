"""A trace of one tick, for xprof and Perfetto."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Self

import jax

# The first tick compiles, and the second one may: the first evaluation lies between.
_WARM_TICKS = 2


class Profile:
    """Traces the third tick that this process runs into `folder`; nothing for None.

    A context manager around the ticks. After it `path` is the trace for Perfetto, None where
    there were fewer ticks.
    Source: ours: jax.profiler, with the names of phases and layers (jax.named_scope).
    """

    def __init__(self, folder: Path | None):
        self._folder, self._ticks = folder, 0
        self.path: Path | None = None

    def __enter__(self) -> Self:
        self._ticks = 0
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @contextlib.contextmanager
    def of(self, tick: int) -> Generator[None]:
        """Around one tick. Source: ours."""
        self._ticks += 1
        with jax.profiler.StepTraceAnnotation("tick", step_num=tick):
            if self._folder is None or self._ticks != _WARM_TICKS + 1:
                yield
                return
            with jax.profiler.trace(self._folder, create_perfetto_trace=True):
                yield
        found = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self.path = found[-1] if found else None
