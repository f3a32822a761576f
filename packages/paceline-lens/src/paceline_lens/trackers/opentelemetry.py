"""`OpenTelemetryTracker` sends numbers as metrics to an OpenTelemetry collector, over OTLP/HTTP, with the official SDK.

The SDK's own reader exports only the last value of each minute, and drops values if the collector does not answer. Here each
value is a data point with the time at which it was logged, and `Delivery` keeps the points until the collector answers:

    log({"train/loss": 0.7}, step=10)  ->  gauges `train/loss` = 0.7 and `paceline.step` = 10
                                           of the resource service.name="digits", service.instance.id=<the run's id>
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.base import env as environment
from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status, flatten, plain_value
from paceline_lens.trackers.delivery import DeliveryEntry
from paceline_lens.trackers.server import knock

_SCOPE = "paceline"
_ENDPOINT = "http://localhost:4318"
# What OpenTelemetry allows in the name of an instrument: 255 characters, of which the first is a letter.
_FOREIGN = re.compile(r"[^A-Za-z0-9_.\-/]")


class OpenTelemetryTracker(LibraryTracker):
    """Sends data points to a collector.

    Options: `endpoint` (the URL that takes metrics, such as `http://collector:4318/v1/metrics`), else the SDK's variables,
    such as OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS (a login) and OTEL_RESOURCE_ATTRIBUTES.
    """

    name = "opentelemetry"
    requires = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    package = "opentelemetry-exporter-otlp-proto-http"
    without_server = "start a collector, and name it: OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318"

    def open_run(self, run: str) -> Any:
        """Makes the resource that the values belong to. A collector has no runs, so that nothing is sent yet."""
        from opentelemetry.sdk.resources import Resource

        run_id = str(self.options.get("run_id") or uuid.uuid4())
        # The SDK adds what OTEL_RESOURCE_ATTRIBUTES says.
        return Resource.create({"service.name": run, "service.instance.id": run_id})

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Adds the settings to the attributes of the resource; those that are neither numbers nor text as text."""
        from opentelemetry.sdk.resources import Resource

        settings = flatten(values, ".")
        attributes = {f"paceline.config.{name}": plain_value(value) for name, value in settings.items()}
        self._run = self.native.merge(Resource(attributes))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Sends values at once, for scripts that hold the tracker; `Accelerator.log` sends by `Delivery`."""
        self.send(self.address(), [DeliveryEntry(time.time(), step, self.numbers_of(values))])

    def run_id(self) -> str | None:
        """Returns the id of the resource."""
        return str(self.native.attributes["service.instance.id"])

    @staticmethod
    def resume_options(run_id: str) -> Mapping[str, Any]:
        """Returns the option that continues a run."""
        return {"run_id": run_id}

    def address(self) -> dict[str, Any]:
        """Returns the resource and where it is sent; a login stays in the environment."""
        attributes = {name: plain_value(value) for name, value in self.native.attributes.items()}
        return {"id": self.run_id(), "endpoint": self._endpoint(), "resource": attributes}

    def _endpoint(self) -> str:
        env = environment.snapshot()
        metrics = self.options.get("endpoint") or env.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
        base = env.get("OTEL_EXPORTER_OTLP_ENDPOINT", _ENDPOINT)
        return str(metrics or f"{base.rstrip('/')}/v1/metrics")

    @staticmethod
    def send(address: Mapping[str, Any], entries: Sequence[DeliveryEntry]) -> None:
        """Exports the entries as one message.

        Raises:
            ConnectionError: the collector does not answer, or refuses the values; the log of the SDK says which.
        """
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import MetricExportResult

        endpoint = address["endpoint"]
        knock(endpoint)  # the SDK would try for a minute
        exporter = OTLPMetricExporter(endpoint=endpoint)
        try:
            result = exporter.export(_message(address["resource"], entries))
        finally:
            exporter.shutdown()
        if result is not MetricExportResult.SUCCESS:
            raise ConnectionError(f"the collector at {endpoint} did not take the values")

    def abandon(self) -> None:
        """Closes the run; nothing is open on this side."""
        self._run = None

    def close_run(self, status: Status) -> None:
        """Does nothing: `Delivery` has sent how the run ended, as `paceline.finished`."""


def _message(resource: Mapping[str, Any], entries: Sequence[DeliveryEntry]) -> Any:
    """Returns entries as the data classes of the SDK: one gauge for each name, one point for each value."""
    from opentelemetry.sdk.metrics.export import (
        Gauge,
        Metric,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
    )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    points: dict[str, list[Any]] = {}
    for entry in entries:
        for name, value in _gauges(entry).items():
            time_ns = round(entry.t * 1e9)
            point = NumberDataPoint({}, start_time_unix_nano=time_ns, time_unix_nano=time_ns, value=value)
            points.setdefault(_instrument(name), []).append(point)
    metrics = [Metric(name, None, None, Gauge(points_of_name)) for name, points_of_name in points.items()]
    scope = ScopeMetrics(InstrumentationScope(_SCOPE), metrics, "")
    return MetricsData([ResourceMetrics(Resource(resource), [scope], "")])


def _gauges(entry: DeliveryEntry) -> Mapping[str, float]:
    """Returns the values of an entry, and its step or its status as further numbers."""
    if entry.status is not None:
        return {"paceline.finished": int(entry.status == "finished")}
    if entry.step is None:
        return entry.values
    return {**entry.values, "paceline.step": entry.step}


def _instrument(name: str) -> str:
    """Returns a name that OpenTelemetry allows for an instrument."""
    plain = _FOREIGN.sub("_", name)
    if not plain[:1].isalpha():
        plain = f"n{plain}"
    return plain[:255]


TRACKER = OpenTelemetryTracker
