"""Recorded environments of launchers, and what `World.detect` makes of them."""

from __future__ import annotations

import pytest

from paceline.base.errors import WorldError
from paceline.world.detect import slurm
from paceline.world.world import World

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess_base_jobid": "1184563201",
}  # fmt: skip
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "MASTER_ADDR": "n0"}
SRUN = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_TASKS_PER_NODE": "2,1",
}  # fmt: skip


def place(world: World) -> tuple[int, ...]:
    return (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes)


def test_nothing_is_a_world_of_one() -> None:
    assert World.detect({"PATH": "/bin"}) == World()


def test_a_lone_world_size_of_one_numbers_no_process() -> None:
    assert World.detect({"WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}) == World()
    assert World.detect({**SRUN, "WORLD_SIZE": "1"}) == World.detect(SRUN)


def test_one_process_has_one_host_whatever_it_inherits() -> None:
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert place(World.detect({**TORCHRUN, **own})) == (0, 1, 0, 1, 0, 1)
    assert place(World.detect({**SRUN, **own})) == (0, 1, 0, 1, 0, 1)


def test_torchrun() -> None:
    world = World.detect(TORCHRUN)
    assert place(world) == (3, 4, 1, 2, 1, 2)
    assert (world.source, world.address, world.port) == ("torchrun", "10.0.0.1", 29500)


def test_four_variables_are_enough_on_one_host() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}
    assert place(World.detect(env)) == (1, 2, 1, 2, 0, 1)


def test_names_exported_from_slurm_keep_the_local_rank() -> None:
    env = {**SRUN, "RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "gpu08", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}
    world = World.detect(env)
    assert (world.source, world.rank, world.local_rank) == ("torchrun", 2, 0)


def test_names_exported_from_mpi_keep_the_local_rank_and_size() -> None:
    exported = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "1"}
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    world = World.detect({**exported, **local})
    assert (world.source, *place(world)) == ("torchrun", 3, 4, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": "4"}, "rank 4 does not exist"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc'"),
        ({"LOCAL_RANK": "2"}, "local rank 2 does not exist"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set"),
        ({"LOCAL_WORLD_SIZE": "8"}, "more than the 4 of all hosts"),
    ],
)
def test_contradictions(change: dict[str, str | None], told: str) -> None:
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(WorldError, match="world-env") as caught:
        World.detect(env)
    assert told in str(caught.value)


