"""`Overrides`: what a script says about the settings of its run, each value with its type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.config.given import Given

# Arguments of `Accelerator` that are not called as their setting is; messages must name what stands in the script.
ARGUMENTS = {"accumulate": "gradient_accumulation_steps"}
# What `Accelerator(plan=...)` takes: settings by name, those that a part has read from another library's config, or a file.
PlanArgument = Mapping[str, Any] | Sequence[Given] | str | Path


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """The settings that a script gives; None for one that it does not give.

    A field has the name and the type of its setting in `RunSettings`, so that its value can be followed from the constructor
    to where it is used.

    Attributes:
        plan: further settings by name; or the name of a config file, which flags and variables override; or settings that a
            part has read from a config of another library.
        options: options of strategies, by the strategy's name.
    """

    mixed_precision: str | None = None
    accumulate: int | None = None
    cpu: bool | None = None
    debug: bool | None = None
    timeout_s: float | None = None
    split_batches: bool | None = None
    dispatch_batches: bool | None = None
    even_batches: bool | None = None
    data_seed: int | None = None
    non_blocking: bool | None = None
    log_system: bool | None = None
    profile: str | None = None
    plan: PlanArgument | None = None
    options: Mapping[str, Mapping[str, Any]] | None = None

    def given(self) -> Iterator[Given]:
        """Yields the single settings that the script gives, each with the argument that it stands in."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("plan", "options") and value is not None:
                yield Given(field.name, value, "code", f"Accelerator({ARGUMENTS.get(field.name, field.name)}=...)")
