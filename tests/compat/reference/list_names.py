"""Lists the public names of an installed accelerate, module by module: `python list_names.py > names.txt`.

Run with the real library (1.15.0) in an environment of its own. The list is what tells a name that Paceline does not
carry from one that never existed; it goes to `src/paceline/compat/accelerate/names.txt`. Where deepspeed is installed too,
`accelerate.utils` has the names of `accelerate.utils.deepspeed` as well: served together, they are listed.
"""

import importlib
import pkgutil

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


names = ["accelerate", *(found.name for found in pkgutil.walk_packages(accelerate.__path__, "accelerate."))]
for name in sorted(set(names)):
    if name.startswith(SKIPPED) or name.endswith("__main__"):
        continue
    try:
        module = importlib.import_module(name)
    except ImportError:  # needs a library that is not here
        print(f"{name}:")
        continue
    public = sorted(each for each in vars(module) if not each.startswith("_") and own(module, each))
    if name == "accelerate.test_utils":
        public = sorted({*public, *SCRIPTS[1:]})
    print(f"{name}: {' '.join(public)}")
for script in SCRIPTS:
    print(f"accelerate.test_utils.scripts.{script}: main")