def test_all_contradictions_are_told_at_once() -> None:
    env = {"RANK": "7", "WORLD_SIZE": "2", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(WorldError) as caught:
        World.detect(env)
    assert len(caught.value.problems) == 5  # rank, local rank, local size, address, port


def test_open_mpi_on_one_host() -> None:
    world = World.detect(OPEN_MPI)
    assert place(world) == (1, 2, 1, 2, 0, 1)
    assert (world.source, world.address) == ("mpi", "127.0.0.1")
    other = World.detect({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "1184563202"})
    assert world.port is not None and 15000 <= world.port < 31000
    assert world.port != other.port


def test_hydra_on_two_hosts() -> None:
    world = World.detect(HYDRA)
    assert place(world) == (5, 8, 1, 4, 1, 2)
    assert world.address == "n0"


def test_mpi_on_several_hosts_needs_an_address() -> None:
    with pytest.raises(WorldError, match=r"(?s)world-env.*mpirun -x MASTER_ADDR"):
        World.detect({name: value for name, value in HYDRA.items() if name != "MASTER_ADDR"})


def test_mpi_half_an_environment() -> None:
    with pytest.raises(WorldError, match="OMPI_COMM_WORLD_SIZE is not set"):
        World.detect({"OMPI_COMM_WORLD_RANK": "0"})


def test_srun() -> None:
    world = World.detect(SRUN)
    assert place(world) == (2, 3, 0, 1, 1, 2)
    assert (world.source, world.address, world.port) == ("slurm", "gpu08", 15000 + 41 * 16)


def test_srun_with_pmi_is_slurm() -> None:
    assert World.detect({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3"}).source == "slurm"


def test_srun_of_one_task_is_a_world_of_one() -> None:
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    world = World.detect({**SRUN, **one, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert place(world) == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": None},  # the script of sbatch, a shell of salloc
        {"SLURM_STEP_ID": "4294967291"},  # the batch step
        {"SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        {"SLURM_PTY_PORT": "40011"},  # srun --pty bash
        {"SLURM_PROCID": None},
    ],
)
def test_what_is_no_task_of_srun_stands_alone(change: dict[str, str | None]) -> None:
    env = {name: value for name, value in {**SRUN, **change}.items() if value is not None}
    assert World.detect(env) == World()


def test_srun_contradictions() -> None:
    with pytest.raises(WorldError, match="rank 3 does not exist"):
        World.detect({**SRUN, "SLURM_PROCID": "3"})
    with pytest.raises(WorldError, match="no host can be read"):
        World.detect({name: value for name, value in SRUN.items() if not name.endswith("NODELIST")})


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("login", ["login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,12]-ib,cpu1", ["gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu12-ib", "cpu1"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("", []),
    ],
)
def test_expand(hosts: str, names: list[str]) -> None:
    assert slurm.expand(hosts) == names


def test_task_counts() -> None:
    assert slurm.task_counts("2(x3),1") == [2, 2, 2, 1]
    assert slurm.task_counts("two") == []


TRAINJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "t-node-0-0.t", "PET_MASTER_PORT": "29400",
}  # fmt: skip
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "t-worker-0", "MASTER_ADDR": "t-master-0", "MASTER_PORT": "23456",
    "WORLD_SIZE": "2", "RANK": "1", "PYTHONUNBUFFERED": "0",
}  # fmt: skip
INDEXED = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "t-0.t", "MASTER_PORT": "5"}


@pytest.mark.parametrize(
    ("env", "address", "port"),
    [
        (TRAINJOB, "t-node-0-0.t", 29400),
        (PYTORCHJOB, "t-master-0", 23456),
        ({**PYTORCHJOB, "HOSTNAME": "", "PET_NODE_RANK": "1", "PET_NNODES": "2"}, "t-master-0", 23456),
        (INDEXED, "t-0.t", 5),
    ],
)
def test_pods_that_run_a_script_alone(env: dict[str, str], address: str, port: int) -> None:
    world = World.detect(env)
    assert place(world) == (1, 2, 0, 1, 1, 2)
    assert (world.source, world.address, world.port) == ("kubernetes", address, port)


def test_the_first_pod_of_a_pytorchjob() -> None:
    master = {**PYTORCHJOB, "HOSTNAME": "t-master-0", "RANK": "0", "MASTER_ADDR": "localhost"}
    assert place(World.detect(master)) == (0, 2, 0, 1, 0, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"HOSTNAME": "somewhere"},  # no pod of such a job: whoever set these counts processes of this host
        {"RANK": "0"},  # one of several processes that somebody started in the pod
        {"PET_NODE_RANK": "0"},
        {"PET_NODE_RANK": "1", "PET_NNODES": "1"},
        {"LOCAL_RANK": "1"},
        {"LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_processes_that_a_launcher_started_in_a_pod(change: dict[str, str]) -> None:
    assert World.detect({**PYTORCHJOB, **change}).source == "torchrun"


def test_workers_in_a_pod_have_torchruns_names_and_the_pods() -> None:
    assert place(World.detect({**TRAINJOB, **TORCHRUN})) == (3, 4, 1, 2, 1, 2)


def test_one_pod_is_a_world_of_one() -> None:
    assert World.detect({**TRAINJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}) == World()
    assert World.detect({"JOB_COMPLETION_INDEX": "7"}) == World(), "a sweep, of runs that know nothing of each other"
    assert World.detect({**TRAINJOB, "PET_NNODES": "1:3"}) == World(), "that is for a launcher"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"PET_MASTER_ADDR": None}, "MASTER_ADDR is not set, so 2 pods cannot find each other"),
        ({"PET_NODE_RANK": None, "JOB_COMPLETION_INDEX": None}, "PET_NODE_RANK is not set"),
        ({"PET_NODE_RANK": "2"}, "rank 2 does not exist"),
        ({"PET_NNODES": "two"}, "PET_NNODES is 'two'"),
    ],
)
def test_what_contradicts_in_a_pod(change: dict[str, str | None], told: str) -> None:
    env = {name: value for name, value in {**TRAINJOB, **change}.items() if value is not None}
    with pytest.raises(WorldError, match="world-env") as caught:
        World.detect(env)
    assert told in str(caught.value)
