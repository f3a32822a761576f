"""The outcomes of the whole sweep, written down: `python -m torch_sweep.outcomes` in tests/ runs it (`make sweep`)."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from torch_sweep import loaders
from torch_sweep.loaders import LOADERS
from torch_sweep.modules import MODULES
from torch_sweep.optimizers import AVERAGES, OPTIMIZERS, SCHEDULERS
from torch_sweep.runs import Case, plans_of, sweep

PATH = Path(__file__).with_name("outcomes.json")
KINDS: dict[str, list[Case]] = {
    "modules": MODULES,
    "optimizers": OPTIMIZERS,
    "schedulers": SCHEDULERS,
    "averages": AVERAGES,
}
WIDTHS = (1, 2, 3)
AT_ONCE = 60  # cases in one group of processes, which would run out of groups and threads after some hundreds


def known() -> dict[str, dict[str, dict[str, str]]]:
    """Returns for each kind and name the outcomes that are written down: by plan, or of loaders by width."""
    outcomes: dict[str, dict[str, dict[str, str]]] = json.loads(PATH.read_text(encoding="utf-8"))
    return outcomes


def run_all() -> dict[str, dict[str, dict[str, str]]]:
    """Runs every case under every plan and width; outcomes that differ between widths stand side by side."""
    outcomes: dict[str, dict[str, dict[str, str]]] = {}
    for kind, cases in KINDS.items():
        outcomes[kind] = {case.name: {} for case in cases}
        for width in WIDTHS:
            for plan in plans_of(kind, width):
                print(f"{kind}, {plan}, width {width}", file=sys.stderr, flush=True)
                for begin in range(0, len(cases), AT_ONCE):
                    part = [(case, plan) for case in cases[begin : begin + AT_ONCE]]
                    for (name, _), seen in sweep(part, width, timeout_s=900).items():
                        before = outcomes[kind][name].get(plan)
                        both = [seen] if before is None else [*before.split(" / "), seen]
                        outcomes[kind][name][plan] = " / ".join(dict.fromkeys(both))
    return outcomes


def run_loaders() -> dict[str, dict[str, dict[str, str]]]:
    """Reads every loader at every width."""
    outcomes: dict[str, dict[str, dict[str, str]]] = {}
    for kind, cases in LOADERS.items():
        outcomes[kind] = {case.name: {} for case in cases}
        for width in WIDTHS:
            print(f"{kind}, width {width}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                for name, seen in loaders.sweep(cases, width, Path(folder), timeout_s=900).items():
                    outcomes[kind][name][str(width)] = seen
    return outcomes


if __name__ == "__main__":
    found = {**run_all(), **run_loaders()}
    PATH.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    bad = [
        f"{name} under {plan}: {outcome}"
        for named in found.values()
        for name, by_plan in named.items()
        for plan, outcome in by_plan.items()
        if "WRONG" in outcome or "RAW" in outcome
    ]
    print("\n".join(bad))
    sys.exit(len(bad) > 0)
