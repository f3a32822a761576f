"""Changes the modules that decide numbers, one place at a time, and counts the changes that their tests do not notice.

make mutants [ARGS="--modules world/layout.py"]        markdown, for a report

A change (a *mutant*) is a number plus one, `<` in place of `<=`, a condition turned round. A mutant is killed if a test fails
or does not end. What survives is either a change that changes nothing, or one that no test would see. The program works in a
copy of the committed files, because Cosmic Ray changes them in place.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".venv-mutants" / "bin"

# Module below packages/paceline/src/paceline -> the tests that are about it.
MODULES = {
    "world/layout.py": "packages/paceline/tests/unit/world/test_layout.py",
    "optim/mean.py": "packages/paceline/tests/unit/optim/test_mean.py packages/paceline/tests/unit/optim/test_accumulate.py",
    "optim/window.py": "packages/paceline/tests/unit/optim/test_accumulate.py",
}

CONFIG = """
[cosmic-ray]
module-path = "packages/paceline/src/paceline/{module}"
timeout = 120.0
excluded-modules = []
test-command = "{python} -m pytest -q -x -p no:cacheprovider {tests}"

[cosmic-ray.distributor]
name = "local"

# `A | B` stands in annotations alone, which nothing evaluates.
[cosmic-ray.filters.operators-filter]
exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"]
"""


def survivors(copy: Path, module: str, tests: str) -> tuple[int, list[str]]:
    """Runs all mutants of one module; returns how many there are, and a line for each that survived."""
    config, session = copy / "mutants.toml", copy / "mutants.sqlite"
    config.write_text(CONFIG.format(module=module, python=sys.executable, tests=tests), encoding="utf-8")
    session.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(copy / "packages" / "paceline" / "src")}
    steps = (
        ["cosmic-ray", "init", config, session],
        ["cr-filter-operators", session, config],
        ["cosmic-ray", "baseline", config],
        ["cosmic-ray", "exec", config, session],
    )
    for tool, *words in steps:
        subprocess.run([TOOLS / tool, *words], cwd=copy, env=environment, check=True, stdout=subprocess.DEVNULL)
    dumped = subprocess.run([TOOLS / "cosmic-ray", "dump", session], capture_output=True, text=True, check=True)
    lines = []
    count = 0
    for line in dumped.stdout.splitlines():
        item, result = json.loads(line)
        if result is None or result["worker_outcome"] == "skipped":
            continue
        count += 1
        if result["test_outcome"] == "survived":
            for mutation in item["mutations"]:
                line_number = mutation["start_pos"][0]
                operator = mutation["operator_name"].removeprefix("core/")
                lines.append(f"{module}:{line_number} {operator} ({mutation['occurrence']})")
    return count, sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    given = parser.parse_args()
    print("| module | mutants | survive | killed |\n|---|---|---|---|")
    surviving = []
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        for module in given.modules:
            count, lines = survivors(Path(folder), module, MODULES[module])
            print(f"| `{module}` | {count} | {len(lines)} | {1 - len(lines) / count:.0%} |", flush=True)
            surviving += lines
    print("\nSurvivors:\n", *(f"- {line}" for line in surviving), sep="\n")


if __name__ == "__main__":
    main()
