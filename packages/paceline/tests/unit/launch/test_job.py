"""From settings to a job to the processes it would start: pure, nothing runs."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.base.devices import ACCELERATORS, device_type
from paceline.base.errors import ConfigError, LaunchError
from paceline.config.given import Given
from paceline.config.sources import resolve_launch
from paceline.launch import host
from paceline.launch.failure_report import describe
from paceline.launch.job import Job, Target
from paceline.launch.launcher import LAUNCHERS, Failure, Outcome
from paceline.launch.launchers.local import LAUNCHER, world_table
from paceline.launch.make_job import job_of
from paceline.launch.processes.output import Output
from paceline.launch.worker.show_once import ShownTexts


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "accelerators", host.Accelerators)
    monkeypatch.setattr(host, "cores", lambda: 8)


def told(env: dict[str, str] | None = None, **flags: object) -> tuple[Job, list[str]]:
    given = [Given(name, str(value), "command line", f"--{name}") for name, value in flags.items()]
    env = {"HOME": "/nonexistent", **(env or {})}
    return job_of(resolve_launch(given, env), "train.py", ["--lr", "1"], env)


def test_local_is_registered() -> None:
    assert LAUNCHERS.get("local") is LAUNCHER
    assert LAUNCHER.available() == ""


def test_rendering_is_pure_and_exact() -> None:
    job = Job(Target("script", "train.py", ("--lr", "1")), procs=2, env={"A": "b c"}, main_port=29500)
    rendered = LAUNCHER.render(job)
    assert rendered == LAUNCHER.render(job)
    assert rendered.command[1:] == ("train.py", "--lr", "1")
    assert [(p.rank, p.env["LOCAL_RANK"], p.env["WORLD_SIZE"], p.env["A"]) for p in rendered.processes] == [
        (0, "0", "2", "b c"),
        (1, "1", "2", "b c"),
    ]
    assert "  A='b c'" in rendered.text()


def test_ranks_count_on_over_unequal_nodes() -> None:
    job = Job(Target("script", "train.py"), procs=1, nodes=3, node_rank=2)
    (process,) = world_table(job, [2, 3, 1], 2, ("10.0.0.1", 29500), 4)
    assert process.rank == 5
    assert process.env["TORCHELASTIC_RESTART_COUNT"] == "4"
    assert (process.env["LOCAL_WORLD_SIZE"], process.env["GROUP_RANK"]) == ("1", "2")


def test_one_process_without_an_accelerator_says_so() -> None:
    job, notices = told()
    assert (job.procs, job.start) == (1, "fork")
    assert any("--procs 2" in notice for notice in notices)


def test_one_process_for_each_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "accelerators", lambda: host.Accelerators("cuda", 4))
    job, _ = told()
    assert (job.procs, job.start) == (4, "exec")
    job, _ = told(gpu_ids="1,3")
    assert (job.procs, job.env["CUDA_VISIBLE_DEVICES"]) == (2, "1,3")
    assert told(cpu="yes")[0].procs == 1


@pytest.mark.parametrize("name", ACCELERATORS)
def test_devices_are_hidden_by_the_variable_of_their_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "accelerators", lambda: host.Accelerators(name, 4))
    row = device_type(name)
    if row.visible:
        assert told(gpu_ids="1,3")[0].env[row.visible] == "1,3"
        return
    with pytest.raises(ConfigError) as caught:
        told(gpu_ids="1,3")
    assert caught.value.code == "gpu-ids"


def test_threads_share_the_cores_unless_said_otherwise() -> None:
    job, notices = told(procs=3)
    assert job.env["OMP_NUM_THREADS"] == "2"
    assert any("OMP_NUM_THREADS=2" in notice for notice in notices)
    assert told(procs=16)[0].env["OMP_NUM_THREADS"] == "1"
    assert not any("take turns" in notice for notice in notices)
    assert any("500 processes take turns on" in notice for notice in told(procs=500)[1])
    assert "OMP_NUM_THREADS" not in told({"OMP_NUM_THREADS": "5"}, procs=2)[0].env
    assert told({"OMP_NUM_THREADS": "5"}, threads=4)[0].env["OMP_NUM_THREADS"] == "4"


def test_settings_are_handed_to_the_processes() -> None:
    job, _ = told(mixed_precision="bf16", shard=2)
    assert json.loads(job.env["PACELINE_SETTINGS"])["shard"] == [2, "command line", "--shard"]


def test_tee_by_local_rank() -> None:
    assert told(procs=2)[0].tee is None
    assert told(procs=2, tee=3)[0].tee == {0: 3, 1: 3}
    assert told(procs=2, log_dir="x")[0].tee == {0: 3, 1: 3}
    assert told(procs=2, tee="1:2")[0].tee == {1: 2}
    with pytest.raises(ConfigError, match=r"(?s)tee names local rank 5.*config-value"):
        told(procs=2, tee="5:1")


def test_ranks_whose_output_is_shown() -> None:
    assert told(procs=4)[0].ranks is None
    job, _ = told(procs=4, ranks="0,2-3")
    assert (job.ranks, job.tee) == ({0, 2, 3}, dict.fromkeys(range(4), 3))  # several are told apart
    job, _ = told(procs=4, ranks="1")
    assert (job.ranks, job.tee) == ({1}, None)
    assert told(procs=4, ranks="0,1", tee="0")[0].tee == dict.fromkeys(range(4), 0)
    assert told(procs=2, nodes="1:2", main_address="a", ranks="3")[0].ranks == {3}
    for ranks in ("4", "3-1"):
        with pytest.raises(ConfigError, match=rf"(?s)ranks={ranks} \(--ranks\).*name ranks from 0 to 3"):
            told(procs=4, ranks=ranks)


def test_the_number_of_processes_behind_the_script() -> None:
    def notices_of(*args: str, **flags: str) -> str:
        given = [Given(name, value, "command line", f"--{name}") for name, value in flags.items()]
        env = {"HOME": "/nonexistent"}
        return "\n".join(job_of(resolve_launch(given, env), "train.py", args, env)[1])

    for flag in ("--procs", "--nproc_per_node", "--num-processes"):
        assert f"1 process, as `{flag} 2` stands after the script" in notices_of("--lr", "1", flag, "2")
    assert "`paceline launch --procs=2 train.py`" in notices_of("--procs=2")
    assert "stands after the script" not in notices_of("--procs", "2", procs="1")  # the launcher was told, too
    assert "stands after the script" not in notices_of("--num_workers", "2", "--devices", "2")


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = Job(Target("script", "no.py"), main_port=taken.getsockname()[1], log_dir=str(tmp_path / "file" / "x"))
        with pytest.raises(LaunchError) as caught:
            host.check(job)
    assert [problem.code for problem in caught.value.problems] == ["launch-script", "launch-port", "launch-log-dir"]
    with pytest.raises(LaunchError, match="launch-node"):
        host.check(Job(Target("module", "json"), nodes=2, node_rank=2))
    for target in (Target("module", "no_such_module.x"), Target("program", "no-such-program")):
        with pytest.raises(LaunchError, match="launch-script"):
            host.check(Job(target))


def test_words_before_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    cases = {("python", str(script)): "leave 'python' out", ("runs/x", str(script)): "leave 'runs/x' out"}
    for (word, *args), fix in cases.items():
        problem = host.unusable(Target("script", word, tuple(args)))
        assert problem is not None and fix in problem.fix


def test_a_held_port_is_free_for_rank_0_alone() -> None:
    held = host.hold_port(0)
    port = held.getsockname()[1]
    with socket.socket(held.family) as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", port))
        store.listen()
        with pytest.raises(OSError, match="in use"):
            host.hold_port(port)
    held.close()


def test_output_marks_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(None, {0: 3})
    (process,) = world_table(Job(Target("script", "x")), [1], 0, ("127.0.0.1", 0), 0)
    ends = output.open(process, 0)
    for number, text in ((1, "one\ntw"), (1, "o\nthr"), (2, "wrong\n")):
        with open(ends[number], "w", closefd=False) as stream:
            stream.write(text)
        for read in output.pipes:
            output.copy(read)
    output.started()
    output.finish()
    shown = capsys.readouterr()
    assert shown.out == "[rank0]: one\n[rank0]: two\n[rank0]: thr\n"
    assert shown.err == "[rank0]: wrong\n"


def test_a_text_is_first_once_for_each_time_that_it_is_said(tmp_path: Path) -> None:
    first, second = ShownTexts(tmp_path, "shown-1"), ShownTexts(tmp_path, "shown-1")
    assert [first.is_first("a"), second.is_first("a"), second.is_first("b"), first.is_first("b")] == [True, False] * 2
    assert [second.is_first("a"), second.is_first("a"), first.is_first("a")] == [True, True, False]
    assert ShownTexts(tmp_path, "shown-2").is_first("a")  # after a restart
    assert ShownTexts(tmp_path / "gone", "shown-1").is_first("a")


def test_a_misplaced_flag_of_the_launcher_is_told_with_the_command_line() -> None:
    job = Job(Target("module", "pkg.train", ("--lr", "2", "--zero", "2", "--x", "--dry-run")))
    report = "SystemExit: 2 (train.py:5)\n  unrecognized arguments: --zero 2 --x --dry-run"
    text = describe(Outcome(2, Failure(0, 0, 0, 77, 2, report=report)), job)
    assert "as in `paceline launch --zero 2 --dry-run -m pkg.train --lr 2 --x`" in text
    text = describe(
        Outcome(2, Failure(0, 0, 0, 77, 2, report="unrecognized arguments: --zero 2")),
        replace(job, target=Target("script", "x")),
    )
    assert "fix: correct the error that is shown above" in text  # the script made these words itself


@pytest.mark.parametrize(
    ("report", "fix"),
    [
        ("Traceback ...\npaceline.ConfigError: what.  [config-value]\n  why: a\n  fix: write bf16", "write bf16"),
        ("SystemExit: 65 (anomalies.py:377)\n  fix: lower the learning rate", "lower the learning rate"),
        ("paceline.PlanError: 2 problems:\n1. a\n  fix: x\n2. b\n  fix: y", "each of the 2 problems above has one"),
        (
            "ValueError: x\n  fix: old\n\nTraceback (most recent call last):\nKeyError: 1",
            "correct the error that is shown above",
        ),
    ],
)
def test_the_last_line_is_the_fix_that_the_error_itself_names(report, fix) -> None:
    text = describe(Outcome(1, Failure(0, 0, 0, 77, 1, report=report)), Job(Target("script", "x")))
    assert text.splitlines()[-1] == f"  fix: {fix}"


def test_the_last_line_in_a_notebook_repeats_the_error_of_the_function() -> None:
    report = "Traceback (most recent call last):\n  File ...\nValueError: my own mistake"
    text = describe(Outcome(1, Failure(0, 0, 0, 77, 1, report=report)), Job(Target("function", "train")))
    assert text.splitlines()[-1] == "  fix: correct the error of the function: ValueError: my own mistake"


def test_report_names_rank_and_signal() -> None:
    job = Job(Target("script", "x"), procs=4, nodes=2)
    failure = Failure(3, 1, 1, 77, -9, later=("failed after it: rank 0: RuntimeError: gone",))
    text = describe(Outcome(137, failure), job)
    assert failure.exit_code == 137
    for part in ("rank 3 was ended by SIGKILL.  [rank-failed]", "node 1", "pid 77", "failed after it: rank 0"):
        assert part in text


SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip


def test_one_launcher_on_each_node_of_srun_knows_its_place() -> None:
    job, notices = told(SRUN, procs=4)
    assert (job.procs, job.nodes, job.node_rank, job.main_address, job.main_port) == (4, 2, 1, "gpu1", 15112)
    assert "node 1 of 2, as slurm says." in notices
    assert job.least == 0, "the number of tasks is fixed: no node may be missing"
    assert told(SRUN, procs=4, main_port=1234)[0].main_port == 1234


def test_several_launchers_on_one_node_are_refused() -> None:
    here = {**SRUN, "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"}
    with pytest.raises(LaunchError, match=r"(?s)2 tasks of this host each start a launcher.*launch-tasks"):
        told({**here, "SLURM_STEP_TASKS_PER_NODE": "2"}, procs=4)


@pytest.mark.parametrize("counts", [{"procs": 99_999_999}, {"nodes": 99_999_999}, {"nodes": "1:99999999"}])
def test_counts_that_no_cluster_has_are_refused(counts: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="config-value"):
        told(**counts)


def test_a_span_of_cores_is_not_listed_to_its_end() -> None:
    with pytest.raises(ConfigError, match="bind-cores"):
        told(procs=1, bind_cores="0-99999999999")


def test_several_nodes_need_an_address() -> None:
    with pytest.raises(LaunchError, match=r"(?s)node 1 does not know where node 0 is.*launch-address"):
        told(nodes=2, node_rank=1)
    assert told(nodes=2, node_rank=0)[0].main_port == 29500


@pytest.mark.parametrize(
    ("nodes", "address", "store"),
    [
        (1, "localhost:4000", ("localhost", "4000")),
        (1, "[::1]:4000", ("::1", "4000")),
        (1, "a:4000,b", ("a", "4000")),
        (2, "::1", ("::1", "29500")),
        (2, "[::1]:4000", ("::1", "4000")),
        (2, "[::1]:4000,b", ("::1", "4000")),
    ],
)
def test_an_address_may_have_a_port(nodes: int, address: str, store: tuple[str, str]) -> None:
    job, _ = told(procs=1, nodes=nodes, main_address=address)
    env = LAUNCHER.render(job).processes[0].env
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == store


def test_pods_know_their_place() -> None:
    trainjob = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "t-0.t"}
    job, _ = told({**trainjob, "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "1"})
    assert (job.nodes, job.node_rank, job.numbered, job.procs) == (2, 1, True, 2)
    assert (job.main_address, job.main_port) == ("t-0.t", 29400)
    # An older PyTorchJob: RANK and WORLD_SIZE count pods, and say so to the launcher too.
    env = {"KUBERNETES_SERVICE_HOST": "a", "HOSTNAME": "t-worker-0", "RANK": "1", "WORLD_SIZE": "2"}
    job, notices = told({**env, "MASTER_ADDR": "t-master-0", "MASTER_PORT": "23456"}, procs="2")
    assert (job.nodes, job.node_rank, job.main_address, job.main_port) == (2, 1, "t-master-0", 23456)
    assert "node 1 of 2, as kubernetes says." in notices
    # A manifest by hand: the Indexed Job numbers its pods.
    job, _ = told({"JOB_COMPLETION_INDEX": "1"}, nodes="2", main_address="t-0.t", procs="1")
    assert (job.nodes, job.node_rank, job.numbered) == (2, 1, True)
    # A sweep: its pods are numbered too, and each is a run of its own.
    job, _ = told({"JOB_COMPLETION_INDEX": "7"}, procs="1")
    assert (job.nodes, job.node_rank) == (1, 0)
    # Whoever says --node-rank is right, and who does not know node 0 is told.
    job, _ = told({"JOB_COMPLETION_INDEX": "1"}, nodes="2", node_rank="0", procs="1")
    assert job.node_rank == 0
    with pytest.raises(LaunchError, match="node 1 does not know where node 0 is"):
        told({"JOB_COMPLETION_INDEX": "1"}, nodes="2", procs="1")
