"""What scripts for accelerate expect of the launcher that starts them."""

from __future__ import annotations

from paceline.launch.script_libraries import ScriptLibrary


class AccelerateScripts(ScriptLibrary):
    """Scripts that were started by accelerate's launcher."""

    command = "accelerate launch"
    # Each makes an accelerator and an optimizer; torch loads its compiler's front (0.8 s) with the first of those.
    imports = ("paceline.torch_internals.compiler", "paceline_accelerate.accelerator")


SCRIPT_LIBRARY = AccelerateScripts()
