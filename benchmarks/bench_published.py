"""The plan's forecasts beside steps of Llama 3 that others measured and published.

    python benchmarks/bench_published.py [--rows 8b]

Each row is rehearsed on this machine: rank 0 of the published number of devices, on tensors without values. The efficiencies
are those of `paceline plan` (`planner/datasheet.py`), the same for all rows.

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
from paceline.planner.device import GIB, device_of
from paceline_lens.forecast.rehearsal import SimulatedWorld, rehearse
from paceline_lens.forecast.report import PlanReport

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
        memory: published GiB that the allocator held at most; None if not published.
        settings: the plan, beside bf16.
        note: what the published run had that the forecast does not know.
    """

    name: str
    size: str
    ranks: int
    batch: int
    length: int
    tokens: float
    memory: float | None
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


FLOAT8 = "published with float8"
EAGER = "published with float8 and compiled, which Paceline refuses beside cp and tp"
SEQUENCE = {"sequence": True, "loss": True}
ROWS = (
    Row("8b, 8", "8b", 8, 2, 8192, 5762, 82.4, {"shard": 8, **SELECTIVE}),
    Row("8b, 8, compiled", "8b", 8, 2, 8192, 6667, 77.0, {"shard": 8, **SELECTIVE, "compile": True}),
    Row("8b, 128", "8b", 128, 2, 8192, 5605, None, {"shard": 128, **SELECTIVE}),
    Row("8b, 128, compiled", "8b", 128, 2, 8192, 6514, None, {"shard": 128, **SELECTIVE, "compile": True}),
    Row("8b, 8, float8", "8b", 8, 2, 8192, 8532, 76.8, {"shard": 8, **COMPILED_FLOAT8}, GATHERS),
    Row("8b, 128, float8", "8b", 128, 2, 8192, 8380, None, {"shard": 128, **COMPILED_FLOAT8}, GATHERS),
    *(
        Row(
            f"8b, 8, {32 * cp}k tokens, cp {cp}",
            "8b",
            8,
            1,
            32_768 * cp,
            tokens,
            None,
            {"shard": 8 // cp, "cp": cp, "recompute": "blocks", "compile": cp == 1},
            FLOAT8 if cp == 1 else EAGER,
        )
        for cp, tokens in ((1, 3890), (2, 2540), (4, 1071), (8, 548))
    ),
    Row(
        "70b, 256, tp 8",
        "70b",
        256,
        16,
        8192,
        829,
        71.9,
        {"shard": 32, "tp": 8, "recompute": "blocks"},
        EAGER,
    ),
    # What the published run did: activations between divided layers by position, logits and loss by the vocabulary.
    Row(
        "70b, 256, tp 8, sequence and loss",
        "70b",
        256,
        16,
        8192,
        829,
        71.9,
        {"shard": 32, "tp": 8, "recompute": "blocks", "options": {"tensor": SEQUENCE}},
        EAGER,
    ),
    Row(
        "405b, 512, tp 8, pp 8, sequence and loss",
        "405b",
        512,
        32,
        8192,
        100,
        82.5,
        {
            "shard": 8,
            "tp": 8,
            "pp": 8,
            "recompute": "blocks",
            "options": {"tensor": SEQUENCE, "pipeline": {"microbatches": 32}},
        },
        EAGER,
    ),
)


def report_of(row: Row) -> PlanReport:
    """Rehearses a row."""

    def program() -> None:
        sys.argv = [str(PROGRAM), "--size", row.size, "--batch", str(row.batch), "--length", str(row.length)]
        runpy.run_path(str(PROGRAM), run_name="__main__")

    settings = {"mixed_precision": "bf16", **row.settings}
    choices = [Choice(name, value, "command line", f"--{name}") for name, value in settings.items()]
    world = SimulatedWorld(row.ranks, 8, {HANDED: hand_over(choices)}, accelerated=True)
    rehearsal = rehearse(program, world)
    return PlanReport(rehearsal.plan, row.ranks, rehearsal, device=DEVICE)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows whose name begins like this")
    options = parser.parse_args()
    print("| run | forecast, tokens/s/device | published | middle to published | forecast, GiB | published | |")
    print("|---|---|---|---|---|---|---|")
    for row in ROWS:
        if not row.name.startswith(options.rows):
            continue
        report = report_of(row)
        if report.rehearsal.memory is None:
            print(
                f"| {row.name} | not rehearsed: {report.rehearsal.problem} | {row.tokens:.0f} | | | | {row.note} |",
                flush=True,
            )
            continue
        fast, slow = (report.tokens_a_second(seconds) for seconds in report.range_s())
        middle = (fast * slow) ** 0.5
        memory = f"{row.memory:.1f}" if row.memory else ""
        print(
            f"| {row.name} | {slow:.0f} to {fast:.0f} | {row.tokens:.0f} | {middle / row.tokens - 1:+.0%} | "
            f"{report.peak / GIB:.1f} | {memory} | {row.note} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
