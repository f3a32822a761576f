"""`paceline doctor` itself: which hosts, in which rounds, what it prints, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import warm_python

from paceline.base.errors import ConfigError
from paceline.cli.main import main
from paceline.config.given import Given
from paceline.config.sources import resolve_launch
from paceline_hosts.doctor import units
from paceline_hosts.doctor.facts import (
    AllReduce,
    AllReduces,
    ClockFacts,
    ConnectionFacts,
    Examination,
    HostFacts,
    LinkFacts,
    Network,
    Processors,
    Versions,
)
from paceline_hosts.doctor.finding import Finding
from paceline_hosts.doctor.hosts import AGENT, reach
from paceline_hosts.doctor.report import DoctorReport, matrix
from paceline_hosts.doctor.rounds import SECONDS, rounds, sizes, slow_rounds


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_each_ordered_pair_is_measured_once(count: int) -> None:
    hosts = [f"node{number}" for number in range(count)]
    seconds, plan = rounds(hosts, budget_s=60.0)
    assert sorted(pair for pairs in plan for pair in pairs) == sorted(permutations(hosts, 2))
    for pairs in plan:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy)), "a host takes part in two measurements at the same time"
    assert seconds == SECONDS


def test_the_time_of_measurements_is_bounded() -> None:
    seconds, plan = rounds([f"node{number}" for number in range(40)], budget_s=30.0)
    assert seconds < SECONDS and len(plan) == 78
    seconds, plan = rounds([f"node{number}" for number in range(400)], budget_s=15.0)
    assert (seconds, len(plan)) == (0.1, 60)
    assert rounds(["node0"], 15.0)[1] == []


def test_slow_links_are_measured_again() -> None:
    _, plan = rounds(["a", "b", "c"], 15.0)
    links = {pair: LinkFacts(*pair, 1e-4, 1e9) for pairs in plan for pair in pairs}
    assert slow_rounds(plan, links) == []
    links["a", "c"] = LinkFacts("a", "c", 1e-4, 0.4e9)
    assert slow_rounds(plan, links) == [[("a", "c")]]
    assert slow_rounds(plan, {}) == []


def test_sizes_of_all_reduces() -> None:
    assert sizes(None, has_devices=False) == [4096, 65536, 1 << 20, 16 << 20]
    assert sizes(6e6, has_devices=False) == [4096, 65536, 1 << 20]
    assert sizes(1.0, has_devices=True) == [4096]
    assert sizes(10e9, has_devices=True)[-1] == 256 << 20


def test_units() -> None:
    assert [units.rate(value) for value in (1.25e9, 5.9e6, 1e3)] == ["10 Gbit/s", "47.2 Mbit/s", "8 kbit/s"]
    assert [units.seconds(value) for value in (2.5, 0.03, 1.5e-5)] == ["2.5 s", "30 ms", "0.015 ms"]
    assert [units.num_bytes(value) for value in (64 << 20, 1536, 12)] == ["64 MiB", "1.5 KiB", "12 bytes"]


def settings(*given: Given):
    return resolve_launch(given, {}, search=False)


def hostfile(folder: Path) -> Given:
    (folder / "hosts").write_text("node7 slots=1\nnode8 slots=1\nlocalhost slots=1\n")
    return Given("hostfile", str(folder / "hosts"), "command line", "--hostfile")


def test_hosts_of_a_hostfile(tmp_path: Path) -> None:
    some = Given("include", "node8@localhost", "command line", "--include")
    words = Given("launcher_args", "-F config", "command line", "--launcher-args")
    reached = reach(settings(hostfile(tmp_path), some, words), {"NCCL_DEBUG": "INFO", "SECRET": "x"})
    assert reached.names == ("node8", "localhost")
    assert reached.env == {"NCCL_DEBUG": "INFO"}
    remote, here = reached.commands
    assert remote[:3] == ("ssh", "-F", "config") and AGENT in remote[-1]
    assert here[0] == "sh" and AGENT in here[-1]


def test_hosts_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[host-filter\]"):
        reach(settings(hostfile(tmp_path), Given("include", "node9", "command line", "--include")), {})
    with pytest.raises(ConfigError, match=r"\[host-flags\]"):
        reach(settings(Given("include", "node9", "command line", "--include")), {})


def test_this_host_alone() -> None:
    reached = reach(settings(), {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"})
    assert len(reached.names) == 1 and reached.by == ""


def test_an_allocation_of_slurm() -> None:
    reached = reach(settings(), {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"})
    assert (reached.names, reached.by) == (("n1", "n2"), "srun")
    assert reached.commands[1][0] == "srun" and "n2" in reached.commands[1] and "--overlap" in reached.commands[1]


def examination(**changes: object) -> Examination:
    facts = {}
    for name in ("node0", "node1"):
        versions = Versions("0.1.0", "3.11.7", "python", "2.13.0", "", "", ("gloo",))
        facts[name] = HostFacts(versions, Network(name, (), ()), Processors(2, 2), shared_memory=(1 << 33, 1 << 33))
    link = LinkFacts("node0", "node1", 1e-4, 1e9)
    return Examination(
        ("node0", "node1"), {}, facts, {"node0": ClockFacts(0.0, 0.1)}, (ConnectionFacts("node0", "node1", "x", 1, "open"),),
        (link,), AllReduces("gloo", 2, (AllReduce(4096, 0.1),)), **changes,
    )  # fmt: skip


def test_a_report_puts_the_worst_last() -> None:
    silent = replace(examination(), silent={"node1": "folder: it did not answer within 12 s"})
    report = DoctorReport.of(silent, 12.345)
    levels = [finding.level for _, finding in report.findings]
    assert levels == sorted(levels, key=("ok", "warning", "problem").index)
    assert report.exit_code == 1
    lines = report.text().splitlines()
    assert lines[-1].startswith("1 problem, ") and lines[-1].endswith("2 hosts, 12.3 s")
    at = next(number for number, line in enumerate(lines) if line.startswith("problem"))
    assert "folder: it did not answer within 12 s" in lines[at]
    assert lines[at + 1].lstrip().startswith("fix: start without it until it is repaired: `--exclude node1`")
    assert "bandwidth from the host of a row to that of a column" in lines
    as_json = json.loads(json.dumps(report.to_json()))
    assert (as_json["format"], as_json["problems"], as_json["hosts"]) == (1, 1, ["node0", "node1"])
    assert as_json["facts"]["links"][0]["bytes_per_s"] == 1e9
    assert {"check", "level", "code", "where", "what", "fix"} == set(as_json["findings"][0])


def test_no_problem_is_exit_code_0() -> None:
    assert DoctorReport(examination(), (("x", Finding("warning", "x", "node0", "what", "fix")),), 1.0).exit_code == 0
    with pytest.raises(AssertionError, match="a fix belongs to each"):
        Finding("problem", "x", "node0", "what")


def test_a_matrix() -> None:
    links = (LinkFacts("a", "b", 1e-4, 1e9), LinkFacts("b", "long", 1e-4, 1e6))
    assert matrix(["a", "b", "long"], links, lambda link: units.rate(link.bytes_per_s)) == [
        "        a         b      long",
        "  a        8 Gbit/s         -",
        "  b     -            8 Mbit/s",
        "  long  -         -",
    ]


def test_help_does_not_import_torch() -> None:
    program = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    program += (
        "from paceline.cli.main import main; import paceline_hosts.doctor.examine, paceline_hosts.doctor.host.agent; "
    )
    program += "main(['doctor', '--help'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--hostfile" in done.stdout
    assert done.stdout.endswith("False\n")


def test_this_host_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm_python.executable())
    code = main(["doctor", "--json"])
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert code == (1 if report["problems"] else 0)
    checks = {finding["check"]: finding for finding in report["findings"]}
    assert {"devices", "hosts", "limits", "processors", "shared folder", "shared memory", "versions"} <= set(checks)
    assert "torch" in checks["versions"]["what"]
    assert str(tmp_path) in checks["shared folder"]["what"]
    assert "torch and devices" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python.executable())
    assert main(["doctor", "--folder", str(tmp_path / "missing")]) == 1
    out = capsys.readouterr().out
    assert "no such file or directory" in out and "1 problem" in out
