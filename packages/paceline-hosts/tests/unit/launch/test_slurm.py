"""SLURM without a SLURM: what is asked of it, and how its answers are read."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.base.errors import ConfigError, LaunchError
from paceline.base.version import VERSION
from paceline.cli.main import parser_for
from paceline.config import schema
from paceline.config.given import Given
from paceline.config.sources import resolve_launch
from paceline.launch.job import Job, Target
from paceline_hosts.assignment import Assignment, assignment_of
from paceline_hosts.clusters.slurm import SlurmSettings
from paceline_hosts.hostfile import Slots
from paceline_hosts.launchers.slurm import LAUNCHER, put_back, queue, step_command
from paceline_hosts.launchers.slurm.allocation import SlurmAllocation, allocation_of, completed
from paceline_hosts.launchers.slurm.batch_script import batch_script, seconds_of, warning_s

BATCH = {
    "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[01-03,7]", "SLURM_PROCID": "0", "SLURMD_NODENAME": "node01",
    "SLURM_NTASKS_PER_NODE": "4",
}  # fmt: skip
SALLOC = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[1-2]"}
TASK = {**BATCH, "SLURM_STEP_ID": "0"}


def job(*words: str, nodes: int = 2, procs: int = 4, **more: object) -> Job:
    """A job of these words of the command line; its launcher is SLURM's."""
    given = [Given(*pair, "command line", f"--{pair[0]}") for pair in (word.split("=", 1) for word in words)]
    settings = resolve_launch(given, {}, search=False)
    slots = tuple(Slots(f"node{number}", tuple(range(procs))) for number in range(nodes))
    assignment = Assignment(settings, "train.py", ("--lr", "1 2"), "/work/a b", {}, slots)
    return replace(Job(Target("script", "train.py"), procs, nodes, assignment=assignment), **more)


def test_the_script() -> None:
    settings = SlurmSettings(partition="gpu", account="me", time="2:00:00")
    assert batch_script(job("max_restarts=2", "mixed_precision=bf16", "gpus_per_node=4"), settings) == (
        f"""#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --time=2:00:00
#SBATCH --gpus-per-node=4
#SBATCH --signal=B:TERM@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH '--output=/work/a b/paceline-%j.log'
# Written by paceline {VERSION}. Exit code 75: the run has saved; with --requeue the job goes back to the queue.
exec {sys.executable} -m paceline launch --on slurm --procs 4 --requeue --max-restarts 2 --mixed-precision bf16 """
        "train.py --lr '1 2'\n"
    )


def test_words_for_sbatch_come_last_and_an_array_has_a_log_for_each_element() -> None:
    settings = SlurmSettings(sbatch_args="--array 0-3 -p 'my part' --exclusive --cpus-per-task=9")
    lines = batch_script(job(), settings).splitlines()
    assert [shlex.split(line)[1:] for line in lines[-7:-2]] == [
        ["--output=/work/a b/paceline-%A_%a.log"],
        ["--array", "0-3"],
        ["-p", "my part"],
        ["--exclusive"],
        ["--cpus-per-task=9"],
    ]


@pytest.mark.parametrize(
    ("settings", "words", "line"),
    [
        (SlurmSettings(requeue=False), (), "#SBATCH --no-requeue"),
        (SlurmSettings(cpus_per_proc=6), (), "#SBATCH --cpus-per-task=24"),
        (SlurmSettings(), ("threads=3",), "#SBATCH --cpus-per-task=12"),
        (SlurmSettings(time="1"), (), "#SBATCH --signal=B:TERM@30"),
        (SlurmSettings(), ("grace_s=100",), "#SBATCH --signal=B:TERM@160"),
        (SlurmSettings(time="1-0", warning_s=300.0), (), "#SBATCH --signal=B:TERM@300"),
    ],
)
def test_what_settings_ask_for(settings: SlurmSettings, words: tuple[str, ...], line: str) -> None:
    grace = [float(word.partition("=")[2]) for word in words if word.startswith("grace_s")]
    assert line in batch_script(job(*words, grace_s=(grace or [30.0])[0]), settings).splitlines()


def test_a_range_of_nodes_goes_on_with_those_that_are_left() -> None:
    script = batch_script(job(nodes=3, least=1), SlurmSettings())
    assert "#SBATCH --nodes=1-3\n" in script
    assert "#SBATCH --no-kill\n" in script
    assert "--ntasks-per-node" not in script  # with it SLURM gives the fewest nodes, even where more are free
    assert " --nodes 1:3 " in script


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129_600), ("1-0:30", 88_200), ("1-2:03:04", 93_784)],
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_a_warning_before_the_beginning() -> None:
    with pytest.raises(ConfigError, match="before they have begun") as error:
        warning_s(job(), SlurmSettings(time="1:00", warning_s=60.0))
    assert error.value.code == "slurm-time"


