"""The order of trials in a search, and the arguments of a candidate: no process is started."""

import pytest

from paceline.launch.job import Target
from paceline_lens.tune.search import Candidate, Measured, SearchProgress, Space, Tuning
from paceline_lens.tune.tuner import Tuned, Tuner, with_arguments

CANDIDATES = [Candidate(zero, 8, 1) for zero in range(3)]


class SimulatedTuner(Tuner):
    """Runs no process: every trial takes the same time, so that all candidates are contenders."""

    def __init__(self):
        super().__init__(None, lambda *_: None, lambda *_: {}, self.keep)
        self.tried = []
        self.stored = {}

    def keep(self, candidate, measured):
        self.stored[candidate.name] = measured

    def _try(self, tuned, candidate):
        self.tried.append(candidate)
        return Measured("measured", 1.0, 0.1, 8)


def search(earlier):
    tuner = SimulatedTuner()
    tuned = Tuned(None, 1, Space((), (), ()), {}, CANDIDATES, [], SearchProgress(Tuning(early_stop=20), {}))
    tuner._search(tuned, earlier)
    return tuner, tuned


def test_close_candidates_run_a_second_time_also_in_a_search_that_goes_on():
    first, tuned = search({})
    assert first.tried == [*CANDIDATES, *CANDIDATES]
    assert tuned.again == 3
    interrupted = {CANDIDATES[0].name: Measured("measured", 1.0, 0.1, 8)}
    second, tuned = search(interrupted)
    assert second.tried == [*CANDIDATES[1:], *CANDIDATES]
    assert (tuned.reused, tuned.again) == (1, 3)


def test_a_search_that_had_come_to_its_end_runs_nothing_again():
    first, _ = search({})
    second, tuned = search(first.stored)
    assert second.tried == []
    assert (tuned.reused, tuned.again) == (3, 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--size", "8", "--fast"], ["--size", "4", "--fast"]),
        (["--size=8"], ["--size=4"]),
        (["--fast"], ["--fast", "--size", "4"]),
        (["--size"], ["--size", "4"]),
        (["--size", "--fast"], ["--size", "4", "--fast"]),
        (["--size", "8", "--size", "16"], ["--size", "8", "--size", "4"]),
    ],
    ids=["next word", "same word", "absent", "without a value at the end", "without a value", "twice: the last counts"],
)
def test_a_candidate_s_value_in_the_arguments_of_the_script(words, expected):
    candidate = Candidate(0, micro=4, accumulate=1)
    target = with_arguments(Target("script", "train.py", tuple(words)), candidate, {"micro": "--size"})
    assert list(target.args) == expected
