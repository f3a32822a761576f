"""`no`: the model computes in its own dtype, which is float32 unless its author said otherwise."""

from __future__ import annotations

from paceline.precision.policy import Precision

PRECISION = Precision("no")
