"""One life of a run that logs by one tracker: `python client_program.py NAME FOLDER first|again`. Prints its run's id as JSON.

The first life fails after step 4; the second goes on in the same run, from step 3, as after a resume.
"""

from __future__ import annotations

import json
import math
import sys

import numpy as np

from paceline.observe.trackers.group import Trackers

OPTIONS = {"comet_ml": {"online": False}, "swanlab": {"mode": "offline"}, "wandb": {"mode": "offline"}}
CONFIG = {"lr": 0.1, "model": {"depth": 3}, "optimizer": "sgd"}


def main(name: str, folder: str, life: str) -> None:
    trackers = Trackers([name], folder)
    options = {name: OPTIONS[name]} if name in OPTIONS else None
    trackers.start("digits", CONFIG, options, goes_on=life == "again")
    tracker = trackers.get_tracker(name)
    first_step = 0 if life == "first" else 3
    for step in range(first_step, first_step + 5):
        trackers.log({"loss": 1.0 / (step + 1), "train/accuracy": step / 10, "steps": step}, step=step)
    if life == "first":
        trackers.log({"odd": math.nan, "high": math.inf, "low": -math.inf}, step=5)
    else:
        trackers.log({f"many/{number}": number for number in range(300)}, step=9)
        if hasattr(tracker, "log_images"):
            picture = np.zeros((8, 8, 3), dtype=np.uint8)
            tracker.log_images({"picture": picture if name in ("aim", "clearml") else [picture]}, step=10)
    run_id = tracker.run_id()
    native = type(trackers.get_tracker(name, unwrap=True)).__name__
    trackers.finish("failed" if life == "first" else "finished")
    print(json.dumps({"id": run_id, "native": native}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
