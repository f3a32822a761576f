"""`Plan` and `Decision`: what will be done, and why. Frozen data; nothing here touches a device or a group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.plan.semantics import NATIVE, Semantics
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
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.field} = {self.value}  <- {origin}{reason}"


@dataclass(frozen=True)
class Plan:
    """What a run will do, each value with its `Decision`. Stored in every checkpoint.

    Attributes:
        layout: ranks along each axis.
        precision: name of a row of the precision table: "no", "bf16", "fp16", "fp8".
        accumulate: micro-batches in one optimizer step.
        zero: what ranks along `shard` divide: 1 optimizer states, 2 gradients too, 3 parameters too; 0 where shard is 1.
        recompute: which activations are computed again in the backward pass: "no", "blocks", "selective", or "K" for
            every K-th block.
        compile: whether the repeated blocks are compiled.
        offload: what waits in the host's memory while it is not needed: "no", "optimizer", "all" or "activations", or
            "activations" behind a + with one of the others; or "optimizer=disk:FOLDER" or "all=disk:FOLDER", with
            "activations+" before it.
        open: settings that were asked to be chosen when the models are known; () once they are.
        strategies: names of the model passes, in the order in which they are applied.
        options: options of each strategy, by its name.
        semantics: how the loop is meant: as Paceline's own, or as another library's.
        decisions: where each value came from.
    """

    layout: Layout = field(default_factory=Layout)
    precision: str = "no"
    accumulate: int = 1
    zero: int = 0
    recompute: str = "no"
    compile: bool = False
    offload: str = "no"
    open: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    semantics: Semantics = NATIVE
    decisions: tuple[Decision, ...] = ()

    @property
    def fully_sharded(self) -> bool:
        """Whether FSDP2 does the ZeRO stage: always where parameters are divided, and for a lower stage where tensor, pipeline
        or expert ranks hold parts of the model too, which our own stages 1 and 2 do not divide again."""
        return self.zero == 3 or (self.zero > 0 and self.layout.parameter_parts > 1)

    @property
    def offloads_states(self) -> bool:
        """Whether optimizer states wait in the host's memory, or on its disk."""
        return self.offload not in ("no", "activations")

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameters that FSDP2 divides wait in the host's memory or on its disk. In memory it moves all or nothing."""
        return self.fully_sharded and self.offloads_states and "optimizer=disk:" not in self.offload

    @property
    def disk_folder(self) -> str:
        """The folder of the files in which optimizer states, and parameters, are kept; "" where they are in memory."""
        return self.offload.partition("=disk:")[2]

    @property
    def offloads_activations(self) -> bool:
        """Whether activations wait in the host's memory."""
        return "activations" in self.offload.partition("=")[0]

    @property
    def half(self) -> str:
        """In which 16-bit dtype the model computes: "bf16", "fp16", or "" for none."""
        if self.precision != "fp8":
            return self.precision if self.precision in ("bf16", "fp16") else ""
        # What is not multiplied in float8.
        return "" if self.options.get("fp8", {}).get("dtype") == "float32" else "bf16"

    def in_float32(self, reason: str) -> Plan:
        """Returns the plan in float32, whatever precision was asked for."""
        decision = Decision("precision", "no", "derived", reason=reason)
        return replace(self, precision="no", decisions=(*self.decisions, decision))

    def explain(self) -> str:
        """Returns the whole plan as text: a heading, one line for each decision, and one for all that nobody chose.

        Where the loop is not meant as Paceline's own, a line below the heading says what differs.
        """
        chain = " -> ".join(self.strategies) or "none"
        lines = [f"plan: {self.layout}, precision {self.precision}, accumulate {self.accumulate}, strategies {chain}"]
        meaning = self.semantics.explain()
        if meaning:
            lines.append(f"  {meaning}")
        defaults = []
        for decision in self.decisions:
            if decision.source == "default":
                defaults.append(f"{decision.field} = {decision.value}")
            elif decision.field != "strategies":
                lines.append(f"  {decision}")
        if defaults:
            lines.append(f"  by default: {', '.join(defaults)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the plan as JSON text; values that JSON lacks are written as their `str`."""
        return json.dumps({**asdict(self), "layout": self.layout.sizes()}, default=str, sort_keys=True)
