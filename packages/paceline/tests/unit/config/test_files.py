"""Config files: ours and accelerate's, read as they are; every mistake named with its line."""

import contextlib
import json
import random
from pathlib import Path

import pytest

from paceline.base.errors import ConfigError
from paceline.config import Given, files, resolve_launch
from paceline.config.places import default_file, write

# As `accelerate config` has written it for one host with two GPUs.
TWO_GPUS = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


@pytest.fixture
def resolve_file(tmp_path):
    def resolve(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return resolve_launch([Given("config", str(path), "command line", "--config")], {})

    return resolve


@pytest.fixture
def problems(resolve_file):
    def find(text, name="run.yaml"):
        with pytest.raises(ConfigError) as caught:
            resolve_file(text, name)
        return caught.value.problems

    return find


def test_our_file(resolve_file, tmp_path):
    resolved = resolve_file(
        "procs: 2  # two\nmixed_precision: no\ntimeout_s: 1e1\ngpu_ids: [0, 2]\ndata_seed: null\ndebug: on\n"
    )
    assert (resolved.launch.procs, resolved.launch.gpu_ids) == (2, "0,2")
    assert (resolved.run.mixed_precision, resolved.run.timeout_s, resolved.run.debug) == ("no", 10.0, True)
    assert resolved.file == str(tmp_path / "run.yaml")


def test_an_empty_file_says_nothing(resolve_file):
    assert all(
        decision.source == "default" for decision in resolve_file("# nothing\n").decisions if decision.field != "config"
    )


@pytest.mark.needs("accelerate")
def test_accelerates_yaml(resolve_file):
    resolved = resolve_file(TWO_GPUS)
    assert (resolved.launch.procs, resolved.launch.nodes, resolved.launch.rdzv_backend) == (2, 1, "static")
    assert (resolved.run.mixed_precision, resolved.run.cpu) == ("fp16", False)
    assert {"same_network", "downcast_bf16", "tpu_env", "main_training_function"} <= {
        row.field for row in resolved.unused
    }
    assert not resolved.notices


@pytest.mark.needs("accelerate")
def test_accelerates_json_with_tabs(resolve_file):
    resolved = resolve_file(
        json.dumps(
            {"num_processes": 4, "num_machines": 2, "main_process_ip": "a", "mixed_precision": "no"}, indent="\t"
        ),
        "c.json",
    )
    assert (resolved.launch.procs, resolved.launch.nodes) == (2, 2)


def test_accelerates_minus_one_says_nothing(resolve_file):
    assert resolve_file("num_processes: -1\n").launch.procs == "auto"


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("kind", ["'NO'", "NO"])
def test_a_file_of_accelerates_that_is_not_distributed_starts_one_process(resolve_file, kind):
    # As trl's single_gpu.yaml.
    text = TWO_GPUS.replace("MULTI_GPU", kind).replace("num_processes: 2", "num_processes: 8")
    resolved = resolve_file(text)
    [notice] = resolved.notices
    assert resolved.launch.procs == 1 and "num_processes" in notice and "run.yaml:9" in notice
    assert not resolve_file(text.replace("num_processes: 8", "num_processes: 1")).notices
    assert resolve_file(text.replace("num_processes: 8", "debug: false")).launch.procs == 1


@pytest.mark.needs("accelerate")
def test_accelerates_parallelism_block(resolve_file):
    resolved = resolve_file(
        "parallelism_config:\n  parallelism_config_tp_size: 2\n  dp_shard_size: 4\ndynamo_config:\n"
    )
    assert (resolved.run.axes["tp"], resolved.run.axes["shard"]) == (2, 4)


@pytest.mark.needs("accelerate")
def test_a_wish_that_is_not_met_is_noticed(resolve_file):
    [notice] = resolve_file("enable_cpu_affinity: true\nsame_network: true\n").notices
    assert "enable_cpu_affinity" in notice and "run.yaml:1" in notice and "numactl" in notice


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("kind", ["MEGATRON_LM", "XLA", "TPU"])
def test_engines_are_refused(problems, kind):
    [problem] = problems(f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\n")
    assert problem.code == "accelerate-feature"
    assert kind in problem.what and "run.yaml:2" in problem.why and problem.fix


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize(
    "text",
    [
        "compute_environment: AMAZON_SAGEMAKER",
        "fsdp_config:\n  fsdp_no_such: 1",
        "dynamo_config:\n  dynamo_options: {a: 1}\n  dynamo_backend: inductor",
    ],
)
def test_other_features_are_refused(problems, text):
    [problem] = problems(text + "\n")
    assert problem.code == "accelerate-feature" and problem.fix


@pytest.mark.needs("accelerate", "hosts")
def test_the_hostfile_of_mpirun(resolve_file):
    """accelerate starts the processes of a CPU run by mpirun: so does the launcher `openmpi`."""
    resolved = resolve_file(
        "num_processes: 4\nnum_machines: 2\nmpirun_config:\n  mpirun_hostfile: hosts\n  mpirun_ccl: '1'\n"
    )
    assert (resolved.launch.hostfile, resolved.launch.launcher) == ("hosts", "openmpi")
    assert (resolved.launch.procs, resolved.launch.nodes) == (2, 2)
    assert [row.field for row in resolved.unused] == ["mpirun_ccl"]
    resolved = resolve_file("mpirun_config:\n  mpirun_hostfile:\n")
    assert (resolved.launch.hostfile, resolved.launch.launcher) == (None, "ssh")
    assert resolve_file("mpirun_config: {}\n").launch.hostfile is None


@pytest.mark.needs("accelerate")
def test_all_problems_with_lines_and_closest_keys(problems):
    reported = problems(
        "mixed_precison: fp16\nprocs: two\n\nnum_machine: 2\ntp:\n  a: 1\ndry_run: true\nzzzz: 1\nnodes: -1\nplan:\n  zero: 2\n"
    )
    text = [str(problem) for problem in reported]
    expected = {
        ":1: there is no setting 'mixed_precison'": "write 'mixed_precision'",
        "procs cannot be 'two'": "a whole number from 1 to 4096, or auto",
        ":4: there is no setting 'num_machine'": "write 'num_machines'",
        "tp cannot be a block of keys": ":5",
        ":7: dry_run cannot stand in a file": "say --dry-run",
        ":8: there is no setting 'zzzz'": "paceline explain",
        ":10: there is no setting 'plan'": "write what it holds without it, each at the start of a line: zero",
        "nodes cannot be '-1'": ":9",
    }
    assert len(reported) == len(expected)
    for what, hint in expected.items():
        assert any(what in problem and hint in problem for problem in text), (what, text)


@pytest.mark.needs("accelerate")
def test_a_setting_twice_by_two_names(problems):
    [problem] = problems("nodes: 2\nnum_machines: 2\n")
    assert problem.code == "config-twice" and "run.yaml:1" in problem.why


@pytest.mark.parametrize(
    ("text", "where"),
    [("a: b: c\n", ":1 "), ("procs: 2\n\tcpu: true\n", ":2 "), ("- 1\n", ":1 "), ("procs: 2\ncpu true\n", ":2 ")],
)
def test_what_is_no_yaml_names_the_line(problems, text, where):
    [problem] = problems(text)
    assert problem.code == "config-syntax" and where in problem.what


@pytest.mark.parametrize("text", ['a: "\\UFFFFFFFF"', "[" * 50, "a: " + "{" * 50, "a: *b"])
def test_text_that_breaks_the_yaml_reader(problems, text):
    [problem] = problems(text)
    assert problem.code == "config-syntax"


def test_any_text_is_read_or_refused(tmp_path):
    draws, path = random.Random(0), tmp_path / "run.yaml"
    for _ in range(500):
        path.write_text("".join(draws.choices("abtp:-[]{}#&*!|>'\"%@`,?\n  01\\U\t~<=.", k=draws.randint(1, 30))))
        with contextlib.suppress(ConfigError):
            files.read(str(path))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file") as caught:
        files.read(str(tmp_path / "none.yaml"))
    assert caught.value.code == "config-file"


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        files.read(str(path))


@pytest.mark.needs("accelerate")
def test_default_files(tmp_path):
    env = {"HOME": str(tmp_path)}
    assert default_file(env) is None
    ours = tmp_path / ".config/paceline/config.yaml"
    ours.parent.mkdir(parents=True)
    ours.write_text("tp: 2\n")
    assert default_file(env) == default_file(env, compat="accelerate") == str(ours)
    theirs = tmp_path / ".cache/huggingface/accelerate/default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("use_cpu: true\n")
    assert default_file(env) == str(ours)
    assert default_file(env, compat="accelerate") == str(theirs)
    assert default_file({**env, "XDG_CONFIG_HOME": str(tmp_path / "x")}) is None
    assert resolve_launch((), env).run.axes["tp"] == 2
    resolved = resolve_launch([Given("compat", "accelerate", "command line", "--compat")], env)
    assert (resolved.run.axes["tp"], resolved.run.cpu) == (1, True)


@pytest.mark.needs("accelerate")
def test_hf_home_holds_accelerates_json(tmp_path):
    path = tmp_path / "accelerate/default_config.json"
    path.parent.mkdir()
    path.write_text("{}")
    assert default_file({"HF_HOME": str(tmp_path), "HOME": str(tmp_path)}, compat="accelerate") == str(path)


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "config.yaml"
    write(file, "procs: 2\n")
    file.chmod(0o600)
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    write(link, "procs: 3\n")
    assert link.is_symlink() and file.read_text() == "procs: 3\n" and file.stat().st_mode & 0o777 == 0o600

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(file, "procs: 4\n")
    assert file.read_text() == "procs: 3\n" and len(list(tmp_path.iterdir())) == 2
