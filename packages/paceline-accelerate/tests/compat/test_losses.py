"""Losses with shuffling and dropout: step by step those of the real accelerate, and after a resume those of the whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_losses.json").read_text(encoding="utf-8"))
STOP = {1: 8, 2: 4}  # steps, in the second epoch


def served(folder: str, stop: int):
    """All losses; and those of loops that are saved after `stop` steps and resumed."""
    import losses_program

    resumed = {}
    for name, options in losses_program.LOOPS.items():
        # A batch that is split makes twice as many steps of an epoch as the program counts.
        if name != "split":
            place = f"{folder}/{name}"
            losses_program.loop(folder=place, stop=stop, epochs=2, **options)
            resumed[name] = losses_program.loop(folder=place, stop=stop, resume=True, **options)
    return losses_program.everything(folder), resumed


def of_all_sizes(folder: Path) -> dict[int, list[Any]]:
    """What each rank returns, by the number of ranks. These are forks of a process that has transformers already."""
    import sys

    from paceline.compat import install

    install(["accelerate"])
    import transformers.trainer  # noqa: F401  (looks for accelerate when it is imported)

    sys.path.insert(0, str(REFERENCE))
    found = {}
    for size, stop in STOP.items():
        place = folder / str(size)
        place.mkdir()
        found[size] = run_ranks(served, world=size, args=(str(place), stop), group=size != 1, timeout_s=200)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, list[Any]]:
    return run_ranks(of_all_sizes, world=1, args=(tmp_path_factory.mktemp("losses"),), group=False, timeout_s=400)[0]


@pytest.fixture(params=STOP)
def run(request, runs) -> tuple[int, list[Any]]:
    return request.param, runs[request.param]


@pytest.mark.timeout(420)
def test_as_recorded(run) -> None:
    size, ranks = run
    for (ours, _), theirs in zip(ranks, RECORDED[str(size)], strict=True):
        assert ours.keys() == theirs.keys()
        for name, losses in theirs.items():
            assert ours[name] == pytest.approx(losses, rel=1e-5), name


def test_a_resumed_loop_goes_on_as_the_whole_one(run) -> None:
    size, ranks = run
    for whole, resumed in ranks:
        for name, losses in resumed.items():
            assert losses == pytest.approx(whole[f"loop, {name}"][STOP[size] :], rel=1e-5), name
