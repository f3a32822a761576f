"""Which checkpoints the rules of `Keep` keep, of five that were saved one after the other."""

import math

import pytest

from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.keep import Keep

LOSSES = {10: 0.5, 20: 0.2, 30: 0.9, 40: 0.2, 50: math.nan}
SAVED = [(str(step), Manifest(files={}, step=step, metrics={"loss": loss})) for step, loss in LOSSES.items()]


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (Keep(), {10, 20, 30, 40, 50}),
        (Keep(last=2), {40, 50}),
        (Keep(every=20), {20, 40}),
        (Keep(best="loss"), {40}),  # of equal values the newest
        (Keep(best="loss", mode="max"), {30}),
        (Keep(best="accuracy"), set()),  # which none of them has
        (Keep(last=1, every=30, best="loss"), {30, 40, 50}),
    ],
)
def test_the_checkpoints_that_stay(keep: Keep, steps: set[int]) -> None:
    assert keep.stays(SAVED) == {str(step) for step in steps}
