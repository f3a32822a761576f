"""The plan's forecasts beside steps of Llama 3 that others measured and published.

    python benchmarks/bench_published.py [--rows 8b]

Each row is rehearsed on this machine: rank 0 of the published number of devices, on tensors without values. The efficiencies
are those of `paceline plan` (`forecast/datasheet.py`), the same for all rows.

Source: torchtitan's documentation of performance, December 2024: H100 with 96 GB of HBM2e and 500 W. They compute between an
H100 SXM (989 TFLOP/s) and an H100 NVL (835), so that the mean of both is taken.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config.given import Choice
from paceline.config.sources import HANDED, hand_over
from paceline.parallel.strategy import timetable_of
from paceline.world.layout import model_axes
from paceline_lens.forecast.datasheet import FAST, SLOW, Efficiency, calibration_of
from paceline_lens.forecast.device import GIB, device_of
from paceline_lens.forecast.rehearsal import Rehearsal, SimulatedWorld, rehearse
from paceline_lens.forecast.step_time import Beside, beside_computing, step_time

PROGRAM = Path(__file__).parent / "published" / "llama.py"
DEVICE = replace(device_of("h100-96GB"), half=912e12, bandwidth=2.4e12)
SELECTIVE = {"recompute": "selective", "options": {"recompute": {"products": 2}}}


TENSORWISE = {"fp8": {"recipe": "tensorwise"}}
COMPILED_FLOAT8 = {
    "mixed_precision": "fp8",
    "compile": True,
    "recompute": "selective",
    "options": {"recompute": {"products": 2}, **TENSORWISE},
}
GATHERS = "published with parameters gathered in float8, which Paceline gathers in bf16"


@dataclass(frozen=True)
class Row:
    """One published run.

    Attributes:
        name: what it is.
        size, ranks, batch, length: the model, the devices, sequences of one rank in a step, tokens of each.
        tokens: published tokens a second on each device.
        memory: published GiB that the allocator had taken from the device.
        settings: the plan, beside bf16.
        note: what the forecast has otherwise.
        cp: ranks among which the program itself divides a sequence; `length` tokens are on each of them.
        compiled: whether to count the step as compiled, where the plan is not.
        beside: whether messages along tp travel while products compute (async tp).
    """

    name: str
    size: str
    ranks: int
    batch: int
    length: int
    tokens: float
    memory: float
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    cp: int = 1
    compiled: bool = False
    beside: bool = False


SEQUENCE = {"sequence": True, "loss": True}
DENSE = {"mixed_precision": "fp8", "recompute": "blocks"}
COMPILED = "counted as compiled, which Paceline refuses beside tp"
DIVIDED = "the program divides the sequence, as torch's context parallel does"


def fsdp(ranks: int, figures: tuple[tuple[float, float], ...]) -> tuple[Row, ...]:
    """Returns the rows of FSDP alone: eager, compiled, and in float8."""
    kinds = (
        ("", SELECTIVE, ""),
        (", compiled", {**SELECTIVE, "compile": True}, ""),
        (", float8", COMPILED_FLOAT8, GATHERS),
    )
    rows = []
    for (kind, settings, note), (tokens, memory) in zip(kinds, figures, strict=True):
        rows.append(Row(f"8b, {ranks}{kind}", "8b", ranks, 2, 8192, tokens, memory, {"shard": ranks, **settings}, note))
    return tuple(rows)


def along_tp(name: str, size: str, ranks: int, batch: int, figures: tuple[float, float], **settings: Any) -> Row:
    """Returns a row with tp 8: activations between divided layers by position, logits and loss by the vocabulary."""
    options = {"tensor": SEQUENCE, **TENSORWISE, **settings.pop("options", {})}
    plan = {"tp": 8, **DENSE, **settings, "options": options}
    return Row(name, size, ranks, batch, 8192, *figures, plan, COMPILED, compiled=True, beside="async tp" in name)


def pipelined(schedule: str, figures: tuple[float, float]) -> Row:
    """Returns a row with pp 8 and torchtitan's default: as many micro-batches as ranks of a pipeline."""
    options = {"pipeline": {"schedule": schedule, "microbatches": 8}}
    return along_tp(
        f"405b, 512, tp 8, pp 8, async tp, {schedule}", "405b", 512, 32, figures, shard=8, pp=8, options=options
    )


