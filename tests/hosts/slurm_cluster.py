"""A real SLURM on the hosts of `network.py`: slurmctld at the desk, a slurmd on each host, one munged for all.

    with Network(3) as network, Cluster(network, folder) as cluster:
        print(cluster.run("srun", "-N", 3, "hostname").stdout)

Commands run at the desk, as on a login node. The hosts share the machine's files, as a cluster shares a file system.

What makes it quick to test with: a node that does not answer is DOWN after 10 s, a process has 8 s after SIGTERM (KillWait),
and a job that is requeued may begin again after 6 s and not after two minutes (`cred_expire`).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hosts.network import DESK, Host, Network, Started, until

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "scancel", "squeue", "sinfo")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_CONFIG = """
    ClusterName=test
    SlurmctldHost={desk}({address})
    SlurmUser=root
    AuthType=auth/munge
    AuthInfo=socket={folder}/munge/socket,cred_expire=5
    StateSaveLocation={folder}/state
    SlurmdSpoolDir={folder}/spool-%n
    SlurmctldPidFile={folder}/slurmctld.pid
    SlurmdPidFile={folder}/slurmd-%n.pid
    SlurmctldPort=6817
    SlurmdPort=6818
    ProctrackType={proctrack}
    TaskPlugin=task/none
    SelectType=select/cons_tres
    SelectTypeParameters=CR_Core
    SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2
    AccountingStorageType=accounting_storage/none
    JobAcctGatherType=jobacct_gather/none
    MailProg=/bin/true
    ReturnToService=2
    SlurmdTimeout=10
    KillWait=8
    MessageTimeout=5
    InactiveLimit=0
    SlurmdParameters=config_overrides
    EnforcePartLimits={limits}
    PreemptType=preempt/partition_prio
    PreemptMode=REQUEUE
