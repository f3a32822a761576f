"""DeepSpeed's words for what our profiles measure (`observe/`): lines of the wall clock, its profile of operations, its
summary of communication.

What differs, on purpose: a latency is that of one call, the root's latency is measured as the others are, a step has the
number that the config gave it, and the backward pass is counted, not taken for twice the forward one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.config.given import Given
from paceline.observe.clock import clock_of
from paceline.observe.comms import Comms, size
from paceline.observe.flops import Counter, Tree, count_parameters
from paceline.observe.flops_text import by_depth, number, share
from paceline.observe.operations import Part, Profile
from paceline.observe.profiles import Profiles
from paceline.world.tree import tensors

if TYPE_CHECKING:
    from paceline.compat.deepspeed.config import DeepSpeedConfig
    from paceline.compat.deepspeed.engine import DeepSpeedEngine

_RULE = "-" * 30


def wall_clock_settings(config: DeepSpeedConfig) -> list[Given]:
    """What a config with a wall clock adds to its settings: the engine words the times, so that nobody else does."""
    if not config["wall_clock_breakdown"]:
        return []
    return [Given("options.profile.wall_clock_every", 0, "code", config.places["wall_clock_breakdown"])]


class Timers:
    """Tells the times of its engine's micro-batches and steps, on the main process.

    Attributes:
        last: milliseconds by DeepSpeed's names, of the micro-batch and of the step that ended last.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        global _latest
        self.last: dict[str, float] = {}
        self._engine = weakref.proxy(engine)
        self._profiles: Profiles | None = engine.accelerator.profiles
        self._before: dict[str, float] = {}
        if self._profiles is not None:
            _latest = weakref.ref(self._profiles)
            self._profiles.tell = _say
            if self._profiles.flops is not None:
                self._profiles.flops.words = self._words

    def after_step(self, boundary: bool) -> None:
        """Called by the engine at the end of each `step`."""
        if self._profiles is None or self._profiles.wall_clock is None:
            return
        # The clock counts from the beginning of the step, also over several micro-batches.
        of_step = self._profiles.wall_clock.now().phases
        of_micro_batch = {name: ms - self._before.get(name, 0.0) for name, ms in of_step.items()}
        self._before = {} if boundary else dict(of_step)
        due = [_deepspeed_times(of_micro_batch, "_microstep")]
        if boundary:
            due.append(_deepspeed_times(of_step, ""))
        for times in due:
            self.last.update(times)
            if self._engine.config["wall_clock_breakdown"] and self._engine.accelerator.is_main_process:
                cells = [f"{name}: {ms:.2f}" for name, ms in times.items()]
                _say("[Rank 0] time (ms) | " + " | ".join(cells))

    def values(self) -> list[tuple[str, float]]:
        """What monitors get of the step that ended last."""
        names = {
            "forward": "fwd",
            "backward": "bwd",
            "backward_inner": "bwd_inner",
            "step": "step",
            "backward_allreduce": "bwd_allreduce",
        }
        values = []
        for word, name in names.items():
            if name in self.last:
                values.append((f"elapsed_time_ms_{word}", self.last[name]))
        return values

    def _words(self, profile: Profile) -> str:
        """The text of a profile of operations, as the config asks for it."""
        config = self._engine.config
        batch = self._engine.batch
        world_size = self._engine.accelerator.num_processes
        run = {
            "world size": world_size,
            "data parallel size": batch.width,
            "model parallel size": world_size // batch.width,
            "batch size per GPU": batch.micro,
        }
        return profile_text(
            profile,
            step=profile.step - 1,  # as the config counts
            depth=config["flops_profiler.module_depth"],
            top=config["flops_profiler.top_modules"],
            detailed=config["flops_profiler.detailed"],
            run=run,
            samples=batch.train,
        )


def _deepspeed_times(ms: Mapping[str, float], suffix: str) -> dict[str, float]:
    """Our phases under DeepSpeed's names; its backward pass includes what ranks send then."""
    inner = ms.get("backward", 0.0)
    reduce = ms.get("reduce", 0.0)
    values = {
        "fwd": ms.get("forward", 0.0),
        "bwd": inner + reduce,
        "bwd_inner": inner,
        "bwd_allreduce": reduce,
        "step": ms.get("step", 0.0) + ms.get("clip", 0.0),
    }
    if ms.get("pipeline"):  # waiting for other stages, and talking to them
        values["pipe"] = ms["pipeline"]
    return {name + suffix: value for name, value in values.items()}


_say = partial(print, flush=True)


# -- operations ----------------------------------------------------------------------------------------------------


