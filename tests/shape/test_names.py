"""Names that hide a missing noun; and the environment, which has one owner."""

from __future__ import annotations

import ast

VAGUE_MODULES = {"util", "utils", "helper", "helpers", "common", "misc", "tools"}
VAGUE_CLASSES = ("Manager", "Handler", "Helper", "Helpers", "Utils", "Util")
# They carry the names of other libraries (`accelerate.utils`), not ours.
EXEMPT = ("paceline_accelerate", "paceline_deepspeed")
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}


def test_no_vague_names(modules) -> None:
    wrong = []
    for module in modules.values():
        if module.name.startswith(EXEMPT):
            continue
        if VAGUE_MODULES & set(module.name.split(".")):
            wrong.append(f"{module.where}: what does it hold?")
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and node.name.endswith(VAGUE_CLASSES):
                wrong.append(f"{module.where}:{node.lineno} class {node.name}: what is it?")
    assert not wrong, "find the noun:\n" + "\n".join(wrong)


def test_only_base_env_touches_the_environment(modules) -> None:
    wrong = []
    for module in modules.values():
        if module.name == "paceline.base.env":
            continue
        for node in module.nodes:
            by_attribute = (
                isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) == "os"
            )
            by_import = isinstance(node, ast.ImportFrom) and node.module == "os"
            if by_attribute or (by_import and ENVIRONMENT & {alias.name for alias in node.names}):
                wrong.append(f"{module.where}:{node.lineno}")
    assert not wrong, "use paceline.base.env (get, snapshot, export, patched):\n" + "\n".join(wrong)


def test_every_module_says_what_it_owns(modules) -> None:
    silent = [module.where for module in modules.values() if not ast.get_docstring(module.tree)]
    assert not silent, "a module docstring is missing:\n" + "\n".join(silent)


def test_paths_of_users_are_expanded_in_one_way(modules) -> None:
    wrong = [
        f"{module.where}:{node.lineno}"
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr == "expanduser" and ast.unparse(node.value) != "os.path"
    ]
    assert not wrong, "`Path.expanduser` raises RuntimeError for ~unknown; use base.files.expanded:\n" + "\n".join(
        wrong
    )
