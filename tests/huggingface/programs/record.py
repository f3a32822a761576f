"""The record of a run, for programs that need neither transformers nor a tokenizer."""

import json
import os
from pathlib import Path


def summary(state):
    """Two numbers a tensor: enough to see that weights are the same, by their names in the module that the script built."""
    numbers = {}
    for name, value in sorted(state.items()):
        # accelerate's `get_state_dict` of a compiled model gives names of what is around it.
        numbers[name.removeprefix("_orig_mod.")] = [value.double().sum().item(), value.double().norm().item()]
    return numbers


def write(folder, **values):
    """FOLDER/rank_N.json, whole at any moment."""
    rank = os.environ.get("RANK", "0")
    Path(folder).mkdir(parents=True, exist_ok=True)
    partial = Path(folder) / f"partial_{rank}.json"
    partial.write_text(json.dumps(values), encoding="utf-8")
    partial.rename(Path(folder) / f"rank_{rank}.json")
