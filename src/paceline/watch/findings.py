"""Sentences about what is wrong with a run, each with its evidence; pure.

A finding is {kind, level, text, fix, ranks, evidence, stops}:

kind        which one it is, such as "slow-loader"; stable
level       "error", "warning" or "note"
text        one or two sentences
fix         what to do, "" where nothing is known
ranks       those that cause it; [] for all, or none
evidence    name -> number or text: what the sentence was made from
stops       whether the run stands still because of it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def findings(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is wrong, the worst first; [] where nothing is."""
    return []
