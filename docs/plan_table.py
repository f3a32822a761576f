"""Prints the tables of `how-to/choose-a-plan.md`, by the formulas of `paceline plan`: the cheapest plan, the time of sending.

python docs/plan_table.py

The models are those of `examples/plan_llama/train.py` in the usual sizes, without values. Activations are not in the
formulas: a part of each device is left for them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.config.settings import RunSettings
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.facts import ModelFacts, model_facts
from paceline.plan.plan import Decision
from paceline.plan.resolve import draft, resolve
from paceline.planner.estimate import Need, choose, estimate, shown
from paceline_lens.forecast.device import GIB, RESERVE

ROOT = Path(__file__).parents[1]
LEFT_FOR_ACTIVATIONS = 0.25
# (width, layers, heads, hidden) of Llamas.
MODELS = {
    "0.2 billion": (1024, 12, 16, 2816),
    "1.3 billion": (2048, 24, 32, 5504),
    "7 billion": (4096, 32, 32, 11008),
    "13 billion": (5120, 40, 40, 13824),
    "65 billion": (8192, 80, 64, 22016),
}
# Bytes a second from one device to the others.
LINKS = {"NVLink, 450 GB/s": 450e9, "PCIe, 32 GB/s": 32e9, "100 Gbit/s": 12.5e9, "10 Gbit/s": 1.25e9}
# (devices in all, devices on a host, GiB of each)
MACHINES = ((1, 1, 24), (1, 1, 80), (4, 4, 24), (8, 8, 80), (64, 8, 80), (64, 8, 141))


def facts_of(width: int, layers: int, heads: int, hidden: int) -> ModelFacts:
    """What a plan needs to know of a Llama."""
    spec = importlib.util.spec_from_file_location("plan_llama", ROOT / "examples" / "plan_llama" / "train.py")
    assert spec and spec.loader
    example: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    with torch.device("meta"):
        return model_facts(example.Llama(32000, width, layers, heads, hidden))


def plan_table() -> str:
    """Rows: models. Columns: machines. Cells: the flags, and what a rank holds."""
    names = [f"{devices} x {memory} GiB" for devices, _, memory in MACHINES]
    lines = ["| parameters | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name, shape in MODELS.items():
        need = Need((facts_of(*shape),))
        cells = []
        for devices, local, memory in MACHINES:
            usable = int(memory * GIB * (1 - RESERVE) * (1 - LEFT_FOR_ACTIVATIONS))
            opened = ("replicate", "shard", "zero")
            fixed = {"tp": 1, "cp": 1, "pp": 1, "recompute": "no", "mixed_precision": "bf16", "accumulate": 1}
            chosen = choose(need, devices, local, usable, fixed, opened)
            if chosen.settings is None or chosen.estimate is None:
                cells.append("no")
            else:
                flags = "as it is" if devices == 1 else f"`{shown(chosen.settings)}`"
                cells.append(f"{flags}, {chosen.estimate.held / GIB:.0f} GiB")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sending_table(model: str = "7 billion", ranks: int = 8) -> str:
    """Rows: plans. Columns: what a rank sends in a step, and the least time of it over each link."""
    facts = facts_of(*MODELS[model])
    plans: dict[str, dict[str, int]] = {f"`--replicate {ranks}`": {"replicate": ranks}}
    for zero in (1, 2, 3):
        plans[f"`--shard {ranks} --zero {zero}`"] = {"shard": ranks, "zero": zero}
    lines = [f"| plan | sent | {' | '.join(LINKS)} |", "|---" * (len(LINKS) + 2) + "|"]
    for name, settings in plans.items():
        given = {**settings, "mixed_precision": "bf16"}
        decisions = [Decision(field, value, "derived", "table") for field, value in given.items()]
        plan = resolve(draft(RunSettings.of(given), decisions, ranks), [facts], STRATEGIES)
        sent = estimate(plan, Need((facts,))).sent
        times = " | ".join(f"{sent / rate:.2g} s" for rate in LINKS.values())
        lines.append(f"| {name} | {sent / 1e9:.0f} GB | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(plan_table(), sending_table(), sep="\n\n")