"""


def lacking() -> list[str]:
    """Programs of SLURM that this machine does not have."""
    return [name for name in NEEDED if shutil.which(name, path=_PATH) is None]


class Cluster:
    """A SLURM with all hosts of a network in the partition `all`, whose jobs those of the partition `urgent` preempt; the
    partition `short` has the first host alone, for a minute at most.

    Args:
        network: its hosts are the nodes.
        cpus: that each node says it has.
        proctrack: how slurmd knows a job's processes. "pgid" signals the tasks alone, as cgroups on real clusters do;
            "linuxproc" signals all that they have started, too.
        limits: what happens to jobs over a partition's limits: "ALL" refuses them, "NO" lets them wait for ever.

    Attributes:
        folder: configuration, state and logs.
        env: of commands that talk to it.
    """

    def __init__(self, network: Network, cpus: int = 4, proctrack: str = "pgid", limits: str = "ALL") -> None:
        self.network, self._cpus, self._proctrack, self._limits = network, cpus, proctrack, limits
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._slurmds: dict[str, Started] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self.env: dict[str, str] = {}

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.network.prefix}-slurm-"))
        self.folder.chmod(0o755)
        try:
            self._write()
            clean = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "SLURM", "SBATCH", "SRUN"))}
            self.env = {**clean, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH, "OMP_NUM_THREADS": "1"}
            self._munge()
            self._daemon("slurmctld", "-c", "-D")
            for host in self.network.hosts:
                self.start_node(host)
            self.wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.run("scancel", "--user=root", "--quiet")
        if not error or error[0] is None:
            time.sleep(0.2)
        for host in self.network.hosts:
            host.power_off()
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(20)
        shutil.rmtree(self.folder)

    def run(self, *words: object, timeout_s: float = 60, **more: object) -> subprocess.CompletedProcess[str]:
        """Runs a program at the desk, in the cluster's folder if no `cwd` is given, and waits for it."""
        return subprocess.run(
            self._at_desk(words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
            **self._where(more),
        )  # fmt: skip

    def start(self, *words: object, log: Path, **more: object) -> subprocess.Popen[bytes]:
        """Starts a program at the desk, with its output in a file; `hang_up` ends it where it has not ended by itself."""
        with log.open("wb") as out:
            started = subprocess.Popen(
                self._at_desk(words), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                **self._where(more),
            )  # fmt: skip
        self._started.append(started)
        return started

    def hang_up(self) -> bool:
        """Ends the programs at the desk that still run, as those of a test that failed do; tells whether there were any."""
        running = [started for started in self._started if started.poll() is None]
        for started in running:
            started.kill()
            started.wait()
        self._started.clear()
        return running != []

    def job(self, number: int | str) -> Mapping[str, str]:
        """What `scontrol show job` says; empty where there is no such job."""
        text = self.run("scontrol", "show", "job", "--oneliner", number).stdout
        pairs = [word.partition("=") for word in text.split()]
        return {name: value for name, _, value in pairs}

    def queue(self) -> list[str]:
        """The jobs that wait or run."""
        return self.run("squeue", "--noheader", "--format=%i %T %r").stdout.splitlines()

    def wait_for_state(self, number: int | str, *states: str, timeout_s: float = 60) -> float:
        """Waits until a job is in one of some states; returns the seconds."""
        return until(
            lambda: self.job(number).get("JobState") in states, f"{'/'.join(states)} of job {number}", timeout_s
        )

    def start_node(self, host: Host) -> None:
        """Starts the slurmd of a host."""
        config = self.folder / "slurm.conf"
        log = self.folder / f"slurmd-{host.name}-{time.monotonic_ns()}.log"
        words = f"env PATH={_PATH} SLURM_CONF={config} slurmd -D -N {host.name}"
        self._slurmds[host.name] = host.start(words, log)

    def power_off(self, host: Host) -> None:
        """Switches a node off silently, as a power loss does."""
        host.power_off(silently=True)
        del self._slurmds[host.name]

    def restore(self) -> None:
        """Switches nodes on again that were switched off."""
        gone = [host for host in self.network.hosts if host.name not in self._slurmds]
        for host in gone:
            host.power_on()
            self.start_node(host)
        if gone:
            self.wait_for_nodes()

    def wait_for_nodes(self, timeout_s: float = 30) -> None:
        """Waits until all nodes can be used."""
        count = len(self.network.hosts)

        def idle() -> bool:
            states = self.run("sinfo", "--noheader", "--Node", "--partition=all", "--format=%T").stdout.split()
            return states == ["idle"] * count

        try:
            until(idle, f"{count} idle nodes", timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.report()}") from None

    def report(self) -> str:
        """The nodes, the queue and the end of each daemon's log, to be read where something did not come to pass."""
        lines = [self.run("sinfo", "--Node", "--long").stdout, self.run("squeue").stdout]
        for path in self.folder.glob("*.log"):
            lines.append(f"--- {path.name}\n{path.read_text()[-3000:]}")
        return "\n".join(lines)

    def _write(self) -> None:
        config = "".join(f"{line.strip()}\n" for line in _CONFIG.splitlines()).format(
            desk=socket.gethostname(), address=DESK, folder=self.folder, proctrack=f"proctrack/{self._proctrack}",
            limits=self._limits,
        )  # fmt: skip
        hosts = self.network.hosts
        for host in hosts:
            config += f"NodeName={host.name} NodeAddr={host.address} CPUs={self._cpus}\n"
        names = ",".join(host.name for host in hosts)
        config += f"PartitionName=all Nodes={names} Default=YES State=UP MaxTime=1-0\n"
        config += f"PartitionName=short Nodes={hosts[0].name} MaxTime=1 State=UP\n"
        config += f"PartitionName=urgent Nodes={names} PriorityTier=10 MaxTime=1-0 State=UP\n"
        (self.folder / "slurm.conf").write_text(config)
        # `ip netns exec` hides /sys/fs/cgroup, without which slurmd does not start unless it is told so.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "state").mkdir()

    def _munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{what}-file={folder / what}" for what in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--force", "-F", f"--socket={folder / 'socket'}", "--num-threads=2", *files)
        until((folder / "socket").exists, "munged's socket")

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.log").open("wb") as out:
            command = self._at_desk(words)
            self._daemons.append(
                subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )

    def _at_desk(self, words: tuple[object, ...]) -> list[str]:
        return ["ip", "netns", "exec", self.network.switch, *map(str, words)]

    def _where(self, more: Mapping[str, object]) -> dict[str, object]:
        env = {**self.env, **dict(more.get("env") or {})}  # type: ignore[call-overload]
        return {"cwd": self.folder, **more, "env": env}
