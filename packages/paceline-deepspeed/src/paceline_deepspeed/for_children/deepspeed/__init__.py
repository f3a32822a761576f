"""deepspeed, served by Paceline: whatever process imports this package gets Paceline's names for it.

`paceline doors install deepspeed` copies this package into an environment; `paceline doors remove deepspeed` takes it out.
Processes that `paceline launch --compat deepspeed` starts find it through PYTHONPATH.
"""

import sys

try:
    from paceline.compat import install
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "deepspeed is served by Paceline in this environment, and Paceline itself cannot be imported: "
        f"install paceline, or take the door out with `pip uninstall deepspeed` ({error})"
    ) from error

# `install` refuses where the library is imported already, and until it returns this module stands for it.
del sys.modules["deepspeed"]
install(["deepspeed"])
sys.modules["deepspeed"] = __import__("deepspeed")
