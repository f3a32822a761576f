"""`accelerate.test_utils.training`: a data set and a model of a straight line, for tests that train."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import nn


class RegressionDataset:
    """Samples `{"x": ..., "y": ...}` of the line `y = a x + b`, with a little noise.

    Args:
        a, b: slope and intercept of the line.
        length: number of samples.
        seed: seed of the values; with None they differ each time.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = numpy.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=(length,)).astype(numpy.float32)
        noise = generator.normal(scale=0.1, size=(length,)).astype(numpy.float32)
        self.y = a * self.x + b + noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(nn.Module):
    """The line `a x + b`, whose two parameters have no dimensions.

    Args:
        a, b: initial values of slope and intercept.
        double_output: has no effect, as under accelerate.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.first_batch = True

    def forward(self, x: Any = None) -> Any:
        """Returns `a x + b`. The first call prints the dtypes, which a test reads to check the precision."""
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")
            self.first_batch = False
        return x * self.a + self.b
