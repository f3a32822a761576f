"""The layers of `docs/layers.py`: a module imports from those below, and siblings of some do not know each other."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

LAYOUT = runpy.run_path(str(Path(__file__).parents[2] / "docs/layers.py"))
LAYERS, WITHOUT_TORCH = LAYOUT["LAYERS"], LAYOUT["WITHOUT_TORCH"]
FLOOR = {package: number for number, layer in enumerate(LAYERS) for package in layer.packages}


def target(name: str, modules) -> str | None:
    """The module of Paceline that an imported dotted name stands for; None for a name of another library."""
    while name.startswith("paceline"):
        if name in modules:
            return name
        name = name.rpartition(".")[0]
    return None


def may_import(importer: str, imported: str) -> bool:
    """Whether room `importer` may import from room `imported`."""
    if importer == imported:
        return True
    above, below = FLOOR[importer], FLOOR[imported]
    return below < above or (below == above and LAYERS[above].siblings)


def test_the_page_has_the_table(root) -> None:
    page = (root / "docs/concepts/code-layout.md").read_text(encoding="utf-8")
    assert f"{LAYOUT['MARK']}{LAYOUT['table']()}\n\n## " in page, "run python docs/layers.py"


def test_every_room_has_a_floor(modules) -> None:
    unknown = {module.room for module in modules.values()} - set(FLOOR)
    assert not unknown, f"say in docs/layers.py on which layer these stand: {sorted(unknown)}"


def test_imports_go_down(modules) -> None:
    wrong = []
    for module in modules.values():
        for line, name in module.imported():
            found = target(name, modules)
            if found and module.name != "paceline" and not may_import(module.room, modules[found].room):
                wrong.append(f"{module.where}:{line} imports {found}")
    assert not wrong, "imports that go up, or to a sibling:\n" + "\n".join(wrong)


def test_the_doctor_serves_its_command_alone(modules) -> None:
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules.values()
        if not module.name.startswith(("paceline_hosts.doctor", "paceline_hosts.cli.doctor"))
        for line, name in module.imported()
        if name.startswith("paceline_hosts.doctor")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_knows_no_part(modules) -> None:
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules.values()
        if module.name.partition(".")[0] == "paceline"
        for line, name in module.imported()
        if name.startswith("paceline_")
    ]
    assert not wrong, "extension points are entry points:\n" + "\n".join(wrong)


def test_base_needs_the_standard_library_alone(modules) -> None:
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules.values()
        if module.room == "base"
        for line, name in module.imported()
        if name.split(".")[0] not in sys.stdlib_module_names | {"paceline", "__future__"}
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_internals_needs_torch_and_the_standard_library_alone(modules) -> None:
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules.values()
        if module.room == "torch_internals"
        for line, name in module.imported()
        if name.split(".")[0] not in sys.stdlib_module_names | {"torch", "__future__"}
        and ".torch_internals." not in name
    ]
    assert not wrong, "\n".join(wrong)


def test_no_torch_at_top_level_of_the_light_rooms(modules) -> None:
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules.values()
        if module.room in (*WITHOUT_TORCH, "__init__", "__main__")
        for line, name in module.imported(into_functions=False)
        if name.split(".")[0] == "torch"
    ]
    assert not wrong, "import torch inside the function that needs it:\n" + "\n".join(wrong)


def test_peers_are_never_imported(modules) -> None:
    peers = {"accelerate", "deepspeed", "lightning", "pytorch_lightning", "lightning_fabric"}
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules.values()
        for line, name in module.imported()
        if name.split(".")[0] in peers
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("what", ["paceline", "paceline.cli.main", *WITHOUT_TORCH])
def test_torch_stays_unloaded(what: str, modules) -> None:
    names = [what] if what in modules else [name for name, module in modules.items() if module.room == what]
    program = f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
    program += "    assert 'torch' not in sys.modules, name"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
