"""The layers of the package: the only place where they are listed. Writes the table of `concepts/code-layout.md`.

python docs/layers.py

`tests/shape/test_floors.py` checks that imports keep to them, and that the page has this table.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "concepts" / "code-layout.md"
MARK = "<!-- layers -->\n\n"


class Layer(NamedTuple):
    """Packages and files of `packages/paceline/src/paceline`, and other parts, that may import from all layers below.

    Attributes:
        packages: name -> what it contains.
        siblings: whether they may import from each other, as long as no ring of files arises.
    """

    packages: dict[str, str]
    siblings: bool = True


LAYERS = (
    Layer(
        {
            "base": "errors, the table of environment variables, logging, the registry, dataclasses from JSON; it needs the "
            "standard library only",
            "torch_internals": "every private name of torch that Paceline uses, behind one function each (those that one part "
            "alone uses are in its own `torch_internals`); it needs torch only",
        },
        siblings=False,
    ),
    Layer(
        {
            "config": "settings, their sources and precedence, files; the registry of config dialects",
            "world": "the world of processes, the layout, the mesh, the rendezvous, collectives and their transports",
        }
    ),
    Layer(
        {
            "plan": "`Plan`, `Decision`, facts about a model, and the rules that resolve a plan",
            "launch": "the launcher of this host; `processes`: the workers of a host; `worker`: what runs in each of them",
        }
    ),
    Layer(
        {
            "parallel": "the chain of strategies, and those that every part builds on; `data`: replicate, ZeRO, shard",
            "precision": "number formats and loss scaling",
            "optim": "accumulation, clipping, the rebinding of optimizers to divided parameters",
            "data": "order, division and position of samples; prepared loaders",
            "checkpoint": "the checkpoint format, saving and loading, the store on disks, exports of weights",
            "observe": "basic trackers, logs, torch's profiler",
        },
        siblings=False,
    ),
    Layer({"planner": "formulas of the memory of a plan, and the cheapest plan that fits"}),
    Layer(
        {
            "__init__": "the public names, which are loaded on first use",
            "accelerator": "the facade that a script uses",
            "run": "what the facade is made of: starting, `prepare`, the steps, saving and loading, preemption",
        }
    ),
    Layer(
        {
            "cli": "one module for each command of the core, and what commands of all parts have in common",
            "compat": "`paceline.compat.install`, and `python -m paceline.compat script.py`",
            "testing": "tools for users' tests",
            "__main__": "`python -m paceline`",
        }
    ),
    Layer(
        {
            "paceline_doors": "a part: how the names of another library are served, and `paceline doors`",
            "paceline_hosts": "a part: launchers for ssh, SLURM, Kubernetes, Ray and MPI, `paceline doctor`, "
            "stores behind URLs",
            "paceline_large": "a part: tensor, pipeline, context, expert parallel, offload, float8, "
            "models run from memory or disk, optimizers of our own, batches by tokens",
            "paceline_lens": "a part: the journal and its page, hangs, profiles, `plan`, `verify`, `tune`, "
            "`checkpoint`, trackers of products",
        },
        siblings=False,
    ),
    Layer(
        {
            "paceline_deepspeed": "a part: scripts written for DeepSpeed; profiles and `--autotuning` are those of "
            "`paceline_lens`"
        }
    ),
    Layer(
        {
            "paceline_accelerate": "a part: scripts written for accelerate; `DeepSpeedPlugin` uses `paceline_deepspeed`, if "
            "installed",
        }
    ),
)

# Packages that do not import torch at the top of a file, so that commands start fast.
WITHOUT_TORCH = ("base", "config", "launch", "cli", "paceline_hosts")


def table() -> str:
    """One row for each package, the lowest layer first."""
    rows = ["| layer | in `packages/paceline/src/paceline/` | what it contains |", "|---|---|---|"]
    for number, layer in enumerate(LAYERS):
        for name, content in layer.packages.items():
            rows.append(f"| {number} | `{name}` | {content} |")
    alone = [str(number) for number, layer in enumerate(LAYERS) if not layer.siblings]
    light = [f"`{name}`" for name in WITHOUT_TORCH]
    return "\n".join(
        [
            *rows,
            "",
            f"Packages of layers {', '.join(alone[:-1])} and {alone[-1]} do not import each other.",
            f"{', '.join(light[:-1])} and {light[-1]} do not import torch at the top of a file, so that commands start fast.",
        ]
    )


if __name__ == "__main__":
    before, _, after = PAGE.read_text(encoding="utf-8").partition(MARK)
    rest = after.partition("\n\n## ")[2]
    PAGE.write_text(f"{before}{MARK}{table()}\n\n## {rest}", encoding="utf-8")
