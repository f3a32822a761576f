"""`deepspeed.launcher.runner`: its parsers, on ours for hostfiles and filters.

`main` is not carried: `paceline launch` starts processes, and takes DeepSpeed's flags.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline_deepspeed import cli as command
from paceline_hosts import hostfile

DLTS_HOSTFILE = command.DEFAULT_HOSTFILE


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads a command line of `deepspeed`; what follows the script is `user_args`."""
    parser = argparse.ArgumentParser(prog="deepspeed", description="DeepSpeed's command line, as it is read")
    command.configure(parser)
    parser.usage = None  # made from the arguments, in place of that of `paceline launch`
    # DeepSpeed's own defaults, which scripts read from the result; our launcher has others.
    parser.set_defaults(
        hostfile=DLTS_HOSTFILE,
        master_port=command.PORT,
        master_addr="",
        launcher="pdsh",
        enable_each_rank_log="None",
        autotuning="",
    )
    options = parser.parse_args(args)
    if options.script is None:
        parser.error("the following arguments are required: user_script, user_args")
    options.user_script = options.script
    options.user_args = options.script_args
    return options


def fetch_hostfile(hostfile_path: str | Path) -> dict[str, int] | None:
    """Slots of each host of a hostfile; None where there is no such file.

    Raises:
        ConfigError: `hostfile`, with each line that is wrong.
    """
    path = Path(hostfile_path)
    if not path.is_file():
        return None
    hosts = hostfile.read(path.read_text(encoding="utf-8"), str(path))
    return {slots.host: len(slots.ids) for slots in hosts}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Lists the hosts and slots that a filter `HOST[:SLOT,SLOT...][@HOST...]` leaves; a host alone means all its slots.

    Raises:
        ConfigError: `host-filter`; all that is wrong at once.
    """
    hosts = []
    for host, slots in host_info.items():
        hosts.append(hostfile.Slots(host, tuple(slots)))
    chosen = hostfile.choose(hosts, include=include_str, exclude=exclude_str)
    return {slots.host: list(slots.ids) for slots in chosen}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Lists the hosts and slots that two filters leave, of hosts with so many slots each.

    Raises:
        ConfigError: `host-filter`.
    """
    slots_by_host = {host: list(range(count)) for host, count in resource_pool.items()}
    return parse_resource_filter(slots_by_host, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Writes hosts and their slots as base64 of JSON, as DeepSpeed's launchers hand them on."""
    plain = {host: list(slots) for host, slots in world_info.items()}  # JSON knows no other sequences
    text = json.dumps(plain)
    return base64.urlsafe_b64encode(text.encode("utf-8")).decode("utf-8")
