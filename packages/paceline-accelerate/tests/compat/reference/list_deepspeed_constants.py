"""Lists the constants of an installed DeepSpeed with their values: `python list_deepspeed_constants.py > constants.txt`.

Run with the real library (0.19.8) in an environment of its own. Texts that explain a block of the config are left out.
"""

import importlib
import re
from pathlib import Path

NAMES = Path(__file__).parents[4] / "paceline-deepspeed/src/paceline_deepspeed/names.txt"


def is_plain(value, depth=0):
    """Whether a value is a number or a short text, or a short list or dictionary of such."""
    if isinstance(value, str):
        return len(value) <= 60 and "\n" not in value and not value.startswith("/")
    if isinstance(value, dict):
        return is_plain([*value, *value.values()], depth)
    if isinstance(value, (list, tuple)):
        return depth < 2 and len(value) <= 16 and all(is_plain(each, depth + 1) for each in value)
    return type(value) in (bool, int, float, type(None))


values = {}
for line in NAMES.read_text(encoding="utf-8").splitlines():
    module, _, names = line.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ImportError:
        continue
    for name in names.split():
        value = getattr(loaded, name, None)
        if re.fullmatch(r"[A-Z][A-Z0-9_]*", name) and hasattr(loaded, name) and is_plain(value):
            # A name that means the key of a config in one module, and a variable in another one, is told by the first.
            values.setdefault(name, repr(value))
for name in sorted(values):
    print(name, values[name])
