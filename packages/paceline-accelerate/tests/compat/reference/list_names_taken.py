"""Lists what other libraries take from accelerate, as their installed source says: `python list_names_taken.py`.

Run where the libraries are installed (they need not be importable). For each library:

    imports      "module:name" of each `from accelerate... import name`, and "module:" of each `import accelerate...`
    accelerator  attributes of whatever is called `accelerator`, as in `self.accelerator.gather(...)`
    state        attributes of whatever is called `state` or `..._state` and made by a class of accelerate's there
"""

import ast
import importlib.metadata
import importlib.util
import json
from pathlib import Path

LIBRARIES = ("transformers", "peft", "trl", "sentence_transformers", "diffusers", "datasets", "evaluate")
STATES = {"PartialState", "AcceleratorState", "GradientState"}


def is_accelerator(node):
    """Whether an expression is `accelerator` or `something.accelerator`."""
    if isinstance(node, ast.Name):
        return node.id == "accelerator"
    # `torch.accelerator` is torch's module of devices.
    return isinstance(node, ast.Attribute) and node.attr == "accelerator" and ast.unparse(node.value) != "torch"


def read(tree, imports, accelerator, state):
    """Adds what one file takes."""
    # Names under which the file knows accelerate's modules: `import accelerate.utils as u` gives u -> accelerate.utils.
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "accelerate":
                    imports.add(f"{alias.name}:")
                    modules[alias.asname or "accelerate"] = alias.name if alias.asname else "accelerate"
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").partition(".")[0] == "accelerate"
        ):
            imports.update(f"{node.module}:{alias.name}" for alias in node.names)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        root, _, rest = owner.partition(".")
        if root in modules:
            imports.add(f"{'.'.join(filter(None, (modules[root], rest)))}:{node.attr}")
        elif is_accelerator(node.value) and isinstance(node.ctx, ast.Load):
            accelerator.add(node.attr)
        elif isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in STATES:
            state.add(f"{ast.unparse(node.value.func)}.{node.attr}")


taken = {}
for library in LIBRARIES:
    spec = importlib.util.find_spec(library)
    if spec is None:
        continue
    imports, accelerator, state = set(), set(), set()
    for file in Path(spec.origin).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8", errors="replace")
        if "accelerat" in text:
            read(ast.parse(text), imports, accelerator, state)
    version = importlib.metadata.version(library)
    taken[library] = {
        "version": version,
        "imports": sorted(imports),
        "accelerator": sorted(accelerator),
        "state": sorted(state),
    }
print(json.dumps(taken, indent=1))
