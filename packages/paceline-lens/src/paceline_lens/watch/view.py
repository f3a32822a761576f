"""`RunView` reduces the journal of a run, line by line and in bounded memory, to the snapshot that is shown of it.

    reader = JournalReader(folder)
    view = RunView(reader.header)
    for line in reader.read():
        view.add(line)
    view.snapshot(time.time())

The page, `plain.py` and the findings all read the snapshot. It consists of plain JSON types; a float that is not finite is
"nan", "inf" or "-inf". Times are unix seconds, sizes are bytes, and None stands for what is not known. "Recent" is the last
30 seconds, or the last 30 steps if a step takes longer than a second.

version         1
now             the moment of the snapshot; of a run that has ended, the moment of its end
name, script, command, host, pid, started       of `RunHeader`
standing_s      seconds since the last step ended; None before the first one, and after the end of the run
elapsed_s       seconds from `started` to `now`
state           "starting" (no step yet), "running", "stuck" (one of `findings` has `stops` true), "ended"
exit_code       of a run that has ended; None also if its launcher disappeared without writing one
why             the reason of the end, "" for none
progress        {step, total, percent, samples, tokens, seconds_left}; seconds_left by the recent rate
speed           {"recent", "mean", "forecast"} -> {step_ms, steps_per_s, samples_per_s, tokens_per_s, mfu}; mfu is a share,
                0 to 1; the forecast is the plan's, and has no samples and tokens; "recent" also has usual_step_ms, which does
                not grow while the run stands still
flops           {step: of one step of one rank, peak: a second of one device}
history         name -> [[seconds since `started`, value], ...] for steps_per_s, samples_per_s, tokens_per_s, mfu, step_ms,
                memory (of the rank that has the most); a name is missing where nothing is known
names           every logged name, in the order in which they came (up to 20,000); names_left_out: values of further ones
series          name -> {points: [[x, value], ...], by, last, last_step, count}; only of the names that were asked for
                  points: about 2,000 at most; smallest, largest and non-finite values are kept
                  by: what x is: "step", or "number" (of the value) where the script's steps go back
not_finite      name -> [value, step since when], of names whose latest value is not finite; up to 20
latest          {loss, grad_norm, loss_scale, skipped_steps}: the latest values of the names; None where never logged
world           {procs, nodes, hosts: [names], heard: ranks that have said hello}
heat            {phases: [names], ranks: [numbers], share: [[of each phase] of each rank] (0 to 1, of recent time),
                ms_per_step: [[of each phase] or None, of each rank], waits_per_step: of these, inside collectives}
ranks           [{rank, node, host, local_rank, pid, device, restart, step, phase, phase_s, waits, at, silent_s, steps,
                window_steps, window_s, memory, memory_peak, memory_bytes, base_bytes, memory_growth, process}], by rank
                  waits: whether it was inside collectives, for others, in most of the last second
                  silent_s: for how long it has written nothing although it should (about 1 is usual)
                  steps: since its start; window_*: what "recent" covers; memory_bytes: of the device
                  memory_growth: {since_step, bytes, steps} where its least memory has grown all the time; None where not
                  process: "stopped" (by a signal), "gone", or "" where nobody has looked for the process
memory          {peak, peak_rank, forecast, has_activations, base, device}: the largest peak, and the smallest device
                  forecast: of the tensors of a rank; has_activations: whether it includes activations
                  base: what the process of `peak_rank` had in use before it prepared a model; 0 if that is not counted
checkpoints     {count, failed, last: [{t, age_s, step, path, bytes, stall_s, save_s, ok, reason}, ...]}: the last 100, the
                newest is the last one; so in all lists below
rounds          [{t, number, procs, nodes, restarts, why, joined, lost}, ...]: the last 100
restart_steps   step at which the run was when it was started again, of the last 100 times
restarts        how often the processes were started again after a failure
anomalies       {count, last: [{t, step, what, value, limit, action, text}, ...]}: the last 200
stuck           [{t, text, file, ranks}, ...]: the last 20
errors          [{t, rank, host, code, text}, ...]: the last 100
plan            {text, reasons: [[field, value, source, reason], ...], step_ms, memory_bytes, flops}; None before `prepare`
findings        [{kind, level, text, fix, ranks, evidence, stops}, ...], the worst first; see `findings.py`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline_lens.watch import records
from paceline_lens.watch.findings import findings
from paceline_lens.watch.journal import JournalLine, RunHeader
from paceline_lens.watch.progress import RunProgress
from paceline_lens.watch.ranks import PHASES, RankState
from paceline_lens.watch.series import AllSeries, json_number

FIRST_NAMES = 24  # the names whose series are shown if nobody has chosen any
# The clocks of two hosts may differ, and lines of another host arrive later: a rank is silent only if that cannot explain it.
_CLOCKS_S = 10.0
_HEADER = ("name", "script", "command", "host", "pid", "started")
_LATEST = ("loss", "grad_norm", "loss_scale", "skipped_steps")
_NO_PLAN = records.PlanMade()
# How many of the last events of each kind a snapshot has.
_MOST_EVENTS = {
    records.CheckpointSaved: 100,
    records.RoundStarted: 100,
    records.AnomalyFound: 200,
    records.Stuck: 20,
    records.ErrorShown: 100,
}


@dataclass(frozen=True)
class _Ended:
    """When and how a run has ended. `exit_code` is None if its launcher disappeared without writing one."""

    t: float
    exit_code: int | None
    why: str


class RunView:
    """Collects what is shown of a run.

    Args:
        header: the description of the run.
    """

    def __init__(self, header: RunHeader) -> None:
        self.header = header
        self._ranks: dict[int, RankState] = {}
        self._progress = RunProgress()
        self._values = AllSeries()
        self._history = AllSeries()
        self._plan = _NO_PLAN
        self._events: dict[type[records.JournalRecord], deque[dict[str, Any]]] = {}
        for kind, most in _MOST_EVENTS.items():
            self._events[kind] = deque(maxlen=most)
        self._counts = {"checkpoints": 0, "failed": 0, "anomalies": 0}
        self._ends: dict[int, _Ended] = {}  # by launcher
        self._leader: int | None = None  # the launcher that wrote the latest round; the run ends when it does
        self._latest = header.started
        self._heard_by_host: dict[str, float] = {}
        self._restart = 0
        self._restart_steps: deque[int] = deque(maxlen=100)
        self._lead: int | None = None  # the lowest rank; its ticks say how far the run is
        self._gone: float | None = None  # when it was found that the launcher does not exist any more

    # -- taking lines ------------------------------------------------------------------------------------------------

    def add(self, line: JournalLine) -> None:
        """Takes the next line of the journal. Lines must come in the order of their times."""
        record = line.record
        t = line.t
        self._latest = max(self._latest, t)
        # Ticks come first, since nearly all lines are of this kind.
        if isinstance(record, records.Tick):
            self._add_tick(line.number, record, t)
        elif isinstance(record, records.ValuesLogged):
            self._values.add(record.step, record.values)
        elif isinstance(record, records.Hello):
            self._add_hello(record, t)
        elif isinstance(record, records.PlanMade):
            self._plan = record
        elif isinstance(record, records.LauncherEnded):
            self._ends[line.number] = _Ended(t, record.exit_code, record.why)
        elif type(record) in self._events:
            if isinstance(record, records.RoundStarted):
                self._leader = line.number
            self._events[type(record)].append({"t": t, **_plain(record)})
            self._count(record)

    def launcher_has_gone(self, t: float) -> None:
        """Notes that the process of the launcher does not exist any more.

        Args:
            t: when that was found.
        """
        self._gone = t

    def note_process(self, rank: int, process: str) -> None:
        """Notes the state of a rank's process: "stopped", "gone", or "" if it runs or was not looked for."""
        if rank in self._ranks:
            self._ranks[rank].process = process

    def _add_hello(self, hello: records.Hello, t: float) -> None:
        """Takes the first line of a rank. The state of an earlier process with this number is replaced."""
        starts_again = hello.rank in self._ranks
        self._set_rank(RankState(hello, t))
        self._note_host(hello.host, t)
        # A job that was queued again may continue in the folder of the one before. Its end is then no end of the run.
        self._ends = {number: end for number, end in self._ends.items() if end.t > t}
        self._gone = None
        # The lead decides for all: every rank says hello after a restart, and the run restarts only once.
        if starts_again and hello.rank == self._lead:
            self._restart_steps.append(self._progress.done()["step"])
            self._progress.restart()
            self._values.restart()
        self._restart = max(self._restart, hello.restart)

    def _set_rank(self, state: RankState) -> None:
        rank = state.facts.rank
        self._ranks[rank] = state
        self._lead = rank if self._lead is None else min(rank, self._lead)

    def _note_host(self, host: str, t: float) -> None:
        self._heard_by_host[host] = max(t, self._heard_by_host.get(host, 0.0))

    def _add_tick(self, rank: int, tick: records.Tick, t: float) -> None:
        state = self._ranks.get(rank)
        if state is None:  # the file was thinned, and its `Hello` is lost
            state = RankState(records.Hello(rank=rank), t)
            self._set_rank(state)
        state.add(tick, t)
        self._note_host(state.facts.host, t)
        # Ranks take their steps together, so that one of them says how far the run is.
        if rank != self._lead:
            return
        previous = self._progress.tick
        if previous is not None and tick.step < previous.step:
            self._values.restart()  # a rollback to a checkpoint
        self._progress.add(tick, t)
        if tick.steps:
            self._note_history(t)

    def _note_history(self, t: float) -> None:
        speed = self._with_step_time(self._progress.recent(t))
        values = {name: value for name, value in speed.items() if value is not None}
        memory = max((state.tick.memory or 0 for state in self._ranks.values()), default=0)
        # 0 stands for "not known", and a missing value leaves a gap in the curve.
        if memory:
            values["memory"] = float(memory)
        self._history.add(round(t - self.header.started, 1), values)

    def _count(self, record: records.JournalRecord) -> None:
        if isinstance(record, records.CheckpointSaved):
            self._counts["checkpoints" if record.ok else "failed"] += 1
        elif isinstance(record, records.AnomalyFound):
            self._counts["anomalies"] += 1

    # -- the snapshot ------------------------------------------------------------------------------------------------

    def snapshot(self, now: float, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Returns all that is shown, as plain JSON types; the docstring of this module explains the keys.

        Args:
            now: the current time (unix seconds).
            names: the names whose series it contains; None for the first 24 names.
        """
        end = self._end()
        if end is None:
            # The clock here may be behind that of a host, and no line may lie in the future.
            now = max(now, self._latest)
        else:
            now = end.t
        names_in_order = list(self._values.by_name)
        if names is None:
            names = names_in_order[:FIRST_NAMES]
        ranks = self._current_ranks()
        rounds = self._events[records.RoundStarted]
        has_ended = end is not None
        of_header = {name: getattr(self.header, name) for name in _HEADER}
        history = {name: series.points() for name, series in self._history.by_name.items()}
        latest = {name: self._values.last(name) for name in _LATEST}
        rows = [state.row(self._silent_s(state, now, has_ended)) for state in ranks]
        # Ranks say the number in their hello, and launchers in each round. It only grows, so that the largest is the newest.
        restarts = [self._restart, *(event["restarts"] for event in rounds)]
        snapshot: dict[str, Any] = {
            "version": 1,
            "now": now,
            **of_header,
            "standing_s": self._standing_s(now),
            "elapsed_s": round(now - self.header.started, 1),
            "state": "starting",
            "exit_code": None,
            "why": "",
            "progress": self._progress_at(now),
            "speed": self._speed_at(now),
            "flops": {"step": self._plan.flops, "peak": self._peak_flops()},
            "history": history,
            "names": names_in_order,
            "names_left_out": self._values.left_out,
            "series": self._series(names),
            "not_finite": self._values.not_finite(),
            "latest": latest,
            "world": self._world(ranks),
            "heat": _phase_tables(ranks),
            "ranks": rows,
            "memory": self._memory(ranks),
            "checkpoints": self._checkpoints(now),
            "rounds": list(rounds),
            "restart_steps": list(self._restart_steps),
            "restarts": max(restarts),
            "anomalies": {"count": self._counts["anomalies"], "last": list(self._events[records.AnomalyFound])},
            "stuck": list(self._events[records.Stuck]),
            "errors": list(self._events[records.ErrorShown]),
            "plan": None if self._plan is _NO_PLAN else _plain(self._plan),
        }
        if end is not None:
            snapshot |= {"state": "ended", "exit_code": end.exit_code, "why": end.why}
        elif self._progress.stepped_at is not None:
            snapshot["state"] = "running"
        # Findings read the snapshot, and decide in turn whether the run is stuck. So they come last.
        snapshot["findings"] = findings(snapshot)
        if snapshot["state"] != "ended" and any(finding["stops"] for finding in snapshot["findings"]):
            snapshot["state"] = "stuck"
            snapshot["progress"]["seconds_left"] = None
        return snapshot

    def _end(self) -> _Ended | None:
        """Returns when and how the run has ended; None while it goes on. The end of another host's launcher does not end it."""
        if self._leader in self._ends:
            return self._ends[self._leader]
        # If no launcher has written a round, it is not known which one leads. The one with the lowest number counts.
        if self._ends and self._leader is None:
            return self._ends[min(self._ends)]
        if self._gone is None:
            return None
        return _Ended(max(self._latest, self.header.started), None, "its launcher has gone")

    def _current_ranks(self) -> list[RankState]:
        """Returns the ranks of the latest round, in order; an earlier round may have had more ranks."""
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        rounds = self._events[records.RoundStarted]
        procs = rounds[-1]["procs"] if rounds else 0
        if procs == 0:  # not known
            return ranks
        return [state for state in ranks if state.facts.rank < procs]

    def _silent_s(self, state: RankState, now: float, has_ended: bool) -> float:
        """Returns for how long a rank has written nothing, by the clock of its host, since clocks of hosts differ."""
        if has_ended:
            return 0.0
        # The first difference is between times of one host. The second one also sees that a whole host is silent, but counts
        # only beyond what clocks may differ by.
        newest = self._heard_by_host.get(state.facts.host, 0.0)
        return max(0.0, newest - state.heard, now - state.heard - _CLOCKS_S)

    def _standing_s(self, now: float) -> float | None:
        stepped_at = self._progress.stepped_at
        if stepped_at is None or self._end() is not None:
            return None
        return round(max(0.0, now - stepped_at), 1)

    def _progress_at(self, now: float) -> dict[str, Any]:
        progress = self._progress.done()
        progress["seconds_left"] = None
        rate = self._progress.recent(now)["steps_per_s"]
        # A script may take more steps than it has announced; then nothing is left.
        if rate and progress["total"] and self._end() is None:
            steps_left = max(0, progress["total"] - progress["step"])
            progress["seconds_left"] = round(steps_left / rate, 1)
        return progress

    def _speed_at(self, now: float) -> dict[str, dict[str, float | None]]:
        until = now
        if self._end() is not None:
            until = self._progress.t
        forecast: dict[str, float | None] = dict.fromkeys(("steps_per_s", "samples_per_s", "tokens_per_s"))
        if self._plan.step_ms:
            forecast["steps_per_s"] = 1e3 / self._plan.step_ms
        speed = {
            "recent": self._with_step_time(self._progress.recent(until)),
            "mean": self._with_step_time(self._progress.mean()),
            "forecast": self._with_step_time(forecast),
        }
        usual_step_s = self._progress.usual_step_s()
        speed["recent"]["usual_step_ms"] = None if usual_step_s is None else usual_step_s * 1e3
        return speed

    def _with_step_time(self, rates: Mapping[str, float | None]) -> dict[str, float | None]:
        """Returns the rates with the time of a step, and with the model FLOPs utilization if it is known."""
        rate = rates["steps_per_s"]
        if not rate:
            return {"step_ms": None, **rates, "mfu": None}
        flops = self._plan.flops
        peak = self._peak_flops()
        mfu = None
        if flops and peak:
            mfu = flops * rate / peak
        return {"step_ms": 1e3 / rate, **rates, "mfu": mfu}

    def _peak_flops(self) -> float | None:
        return None if self._lead is None else self._ranks[self._lead].facts.peak_flops

    def _series(self, names: Iterable[str]) -> dict[str, Any]:
        shown = {}
        for name in names:
            series = self._values.by_name.get(name)
            if series is not None:
                shown[name] = {
                    "points": series.points(),
                    "by": "step" if series.is_by_step else "number",
                    "last": json_number(series.last),
                    "last_step": series.last_step,
                    "count": series.count,
                }
        return shown

    def _world(self, ranks: list[RankState]) -> dict[str, Any]:
        procs = self.header.procs
        nodes = self.header.nodes
        rounds = self._events[records.RoundStarted]
        # An elastic run may have changed its size since the header was written.
        if rounds:
            procs = rounds[-1]["procs"]
            nodes = rounds[-1]["nodes"]
        return {
            "procs": procs,
            "nodes": nodes,
            "hosts": list(dict.fromkeys(state.facts.host for state in ranks)),
            "heard": len(ranks),
        }

    def _memory(self, ranks: list[RankState]) -> dict[str, Any]:
        memory: dict[str, Any] = {
            "peak": None,
            "peak_rank": None,
            "forecast": self._plan.memory_bytes,
            "has_activations": self._plan.has_activations,
            "base": 0,
        }
        reporting = [state for state in ranks if state.memory_peak]
        if reporting:
            fullest = max(reporting, key=lambda state: state.memory_peak)
            memory |= {"peak": fullest.memory_peak, "peak_rank": fullest.facts.rank}
            memory["base"] = fullest.facts.base_bytes or 0
        devices = [state.facts.memory_bytes for state in ranks if state.facts.memory_bytes]
        memory["device"] = min(devices, default=None)
        return memory

    def _checkpoints(self, now: float) -> dict[str, Any]:
        last: list[dict[str, Any]] = []
        for event in self._events[records.CheckpointSaved]:
            last.append({**event, "age_s": round(now - event["t"], 1)})
        return {"count": self._counts["checkpoints"], "failed": self._counts["failed"], "last": last}


def _phase_tables(ranks: list[RankState]) -> dict[str, Any]:
    """Returns where the recent time went, as tables with a row for each rank and a column for each phase."""
    tables: dict[str, list[Any]] = {"ranks": [], "share": [], "ms_per_step": [], "waits_per_step": []}
    for state in ranks:
        tables["ranks"].append(state.facts.rank)
        tables["share"].append(state.window.shares)
        tables["ms_per_step"].append(state.window.ms_per_step)
        tables["waits_per_step"].append(state.window.waits_per_step)
    return {"phases": list(PHASES), **tables}


def _plain(record: records.JournalRecord) -> dict[str, Any]:
    """Returns the fields of a record in types of JSON."""
    values = asdict(record)
    for name, value in values.items():
        if isinstance(value, float):
            values[name] = json_number(value)
    return values
