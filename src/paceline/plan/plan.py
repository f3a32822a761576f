"""`Plan` and `Decision`: what will be done, and why. Frozen data; nothing here touches a device or a group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.world.layout import Layout


@dataclass(frozen=True)
class Decision:
    """One value of a plan.

    Attributes:
        field: which value, such as "layout.replicate".
        value: what was chosen.
        source: "code", "command line", "environment", "file", "default" or "derived".
        where: the exact place, such as "run.yaml:12", "--tp" or "Accelerator(...)"; "" for a default.
        reason: why it was chosen, in a few words; "" where the source says enough.
    """

    field: str
    value: Any
    source: str
    where: str = ""
    reason: str = ""

    def __str__(self) -> str:
        origin = f"{self.source} ({self.where})" if self.where else self.source
        return f"{self.field} = {self.value}  <- {origin}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Plan:
    """What a run will do, each value with its `Decision`. Stored in every checkpoint.

    Attributes:
        layout: ranks along each axis.
        precision: name of a row of the precision table: "no", "bf16", "fp16".
        accumulate: micro-batches in one optimizer step.
        strategies: names of the model passes, in the order in which they are applied.
        options: options of each strategy, by its name.
        decisions: where each value came from.
    """

    layout: Layout = field(default_factory=Layout)
    precision: str = "no"
    accumulate: int = 1
    strategies: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()

    def explain(self) -> str:
        """The whole plan as text: a heading and one line for each decision."""
        lines = [
            f"plan: {self.layout}, precision {self.precision}, accumulate {self.accumulate}, "
            f"strategies {' -> '.join(self.strategies) or 'none'}"
        ]
        return "\n".join(lines + [f"  {decision}" for decision in self.decisions])

    def to_json(self) -> str:
        """The plan as JSON text; values that JSON lacks are written as their `str`."""
        return json.dumps(asdict(self), default=str, sort_keys=True)
