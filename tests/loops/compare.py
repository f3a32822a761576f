"""Compares what a program did in the ranks with what plain PyTorch does, and says what came of it.

An outcome is "equal", "refused" (a coded error of ours, the same on all ranks) or "failed": other numbers, an error without a
code, ranks that differ, a rank that did not end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

NUMBERS = ("losses", "norms", "metrics", "gradients")
# Sums in another order, through at most 30 steps of Adam, whose division enlarges what is near zero.
TOLERANCE = 1e-7
LOW_PRECISION_TOLERANCE = 0.1
# In float32. On one process the reference computes the same products; on several, values near the middle of two numbers of
# float8 are rounded to the other one, and with the last two recipes a scale spans the rows of a rank (docs: 2e-7, 8e-9, 2e-3
# and 7e-2 for a gradient). Of 32 combinations on two processes the largest differences were 1e-7, 1e-4, 1e-3 and 5e-3.
FLOAT8_ALONE = 1e-5
FLOAT8_TOLERANCES = {"rowwise_with_gw_hp": 1e-4, "mxfp8": 1e-3, "rowwise": 2e-2, "tensorwise": 1e-1}
# On three ranks, and with an estimated divisor, a loss is divided by another number than a power of two times that of one
# process. Scales are powers of two, so gradients are rounded elsewhere (docs: 4e-2).
FLOAT8_ROUNDED_ELSEWHERE = 5e-2
FLOAT8_BY_FEATURES = 4e-2  # tp: a scale of a row spans the features of one rank; 2.6e-2 in a sum of gradients was seen


@dataclass(frozen=True)
class Outcome:
    """What came of one program under one plan.

    Attributes:
        kind: see above.
        what: the code of an error of ours; else the first thing that is wrong, without numbers, so that two programs that
            fail in the same way have the same `what`.
        detail: the numbers, or the last lines of the traceback.
    """

    kind: Literal["equal", "refused", "failed"]
    what: str = ""
    detail: str = ""

    def same_way(self, other: Outcome) -> bool:
        """Whether a smaller program that ended like this shows the same fault."""
        return (self.kind, self.what) == (other.kind, other.what)


EQUAL = Outcome("equal")
# Errors that say that our own numbers are wrong. A drawn program does nothing that could lead to them.
FAULTS = ("replicas-differ",)


def outcome(results: Sequence[Mapping[str, Any] | None], want: Mapping[str, Any], tolerance: float) -> Outcome:
    """Judges the results of all ranks; None stands for a rank that sent none."""
    errors = {rank: got for rank, got in enumerate(results) if got is not None and "error" in got}
    if errors:
        return _of_errors(errors, results)
    missing = [rank for rank, got in enumerate(results) if got is None]
    if missing:
        return Outcome("failed", "hang or death", f"ranks {missing} of {len(results)} did not end")
    for rank, got in enumerate(results):
        assert got is not None
        different = difference(got, want, tolerance)
        if different is not None:
            what, detail = different
            return Outcome("failed", what, f"rank {rank}: {detail}")
    return EQUAL


def _of_errors(errors: Mapping[int, Mapping[str, Any]], results: Sequence[Mapping[str, Any] | None]) -> Outcome:
    first = errors[min(errors, key=lambda rank: errors[rank]["at"])]
    if first["code"] is None:
        return Outcome("failed", f"error: {first['error']}", first["trace"])
    codes = {error["code"] for error in errors.values()}
    # A rank that waits for one that raised gets an error of its own, or is ended.
    others_finished = [rank for rank, got in enumerate(results) if got is not None and "error" not in got]
    if others_finished:
        return Outcome("failed", f"refused on some ranks: {first['code']}", first["trace"])
    if first["code"] in FAULTS:
        return Outcome("failed", first["code"], first["text"])
    if codes == {first["code"]} and len(errors) == len(results):
        return Outcome("refused", first["code"], first["text"])
    return Outcome("failed", f"refused on some ranks: {first['code']}", first["trace"])


def difference(got: Mapping[str, Any], want: Mapping[str, Any], tolerance: float) -> tuple[str, str] | None:
    """The first thing that differs, or None: the kind of number, and both values."""
    for name in NUMBERS:
        if len(got[name]) != len(want[name]):
            return f"number of {name}", f"{len(got[name])} for {len(want[name])}"
        for place, (own, right) in enumerate(zip(got[name], want[name], strict=True)):
            if not _close(own, right, tolerance):
                return (
                    name,
                    f"{name}[{place}] is {own:.9g} for {right:.9g}; {name}: {_short(got[name])} for {_short(want[name])}",
                )
    for number, (own, right) in enumerate(zip(got["weights"], want["weights"], strict=True)):
        if set(own) != set(right):
            return "names of weights", f"model{number}: {sorted(set(own) ^ set(right))}"
        for name in right:
            if not _close_tensors(own[name], right[name], tolerance):
                return "weights", f"model{number}.{name} differs by {_distance(own[name], right[name]):.3g}"
    if got.get("rates") is not None and got["rates"] != want["rates"]:
        return "learning rates", f"{got['rates']} for {want['rates']}"
    if got.get("states") is not None:
        return _different_states(got["states"], want["states"], tolerance)
    return None


def _different_states(got: Sequence[Any], want: Sequence[Any], tolerance: float) -> tuple[str, str] | None:
    for number, (own, right) in enumerate(zip(got, want, strict=True)):
        if len(own) != len(right):
            return "optimizer states", f"optimizer{number}: {len(own)} parameters for {len(right)}"
        for place, (own_state, right_state) in enumerate(zip(own, right, strict=True)):
            where = f"optimizer{number}, parameter {place}"
            if set(own_state) != set(right_state):
                return "optimizer states", f"{where}: {sorted(own_state)} for {sorted(right_state)}"
            for name, value in right_state.items():
                mine = own_state[name]
                equal = _close_tensors(mine, value, tolerance) if isinstance(value, torch.Tensor) else mine == value
                if not equal:
                    return "optimizer states", f"{where}: {name} is {_brief(mine)} for {_brief(value)}"
    return None


def _close(own: float, right: float, tolerance: float) -> bool:
    if math.isnan(own) or math.isnan(right):
        return math.isnan(own) and math.isnan(right)
    return abs(own - right) <= tolerance * (1 + abs(right))


def _close_tensors(own: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    if own.shape != right.shape:
        return False
    # What rounds to a scale of the whole tensor is as wrong in its small elements as in its large ones.
    largest = float(right.double().abs().nan_to_num().max()) if right.numel() else 0.0
    absolute = tolerance * max(1.0, largest)
    return torch.allclose(own.double(), right.double(), rtol=tolerance, atol=absolute, equal_nan=True)


def _distance(own: torch.Tensor, right: torch.Tensor) -> float:
    return float((own.double() - right.double()).abs().max()) if own.shape == right.shape else math.inf


def _brief(value: Any) -> str:
    return f"{value.flatten()[:3].tolist()}" if isinstance(value, torch.Tensor) else repr(value)


def _short(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"
