"""`bf16`: bfloat16 has the range of float32, and needs no loss scale."""

from __future__ import annotations

import torch

from paceline.precision.policy import Precision

PRECISION = Precision("bf16", torch.bfloat16)
