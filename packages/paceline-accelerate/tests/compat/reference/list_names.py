"""Lists the public names of an installed accelerate, module by module: `python list_names.py > names.txt`.

`python list_names.py imports > imports.txt` lists the modules and loggers that they import under a public name, which tests
of scripts replace: `patch("accelerate.state.os.environ")`.

Run with the real library (1.15.0) in an environment of its own. The list is what tells a name that Paceline does not
carry from one that never existed; it goes to `names.txt` of `paceline_accelerate`. Where deepspeed is installed too,
`accelerate.utils` has the names of `accelerate.utils.deepspeed` as well: served together, they are listed.
"""

import importlib
import logging
import pkgutil
import sys
from types import ModuleType

import accelerate

SKIPPED = ("accelerate.test_utils.scripts.", "accelerate.commands.menu.")
# Of accelerate's scripts for its own tests, one that only prints, and those that `accelerate.test_utils` imports.
SCRIPTS = ("test_cli", "test_ops", "test_script", "test_sync")
PLAIN = (str, int, float, bool, list, tuple, dict, set)


def own(module, name):
    """Whether a name is the library's, and not one that it imported from elsewhere."""
    value = getattr(module, name)
    where = getattr(value, "__module__", None)
    return str(where).startswith("accelerate") if isinstance(where, str) else isinstance(value, PLAIN)


def imported(module):
    """Words `name` or `name=module` for the modules of others that a module imports, and `logger`."""
    words = []
    for name, value in sorted(vars(module).items()):
        if isinstance(value, ModuleType) and not name.startswith("_") and not value.__name__.startswith("accelerate"):
            words.append(name if name == value.__name__ else f"{name}={value.__name__}")
        elif isinstance(value, logging.Logger):
            words.append(name)
    return words


names = ["accelerate", *(found.name for found in pkgutil.walk_packages(accelerate.__path__, "accelerate."))]
for name in sorted(set(names)):
    if name.startswith(SKIPPED) or name.endswith("__main__"):
        continue
    try:
        module = importlib.import_module(name)
    except ImportError:  # needs a library that is not here
        print(f"{name}:")
        continue
    if sys.argv[1:] == ["imports"]:
        print(f"{name}: {' '.join(imported(module))}")
        continue
    public = sorted(each for each in vars(module) if not each.startswith("_") and own(module, each))
    if name == "accelerate.test_utils":
        public = sorted({*public, *SCRIPTS[1:]})
    print(f"{name}: {' '.join(public)}")
for script in SCRIPTS if sys.argv[1:] == [] else ():
    print(f"accelerate.test_utils.scripts.{script}: main")
