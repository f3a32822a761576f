"""Losses with shuffling and dropout: step by step those of the real accelerate, and after a resume those of the whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_losses.json").read_text(encoding="utf-8"))
STOP = {1: 8, 2: 4}  # steps, in the second epoch


def served(folder: str, stop: int):
    """All losses; and those of loops that are saved after `stop` steps and resumed."""
    import sys

    from paceline.compat import install

    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    import losses_program

    resumed = {}
    for name, options in losses_program.LOOPS.items():
        # A batch that is split makes twice as many steps of an epoch as the program counts.
        if name != "split":
            place = f"{folder}/{name}"
            losses_program.loop(folder=place, stop=stop, epochs=2, **options)
            resumed[name] = losses_program.loop(folder=place, stop=stop, resume=True, **options)
    return losses_program.everything(folder), resumed


@pytest.fixture(scope="module", params=[1, 2])
def run(request, tmp_path_factory):
    size = request.param
    folder = str(tmp_path_factory.mktemp("losses"))
    return size, run_ranks(served, world=size, args=(folder, STOP[size]), group=size != 1, timeout_s=200)


@pytest.mark.timeout(240)
def test_as_recorded(run) -> None:
    size, ranks = run
    for (ours, _), theirs in zip(ranks, RECORDED[str(size)], strict=True):
        assert ours.keys() == theirs.keys()
        for name, losses in theirs.items():
            assert ours[name] == pytest.approx(losses, rel=1e-5), name


@pytest.mark.timeout(240)
def test_a_resumed_loop_goes_on_as_the_whole_one(run) -> None:
    size, ranks = run
    for whole, resumed in ranks:
        for name, losses in resumed.items():
            assert losses == pytest.approx(whole[f"loop, {name}"][STOP[size] :], rel=1e-5), name
