"""The core knows no other library: what concerns one is a part of its own, which the core finds by entry points."""

from __future__ import annotations

import ast
import re

NAMED = re.compile(r"deepspeed|accelerate(?![rd])", re.IGNORECASE)  # not `accelerator`, not `accelerated`

# The parts that serve a library, under its name.
DOORS = ("paceline_accelerate", "paceline_deepspeed")

# Lines of other parts that name a library: a part of each, and why it stays.
TEXTS = {
    "packages/paceline/src/paceline/base/env.py": {
        "`accelerate`, `deepspeed`, joined by commas": "documentation of a variable: users have to know what it may hold",
    },
    "packages/paceline/src/paceline/cli/env.py": {
        '"ACCELERATE_"': "a prefix of variables that a report shows, since they change a run",
    },
    "packages/paceline-lens/src/paceline_lens/cli/checkpoint/export.py": {
        "that accelerate's FSDP divided": "help of the command: users have to know what it reads",
        "a checkpoint of Paceline, accelerate": "the same",
    },
    "packages/paceline/src/paceline/config/settings.py": {
        "as accelerate does": "help of a setting: whose habit it is",
    },
    "packages/paceline/src/paceline/base/parts.py": {
        '"accelerate": {': "the table of extras, for errors about a part that is not installed",
        '"deepspeed": {': "the same",
    },
    "packages/paceline-large/src/paceline_large/context/ulysses.py": {
        '"DeepSpeed Ulysses", 2023': "title of the paper that the algorithm is from",
    },
    "packages/paceline/src/paceline/precision/scaler.py": {
        "min_scale (DeepSpeed: ": "an error: the name that the value has in the user's config",
    },
}


# Private attributes of the core that doors still use. An entry may be removed; none is added.
PRIVATE: set[str] = set()

# Names of torch's own modules, which some class of ours has too.
OF_TORCH = {"_buffers", "_modules", "_parameters", "_version"}


def lines_with_a_name(modules) -> dict[str, list[tuple[int, str]]]:
    """Path -> the lines outside the doors that name a library; what serves doors has examples, which need names."""
    found: dict[str, list[tuple[int, str]]] = {}
    for module in modules.values():
        if module.room in (*DOORS, "compat", "paceline_doors"):
            continue
        for number, line in enumerate(module.text.splitlines(), start=1):
            if NAMED.search(line):
                found.setdefault(module.where, []).append((number, line.strip()))
    return found


def test_the_core_names_no_other_library(modules) -> None:
    wrong = []
    for path, lines in lines_with_a_name(modules).items():
        texts = TEXTS.get(path, {})
        wrong += [f"{path}:{number} {line}" for number, line in lines if not any(text in line for text in texts)]
    assert not wrong, "move it to the part of that library, or give a text for users its reason here:\n" + "\n".join(
        wrong
    )


def test_the_lists_only_shrink(modules) -> None:
    named = lines_with_a_name(modules)
    stale = []
    for path, texts in TEXTS.items():
        stale += [f"{path}: {text}" for text in texts if not any(text in line for _, line in named.get(path, []))]
    assert not stale, "remove these entries:\n" + "\n".join(stale)


def private_names(nodes: list[ast.AST]) -> set[str]:
    """Private attributes and methods that the classes of a module define."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def library_of(module) -> str:
    """The part that serves a library."""
    return str(module.room)


def test_doors_use_public_names_of_the_core(modules) -> None:
    of_core: set[str] = set()
    of_library: dict[str, set[str]] = {}
    for module in modules.values():
        if module.room not in DOORS:
            of_core |= private_names(module.nodes)
        else:
            of_library.setdefault(library_of(module), set()).update(private_names(module.nodes))
    wrong = []
    for module in modules.values():
        if module.room not in DOORS:
            continue
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and node.attr in of_core - PRIVATE - OF_TORCH:
                owner = ast.unparse(node.value)
                # The modules of one library may reach into each other's classes.
                if owner not in ("self", "cls", "super()") and node.attr not in of_library[library_of(module)]:
                    wrong.append(f"{module.where}:{node.lineno} {owner}.{node.attr}")
    assert not wrong, "give it a public name:\n" + "\n".join(wrong)
