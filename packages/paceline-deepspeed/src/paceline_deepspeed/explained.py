"""What a DeepSpeed config means, as text or JSON: settings with their places, the batch, what else is read, what is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from paceline.base import env as environment
from paceline.base.text_table import text_table
from paceline.config import schema
from paceline.config.given import Choice, Given
from paceline.config.overrides import Overrides
from paceline.config.settings import RunSettings
from paceline.config.sources import Resolved, resolve_launch, resolve_run
from paceline_deepspeed.config import Batch, DeepSpeedConfig, read
from paceline_deepspeed.config.batch import MICRO, STEPS, TRAIN
from paceline_deepspeed.semantics import DEEPSPEED


def explain(path: str, flags: Sequence[Given], *, as_json: bool, changed: bool) -> str:
    """Explains the plan of a DeepSpeed config under a command line.

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
    procs = launch.launch.procs
    nodes = launch.launch.nodes
    processes: int | None = None  # nobody said so
    if isinstance(procs, int) and isinstance(nodes, int):
        processes = procs * nodes
    env = {**environment.snapshot(), **launch.hand_over()}
    batch: Batch | None = None
    window: list[Given] = []
    if processes is not None:
        # The width of the run decides how long a window is, and follows from the other settings.
        batch = _batch(config, resolve_run(Overrides(plan=config.given), env), processes)
        window.append(Given("accumulate", batch.accumulate, "code", config.places.get(STEPS, path)))
    resolved = resolve_run(Overrides(plan=[*config.given, *window]), env)

    if as_json:
        batch_sizes = None
        if batch is not None:
            batch_sizes = asdict(batch)
        content = {
            "file": config.source,
            "settings": list(map(asdict, resolved.decisions)),
            "processes": processes,
            "batch": batch_sizes,
            "kept": list(map(asdict, config.kept)),
            "unused": list(map(asdict, config.unused)),
            "notices": [*resolved.notices, *config.notices],
        }
        return json.dumps(content, indent=2, default=str)

    shown = list(resolved.decisions)
    if changed:
        shown = [row for row in shown if row.source != "default"]
    lines = [f"file: {config.source}", "", *_table("setting", shown), "", _triangle(config, processes, batch)]
    for heading, choices in (("read by the engine", config.kept), ("no effect here", config.unused)):
        if choices:
            lines += ["", *_table(heading, choices)]
    lines += [f"\nnotice: {text}" for text in resolved.notices]
    return "\n".join(lines)


def _batch(config: DeepSpeedConfig, resolved: Resolved[RunSettings], processes: int) -> Batch:
    from paceline.plan.plan import Decision
    from paceline.plan.resolve import draft

    decisions = [Decision(**vars(choice)) for choice in resolved.decisions]
    plan = draft(resolved.settings, decisions, processes, DEEPSPEED)
    return config.batch(plan.layout.width)


def _table(heading: str, choices: Sequence[Choice]) -> list[str]:
    rows = [(heading, "value", "from", "")]
    for choice in choices:
        origin = choice.source
        if choice.source in ("code", "file"):
            origin = choice.where
        elif choice.where:
            origin = f"{choice.source} ({choice.where})"
        value = choice.value
        if not isinstance(value, str):
            value = schema.shown_value(value)
        rows.append((choice.field, value or "-", origin, choice.reason.removeprefix("no effect here: ")))
    return text_table(rows)


def _triangle(config: DeepSpeedConfig, processes: int | None, batch: Batch | None) -> str:
    """Writes the batch triangle in one line; without the number of processes, what the config says of it."""
    if batch is not None:
        ranks = f"{processes} processes"
        if batch.width != processes:
            ranks = f"{batch.width} of {ranks}"
        return f"batch: {batch.train} = micro-batch {batch.micro} x accumulation {batch.accumulate} x {ranks}"
    numbers = []
    for name in (TRAIN, MICRO, STEPS):
        number = config[name]
        if number is None:  # follows from the others, once the number of processes is known
            number = "open"
        numbers.append(number)
    train, micro, steps = numbers
    return f"batch: {train} = micro-batch {micro} x accumulation {steps} x processes (say how many: --procs N)"
