"""Private names of torch stand in `torch_internals/` alone, where each has a contract test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

# Private names of other libraries that are used, by the library. A name that is neither here nor our own is one of torch.
OTHERS = {
    "Python": "_actions _action_groups _option_string_actions _ArgumentGroup _SubParsersAction _current_frames _exit _fields "
    "_getframe _initializing _parent_pid _register_atexit _replace _run_exitfuncs _shutdown",
    "fsspec and s3fs": "_abort_mpu _call_s3 _cat_file _s3",
    "accelerate, which transformers and peft look at": "_hf_hook _old_forward _mixed_precision",
    "transformers": "_init_weights _no_split_modules _tie_weights _tp_plan",
    "sentence-transformers and trl": "_load_from_checkpoint _sync_target_model",
}
PRIVATE = re.compile(r"_(?!_|paceline)\w+")
PRIVATE_MODULE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
LOOKUPS = {"getattr", "hasattr", "setattr", "delattr"}


def defined(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that a module gives to functions, classes and variables, and to attributes of its own objects."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def used(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Lines, and the attributes and names of torch's modules that they use."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOOKUPS:
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield node.lineno, str(node.args[1].value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
            yield node.lineno, node.value


def test_private_names_of_torch_stand_in_torch_internals(modules) -> None:
    known = {name for names in OTHERS.values() for name in names.split()}
    for module in modules.values():
        known.update(defined(module.nodes))
    wrong = [
        f"{module.where}:{line} {name}"
        for module in modules.values()
        if module.room != "torch_internals"
        for line, name in used(module.nodes)
        if PRIVATE_MODULE.fullmatch(name) or (PRIVATE.fullmatch(name) and name not in known)
    ]
    assert not wrong, "give these a function in torch_internals/, and a contract test:\n" + "\n".join(wrong)


def test_no_name_of_another_library_is_listed_in_vain(modules) -> None:
    names = {name for module in modules.values() for _, name in used(module.nodes)}
    listed = {name for row in OTHERS.values() for name in row.split()}
    assert listed <= names, sorted(listed - names)


def test_an_accelerator_is_one_that_is_there(modules) -> None:
    """A build of torch for CUDA names a device that a machine without a driver does not have."""
    found = []
    for module in modules.values():
        calls = [node for node in module.nodes if isinstance(node, ast.Call)]
        asking = [call for call in calls if ast.unparse(call.func) == "torch.accelerator.current_accelerator"]
        found += [f"{module.where}:{call.lineno}" for call in asking if not call.keywords]
    assert found == []