def profile_text(
    profile: Profile,
    step: int = 1,
    depth: int = -1,
    top: int = 1,
    detailed: bool = True,
    run: Mapping[str, Any] | None = None,
    samples: int = 0,
) -> str:
    """A profile under DeepSpeed's headings.

    Args:
        step: its number, as the config counts.
        run: rows about the run, which come first.
        samples: of all ranks in one step.
    """
    forward_s = profile.forward_ms / 1e3
    backward_s = profile.backward_ms / 1e3
    step_s = profile.step_ms / 1e3
    pipeline_s = profile.pipeline_ms / 1e3
    rows: list[tuple[str, str]] = []
    for name, value in (run or {}).items():
        rows.append((name, str(value)))
    rows += [
        ("params per GPU", params_to_string(profile.model.parameters)),
        ("params of model", params_to_string(profile.parameters)),
        ("fwd MACs per GPU", macs_to_string(profile.macs)),
        ("fwd flops per GPU", number_to_string(profile.forward)),
        ("fwd flops of model", number_to_string(profile.copy)),
        ("fwd latency", duration_to_string(forward_s)),
        ("fwd FLOPS per GPU", _rate(profile.forward, forward_s)),
    ]
    if backward_s:
        passes_s = forward_s + backward_s
        iteration_s = passes_s + step_s + pipeline_s
        rows += [
            ("bwd latency", duration_to_string(backward_s)),
            # What is computed again is computed within the backward pass.
            ("bwd FLOPS per GPU", _rate(profile.backward + profile.recomputed, backward_s)),
            ("fwd+bwd FLOPS per GPU", _rate(profile.total, passes_s)),
        ]
        if pipeline_s:
            rows.append(("pipe latency", duration_to_string(pipeline_s)))
        rows += [
            ("step latency", duration_to_string(step_s)),
            ("iter latency", duration_to_string(iteration_s)),
            ("FLOPS per GPU", _rate(profile.total, iteration_s)),
            ("samples/second", f"{samples / iteration_s:.2f}"),
        ]
    lines = [f"{_RULE} Flops Profiler {_RULE}", f"Profile Summary at step {step}:"]
    lines += [f"{name + ':':<60}{value:<8}".rstrip() for name, value in rows]
    lines += ["", f"{_RULE} Aggregated Profile per GPU {_RULE}", *_aggregated(profile.model, depth, top)]
    if detailed:
        lines += ["", f"{_RULE} Detailed Profile per GPU {_RULE}", *_detailed(profile.model)]
    return "\n".join([*lines, "-" * 78])


# Heading -> what is compared of a part, and how it is written. The writers are defined below, hence a lambda around each.
_MEASURES: dict[str, tuple[Callable[[Part], float], Callable[[float], str]]] = {
    "params": (lambda part: part.parameters, lambda value: params_to_string(value)),
    "MACs": (lambda part: part.macs, lambda value: macs_to_string(value)),
    "fwd latency": (lambda part: part.latency_ms / 1e3, lambda value: duration_to_string(value)),
}


def _aggregated(model: Part, depth: int, top: int) -> list[str]:
    """Lines with the heaviest kinds of modules at each depth; a negative depth is all."""
    kinds = by_depth(model)
    last = max(kinds)
    if depth >= 0:
        last = min(depth, last)
    lines = [f"Top {top} modules in terms of params, MACs or fwd latency at different model depths:"]
    for level in range(last + 1):
        lines.append(f"depth {level}:")
        for heading, (measure, as_text) in _MEASURES.items():
            heaviest = sorted(kinds[level].values(), key=measure, reverse=True)[:top]
            texts = {part.kind: as_text(measure(part)) for part in heaviest}
            lines.append(f"    {heading:<11} - {texts}")
    return lines


def _detailed(model: Part) -> list[str]:
    """A line for each module, with its part of the whole model's numbers."""
    lines = []
    for level, part in model.walk():
        facts = [
            f"{params_to_string(part.parameters)} = {share(part.parameters, model.parameters)} Params",
            f"{macs_to_string(part.macs)} = {share(part.macs, model.macs)} MACs",
            f"{duration_to_string(part.latency_ms / 1e3)} = {share(part.latency_ms, model.latency_ms)} latency",
            _rate(part.flops, part.latency_ms / 1e3),
        ]
        name = ""
        if part.name:  # the model itself has none
            name = f"({part.name.rpartition('.')[2]}): "
        lines.append(f"{'  ' * level}{name}{part.kind}({', '.join(facts)})")
    return lines


