"""What a DeepSpeed config means, as text or JSON: settings with their places, the batch, what else is read, what is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.base import env as environment
from paceline.compat.deepspeed.config import Batch, DeepSpeedConfig, read
from paceline.compat.deepspeed.config.batch import MICRO, STEPS, TRAIN
from paceline.config import schema
from paceline.config.given import Choice, Given
from paceline.config.settings import RunSettings
from paceline.config.sources import Launch, Resolved, resolve_launch, resolve_run


def explain(path: str, flags: Sequence[Given], *, as_json: bool, changed: bool) -> str:
    """The plan of a DeepSpeed config under a command line.

    Args:
        path: the config.
        flags: what else stood on the command line; `procs` (and `nodes`) give the number of processes.
        as_json: JSON in place of a table.
        changed: leave out settings that have their default.

    Raises:
        ConfigError: whatever is wrong with the config, and `deepspeed-batch`; PlanError: a layout that cannot be.
    """
    config = read(path)
    launch = resolve_launch(flags)
    procs = _processes(launch)
    env = {**environment.snapshot(), **launch.hand_over()}
    batch = _batch(config, resolve_run({}, env, plan=config.given), procs)
    window = [] if batch is None else [Given("accumulate", batch.accumulate, "code", config.places.get(STEPS, path))]
    resolved = resolve_run({}, env, plan=[*config.given, *window])
    if as_json:
        return json.dumps(_json(config, resolved, procs, batch), indent=2, default=str)
    return "\n".join(_text(config, resolved, procs, batch, changed))


def _processes(launch: Launch) -> int | None:
    """How many processes were asked for; None where nobody said so."""
    procs, nodes = launch.launch.procs, launch.launch.nodes
    return procs * nodes if isinstance(procs, int) and isinstance(nodes, int) else None


def _batch(config: DeepSpeedConfig, resolved: Resolved[RunSettings], procs: int | None) -> Batch | None:
    if procs is None:
        return None
    from paceline.plan.plan import Decision
    from paceline.plan.resolve import draft

    decisions = [Decision(**vars(each)) for each in resolved.decisions]
    return config.batch(draft(resolved.settings.by_name(), decisions, procs, resolved.settings.options).layout.width)


def _json(
    config: DeepSpeedConfig, resolved: Resolved[RunSettings], procs: int | None, batch: Batch | None
) -> dict[str, Any]:
    return {
        "file": config.source,
        "settings": [asdict(row) for row in resolved.decisions],
        "processes": procs,
        "batch": None if batch is None else asdict(batch),
        "kept": [asdict(row) for row in config.kept],
        "unused": [asdict(row) for row in config.unused],
        "notices": [*resolved.notices, *config.notices],
    }


def _text(
    config: DeepSpeedConfig, resolved: Resolved[RunSettings], procs: int | None, batch: Batch | None, changed: bool
) -> list[str]:
    shown = [row for row in resolved.decisions if row.source != "default" or not changed]
    rows = [("setting", "value", "from", ""), *map(_row, shown)]
    lines = [f"file: {config.source}", "", *schema.lined_up(rows), "", _triangle(config, procs, batch)]
    for heading, choices in (("read by the engine", config.kept), ("no effect here", config.unused)):
        if choices:
            lines += ["", *schema.lined_up([(heading, "value", "from", ""), *map(_row, choices)])]
    return [*lines, *(f"\nnotice: {text}" for text in resolved.notices)]


def _row(each: Choice) -> tuple[str, str, str, str]:
    origin = each.source
    if each.source in ("code", "file"):
        origin = each.where
    elif each.where:
        origin = f"{each.source} ({each.where})"
    value = each.value if isinstance(each.value, str) else schema.shown_value(each.value)
    return each.field, value or "-", origin, each.reason.removeprefix("no effect here: ")


def _triangle(config: DeepSpeedConfig, procs: int | None, batch: Batch | None) -> str:
    if batch is not None:
        ranks = f"{batch.width} of {procs} processes" if batch.width != procs else f"{procs} processes"
        return f"batch: {batch.train} = micro-batch {batch.micro} x accumulation {batch.accumulate} x {ranks}"
    open_or = {name: "open" if config[name] is None else config[name] for name in (TRAIN, MICRO, STEPS)}
    return (
        f"batch: {open_or[TRAIN]} = micro-batch {open_or[MICRO]} x accumulation {open_or[STEPS]} x processes "
        "(say how many: --procs N)"
    )
