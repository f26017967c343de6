"""A driver's counts for Prometheus, read when somebody asks and at no other time."""

from collections.abc import Iterator
from threading import Thread
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from s3ac_jax.rollout.server.driver import RolloutDriver

_GAUGES = {
    "waiting": "responses that wait for a slot",
    "slots_busy": "slots with a response in them",
    "slots": "slots",
    "version": "version of the weights in use",
}
_SUMMARIES = {
    "step": "steps of the engine, seconds",
    "prefill": "prefills with the inserts after them, seconds of the host",
}


class DriverCollector(Collector):
    """The metrics of one driver: its `stats` under names of Prometheus. Source: ours."""

    def __init__(self, driver: RolloutDriver):
        self._driver = driver

    def collect(self) -> Iterator[Metric]:
        """The metrics as of now. Source: prometheus_client's interface."""
        stats = self._driver.stats()
        requests = CounterMetricFamily(
            "rollout_requests",
            "responses by how they ended, and requests refused or failed",
            labels=["outcome"],
        )
        for outcome, count in stats["requests"].items():
            requests.add_metric([outcome], count)
        yield requests
        tokens = CounterMetricFamily("rollout_tokens", "tokens read and made", labels=["kind"])
        for kind in ("prompt", "response"):
            tokens.add_metric([kind], stats[f"{kind}_tokens"])
        yield tokens
        for name, what in _GAUGES.items():
            yield GaugeMetricFamily(f"rollout_{name}", what, value=stats[name])
        for name, what in _SUMMARIES.items():
            yield SummaryMetricFamily(
                f"rollout_{name}_seconds",
                what,
                count_value=stats[f"{name}s"],
                sum_value=stats[f"{name}_seconds"],
            )


class Metrics:
    """A registry of the driver's metrics alone, and, with `serve`, a port that shows it.

    Source: ours.
    """

    def __init__(self, driver: RolloutDriver):
        self._registry = CollectorRegistry()
        self._registry.register(DriverCollector(driver))
        self._open: tuple[WSGIServer, Thread] | None = None

    def text(self) -> bytes:
        """What Prometheus reads. Source: ours."""
        return prometheus_client.generate_latest(self._registry)

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Shows the metrics at http://host:port/metrics until `close`; 0 takes a free port.

        Returns the port. Raises OSError when it is taken.
        Source: ours.
        """
        self._open = prometheus_client.start_http_server(port, host, registry=self._registry)
        return self._open[0].server_port

    def close(self) -> None:
        """Closes the port. Source: ours."""
        if self._open is not None:
            server, thread = self._open
            server.shutdown()
            server.server_close()
            thread.join()
            self._open = None
