"""What outsiders look for: jobs that anybody can run, decisions with a status, promises with their tests."""

from __future__ import annotations

import re
import runpy
import tomllib
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

import yaml

STATUS = re.compile(
    r"\*Status: (?:accepted on (?P<accepted>DATE)(?:; (?:superseded in part|extended) by LINK on DATE: [^*]+)?"
    r"|superseded by (?P<by>LINK) on DATE; accepted on DATE)\.\*".replace("DATE", r"\d{4}-\d\d-\d\d").replace(
        "LINK", r"\[\d+\]\(\d{4}-[\w-]+\.md\)"
    )
)


def test_each_decision_has_a_status_and_a_date(root: Path) -> None:
    folder = root / "docs" / "adr"
    index = (folder / "index.md").read_text(encoding="utf-8")
    wrong = []
    for path in sorted(folder.glob("[0-9]*.md")):
        status = path.read_text(encoding="utf-8").splitlines()[2]
        matched = STATUS.fullmatch(status)
        if matched is None:
            wrong.append(f"{path.name}: {status}")
            continue
        for number, name in re.findall(r"\[(\d+)\]\(([\w.-]+)\)", status):
            assert name.startswith(f"{int(number):04}-") and (folder / name).is_file(), status
        if matched["by"]:
            (row,) = [line for line in index.splitlines() if f"]({path.name})" in line]
            number = re.findall(r"\d+", matched["by"])[0]
            assert f"(replaced by {number})" in row, row
    assert not wrong, (
        "the line below the title: *Status: accepted on YEAR-MONTH-DAY.* or *superseded by ...*:\n" + "\n".join(wrong)
    )


def jobs(root: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((root / ".github" / "workflows").glob("*.yml")):
        found |= yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def test_each_job_calls_one_entry_of_the_makefile(root: Path) -> None:
    entries = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name, job in jobs(root).items():
        (command,) = [step["run"] for step in job["steps"] if "run" in step]
        program, entry = command.split()[:2]
        assert program == "make" and entry in entries, f"{name}: {command}"


def test_the_matrix_is_what_the_package_says_of_itself(root: Path) -> None:
    from paceline.base.version import TORCH_NEWEST, TORCH_OLDEST

    project = (root / "packages" / "paceline" / "pyproject.toml").read_text(encoding="utf-8")
    matrix = jobs(root)["torch"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    minors = [int(release.split(".")[1]) for release in matrix["torch"]]
    assert minors == list(range(TORCH_OLDEST[1], TORCH_NEWEST[1] + 1))


def test_a_tree_that_is_not_installed_has_the_entry_points_of_one_that_is(root: Path, tmp_path: Path) -> None:
    from_source = runpy.run_path(str(root / "dev" / "from_source.py"))
    folders = list(map(str, from_source["write_metadata"](tmp_path)))
    for file in (root / "packages").glob("*/pyproject.toml"):
        name = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"]
        (written,) = distributions(name=name, path=folders)
        installed = distribution(name)
        assert written.version == installed.version
        assert set(written.entry_points) == set(installed.entry_points)


def test_the_tests_that_hold_the_promises_of_security_are_there(root: Path) -> None:
    text = (root / "SECURITY.md").read_text(encoding="utf-8")
    promises = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(promises) > 5
    for promise in promises:
        paths = re.findall(r"`((?:packages|tests)/[\w/.-]+)`", promise)
        assert paths and all((root / path).is_file() for path in paths), promise


def test_forms_and_hooks_are_read(root: Path) -> None:
    for path in (root / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    # Hooks use the pinned tools of the environment; none is downloaded.
    assert [repository["repo"] for repository in hooks] == ["local"]
    owned = (root / ".github" / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    for line in owned:
        if line and not line.startswith("#") and not line.startswith("*"):
            assert (root / line.split()[0].strip("/")).exists(), line


def test_the_log_has_a_file_a_month(root: Path) -> None:
    names = sorted(path.name for path in (root / "dev" / "LOG").iterdir())
    assert names[-1] == "README.md" and all(re.fullmatch(r"\d{4}-\d\d\.md", name) for name in names[:-1])
    for name in names[:-1]:
        dated = re.findall(
            r"^## (\d{4}-\d\d)-", (root / "dev" / "LOG" / name).read_text(encoding="utf-8"), re.MULTILINE
        )
        assert set(dated) == {name.removesuffix(".md")}, name
