"""`deepspeed.launcher.runner`: its parsers, on ours for hostfiles and filters.

`main` is not carried: `paceline launch` starts processes, and takes DeepSpeed's flags.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch import hostfile

DLTS_HOSTFILE = "/job/hostfile"
_PORT = 29500


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """What a command line of `deepspeed` says; what follows the script is `user_args`."""
    parser = argparse.ArgumentParser(prog="deepspeed", description="DeepSpeed's command line, as it is read")
    add = parser.add_argument
    add("-H", "--hostfile", default=DLTS_HOSTFILE, help="hosts and their slots")
    add("-i", "--include", default="", help="hosts and slots that are used: HOST[:SLOT,SLOT...][@HOST...]")
    add("-e", "--exclude", default="", help="hosts and slots that are left out, in the same form")
    add("--num_nodes", type=int, default=-1, help="the first so many hosts")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="so many slots of each host")
    add("--master_port", type=int, default=_PORT, help="where rank 0 listens")
    add("--master_addr", default="", help="the host of rank 0")
    add("--node_rank", type=int, default=-1, help="number of this host, with --no_ssh")
    add("--launcher", default="pdsh", help="what starts processes on other hosts")
    add("--launcher_args", default="", help="flags for it")
    add("--module", action="store_true", help="the script is a module")
    add("--no_python", action="store_true", help="the script is a program")
    add("--no_local_rank", action="store_true", help="the script gets no --local_rank")
    add("--no_ssh", action="store_true", help="each host starts its own processes")
    add("--no_ssh_check", action="store_true", help="hosts are not tried out first")
    add("--force_multi", action="store_true", help="the launcher is used on one host too")
    add("--save_pid", action="store_true", help="process ids are kept in a file")
    add("--enable_each_rank_log", default="None", help="a folder with a log of each rank")
    add("--autotuning", default="", choices=["", "tune", "run"], help="tries configs out")
    add("--bind_cores_to_rank", action="store_true", help="each rank gets cores of its own")
    add("--bind_core_list", default=None, help="the cores that ranks share")
    add("--ssh_port", type=int, default=None, help="port of ssh")
    add("--venv_script", default=None, help="is sourced before the script runs")
    add("--log_level", default="info", help="of the launcher")
    add("-q", "--quiet", action="store_true", help="the launcher says nothing")
    add("user_script", help="the script")
    add("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


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
    """The hosts and slots that a filter leaves.

    Args:
        host_info: slots of each host.
        include_str: those that are used: `HOST[:SLOT,SLOT...][@HOST...]`; a host alone means all its slots.
        exclude_str: those that are left out, in the same form.

    Raises:
        ConfigError: `host-filter`; all that is wrong at once.
    """
    hosts = [hostfile.Slots(host, tuple(slots)) for host, slots in host_info.items()]
    chosen = hostfile.choose(hosts, include=include_str, exclude=exclude_str)
    return {slots.host: list(slots.ids) for slots in chosen}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """The same for hosts with so many slots each.

    Raises:
        ConfigError: `host-filter`.
    """
    slots_by_host = {host: list(range(count)) for host, count in resource_pool.items()}
    return parse_resource_filter(slots_by_host, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Hosts and their slots as base64 of JSON, as DeepSpeed's launchers hand them on."""
    text = json.dumps({host: list(slots) for host, slots in world_info.items()})
    return base64.urlsafe_b64encode(text.encode("utf-8")).decode("utf-8")
