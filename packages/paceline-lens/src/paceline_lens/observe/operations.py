"""`Profile` and `ModulePart`: what a step, and each module in it, computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModulePart:
    """A module, with all that is inside it, in one step on this rank.

    Attributes:
        name: in the model; "" is the model itself.
        kind: name of its class.
        parameters: elements, tied ones once; of divided parameters all of them, not this rank's part alone.
        flops: of its forward passes.
        latency_ms: of its forward passes.
        calls: of its forward.
        children: modules directly in it.
    """

    name: str
    kind: str
    parameters: int = 0
    flops: int = 0
    latency_ms: float = 0.0
    calls: int = 0
    children: list[ModulePart] = field(default_factory=list)

    @property
    def macs(self) -> int:
        """Multiply-accumulates: half of its operations."""
        return self.flops // 2

    def clear_times(self) -> None:
        """Forgets the times, of the parts inside it too."""
        for _, part in self.walk():
            part.latency_ms = 0.0

    def add(self, part: ModulePart) -> None:
        """Adds another part to this one, which is a sum over several."""
        self.parameters += part.parameters
        self.flops += part.flops
        self.latency_ms += part.latency_ms
        self.calls += part.calls

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ModulePart]]:
        """This part and those inside it, each with its depth."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


@dataclass
class Profile:
    """What one step computes.

    Attributes:
        model: the tree of modules, of this rank.
        parameters: of the whole model, whatever the plan.
        step: number of the step that was counted, from 1; 0 outside of training.
        micro_batches: in it.
        forward, backward, recomputed: operations of this rank in the step; `backward` without what was `recomputed`.
        copy, everywhere: forward operations of the ranks that hold one copy of the model together, and of all ranks.
        forward_ms, backward_ms, pipeline_ms, step_ms, total_ms: of the step that was timed: the model's forward passes,
            backward passes with their communication, waiting for other stages, clipping and the optimizer, all of it.
    """

    model: ModulePart
    parameters: int = 0
    step: int = 0
    micro_batches: int = 0
    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    copy: int = 0
    everywhere: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    pipeline_ms: float = 0.0
    step_ms: float = 0.0
    total_ms: float = 0.0

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward passes of this rank."""
        return self.forward // 2

    @property
    def total(self) -> int:
        """All operations of this rank in the step."""
        return self.forward + self.backward + self.recomputed

    def take_times(self, model: ModulePart, ms_by_phase: Mapping[str, float]) -> None:
        """Takes the times of another step, which was not counted.

        Args:
            model: the tree with its times.
            ms_by_phase: milliseconds by the names of `observe.phases`.
        """
        self.model = model
        self.forward_ms = ms_by_phase.get("forward", 0.0)
        self.backward_ms = ms_by_phase.get("backward", 0.0) + ms_by_phase.get("reduce", 0.0)
        self.pipeline_ms = ms_by_phase.get("pipeline", 0.0)
        self.step_ms = ms_by_phase.get("clip", 0.0) + ms_by_phase.get("step", 0.0)
        self.total_ms = sum(ms_by_phase.values())

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        values = {name: value for name, value in vars(self).items() if name != "model"}
        return {**values, "macs": self.macs, "total": self.total, "model": _plain(self.model)}


def _plain(part: ModulePart) -> dict[str, Any]:
    return {**vars(part), "macs": part.macs, "children": [_plain(child) for child in part.children]}
