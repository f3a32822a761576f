"""DeepSpeed's profile of operations, in its own words.

What differs, on purpose: a step has the number that the config gave it, and the backward pass is counted. DeepSpeed takes it
for twice the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline_lens.observe.clock import clock_of
from paceline_lens.observe.flops import Counter, Tree, count_parameters, counted
from paceline_lens.observe.flops_text import by_depth, share
from paceline_lens.observe.operations import ModulePart, Profile

if TYPE_CHECKING:
    from paceline_deepspeed.engine_parts import Engine

_RULE = "-" * 30


def profile_text(
    profile: Profile,
    step: int = 1,
    depth: int = -1,
    top: int = 1,
    detailed: bool = True,
    run: Mapping[str, Any] | None = None,
    samples: int = 0,
) -> str:
    """Writes a profile under DeepSpeed's headings.

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


def _aggregated(model: ModulePart, depth: int, top: int) -> list[str]:
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


def _detailed(model: ModulePart) -> list[str]:
    """Lists a line for each module, with its part of the whole model's numbers."""
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
    """Writes operations per second; none where nothing was timed."""
    if not seconds:
        return flops_to_string(0.0)
    return flops_to_string(flops / seconds)


# Letter -> what it stands for, the largest first.
_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Writes a number with a letter for its scale, such as `1.63 M`; `units` is the letter, None for the one that fits."""
    if units is None:
        fitting = [letter for letter, scale in _SCALES.items() if abs(num) >= scale]
        units = [*fitting, "u"][0] if num else ""
    return f"{round(num / _SCALES.get(units, 1.0), precision):g} {units}"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    return number_to_string(params_num, units, precision).replace("G", "B").rstrip()


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations per second, such as `1.2 GFLOPS`."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds, such as `12.5 ms`."""
    return f"{number_to_string(duration, units, precision)}s"


# Heading -> what is compared of a part, and how it is written.
_MEASURES: dict[str, tuple[Callable[[ModulePart], float], Callable[[float], str]]] = {
    "params": (lambda part: part.parameters, params_to_string),
    "MACs": (lambda part: part.macs, macs_to_string),
    "fwd latency": (lambda part: part.latency_ms / 1e3, duration_to_string),
}


class FlopsProfiler:
    """Counts what a model computes between `start_profile` and `stop_profile`, what is computed again included."""

    def __init__(self, model: nn.Module, ds_engine: Engine | None = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.started = False
        self._profile = Profile(ModulePart("", type(model).__name__))
        self._open: tuple[ExitStack, Counter, Tree] | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begins to count."""
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
        self._profile = Profile(ModulePart("", type(self.model).__name__))

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
            print(text, flush=True)
            return
        with open(output_file, "w", encoding="utf-8") as out:
            out.write(text + "\n")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        print("\n".join(_aggregated(self._profile.model, module_depth, top_modules)), flush=True)


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
