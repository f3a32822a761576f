"""Would `make test` have run the tests that notice a change? Asks the history: `python dev/replay.py FROM..TO [--run N]`.

A commit that changes our sources and a file of tests says by itself which tests belong to the change. The change of the
sources alone must choose these files. The graph is that of today; files that were moved since are found by `MOVED`, or by the
end of their paths.

With `--run N`, those of the newest N commits that add a test are also tried: their change of the sources is taken back from
the sources of today, in a copy of the repository, and the tests that came with it are run there as `make test-all` runs them.
Where the change does not apply any more, the commit says nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from choose_tests import FilesOfTests, Sources, chosen, git  # noqa: E402

# Where the folders of 2026-11-28 lie since the cut into five parts; `src/paceline/` comes last.
MOVED = {
    "src/paceline/compat/accelerate/": "packages/paceline-accelerate/src/paceline_accelerate/",
    "src/paceline/compat/deepspeed/": "packages/paceline-deepspeed/src/paceline_deepspeed/",
    "src/paceline/verify/": "packages/paceline-lens/src/paceline_lens/verify/",
    "src/paceline/watch/": "packages/paceline-lens/src/paceline_lens/watch/",
    "src/paceline/tune/": "packages/paceline-lens/src/paceline_lens/tune/",
    "src/paceline/doctor/": "packages/paceline-hosts/src/paceline_hosts/doctor/",
    "src/paceline/launch/launchers/": "packages/paceline-hosts/src/paceline_hosts/launchers/",
    "src/paceline/": "packages/paceline/src/paceline/",
}


@cache
def of_today(name: str) -> str:
    """Where a file is today; "" if it is not found."""
    for before, now in {"": "", **MOVED}.items():
        moved = now + name.removeprefix(before)
        if name.startswith(before) and (ROOT / moved).exists():
            return moved
    for words in (2, 1):
        tail = "/".join(Path(name).parts[-words:])
        found = [path for path in git("ls-files", f"*/{tail}") if Path(path).parts[0] in ("packages", "tests")]
        if len(found) == 1:
            return found[0]
    return ""


def changes(revisions: str) -> list[tuple[str, set[str], set[str]]]:
    """Commits, newest first, with the sources and the files of tests that each changes, as they are called today."""
    rows = []
    for commit in git("log", "--no-merges", "--format=%h", revisions):
        files = {of_today(name) for name in git("show", "--name-only", "--format=", commit)}
        sources = {name for name in files if "/src/" in name and name.endswith(".py")}
        tests = {name for name in files if "/src/" not in name and Path(name).name.startswith("test_")}
        if sources and tests:
            rows.append((commit, sources, tests))
    return rows


def added_tests(commit: str) -> list[str]:
    """The names of the tests that a commit adds."""
    lines = git("show", "--format=", "--unified=0", commit, "--", "tests", "packages/*/tests")
    return sorted(match[1] for line in lines if (match := re.match(r"\+def (test_\w+)", line)))


def notices(commit: str, tests: set[str]) -> str:
    """What the tests of a commit say to the sources of today without its change: "noticed", "not noticed" or why nothing."""
    patch = subprocess.run(
        ["git", "diff", f"{commit}~", commit, "--", "packages/*/src/*.py"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    take_back = ["git", "apply", "--reverse"]
    if not patch or subprocess.run([*take_back, "--check"], cwd=ROOT, input=patch, capture_output=True).returncode:
        return "does not apply any more"
    with tempfile.TemporaryDirectory() as folder:
        git("worktree", "add", "--quiet", "--detach", folder, "HEAD")
        try:
            subprocess.run(take_back, cwd=folder, input=patch, check=True)
            words = ["-q", "-x", "-m", "not long", *sorted(tests)]
            added = [*words, "-k", " or ".join(added_tests(commit))]
            # The tests that were added may be long ones, or have other names today.
            for tried in (added, words):
                code = _pytest(folder, tried)
                if code not in (0, 5):
                    break
            fails_anyway = code not in (0, 5) and _pytest(str(ROOT), tried) != 0
        finally:
            git("worktree", "remove", "--force", folder)
    if fails_anyway:
        return "fails with the change, too"
    return {0: "NOT NOTICED", 1: "noticed", 2: "noticed by an import"}.get(code, f"pytest ended with {code}")


def _pytest(folder: str, words: list[str]) -> int:
    paths = [*map(str, Path(folder).glob("packages/*/src")), f"{folder}/tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions")
    parser.add_argument("--run", type=int, default=0, metavar="N")
    args = parser.parse_args()
    tests = FilesOfTests(Sources())
    needs = {str(file.relative_to(ROOT)): tests.needs(file) for file in tests.files}
    num_missed = 0
    num_files = 0
    rows = changes(args.revisions)
    if args.run:
        rows = rows[: args.run]
    for commit, sources, of_commit in rows:
        words = chosen(sources, needs)
        files = set(needs) if words is None else {word.partition("::")[0] for word in words}
        missed = of_commit - files
        num_files += len(files)
        num_missed += bool(missed)
        outcome = notices(commit, of_commit) if args.run and added_tests(commit) else ""
        print(
            commit,
            f"{len(files):4d} of {len(needs)} files",
            outcome,
            "MISSED: " + " ".join(sorted(missed)) if missed else "",
            flush=True,
        )
    if rows:
        print(
            f"{len(rows)} commits, {len(rows) - num_missed} chose all of their tests; {num_files / len(rows):.0f} files each"
        )


if __name__ == "__main__":
    main()
