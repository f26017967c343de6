"""Seconds per phase of a tick."""

import time
from collections.abc import Generator
from contextlib import contextmanager

import jax


class PhaseTimes:
    """Seconds per phase of one tick; a phase waits for its own device work before it ends.

    already: seconds that the tick has taken before. Source: ours.
    """

    def __init__(self, already: float = 0.0):
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter() - already

    def since_start(self, now: float | None = None) -> float:
        """Seconds since it was made, until `now` of time.perf_counter. Source: ours."""
        return (time.perf_counter() if now is None else now) - self._start

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Adds the time spent inside to `time/<name>`, and shows in traces. Source: ours."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        key = f"time/{name}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start
