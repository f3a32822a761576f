"""Shows versions, devices, ranks and variables, for a bug report.

Secrets are hidden: values of variables whose names speak of keys, tokens or passwords, and logins within addresses.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import PacelineError
from paceline.config.dialects import dialects
from paceline.config.libraries import LIBRARIES
from paceline.config.places import own_default
from paceline.config.settings import settings_of
from paceline.launch import host
from paceline.world import torch_version
from paceline.world.world import World

PACKAGES = ("numpy", "safetensors", "pyyaml", "transformers", *LIBRARIES.names(), "lightning")
PREFIXES = ("PACELINE_", "ACCELERATE_", "PARALLELISM_CONFIG_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "OMP_", "MKL_",
            "SLURM_", "OMPI_", "PMI_", "MASTER_", "FSDP_", "HF_")  # fmt: skip
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=//)[^/@\s]+@")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    report = facts()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for heading, rows in report.items():
        print(heading)
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            print(f"  {name.ljust(width)}  {value}")
    return 0


def facts() -> dict[str, dict[str, Any]]:
    """Returns the report as heading -> name -> value."""
    env = environment.snapshot()
    files = {"paceline": own_default(env)}
    for dialect in dialects():
        path = dialect.default_file(env)
        if path is not None:
            files[dialect.name] = path
    shown_files = {}
    for name, path in files.items():
        shown_files[name] = str(path) if path.is_file() else f"{path} (none)"
    return {
        "versions": _versions(),
        "devices": _devices(),
        "this process": _world(),
        "config files": shown_files,
        "variables": relevant(env),
    }


def relevant(env: dict[str, str]) -> dict[str, str]:
    """Returns the sorted environment variables that can change a run, without secrets."""
    rows = environment.TABLE
    variables = set(rows)
    for setting in settings_of().values():
        variables.update([setting.variable, *setting.other_variables])
    shown = {}
    for name in sorted(env):
        if name in variables or name.startswith(PREFIXES):
            is_secret = rows[name].secret if name in rows else _SECRET.search(name)
            # A URL may contain a user name and a password, which the report must not show.
            shown[name] = "(hidden)" if is_secret else _LOGIN.sub("(hidden)@", env[name])
    return shown


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    import paceline

    versions = {"paceline": paceline.__version__, "python": platform.python_version(), "torch": torch.__version__}
    standing = torch_version.compare(torch.__version__)
    note = "" if standing == "tested" else f" (this one is {standing}: {torch.__version__})"
    versions["torch, tested"] = torch_version.range_text() + note
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**versions, "system": platform.platform(), "executable": sys.executable}


def _devices() -> dict[str, Any]:
    import torch
    import torch.distributed

    machine: dict[str, Any] = {"cpu cores": host.cores(), "torch threads": torch.get_num_threads()}
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator(check_available=True)
        kind = device.type if device else "unknown"
        machine["accelerator"] = f"{torch.accelerator.device_count()} x {kind}"
        module = torch.get_device_module(device)
        for index in range(torch.accelerator.device_count()):
            machine[f"  {index}"] = getattr(module, "get_device_name", lambda _: "unnamed")(index)
    else:
        machine["accelerator"] = "none"
    backends: list[str] = []
    if torch.distributed.is_available():
        backends = [name for name in ("gloo", "nccl", "xccl", "mpi") if torch.distributed.is_backend_available(name)]
    return {**machine, "backends": ", ".join(backends) or "none"}


def _world() -> dict[str, Any]:
    try:
        world = World.detect()
    except PacelineError as error:
        return {"error": str(error)}
    return {"found by": world.source, "rank": f"{world.rank} of {world.size}",
            "local rank": f"{world.local_rank} of {world.local_size}",
            "node": f"{world.node} of {world.nodes}"}  # fmt: skip
