"""Words of other libraries' command lines that are no flags of Paceline, and the flags that do what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# With "N" for the value that follows the word.
_MEANINGS = {
    **dict.fromkeys(("nproc", "nprocs", "num_procs", "n_procs", "np", "processes", "num_proc"), "--procs N"),
    **dict.fromkeys(("bf16", "bfloat16"), "--mixed-precision bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "amp"), "--mixed-precision fp16"),
    **dict.fromkeys(("fp8", "float8"), "--mixed-precision fp8"),
    **{f"zero{stage}": f"--zero {stage}" for stage in (1, 2, 3)},
    "zero_stage": "--zero N",
    "tensor_parallel": "--tp N",
    "tensor_parallel_size": "--tp N",
    "pipeline_parallel": "--pp N",
    "pipeline_parallel_size": "--pp N",
    "context_parallel": "--cp N",
    "gradient_checkpointing": "--recompute blocks",
    "activation_checkpointing": "--recompute blocks",
}
_OFF = ("false", "no", "off", "none", "0")
_FULLY_SHARDED = ("fsdp", "fsdp2", "fully_shard")


def meaning(word: str, words: Sequence[str]) -> str:
    """Returns the flags that do what a word of another library asks for; "" for a word that says nothing here.

    Args:
        word: with its value, if one follows it: "--nproc 2", "--nproc=2" or "--fsdp".
        words: the whole command line, in which the number of processes is looked for.
    """
    flag, _, value = word.replace("=", " ", 1).partition(" ")
    name = flag.lstrip("-").replace("-", "_").lower()
    # `--bf16 False` asks for nothing; a notice that advised bf16 would change the numbers of whoever follows it.
    if not flag.startswith("-") or value.strip().lower() in _OFF:
        return ""
    if name in _FULLY_SHARDED:
        procs = ""
        for before, after in pairwise(words):
            if before in ("--procs", "-n", "--nproc", "--nproc-per-node", "--nproc_per_node") and after.isdecimal():
                procs = after
        # Without a number of processes it is that of the devices, which ZeRO 3 takes all of.
        return f"--shard {procs}" if procs else "--zero 3"
    flags = _MEANINGS.get(name, "")
    if flags.endswith(" N"):
        return flags.replace(" N", f" {value}") if value.isdecimal() else ""
    return flags
