"""A run starts without what only some runs need: torch's distributed checkpoint and tensors take half a second to load."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch._dynamo",
    "sympy",
    "hjson",
    "fsspec",
    "s3fs",
)


def loaded(program: str) -> list[str]:
    """Which of the heavy modules a program has loaded."""
    program += f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_an_accelerator_loads_none_of_them() -> None:
    assert loaded("import paceline; paceline.Accelerator(cpu=True)") == []


def test_the_names_of_deepspeed_load_none_of_them() -> None:
    program = "from paceline.compat import install; install(['deepspeed'])\nimport deepspeed; deepspeed.initialize; "
    assert loaded(program + "deepspeed.init_distributed; deepspeed.DeepSpeedEngine") == []
