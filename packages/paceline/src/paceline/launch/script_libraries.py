"""`ScriptLibrary` says what scripts for another library expect from the launcher that starts them.

The part of a library whose scripts expect something offers it as an entry point of `paceline.script_libraries`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from paceline.base.registry import Registry
from paceline.launch.job import Job

_REGISTRY = Registry("paceline.script_libraries", "library")
# torch loads its compiler's front (1 s) with the first optimizer of a process, or with DistributedDataParallel.
FRONT = "paceline.torch_internals.compiler"
# The compiler reads these when it is imported, so that a script which sets one of them has to import it itself.
COMPILER_VARIABLE = re.compile(r"\b(TORCH_?(COMPILE|DYNAMO|INDUCTOR)|AOT_?INDUCTOR)")


class ScriptLibrary:
    """One library. A subclass says what its scripts expect.

    Attributes:
        imports: modules that all of its scripts need, and that take long to import.
        command: the library's own command that starts scripts, where it is served too; "" for none.
        device: how its scripts ask for the device of their process.
        host_variables: name of a file in the home directory and in the working directory, with lines `NAME=VALUE` that are
            set on the other hosts; "" for none.
        host_variables_from: a variable that names another file in its place; "" for none.
    """

    imports: tuple[str, ...] = ()
    command: str = ""
    device: str = "accelerator.device"
    host_variables: str = ""
    host_variables_from: str = ""

    def variables(self, local_size: int, node: int, nodes: int) -> dict[str, str]:
        """Returns variables that its scripts read besides torchrun's.

        Args:
            local_size: the number of processes on this node.
            node: the number of this node.
            nodes: the number of nodes.
        """
        return {}


def script_libraries(names: Iterable[str] | None = None) -> list[ScriptLibrary]:
    """Returns those of the named libraries whose scripts expect something; without names, all of them."""
    libraries = _REGISTRY.names()
    wanted = libraries if names is None else names
    return [_REGISTRY.get(name) for name in wanted if name in libraries]


def needed_by(job: Job, *, forked: bool) -> list[str]:
    """Returns modules that the script of a job needs, besides torch, and that take long to import.

    Args:
        job: the job.
        forked: whether they are imported once for several processes. One process alone imports by itself what is not sure.
    """
    found = [name for library in script_libraries(job.compat.split(",")) for name in library.imports]
    script = job.target.name
    if job.target.kind == "module":
        script = script.replace(".", "/") + ".py"
    text = ""
    # `-m` may also name a program that runs a script, as `paceline rehearse` does.
    for file in (script, *job.target.args):
        if (file == script or file.endswith(".py")) and Path(file).is_file():
            text += Path(file).read_text(encoding="utf-8", errors="replace")
    if COMPILER_VARIABLE.search(text):
        return []
    if forked and "optim" in text:
        found.append(FRONT)
    if forked and "paceline" in text:
        found.append("paceline.accelerator")
    if found and (job.max_restarts or job.nodes > 1):
        found.append("paceline.checkpoint.checkpointer")  # what starts again begins with a checkpoint
    return found
