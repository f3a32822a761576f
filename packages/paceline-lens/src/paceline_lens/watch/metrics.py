"""`RunMetrics`: a watched run in Prometheus' text format, and `MetricsServer`, which serves it at `/metrics`.

    JournalReader(folder).read() -> RunMetrics.add(line) -> RunMetrics.text() -> Prometheus

Counters (`_total`) count what was done, also what a restart did again; gauges say how it stands. A counter never falls while
the server lives. Names and units follow Prometheus' conventions: seconds, bytes, one name for one unit.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from paceline.base.errors import LaunchError
from paceline_lens.watch import records
from paceline_lens.watch.journal import JournalLine, JournalReader, RunHeader

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A scrape of 10,000 names takes Prometheus a tenth of a second; a script that makes up names without end must not grow this.
MOST_NAMES = 10_000

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """A name and what it means."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str


METRICS = {
    metric.name: metric
    for metric in (
        Metric("paceline_run_info", "gauge", "What the run is; always 1."),
        Metric("paceline_start_time_seconds", "gauge", "When the run began, in unix seconds."),
        Metric("paceline_processes", "gauge", "Processes of the current round."),
        Metric("paceline_nodes", "gauge", "Hosts of the current round."),
        Metric("paceline_restarts_total", "counter", "How often the processes were started again after a failure."),
        Metric("paceline_step", "gauge", "Optimizer steps that have ended, those before a resume included."),
        Metric("paceline_step_target", "gauge", "Optimizer steps of the whole run, where they are known."),
        Metric("paceline_steps_total", "counter", "Optimizer steps done, repeated ones included."),
        Metric("paceline_samples_total", "counter", "Samples trained on over all ranks, repeated ones included."),
        Metric("paceline_tokens_total", "counter", "Tokens trained on over all ranks, repeated ones included."),
        Metric("paceline_phase_seconds_total", "counter", "Time that a rank spent in each phase of its steps."),
        Metric("paceline_last_report_time_seconds", "gauge", "When a rank last wrote, in unix seconds."),
        Metric("paceline_memory_bytes", "gauge", "Memory in use, of the device or of the process on a CPU."),
        Metric("paceline_memory_peak_bytes", "gauge", "Most memory that was in use at once."),
        Metric("paceline_device_memory_bytes", "gauge", "Memory that the device has."),
        Metric("paceline_device_peak_flops", "gauge", "Floating-point operations a second that the device can do."),
        Metric("paceline_step_flops", "gauge", "Floating-point operations of one step of one rank."),
        Metric("paceline_planned_step_seconds", "gauge", "Time of a step by the plan's forecast."),
        Metric("paceline_planned_memory_bytes", "gauge", "Peak memory of a rank by the plan's forecast."),
        Metric("paceline_value", "gauge", "The latest of each value that the script logged."),
        Metric("paceline_values_left_out", "gauge", "Logged names that are not shown, as there are too many."),
        Metric("paceline_checkpoints_total", "counter", "Checkpoints, by whether they are complete."),
        Metric("paceline_checkpoint_stall_seconds_total", "counter", "Time that training waited for checkpoints."),
        Metric("paceline_checkpoint_step", "gauge", "Step of the latest complete checkpoint."),
        Metric("paceline_checkpoint_bytes", "gauge", "Size of the latest complete checkpoint."),
        Metric("paceline_checkpoint_time_seconds", "gauge", "When it was complete, in unix seconds."),
        Metric("paceline_anomalies_total", "counter", "Values that went wrong, by what they were."),
        Metric("paceline_stuck_total", "counter", "How often no step ended for too long."),
        Metric("paceline_errors_total", "counter", "Errors that the launcher showed, by code."),
        Metric("paceline_exit_code", "gauge", "Exit code of a launcher that has ended."),
    )
}


