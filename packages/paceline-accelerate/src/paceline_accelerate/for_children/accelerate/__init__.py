"""accelerate, served by Paceline: whatever process imports this package gets Paceline's names for it.

`paceline doors install accelerate` copies this package into an environment; `paceline doors remove accelerate` takes it out.
Processes that `paceline launch --compat accelerate` starts find it through PYTHONPATH.
"""

import sys

try:
    from paceline.compat import install
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "accelerate is served by Paceline in this environment, and Paceline itself cannot be imported: "
        f"install paceline, or take the door out with `pip uninstall accelerate` ({error})"
    ) from error

# `install` refuses where the library is imported already, and until it returns this module stands for it.
del sys.modules["accelerate"]
install(["accelerate"])
sys.modules["accelerate"] = __import__("accelerate")
