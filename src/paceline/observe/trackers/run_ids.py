"""`RunIds`: remembers which run each tracker writes, so that a run that is started again goes on in the same ones.

runs/digits/trackers.json      {"version": 1, "launched": "a1b2", "ids": {"mlflow": "6f0c...", "wandb": "x7k2p1qd"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from paceline.base import env
from paceline.base.files import replace_text
from paceline.base.log import logger

VERSION = 1


class RunIds:
    """The file of one run's ids.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trackers.json"

    def earlier(self, *, goes_on: bool) -> dict[str, str]:
        """Ids by tracker that this process goes on with.

        Args:
            goes_on: whether training goes on from a checkpoint. Processes that `paceline launch` has started again go on
                in any case, since they are the same run.
        """
        if not self.path.exists():
            return {}
        record = json.loads(self.path.read_text(encoding="utf-8"))
        if record.get("version") != VERSION:
            logger("observe").warning("%s is of another version: trackers begin new runs.", self.path)
            return {}
        is_same_launch = bool(_launched()) and record["launched"] == _launched()
        if not (goes_on or is_same_launch):
            return {}
        return dict(record["ids"])

    def write(self, ids: Mapping[str, str]) -> None:
        """Keeps the ids of this process's runs, beside those of the same launch. The file is replaced as a whole."""
        record = {"version": VERSION, "launched": _launched(), "ids": {**self.earlier(goes_on=False), **ids}}
        replace_text(self.path, json.dumps(record, indent=1) + "\n")


def _launched() -> str:
    """Name of the launched run; empty where no launcher named it."""
    return str(env.get("PACELINE_RUN"))