ROWS = (
    *fsdp(8, ((5762, 82.4), (6667, 77.0), (8532, 76.8))),
    *fsdp(128, ((5605, 67.0), (6514, 62.0), (8380, 61.8))),
    *(
        Row(
            f"8b, 8, {32 * cp}k tokens, cp {cp}",
            "8b",
            8,
            1,
            32_768,
            tokens,
            memory,
            {"shard": 8, **DENSE, "compile": True, "options": TENSORWISE},
            DIVIDED if cp > 1 else GATHERS,
            cp=cp,
        )
        for cp, tokens, memory in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5))
    ),
    along_tp("70b, 256, tp 8", "70b", 256, 16, (829, 71.9), shard=32),
    along_tp("70b, 256, tp 8, async tp", "70b", 256, 16, (876, 67.6), shard=32),
    pipelined("1f1b", (100, 82.5)),
    pipelined("interleaved", (128, 72.7)),
)


def rehearsed(row: Row) -> Rehearsal:
    """Rehearses a row."""
    arguments = {"size": row.size, "batch": row.batch, "length": row.length, "cp": row.cp}

    def program() -> None:
        sys.path.insert(0, str(PROGRAM.parent))
        sys.argv = [str(PROGRAM), *(f"--{name}={value}" for name, value in arguments.items())]
        runpy.run_path(str(PROGRAM), run_name="__main__")

    settings = {"mixed_precision": "bf16", **row.settings}
    choices = [Choice(name, value, "command line", f"--{name}") for name, value in settings.items()]
    return rehearse(program, SimulatedWorld(row.ranks, 8, {HANDED: hand_over(choices)}, accelerated=True))


def seconds(row: Row, rehearsal: Rehearsal, efficiency: Efficiency) -> float:
    """Returns how long a step takes with such shares of the datasheet."""
    plan = replace(rehearsal.plan, compile=rehearsal.plan.compile or row.compiled)
    calibration = calibration_of(DEVICE, efficiency, plan)
    beside = beside_computing(plan, calibration)
    if row.beside and beside is not None:
        beside = Beside(beside.phases, ("send",))
    timetable = timetable_of(plan, rehearsal.models)
    return step_time(rehearsal.traffic.work, calibration, beside, timetable).total_s


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows whose name begins like this")
    options = parser.parse_args()
    print(
        "| run | forecast, tokens/s/device | published | middle to published | tensors, GiB | allocator, GiB | published | |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rehearsals: dict[str, Rehearsal] = {}  # rows that differ in what is counted share one
    for row in ROWS:
        if not row.name.startswith(options.rows):
            continue
        run = str((row.size, row.ranks, row.batch, row.length, row.cp, row.settings))
        rehearsal = rehearsals.setdefault(run, rehearsals.get(run) or rehearsed(row))
        memory = rehearsal.memory
        if memory is None:
            print(
                f"| {row.name} | not rehearsed: {rehearsal.problem} | {row.tokens:.0f} | | | | | {row.note} |",
                flush=True,
            )
            continue
        tokens = rehearsal.traffic.work.tokens / rehearsal.plan.layout.size(*model_axes())
        slow, fast = (tokens / seconds(row, rehearsal, efficiency) for efficiency in (SLOW, FAST))
        middle = (fast * slow) ** 0.5
        print(
            f"| {row.name} | {slow:.0f} to {fast:.0f} | {row.tokens:.0f} | {middle / row.tokens - 1:+.0%} | "
            f"{memory.total / GIB:.1f} | {memory.reserved / GIB:.1f} ({memory.reserved / GIB / row.memory - 1:+.0%}) | "
            f"{row.memory:.1f} | {row.note} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
