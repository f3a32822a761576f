"""`accelerate tpu-config`: runs commands on the hosts of a TPU pod, through Google's command `gcloud`.

It needs no TPU on this host. Paceline itself drives none.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

from paceline_accelerate.commands.arguments import parser_for
from paceline_accelerate.commands.config.config_args import default_config_file, load_config_from_file

_SOURCES = "git+https://github.com/huggingface/accelerate.git"


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate tpu-config`."""
    title = "Accelerate tpu-config command"
    parser = parser_for("tpu-config", title, tpu_command_launcher, subparsers)
    add = parser.add_argument
    add("--config_file", default=None, help="the config file that names the TPU and the commands")
    add("--tpu_name", default=None, help="name of the TPU")
    add("--tpu_zone", default=None, help="zone of the TPU")
    add("--use_alpha", action="store_true", help="run `gcloud alpha` in place of `gcloud`")
    add("--command_file", default=None, help="a file with commands, one a line")
    add("--command", action="append", nargs="+", help="a command; may be given several times")
    add("--install_accelerate", action="store_true", help="install accelerate on the hosts first")
    add("--accelerate_version", default="latest", help='the version to install: "latest", "dev" or a number')
    add("--debug", action="store_true", help="show the command, and do not run it")
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Runs `gcloud compute tpus tpu-vm ssh` with the commands; a value of the command line beats the config file.

    Raises:
        ValueError: no command, no name or no zone is given.
        subprocess.CalledProcessError: `gcloud` fails.
    """
    config: Any = argparse.Namespace(tpu_name=None, tpu_zone=None, command_file=None, commands=None)
    if args.config_file is not None or os.path.isfile(default_config_file):
        config = load_config_from_file(args.config_file)
    name = args.tpu_name or config.tpu_name
    zone = args.tpu_zone or config.tpu_zone
    command_file = args.command_file
    if command_file is None and args.command is None:
        command_file = config.command_file
    if command_file:
        commands = Path(command_file).read_text(encoding="utf-8").splitlines()
    elif args.command is not None:
        # Each --command takes several words, and each word is a command.
        commands = list(itertools.chain.from_iterable(args.command))
    else:
        commands = config.commands or []
    if not commands:
        raise ValueError(
            "You must specify either a command file or a command to run on the pod: --command_file or --command."
        )
    if not name or not zone:
        raise ValueError("The TPU is not known: give --tpu_name and --tpu_zone, or a config file that names both.")
    if args.install_accelerate:
        commands = [_installation(args.accelerate_version), *commands]
    gcloud = ["gcloud", "alpha"] if args.use_alpha else ["gcloud"]
    # The commands begin in this folder, as under accelerate.
    shell_line = "; ".join(["cd /usr/share", *commands])
    words = [*gcloud, "compute", "tpus", "tpu-vm", "ssh", name, "--zone", zone]
    words += ["--command", shell_line, "--worker", "all"]
    if args.debug:
        print(f"Running {' '.join(words)}")
        return
    subprocess.run(words, check=True)
    print("Successfully setup pod.")


def _installation(version: str) -> str:
    """Returns the command that installs a version of accelerate."""
    if version == "latest":
        return "pip install accelerate -U"
    package = _SOURCES if version == "dev" else f"accelerate=={version}"
    return f"pip install {package}"


def main() -> int:
    """Runs the command."""
    tpu_command_launcher(tpu_command_parser().parse_args())
    return 0
