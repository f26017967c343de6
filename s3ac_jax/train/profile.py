"""A trace of one tick, for xprof and Perfetto."""

import contextlib
from collections.abc import Generator
from pathlib import Path

import jax

# The first tick compiles, and the second one may: the first evaluation lies between.
_WARM_TICKS = 2


class Profile:
    """Traces the third tick that this process runs into `folder`; nothing for None.

    Source: ours: jax.profiler, with the names of phases and layers (jax.named_scope).
    """

    def __init__(self, folder: Path | None):
        self._folder, self._ticks = folder, 0

    @property
    def told(self) -> str | None:
        """One line on the trace, None where nobody asked for one. Source: ours."""
        if self._folder is None:
            return None
        if self._ticks <= _WARM_TICKS:
            return f"no tick was traced: of {self._ticks} ticks none came after the warm-up"
        found = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        return f"trace of one tick: {found[-1]} (ui.perfetto.dev; or xprof --logdir {self._folder})"

    @contextlib.contextmanager
    def of(self, tick: int) -> Generator[None]:
        """Around one tick. Source: ours."""
        self._ticks += 1
        if self._folder is None or self._ticks != _WARM_TICKS + 1:
            yield
            return
        options = jax.profiler.ProfileOptions()
        # Python's own calls would be most of the trace.
        options.python_tracer_level = 0
        with (
            jax.profiler.trace(self._folder, create_perfetto_trace=True, profiler_options=options),
            jax.profiler.StepTraceAnnotation("tick", step_num=tick),
        ):
            yield
