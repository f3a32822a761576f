"""An OTLP/HTTP receiver on loopback: it decodes what arrives with OpenTelemetry's own protobuf classes."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Takes metrics at `/v1/metrics`.

    Attributes:
        points: (resource's attributes, name, time in nanoseconds, value) of each data point, in the order of arrival.
        status: what it answers.
    """

    def __init__(self, port: int = 0) -> None:
        self.points: list[tuple[dict[str, Any], str, int, float]] = []
        self.requests = 0
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send_response(405)
                self.end_headers()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.requests += 1
                if receiver.status == 200:
                    assert self.path == "/v1/metrics"
                    receiver.take(body)
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        message = ExportMetricsServiceRequest.FromString(body)
        for resource in message.resource_metrics:
            attributes = {pair.key: _plain(pair.value) for pair in resource.resource.attributes}
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.gauge.data_points:
                        value = point.as_double if point.HasField("as_double") else point.as_int
                        self.points.append((attributes, metric.name, point.time_unix_nano, value))

    def values(self, name: str) -> list[float]:
        return [value for _, of, _, value in self.points if of == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
