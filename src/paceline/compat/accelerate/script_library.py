"""What scripts for accelerate expect of the launcher that starts them."""

from __future__ import annotations

from paceline.launch.script_libraries import ScriptLibrary


class AccelerateScripts(ScriptLibrary):
    """Scripts that were started by accelerate's launcher."""

    # Each makes an accelerator and an optimizer; torch loads its compiler's front (0.8 s) with the first of those.
    imports = ("paceline.torch_internals.compiler", "paceline.compat.accelerate.accelerator")
    # Tried one by one: the only thread that is there afterwards is that of pyarrow's jemalloc, which gets over forks. Whoever
    # sets a variable first, such as HF_HOME, does not begin with the import.
    forkable = ("transformers", "datasets", "peft", "trl", "sentence_transformers", "diffusers")


SCRIPT_LIBRARY = AccelerateScripts()
