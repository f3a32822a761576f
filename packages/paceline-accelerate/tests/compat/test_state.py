"""The same questions to the real accelerate (recorded) and to the names that we serve: states, operations, utilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from as_recorded import compare

from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_state.json").read_text(encoding="utf-8"))

# Questions that we mean to answer in another way, and why.
OTHERWISE = {
    "accelerators/attribute data_parallel_rank": "the plan knows the rank",
    "tensors/wrapper_pickled": "the module of the function has another name",
}


def served():
    """Runs the program where accelerate's names are served; in a process of its own, which may be changed."""
    import sys

    from paceline.compat import install

    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    import state_program

    return json.loads(json.dumps(state_program.everything()))


@pytest.fixture(scope="module")
def answers():
    """What each rank answers here, by number of processes."""
    return {size: run_ranks(served, world=int(size), group=size != "1", timeout_s=200) for size in RECORDED}


@pytest.mark.parametrize("part", sorted(RECORDED["1"][0]))
@pytest.mark.parametrize("size", sorted(RECORDED))
def test_as_recorded(answers, size: str, part: str) -> None:
    problems = []
    for rank, expected in enumerate(RECORDED[size]):
        answered = answers[size][rank][part]
        assert answered.keys() == expected[part].keys()
        for question, value in expected[part].items():
            where = f"{part}/{question}"
            if where in OTHERWISE:
                continue
            try:
                compare(answered[question], value, where)
            except AssertionError as error:
                problems.append(f"rank {rank}: {str(error).splitlines()[0]}: {answered[question]} and not {value}")
    assert not problems, "\n".join(problems)
