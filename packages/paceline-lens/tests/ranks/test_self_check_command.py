"""`paceline test`: a real run on two processes, started as a user's script is."""

import subprocess

from warm_python import executable


def run(*words):
    return subprocess.run([executable(), "-m", "paceline", *words], capture_output=True, text=True, timeout=100)


def test_this_machine_passes():
    done = run("test", "--cpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["ok", name] for name in ("group:", "all_reduce:", "data:", "gradients:", "weights:")
    ]
    assert lines[-1] == "All is well on 2 processes."


def test_a_check_that_fails_says_which():
    done = run("launch", "--cpu", "-n", "1", "-m", "paceline_lens.cli._self_check", "--procs", "2")
    assert done.returncode == 1
    assert "FAILED  group: 1 of 2 processes meet" in done.stdout and "All is well" not in done.stdout


def test_a_range_of_nodes_counts_the_processes_of_those_that_came():
    done = run("test", "--cpu", "--procs", "2", "--nodes", "1:3", "--main-address", "127.0.0.1", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "-m paceline_lens.cli._self_check --procs 2:6" in done.stdout
    done = run("launch", "--cpu", "-n", "2", "-m", "paceline_lens.cli._self_check", "--procs", "2:6")
    assert done.returncode == 0, done.stderr
    assert "ok      group: 2 of 2 to 6 processes meet" in done.stdout


def test_dry_run_shows_the_launch():
    done = run("test", "--cpu", "--procs", "3", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "-m paceline_lens.cli._self_check --procs 3" in done.stdout