def _rate(flops: float, seconds: float) -> str:
    """Operations per second; none where nothing was timed."""
    if not seconds:
        return flops_to_string(0.0)
    return flops_to_string(flops / seconds)


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """A count for people, such as `1.63 M`."""
    return number(num, precision).rstrip()


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    return number_to_string(params_num, units, precision)


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    return f"{number(macs, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations per second, such as `1.20 GFLOPS`."""
    return f"{number(flops, precision)}FLOPS"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds for people."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if duration >= scale:
            return f"{duration / scale:.{precision}f} {unit}"
    return f"{duration * 1e6:.{precision}f} us"


class FlopsProfiler:
    """Counts what a model computes between `start_profile` and `stop_profile`, what is computed again included."""

    def __init__(
        self, model: nn.Module, ds_engine: DeepSpeedEngine | None = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        self.model = model
        self.started = False
        self._profile = Profile(Part("", type(model).__name__))
        self._open: tuple[ExitStack, Counter, Tree] | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begins to count."""
        from paceline.observe.flops import counted

        self.end_profile()
        stack = ExitStack()
        self._open = (stack, *stack.enter_context(counted([self.model])))
        self.started = True

    def stop_profile(self) -> None:
        """Ends counting; what was found can be asked for."""
        if self._open is None:
            return
        stack, counter, tree = self._open
        self._open = None
        stack.close()
        part = tree.take()
        self._profile = Profile(part, count_parameters(self.model), 0, 1, counter.forward, counter.backward)
        self._profile.recomputed = counter.recomputed
        self._profile.copy = counter.forward
        self._profile.forward_ms = part.latency_ms

    def take_times(self, run: Callable[[], Any]) -> None:
        """Takes the latencies of a pass in which nothing is counted, in the place of those of one that was slowed by it."""
        # The example tells the model's device; a model without parameters is taken to be on the CPU.
        example = next(self.model.parameters(), torch.empty(0))
        tree = Tree([self.model], clock_of(example.device))
        tree.open = True
        try:
            run()
        finally:
            tree.remove()
        for (_, counted_part), (_, timed_part) in zip(self._profile.model.walk(), tree.take().walk(), strict=True):
            counted_part.latency_ms = timed_part.latency_ms
        self._profile.forward_ms = self._profile.model.latency_ms

    def end_profile(self) -> None:
        """Ends counting; the numbers can still be asked for, until `reset_profile`."""
        self.stop_profile()
        self.started = False

    def reset_profile(self) -> None:
        self._profile = Profile(Part("", type(self.model).__name__))

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations of the forward passes."""
        return number_to_string(self._profile.forward) if as_string else self._profile.forward

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of the forward passes."""
        return macs_to_string(self._profile.macs) if as_string else self._profile.macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forward passes."""
        seconds = self._profile.forward_ms / 1e3
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of all parameters, tied ones once."""
        count = count_parameters(self.model)
        return params_to_string(count) if as_string else count

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the profile, or writes it to a file."""
        text = profile_text(self._profile, profile_step, module_depth, top_modules, detailed)
        if output_file is None:
            _say(text)
            return
        with open(output_file, "w", encoding="utf-8") as out:
            out.write(text + "\n")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        _say("\n".join(_aggregated(self._profile.model, module_depth, top_modules)))


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-accumulates and parameters of one forward pass.

    Args:
        input_shape: of a single input, in place of `args` and `kwargs`.
        warm_up: passes before the one that is counted.
        mode: "forward", or "generate" for a model that has it.
    """
    arguments = tuple(args)
    if input_shape is not None:
        example = next(model.parameters(), torch.empty(0))
        arguments = (torch.ones(tuple(input_shape), dtype=example.dtype, device=example.device),)
    function: Any = model if mode == "forward" else model.generate
    run = partial(function, *arguments, **(kwargs or {}))
    was_training = model.training
    model.eval()
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            run()
        profiler.start_profile(ignore_modules)
        try:
            run()
        finally:
            profiler.stop_profile()
            model.train(was_training)
        # Counting slows a pass down.
        profiler.take_times(run)
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


# -- communication -------------------------------------------------------------------------------------------------

# Profiles of the engine that was made last, because `deepspeed.comm` knows no engine; weak, so that an engine can be freed.
_latest: weakref.ref[Profiles] | None = None


def communication_log() -> Comms | None:
    """The record of what is sent; None where nobody asked for it."""
    profiles = _latest() if _latest is not None else None
    return None if profiles is None else profiles.comms


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Prints, on rank 0, what was sent so far, by operation and size.

    Args:
        show_straggler: compares the ranks.
        return_dict: gives the numbers, on every rank.

    Ranks: all.
    """
    profiles = _latest() if _latest is not None else None
    if profiles is None or profiles.comms is None:
        return {"summary": {}} if return_dict else None
    # With `show_straggler` this gathers the latencies of all ranks, so it stands before anything that only one rank does.
    rows = profiles.comms.summary(show_straggler, profiles.collectives)
    if profiles.is_main:
        _say("\n".join(_summary(rows, show_straggler)))
    if not return_dict:
        return None
    report: dict[str, Any] = {"summary": {}}
    for row in rows:
        report["summary"].setdefault(row.op, {})[row.size_bytes] = {
            "count": row.count,
            "total_latency_ms": row.total_ms,
            "avg_latency_ms": row.mean_ms,
            "tput_avg_gbps": row.algbw_gbps,
            "busbw_avg_gbps": row.busbw_gbps,
            "msg_size_bytes": row.size_bytes,
            "msg_size_str": size(row.size_bytes),
        }
        if show_straggler:
            report.setdefault("straggler_analysis", {}).setdefault(row.op, {})[row.size_bytes] = {
                "count": row.count,
                "total_comm_lat_ms": row.total_ms - (row.straggler_ms or 0.0),
                "total_straggler_ms": row.straggler_ms,
            }
    return report


def _summary(rows: Iterable[Any], straggler: bool) -> list[str]:
    """A table: a line with the name of each operation, and below it one for each size of messages."""
    headings = ["Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)"]
    headings.append("busbw_avg (Gbps)")
    if straggler:
        headings.append("Straggler(ms)")
    lines = [_table_line(headings)]
    op = ""
    for row in rows:
        if row.op != op:
            op = row.op
            lines.append(op)
        cells = ["", size(row.size_bytes), str(row.count), f"{row.total_ms:.2f}", f"{row.mean_ms:.2f}"]
        cells += [f"{row.algbw_gbps:.2f}", f"{row.busbw_gbps:.2f}"]
        if straggler:
            cells.append(f"{row.straggler_ms:.2f}")
        lines.append(_table_line(cells))
    return lines


def _table_line(cells: Iterable[str]) -> str:
    return "".join(f"{cell:<20}" for cell in cells).rstrip()


# -- recomputed functions, and timers of a script's own --------------------------------------------------------------


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls are timed and told: forward at once, backward when it has passed.

    On an accelerator it is the time until what was queued has been done.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        forward_start = _moment()
        output = function(*args, **kwargs)
        _say(f"time (ms) | fwd: {(_moment() - forward_start) * 1e3:.2f}")
        # The backward pass reaches an output first, and an input last.
        backward_starts: list[float] = []
        output_tensor = _first_with_gradient(output)
        input_tensor = _first_with_gradient((args, kwargs))

        def note_start(_: torch.Tensor) -> None:
            backward_starts.append(_moment())

        def tell_backward(_: torch.Tensor) -> None:
            if backward_starts:
                _say(f"time (ms) | backward: {(_moment() - backward_starts.pop()) * 1e3:.2f}")

        if output_tensor is not None:
            output_tensor.register_hook(note_start)
        if input_tensor is not None:
            input_tensor.register_hook(tell_backward)
        return output

    return call


def _first_with_gradient(values: object) -> torch.Tensor | None:
    """The first tensor in some values that a backward pass reaches."""
    return next((tensor for tensor in tensors(values) if tensor.requires_grad), None)


def _moment() -> float:
    """Now, once the accelerator has done what was queued."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


class SynchronizedWallClockTimer:
    """Timers by name: `timers("load").start()`, `.stop()`, `.elapsed()` in milliseconds."""

    class Timer:
        """One of them."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self._lap_start = 0.0
            self._laps: list[float] = []  # milliseconds

        def start(self) -> None:
            self.started_ = True
            self._lap_start = _moment()

        def stop(self, reset: bool = False, record: bool = False) -> None:
            lap = (_moment() - self._lap_start) * 1e3
            if reset:
                self._laps = []
            self._laps.append(lap)
            self.started_ = False

        def reset(self) -> None:
            self._laps = []
            self.started_ = False

        def elapsed(self, reset: bool = True) -> float:
            """Milliseconds of all laps together; one that is being timed goes on."""
            is_timing = self.started_
            if is_timing:
                self.stop()
            total = sum(self._laps)
            if reset:
                self.reset()
            if is_timing:
                self.start()
            return total

        def mean(self) -> float:
            return sum(self._laps) / len(self._laps) if self._laps else 0.0

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, SynchronizedWallClockTimer.Timer]:
        return self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Prints the times of some."""
        cells = []
        for name in names:
            if name in self.timers:
                cells.append(f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}")
        _say("time (ms) | " + " | ".join(cells))
