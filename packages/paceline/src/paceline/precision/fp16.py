"""`fp16`: float16 ends at 65504 and near 6e-8, so gradients are kept in range by a loss scale."""

from __future__ import annotations

import torch

from paceline.precision.policy import Precision

PRECISION = Precision("fp16", torch.float16, scales=True)
