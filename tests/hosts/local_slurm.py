"""A real SLURM whose nodes are all this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from free_ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "sinfo")
PATH = os.environ["PATH"] + ":/usr/sbin"
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n"


def clean() -> dict[str, str]:
    """The environment of this process without what a launcher or SLURM has set."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE", "SLURM"))}
    return own | {"OMP_NUM_THREADS": "1"}


@contextmanager
def local_slurm(folder: Path, *, nodes: int, cpus: int) -> Iterator[dict[str, str]]:
    """Runs the daemons; gives the environment in which SLURM's commands reach them. Nodes are n1, n2, ..."""
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"SLURM is not installed: {', '.join(lacking)} missing")
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons need root")
    names = [f"n{number}" for number in range(1, nodes + 1)]
    for name in ("run", "state", *(f"spool-{name}" for name in names)):
        (folder / name).mkdir(parents=True)
    (folder / "run").chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    host = socket.gethostname()
    lines = [NODE.format(name=name, host=host, port=free_port(), cpus=cpus) for name in names]
    config.write_text("".join(lines) + CONFIG.format(host=host, port=free_port(), folder=folder))
    env = {**clean(), "SLURM_CONF": str(config), "PATH": PATH}
    munged = ["munged", "--force", "-F", f"--key-file={key}", f"--socket={folder}/run/munge.socket"]
    munged += [f"--pid-file={folder}/run/pid", f"--log-file={folder}/run/log", f"--seed-file={folder}/run/seed"]
    daemons = []
    with (folder / "daemons.log").open("w") as log:
        for command in (munged, ["slurmctld", "-c", "-D"], *(["slurmd", "-D", "-N", name] for name in names)):
            daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            time.sleep(0.5)
        try:
            deadline = time.monotonic() + 30
            sinfo = ["sinfo", "-h", "-o", "%T %D"]
            while f"idle {nodes}" not in subprocess.run(sinfo, env=env, capture_output=True, text=True).stdout:
                if time.monotonic() > deadline:
                    pytest.skip(f"SLURM does not come up here: {(folder / 'daemons.log').read_text()[-500:]}")
                time.sleep(0.2)
            yield env
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(20)