def test_the_script_says_the_same_again() -> None:
    """What it runs is parsed into the settings that it was written from."""
    words = ["zero=2", "shard=2", "debug=yes", "compile=no", "threads=2", "launcher_args=-v", "log_dir=a b"]
    one = job(*words, "options=shard.reshard=no")
    command = shlex.split(batch_script(one, SlurmSettings()).splitlines()[-1])
    args = parser_for("launch").parse_args(command[5:])
    again = resolve_launch(schema.given(args), {}, search=False)
    before = assignment_of(one).settings
    assert again.run == before.run
    assert (again.launch.threads, again.launch.log_dir, again.launch.launcher_args) == (2, "a b", "-v")
    assert (args.script, args.script_args) == ("train.py", ["--lr", "1 2"])


def test_a_step() -> None:
    one = job(allocation=SlurmAllocation("12", ("node0", "node1")))
    assert shlex.join(step_command(one)).startswith(
        "srun --nodes 2 --ntasks 2 --ntasks-per-node 1 -w node0,node1 --cpu-bind=none --export=ALL --input=all "
        f"--kill-on-bad-exit=0 --wait=0 --mpi=none {sys.executable} -u -m paceline_hosts.remote"
    )
    shell = job(allocation=SlurmAllocation("12", ("node0", "node1"), in_step=True), least=1)
    assert {"--overlap", "--no-kill"} <= set(step_command(shell))


def test_no_secret_is_shown() -> None:
    one = job()
    rendered = LAUNCHER.render(replace(one, cluster=SlurmSettings()))
    step = LAUNCHER.render(replace(one, allocation=SlurmAllocation("12", ("node0", "node1"))))
    for text in (rendered.document, rendered.text(), step.text()):
        assert assignment_of(one).secret not in text


