"""`accelerate env`: prints versions, devices and the default config file, for the report of a fault."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from typing import Any

from paceline_accelerate import VERSION
from paceline_accelerate.commands.arguments import parser_for
from paceline_accelerate.commands.config.config_args import default_config_file, load_config_from_file

version = VERSION


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate env`."""
    parser = parser_for("env", "Accelerate env command", env_command, subparsers, kind=argparse.ArgumentParser)
    parser.add_argument("--config_file", "--config-file", default=None, help="the config file that is shown")
    return parser


def env_command(args: argparse.Namespace) -> dict[str, str]:
    """Prints the report, and returns its lines: what a line is about -> its value."""
    import numpy
    import torch

    import paceline

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "N/A" if accelerator is None else accelerator.type
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    report = {
        "`Accelerate` version": f"{VERSION}, served by Paceline {paceline.__version__}",
        "Platform": platform.platform(),
        "`accelerate` bash location": shutil.which("accelerate") or "Not found",
        "Python version": platform.python_version(),
        "Numpy version": numpy.__version__,
        "PyTorch version": torch.__version__,
        "PyTorch accelerator": device_type.upper(),
        "System RAM": f"{memory_gib:.2f} GB",
    }
    if accelerator is not None:
        report["Accelerators"] = f"{torch.accelerator.device_count()} x {device_type}"
    print("\nCopy-and-paste the text below in your GitHub issue\n")
    for name, value in report.items():
        print(f"- {name}: {value}")
    heading = "default config" if args.config_file is None else "config passed"
    print(f"- `Accelerate` {heading}:")
    if args.config_file is not None or os.path.isfile(default_config_file):
        values = load_config_from_file(args.config_file).to_dict()
        config = "\n".join(f"\t- {name}: {value}" for name, value in values.items())
        print(config)
    else:
        config = "Not found"
        print(f"\t{config}")
    report["`Accelerate` configs"] = config
    return report


def main() -> int:
    """Runs the command."""
    env_command(env_command_parser().parse_args())
    return 0
