"""What scripts for DeepSpeed expect of the launcher that starts them."""

from __future__ import annotations

from paceline.launch.script_libraries import ScriptLibrary


class DeepSpeedScripts(ScriptLibrary):
    """Scripts that were started by DeepSpeed's launcher."""

    host_variables = ".deepspeed_env"
    host_variables_from = "DS_ENV_FILE"
    # Each makes an engine and an optimizer; torch loads its compiler's front (0.8 s) with the first of those.
    imports = ("paceline.torch_internals.compiler", "paceline_deepspeed.initialize")
    device = "engine.device"

    def variables(self, local_size: int, node: int, nodes: int) -> dict[str, str]:
        """Returns the variables that DeepSpeed's launcher sets besides torchrun's."""
        return {"LOCAL_SIZE": str(local_size), "CROSS_RANK": str(node), "CROSS_SIZE": str(nodes)}


SCRIPT_LIBRARY = DeepSpeedScripts()
