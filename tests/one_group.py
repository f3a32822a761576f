"""Cases of one plan in one group of processes: forming groups, and what torch works out at first use, is paid once.

    def call_of(case: Case, plan: Plan) -> RanksCall:          # the arguments are those of the test
        return RanksCall(str(plan), ours, world=2, args=(case, plan))

    def test_equals_one_process(case: Case, plan: Plan, one_group: OneGroup) -> None:
        one_group.check(call_of, lambda ranks: compare(ranks, reference(case)))

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

Results = dict[str, list[Any] | Exception]  # node id -> what each rank returned, or why the group failed


@dataclass(frozen=True)
class RanksCall:
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

    def check(self, call_of: Callable[..., RanksCall], checked: Callable[[list[Any]], None]) -> None:
        """Checks what the ranks return for this case.

        Args:
            call_of: arguments of a case -> its call.
            checked: raises where what the ranks have returned is wrong.
        """
        call = call_of(**self._item.callspec.params)
        name = f"{self._item.originalname} {call.group_name} {call.world}"
        if name not in self._results:
            self._results[name] = self._run(call_of, call)
        outcome = self._results[name].pop(self._item.nodeid, None)
        if isinstance(outcome, list):
            try:
                checked(outcome)
                return
            except Exception as error:
                outcome = error
        checked(call.run_alone())
        if outcome is not None:
            pytest.fail(f"alone it passes, and behind other cases in the same processes it fails: {outcome}")

    def _run(self, call_of: Callable[..., RanksCall], own: RanksCall) -> Results:
        """Runs the chosen cases of a group, unless there is one alone; of a group that fails, gives the case that did."""
        calls = {}
        for item in self._items:
            if getattr(item, "function", None) is self._item.function:
                call = call_of(**item.callspec.params)
                if (call.group_name, call.world) == (own.group_name, own.world):
                    calls[item.nodeid] = call
        if len(calls) == 1:
            return {}
        functions = {nodeid: partial(call.fn, *call.args) for nodeid, call in calls.items()}
        try:
            ranks = run_ranks(
                one_after_the_other, own.world, args=(functions,), timeout_s=GROUP_TIMEOUT_S, group=own.has_group
            )
        except RankFailed as failed:
            # A group that hangs, or a rank that dies, names no case: the one that has started the group then tells of it.
            notes = getattr(failed.__cause__, "__notes__", [])
            return {next((note for note in notes if note in calls), self._item.nodeid): failed}
        return {nodeid: list(returned) for nodeid, *returned in zip(calls, *ranks, strict=True)}


def one_after_the_other(functions: dict[str, Callable[[], Any]]) -> list[Any]:
    returned = []
    for nodeid, function in functions.items():
        try:
            returned.append(function())
        except Exception as error:
            error.add_note(nodeid)
            raise
    return returned


@pytest.fixture(scope="module")
def results_of_groups() -> dict[str, Results]:
    return {}


@pytest.fixture
def one_group(request: pytest.FixtureRequest, results_of_groups: dict[str, Results]) -> OneGroup:
    return OneGroup(request, results_of_groups)