def test_allocations() -> None:
    batch = allocation_of(BATCH)
    assert batch == SlurmAllocation("12", ("node01", "node02", "node03", "node7"), procs=4)
    assert allocation_of({**BATCH, "SLURM_GPUS_ON_NODE": "8", "SLURM_RESTART_COUNT": "2"}) == replace(
        batch, procs=8, restarts=2
    )
    assert allocation_of(SALLOC) == SlurmAllocation("12", ("node1", "node2"), on_node=False)
    shell = allocation_of({**TASK, "SLURM_PTY_PORT": "40011"})
    assert shell is not None
    assert shell.in_step
    array = allocation_of({**BATCH, "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "0"})
    assert array is not None
    assert array.job == "10_0"
    assert [allocation_of(env) for env in ({}, TASK, {**BATCH, "RANK": "0"})] == [None] * 3


@pytest.mark.parametrize(
    ("words", "env", "launcher", "nodes", "procs"),
    [
        ((), {}, "ssh", 1, "auto"),
        ((), BATCH, "slurm", 4, 4),
        (("procs=1", "nodes=2"), BATCH, "slurm", 2, 1),
        (("gpus_per_node=8",), BATCH, "slurm", 4, "auto"),
        (("nodes=1",), BATCH, "ssh", 1, "auto"),  # on the node where this runs
        (("launcher=slurm", "nodes=1"), BATCH, "slurm", 1, 4),
        ((), {**BATCH, "SLURM_JOB_NODELIST": "node01"}, "ssh", 1, "auto"),
        ((), {**SALLOC, "SLURM_JOB_NODELIST": "node1"}, "slurm", 1, "auto"),  # typed on a login node
        (("nodes=2:9",), BATCH, "slurm", "2:4", 4),
        (("nodes=4:9",), BATCH, "slurm", 4, 4),
        (("launcher=ssh", "hostfile=hf"), BATCH, "ssh", 1, "auto"),
        (("node_rank=1", "main_address=node01", "nodes=4"), BATCH, "ssh", 4, "auto"),
        ((), TASK, "ssh", 1, "auto"),
    ],
)
def test_settings_within_an_allocation(
    words: tuple[str, ...], env: dict[str, str], launcher: str, nodes: int | str, procs: int | str
) -> None:
    given = [Given(*pair, "command line", f"--{pair[0]}") for pair in (word.split("=", 1) for word in words)]
    settings = completed(resolve_launch(given, {}, search=False), env)
    launch = settings.launch
    assert (launch.launcher, launch.nodes, launch.procs) == (launcher, nodes, procs)
    rows = {row.field: row.value for row in settings.decisions}
    assert (rows["launcher"], rows["nodes"], rows["procs"]) == (launcher, nodes, procs)
    says_so = any("one launcher on each node" in notice for notice in settings.notices)
    assert says_so == (launcher == "slurm")


LINE = (
    "JobId=12 JobName=train UserId=root(0) Priority=1 JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:00:05 TimeLimit=00:01:00 AllocNode:Sid=desk:1 "
    "NodeList=node[0-1] BatchHost=node0 Command=(null) WorkDir=/work/a b StdErr=/work/a b/x.log StdIn=/dev/null "
    "StdOut=/work/a b/x.log Power="
)
Slurm = Callable[..., list[list[str]]]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Plays SLURM: gives a function that takes its answers by command, (exit code, output, errors), and notes the calls."""
    monkeypatch.setattr(queue, "_LOOK_S", 0.0)

    def play(**answers: list[tuple[int, str, str]]) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            calls.append(words)
            left = answers.get(words[0], [(0, "", "")])
            code, out, err = left.pop(0) if len(left) > 1 else left[0]
            return subprocess.CompletedProcess(words, code, out, err)

        monkeypatch.setattr(queue.subprocess, "run", run)
        return calls

    return play


def state(name: str, *, reason: str = "None", code: str = "0:0", restarts: int = 0) -> tuple[int, str, str]:
    return 0, LINE.format(state=name, reason=reason, code=code, restarts=restarts), ""


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("Batch job submission failed: Invalid partition name specified", "--partition"),
        ("Batch job submission failed: Invalid account or account/partition combination specified", "--account"),
        ("Batch job submission failed: Invalid qos specification", "quality of service"),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "--time"),
        ("Batch job submission failed: Requested node configuration is not available", "--nodes"),
        ("Batch job submission failed: Invalid generic resource (gres) specification", "GPUs"),
        ("CPU count per node can not be satisfied", "--cpus-per-proc"),
        ("something new", "--sbatch-args"),
    ],
)
def test_slurm_refuses(slurm: Slurm, said: str, fix: str) -> None:
    slurm(sbatch=[(1, "", f"sbatch: error: {said}\n")], sinfo=[(0, "partition all: 2 nodes\n", "")])
    with pytest.raises(LaunchError) as error:
        queue.submit("#!/bin/bash\n", ["--nodes 9 (command line)"], {})
    assert error.value.code == "slurm-refused"
    text = str(error.value)
    assert f"SLURM says: {said}" in text
    assert "why: --nodes 9 (command line)" in text
    assert "why: partition all: 2 nodes" in text
    assert fix in text.partition("fix:")[2]


def test_a_job_that_would_wait_for_ever_is_taken_out(slurm: Slurm) -> None:
    calls = slurm(sbatch=[(0, "12\n", "")], scontrol=[state("PENDING", reason="PartitionTimeLimit")])
    with pytest.raises(LaunchError, match="would never start: PartitionTimeLimit"):
        queue.submit("#!/bin/bash\n", [], {})
    assert ["scancel", "12"] in calls


def test_a_job_that_has_to_wait_stays(slurm: Slurm) -> None:
    slurm(sbatch=[(0, "12;cluster\n", "")], scontrol=[state("PENDING", reason="Resources")])
    assert queue.submit("#!/bin/bash\n", [], {}) == "12"


def test_no_controller(slurm: Slurm) -> None:
    said = "Batch job submission failed: Unable to contact slurm controller (connect failure)"
    slurm(sbatch=[(1, "", f"sbatch: error: {said}\n")], scontrol=[(1, "Slurmctld(primary) at head is DOWN\n", "")])
    with pytest.raises(LaunchError) as error:
        queue.submit("#!/bin/bash\n", [], {})
    assert error.value.code == "slurm-unreachable"
    assert "Slurmctld(primary) at head is DOWN" in str(error.value)


def test_a_configuration_that_is_not_there(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's commands look for it for a minute each: none is called."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    calls = slurm()
    with pytest.raises(LaunchError, match=f"SLURM_CONF={tmp_path}/none") as error:
        queue.submit("#!/bin/bash\n", [], {})
    assert (error.value.code, calls) == ("slurm-unreachable", [])


def test_a_record(slurm: Slurm) -> None:
    slurm(scontrol=[state("FAILED", reason="NonZeroExitCode", code="3:0", restarts=2)])
    (record,) = queue.records("12")
    assert record == queue.QueueRecord("12", "", "FAILED", "NonZeroExitCode", 3, 2, "node[0-1]", "/work/a b/x.log")
    assert record.has_ended
    slurm(scontrol=[state("COMPLETING")])
    assert not queue.records("12")[0].has_ended
    slurm(scontrol=[(1, "", "slurm_load_jobs error: Invalid job id specified\n")])
    assert queue.records("12") == []


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        (state("COMPLETED"), 0, ""),
        (state("FAILED", code="3:0"), 3, ""),
        (state("FAILED", code="0:9"), 137, ""),
        (state("TIMEOUT"), None, "ended as TIMEOUT on node[0-1]"),
        (state("NODE_FAIL"), None, "ended as NODE_FAIL"),
        (state("CANCELLED"), None, "ended as CANCELLED"),
        ((1, "", "Invalid job id"), None, "knows nothing of job 12"),
    ],
)
def test_how_a_job_ends(
    slurm: Slurm, tmp_path: Path, last: tuple[int, str, str], code: int | None, said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    log = tmp_path / "x.log"
    log.write_text("one\ntwo")
    answers = [state("PENDING", reason="Priority"), state("RUNNING"), state("PENDING", restarts=1), last]
    slurm(scontrol=[(code_, out.replace("/work/a b/x.log", str(log)), err) for code_, out, err in answers])
    if code is None:
        with pytest.raises(LaunchError) as error:
            queue.follow("12")
        assert error.value.code == "slurm-job"
        assert said in str(error.value)
    else:
        assert queue.follow("12").exit_code == code
    out, err = capfd.readouterr()
    assert out == "one\ntwo\n"
    assert err.splitlines()[:3] == [
        "paceline: job 12: pending (Priority)",
        "paceline: job 12: running on node[0-1]",
        "paceline: job 12: pending, restart 1",
    ]


def element(number: int | str, name: str, log: Path, code: str = "0:0") -> str:
    line = LINE.format(state=name, reason="None", code=code, restarts=0).replace("/work/a b/x.log", str(log))
    return line.replace("JobId=12 ", f"JobId=12 ArrayJobId=12 ArrayTaskId={number} ")


def test_an_element_whose_record_is_removed_before_the_end_still_counts(slurm: Slurm, tmp_path: Path) -> None:
    """SLURM removes the record of each element `MinJobAge` after its end, however long the others run."""
    log = tmp_path / "x.log"
    log.write_text("one\n")
    both_run = "\n".join([element(0, "RUNNING", log), element(1, "RUNNING", log)])
    first_failed = "\n".join([element(0, "FAILED", log, "3:0"), element(1, "RUNNING", log)])
    first_removed = element(1, "RUNNING", log)
    second_done = element(1, "COMPLETED", log)
    slurm(scontrol=[(0, text, "") for text in (both_run, first_failed, first_removed, second_done)])
    assert queue.follow("12").exit_code == 3


@pytest.mark.parametrize(
    ("before", "after", "unknown"),
    [
        ([("0", "RUNNING"), ("1", "RUNNING")], [("1", "COMPLETED")], "job 12_0 any more"),
        ([("0", "RUNNING"), ("1-2%1", "PENDING")], [("0", "COMPLETED"), ("2", "COMPLETED")], "job 12_1 any more"),
        ([("0-1", "PENDING")], [("0", "COMPLETED"), ("1", "COMPLETED")], ""),
    ],
)
def test_an_element_that_ended_while_nobody_could_look(
    slurm: Slurm, tmp_path: Path, before: list[tuple[str, str]], after: list[tuple[str, str]], unknown: str
) -> None:
    looks = []
    for elements in (before, after):
        lines = [element(number, state, tmp_path / "x.log") for number, state in elements]
        looks.append((0, "\n".join(lines), ""))
    slurm(scontrol=looks)
    if not unknown:
        assert queue.follow("12").exit_code == 0
        return
    with pytest.raises(LaunchError, match=unknown) as error:
        queue.follow("12")
    assert error.value.code == "slurm-job"


def test_a_job_goes_back_into_the_queue(slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    """But not where SLURM puts it back by itself, or somebody has cancelled it."""
    array = SlurmAllocation("10_0", ("node0",), restarts=1)
    calls = slurm(scontrol=[state("RUNNING"), (0, "", "")])
    put_back(array)
    assert calls[-1] == ["scontrol", "requeue", "10_0"]
    assert "job 10_0 is queued again (restart 2)" in capfd.readouterr().err
    for other in ("COMPLETING", "CANCELLED"):
        calls = slurm(scontrol=[state(other)])
        put_back(array)
        assert ["scontrol", "requeue", "10_0"] not in calls
    slurm(scontrol=[state("RUNNING"), (1, "", "Requested operation is presently disabled for job 10_0\n")])
    with pytest.raises(LaunchError, match="presently disabled") as error:
        put_back(array)
    assert error.value.code == "slurm-requeue"


def test_a_log_that_is_not_there(slurm: Slurm) -> None:
    slurm(scontrol=[state("FAILED", code="0:53")])
    with pytest.raises(LaunchError, match="which is not there") as error:
        queue.follow("12")
    assert "a folder that the nodes share" in str(error.value)
