"""Cases of one plan in one group of processes: forming groups, and what torch works out at first use, is paid once.

    def job_of(case: Case, plan: Plan) -> Job:          # the arguments are those of the test
        return Job(str(plan), ours, world=2, args=(case, plan))

    def test_equals_one_process(case: Case, plan: Plan, one_group: OneGroup) -> None:
        one_group.check(job_of, lambda ranks: compare(ranks, reference(case)))

The first case runs all those that were chosen and share its group, one after the other in the same processes. A case whose
group failed, or whose numbers are wrong, runs again alone: a fault is shown by the case that has it, and a case that fails
behind others only is told apart. `pytest -k` with one case runs that case alone from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from paceline.testing import RankFailed, run_ranks

# Of all cases of a group. pytest leaves 240 s to the case that runs them, which may then have to run alone.
GROUP_TIMEOUT_S = 150
ALONE_TIMEOUT_S = 80

Results = dict[str, list[Any]]  # node id -> what each rank returned


@dataclass(frozen=True)
class Job:
    """What a case has `run_ranks` do. Cases of a test that differ in `fn` and `args` alone share a group."""

    group_name: str
    fn: Callable[..., Any]
    world: int
    args: tuple[Any, ...] = ()
    has_group: bool = True

    def run_alone(self) -> list[Any]:
        """Returns what each rank returned."""
        return run_ranks(self.fn, self.world, args=self.args, timeout_s=ALONE_TIMEOUT_S, group=self.has_group)


class OneGroup:
    """The group of a case.

    Args:
        results: of the groups of this module that have run already, by their test and name.
    """

    def __init__(self, request: pytest.FixtureRequest, results: dict[str, Results]) -> None:
        self._item = request.node
        self._items = request.session.items
        self._results = results

    def check(self, job_of: Callable[..., Job], checked: Callable[[list[Any]], None]) -> None:
        """Checks what the ranks return for this case.

        Args:
            job_of: arguments of a case -> its job.
            checked: raises where what the ranks have returned is wrong.
        """
        job = job_of(**self._item.callspec.params)
        name = f"{self._item.originalname} {job.group_name} {job.world}"
        if name not in self._results:
            self._results[name] = self._run(job_of, job)
        ranks = self._results[name].pop(self._item.nodeid, None)
        if ranks is None:
            checked(job.run_alone())
            return
        try:
            checked(ranks)
        except Exception as error:
            checked(job.run_alone())
            pytest.fail(f"alone it passes, and behind other cases in the same processes it fails: {error}")

    def _run(self, job_of: Callable[..., Job], own: Job) -> Results:
        """Runs the cases of a group that were chosen; nothing is returned where it fails, or where there is one alone."""
        jobs = {}
        for item in self._items:
            if getattr(item, "function", None) is self._item.function:
                job = job_of(**item.callspec.params)
                if (job.group_name, job.world) == (own.group_name, own.world):
                    jobs[item.nodeid] = job
        if len(jobs) == 1:
            return {}
        calls = [partial(job.fn, *job.args) for job in jobs.values()]
        try:
            ranks = run_ranks(
                one_after_the_other, own.world, args=(calls,), timeout_s=GROUP_TIMEOUT_S, group=own.has_group
            )
        except RankFailed:
            return {}
        return {nodeid: list(returned) for nodeid, *returned in zip(jobs, *ranks, strict=True)}


def one_after_the_other(calls: list[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


@pytest.fixture(scope="module")
def results_of_groups() -> dict[str, Results]:
    return {}


@pytest.fixture
def one_group(request: pytest.FixtureRequest, results_of_groups: dict[str, Results]) -> OneGroup:
    return OneGroup(request, results_of_groups)
