"""What transformers, peft, trl, sentence-transformers and diffusers take from accelerate is served, name by name."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from paceline.compat import install
from paceline.testing import run_ranks
from paceline_doors.absent import _Absence

TAKEN = json.loads((Path(__file__).parent / "reference" / "names_taken.json").read_text(encoding="utf-8"))

# What is refused when it is used, and why. Nothing else may be.
REFUSED = {
    "MegatronLMPlugin": "Megatron-LM has its own training loop",
    "is_tpu_available": "TPUs are not carried",
}
# Not of accelerate: the scanned text means another thing.
NOT_THEIRS = {"type": "of a `torch.device`, in a variable that is called `accelerator`"}


def unserved() -> dict[str, list[str]]:
    """Names that are taken and that are missing or refused under our door, by library."""
    install(["accelerate"])
    wrong: dict[str, list[str]] = {}
    for library, names in TAKEN.items():
        for entry in names["imports"]:
            module, _, name = entry.partition(":")
            if name in REFUSED or entry in NOT_THEIRS:
                continue
            try:
                value = importlib.import_module(module)
                if name:
                    value = getattr(value, name)
            except (ImportError, AttributeError) as error:
                wrong.setdefault(library, []).append(f"{entry}: {error}")
                continue
            if isinstance(value, _Absence):
                wrong.setdefault(library, []).append(f"{entry}: refused when it is used")
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        for name in names["accelerator"]:
            if name not in NOT_THEIRS and not hasattr(accelerator, name):
                wrong.setdefault(library, []).append(f"Accelerator.{name}")
        for entry in names["state"]:
            kind, _, name = entry.partition(".")
            state = getattr(importlib.import_module("accelerate.state"), kind)()
            if not hasattr(state, name):
                wrong.setdefault(library, []).append(entry)
    return wrong


@pytest.fixture(scope="module")
def wrong():
    return run_ranks(unserved, world=1, group=False)[0]


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize("library", sorted(TAKEN))
def test_a_library_finds_what_it_takes(wrong, library: str) -> None:
    assert not wrong.get(library), "\n".join(wrong[library])