class RunMetrics:
    """What Prometheus is told of a run, reduced from its journal line by line.

    Args:
        header: what the run is.
    """

    def __init__(self, header: RunHeader) -> None:
        self._samples: dict[str, dict[Labels, float]] = {name: {} for name in METRICS}
        # By rank and name: where the last tick was, and by name and rank: what has been done in all.
        self._reached: dict[int, dict[str, int]] = {}
        self._done: dict[str, dict[int, int]] = {}
        self._names_left_out: set[str] = set()
        self._set("paceline_run_info", 1, name=header.name, script=header.script, host=header.host)
        self._set("paceline_start_time_seconds", header.started)
        self._set("paceline_processes", header.procs)
        self._set("paceline_nodes", header.nodes)

    def add(self, line: JournalLine) -> None:
        """Takes the next line of the journal."""
        record = line.record
        if isinstance(record, records.Tick):
            self._add_tick(line.number, record, line.t)
        elif isinstance(record, records.ValuesLogged):
            self._add_values(record)
        elif isinstance(record, records.Hello):
            self._add_hello(record, line.t)
        elif isinstance(record, records.PlanMade):
            self._set("paceline_step_flops", record.flops)
            self._set("paceline_planned_memory_bytes", record.memory_bytes)
            self._set("paceline_planned_step_seconds", None if record.step_ms is None else record.step_ms / 1000)
        elif isinstance(record, records.CheckpointSaved):
            self._add_checkpoint(record, line.t)
        elif isinstance(record, records.RoundStarted):
            self._set("paceline_processes", record.procs)
            self._set("paceline_nodes", record.nodes)
            self._set("paceline_restarts_total", record.restarts)
        elif isinstance(record, records.AnomalyFound):
            self._count("paceline_anomalies_total", 1, what=record.what, action=record.action)
        elif isinstance(record, records.Stuck):
            self._count("paceline_stuck_total", 1)
        elif isinstance(record, records.ErrorShown):
            self._count("paceline_errors_total", 1, code=record.code)
        elif isinstance(record, records.LauncherEnded):
            self._set("paceline_exit_code", record.exit_code, node=str(line.number))

    def text(self) -> str:
        """All metrics in the text format, version 0.0.4."""
        lines = []
        for name, samples in self._samples.items():
            if samples:
                metric = METRICS[name]
                lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
                lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples.items()]
        return "\n".join(lines) + "\n"

    def _add_hello(self, hello: records.Hello, t: float) -> None:
        rank = str(hello.rank)
        self._set("paceline_last_report_time_seconds", t, rank=rank, host=hello.host)
        self._set("paceline_device_memory_bytes", hello.memory_bytes, rank=rank, host=hello.host)
        self._set("paceline_device_peak_flops", hello.peak_flops, rank=rank, host=hello.host)

    def _add_tick(self, number: int, tick: records.Tick, t: float) -> None:
        rank = str(number)
        for phase, milliseconds in tick.ms.items():
            self._count("paceline_phase_seconds_total", milliseconds / 1000, rank=rank, phase=phase)
        self._set("paceline_memory_bytes", tick.memory, rank=rank)
        self._set("paceline_memory_peak_bytes", tick.memory_peak, rank=rank)
        self._report(rank, t)
        self._add_progress(number, tick)

    def _add_progress(self, rank: int, tick: records.Tick) -> None:
        """All ranks do the same steps, and say it at different moments: the one that is ahead speaks for all."""
        reached = self._reached.setdefault(rank, {})
        steps = reached.get("paceline_step", 0)
        reached["paceline_step"] = tick.step
        if tick.step < steps or tick.step >= max(other["paceline_step"] for other in self._reached.values()):
            self._set("paceline_step", tick.step)
        self._set("paceline_step_target", tick.total)
        self._count_up(rank, "paceline_steps_total", tick.steps)
        for name, now in (("paceline_samples_total", tick.samples), ("paceline_tokens_total", tick.tokens)):
            if now is not None:
                # A run that went back to a checkpoint counts on from there.
                self._count_up(rank, name, max(0, now - reached.get(name, 0)))
                reached[name] = now

    def _count_up(self, rank: int, name: str, more: int) -> None:
        done = self._done.setdefault(name, {})
        done[rank] = done.get(rank, 0) + more
        self._set(name, max(done.values()))

    def _report(self, rank: str, t: float) -> None:
        """The moment stands under the labels of the rank's hello, which names its host."""
        name = "paceline_last_report_time_seconds"
        for labels in self._samples[name]:
            if dict(labels)["rank"] == rank:
                self._samples[name][labels] = t
                return
        self._set(name, t, rank=rank, host="")

    def _add_values(self, record: records.ValuesLogged) -> None:
        shown = self._samples["paceline_value"]
        for name, value in record.values.items():
            labels = (("name", name),)
            if labels in shown or len(shown) < MOST_NAMES:
                shown[labels] = value
            elif len(self._names_left_out) < MOST_NAMES:
                self._names_left_out.add(name)
        if self._names_left_out:
            self._set("paceline_values_left_out", len(self._names_left_out))

    def _add_checkpoint(self, saved: records.CheckpointSaved, t: float) -> None:
        self._count("paceline_checkpoints_total", 1, complete=str(saved.ok).lower())
        self._count("paceline_checkpoint_stall_seconds_total", saved.stall_s or 0.0)
        if saved.ok:
            self._set("paceline_checkpoint_step", saved.step)
            self._set("paceline_checkpoint_bytes", saved.bytes)
            self._set("paceline_checkpoint_time_seconds", t)

    def _set(self, name: str, value: float | None, /, **labels: str) -> None:
        if value is not None:
            self._samples[name][tuple(labels.items())] = value

    def _count(self, name: str, more: float, /, **labels: str) -> None:
        key = tuple(labels.items())
        self._samples[name][key] = self._samples[name].get(key, 0) + more


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(text: str) -> str:
    """As the format wants it. A lone surrogate, which UTF-8 lacks, becomes a question mark."""
    plain = text.encode("utf-8", "replace").decode()
    return plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


