"""Lists the public names of an installed DeepSpeed, module by module: `python list_deepspeed_names.py > names.txt`.

Run with the real library (0.19.8) in an environment of its own, with DS_ACCELERATOR=cpu. The list is what tells a name
that Paceline does not carry from one that never existed; it goes to `names.txt` of
`paceline_deepspeed`.
"""

import contextlib
import importlib
import os
import pkgutil
import re
import sys
import types

import deepspeed

# Tests, kernels and what serves models: of these, a script that trains imports the package at most.
SKIPPED = re.compile(
    r"deepspeed\.(inference|model_implementations|module_inject|compile|nvme)\."
    r"|deepspeed\.ops\.(transformer|deepspeed4science|csrc|triton_ops|fp_quantizer|quantizer|aio|gds)\."
    r"|\.tests?\b|test_|op_builder|\.__main__$|\.accelerator\.(?!real|abstract|cpu|cuda)"
)
ALIASES = {"deepspeed.zero": "deepspeed.runtime.zero",
           "deepspeed.checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing"}  # fmt: skip
PLAIN = (str, int, float, bool, list, tuple, dict, set)


def own(module, name):
    """Whether a name is the library's, and not one that it imported from elsewhere."""
    value = getattr(module, name)
    if name == "logger":
        return True
    if isinstance(value, types.ModuleType) or name in ("TYPE_CHECKING", "dist", "mpu"):
        return False
    where = getattr(value, "__module__", None)
    if isinstance(where, str):
        return where.startswith("deepspeed") or (module.__name__.startswith("deepspeed.comm") and "torch" in where)
    if name.isupper() and isinstance(value, PLAIN):  # constants, which are imported from module to module
        return module.__name__.endswith(("constants", "lr_schedules", "comm")) or module is deepspeed
    return isinstance(value, PLAIN) or value is None


names = [
    "deepspeed",
    *(found.name for found in pkgutil.walk_packages(deepspeed.__path__, "deepspeed.", lambda _: None)),
]
said = sys.stdout
for name in sorted({*names, *ALIASES}):
    if SKIPPED.search(name):
        continue
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            module = importlib.import_module(ALIASES.get(name, name))
    except Exception:  # needs a library or a device that is not here
        print(f"{name}:", file=said)
        continue
    public = sorted(each for each in vars(module) if not each.startswith("_") and own(module, each))
    print(f"{name}: {' '.join(public)}".rstrip(), file=said)
