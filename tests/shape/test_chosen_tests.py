"""`make test` runs the tests that a change can reach (`tests/choose_tests.py`): none that would notice it is left out."""

from __future__ import annotations

import choose_tests
import pytest
from choose_tests import ROOT, FilesOfTests, Sources, chosen


@pytest.fixture(scope="module")
def needs() -> dict[str, set[str]]:
    tests = FilesOfTests(Sources())
    return {str(file.relative_to(ROOT)): tests.needs(file) for file in tests.files}


# A file that changes -> a file of tests that would notice. The ways differ: an import, a lazy name, a module that is named by
# text, an entry point of the core, one of a part that the test names, a command, a script beside the tests, a helper.
REACHED = {
    "packages/paceline/src/paceline/optim/clip.py": "packages/paceline-large/tests/ranks/test_parity_plans.py",
    "packages/paceline/src/paceline/data/skip.py": "packages/paceline/tests/ranks/test_accelerator.py",
    "packages/paceline/src/paceline/parallel/data/shard_applied.py": "packages/paceline/tests/ranks/test_shard.py",
    "packages/paceline/src/paceline/precision/bf16.py": "packages/paceline-large/tests/ranks/test_parity_plans.py",
    "packages/paceline-hosts/src/paceline_hosts/launchers/slurm/srun.py": "tests/hosts/test_slurm.py",
    "packages/paceline-lens/src/paceline_lens/cli/ps.py": "packages/paceline-lens/tests/unit/cli/test_watch_command.py",
    "packages/paceline-accelerate/src/paceline_accelerate/operations.py": (
        "packages/paceline-accelerate/tests/compat/test_scripts.py"
    ),
    "packages/paceline-deepspeed/src/paceline_deepspeed/engine.py": (
        "packages/paceline-deepspeed/tests/compat/test_deepspeed_scripts.py"
    ),
    "packages/paceline-lens/src/paceline_lens/watch/page/page.js": "tests/browser/test_page.py",
    "packages/paceline-accelerate/tests/compat/reference/recorded.json": (
        "packages/paceline-accelerate/tests/compat/test_reference.py"
    ),
    "tests/parity_models.py": "packages/paceline-large/tests/ranks/test_parity_plans.py",
}


@pytest.mark.parametrize(("changed", "test"), REACHED.items())
def test_a_change_reaches_the_tests_that_would_notice_it(changed: str, test: str, needs) -> None:
    assert (ROOT / changed).exists()
    assert test in (chosen({changed}, needs) or [])


def test_a_change_of_one_part_does_not_reach_the_others(needs) -> None:
    words = chosen({"packages/paceline-lens/src/paceline_lens/tune/search.py"}, needs)
    assert words is not None
    assert "tests/hosts/test_slurm.py" not in words
    assert "packages/paceline/tests/ranks/test_shard.py" not in words


def test_a_change_of_a_page_runs_this_page(needs) -> None:
    words = chosen({"docs/how-to/ray.md"}, needs)
    assert words is not None
    cases = [word for word in words if word.startswith(choose_tests.PAGE_CASES)]
    assert cases == [f"{choose_tests.PAGE_CASES}::test_a_page_runs[docs/how-to/ray.md]"]
    assert "tests/docs/test_site.py" in words


@pytest.mark.parametrize("changed", ["constraints.txt", "conftest.py", "packages/paceline/pyproject.toml", "Makefile"])
def test_a_change_that_concerns_all_runs_all(changed: str, needs) -> None:
    assert chosen({changed}, needs) is None


def test_reports_and_the_log_reach_nothing_but_what_always_runs(needs) -> None:
    words = chosen({"CHANGELOG.md", "dev/reports/2026-11-29-parts.md", ".github/workflows/ci.yml"}, needs)
    assert words and all(word.startswith(choose_tests.ALWAYS) for word in words)