class MetricsServer:
    """Serves the metrics of one run at `/metrics`, until it is closed. The journal is read when somebody asks.

    Args:
        reader: of the run's journal.
        port: to listen on; 0 takes a free one.
        host: to listen on. Nothing is encrypted, and nobody is asked for a password.

    Attributes:
        url: of the metrics.

    Raises:
        LaunchError: `metrics-port`, where nothing can listen there.
    """

    def __init__(self, reader: JournalReader, port: int, host: str = "127.0.0.1") -> None:
        self._reader = reader
        self._metrics = RunMetrics(reader.header)
        self._lock = threading.Lock()
        server = self

        class Request(BaseHTTPRequestHandler):
            timeout = 10  # a client that sends nothing is dropped

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(HTTPStatus.NOT_FOUND, explain="the metrics are at /metrics")
                    return
                body = server.text().encode()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        try:
            self._server = ThreadingHTTPServer((host, port), Request)
        except OSError as error:
            raise LaunchError(
                "metrics-port",
                f"metrics cannot be served at {host}:{port}.",
                why=str(error.strerror or error),
                fix="name another port, such as `--port 9401`",
            ) from None
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"

    def text(self) -> str:
        """What Prometheus gets."""
        with self._lock:
            for line in self._reader.read():
                self._metrics.add(line)
            return self._metrics.text()

    def serve(self) -> None:
        """Answers until `close` is called by another thread."""
        self._server.serve_forever()

    def close(self) -> None:
        """Ends `serve`."""
        self._server.shutdown()
        self._server.server_close()


def text_of(reader: JournalReader) -> str:
    """Returns the metrics of a run as it stands."""
    metrics = RunMetrics(reader.header)
    for line in reader.read():
        metrics.add(line)
    return metrics.text()
