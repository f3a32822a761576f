"""How a classifier did, class by class: the confusion matrix and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paceline.base.errors import DataError


@dataclass(frozen=True)
class ClassRow:
    """One class of a report; the shares are 0 where nothing can be said (no such sample, or never predicted)."""

    label: str
    precision: float
    recall: float
    f1: float
    samples: int


def confusion_matrix(truth: ArrayLike, predicted: ArrayLike, classes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Counts of (true class, predicted class).

    Args:
        truth, predicted: class numbers from 0 to classes - 1, shape [n]; tensors, arrays or lists.

    Shape: [classes, classes]; rows are the truth, columns the prediction.

    Raises:
        DataError: `class-numbers`, for unequal lengths or a number outside the range.
    """
    rows, columns = (np.asarray(numbers, dtype=np.int64).ravel() for numbers in (truth, predicted))
    both = np.concatenate([rows, columns])
    if len(rows) != len(columns) or (len(both) and not (both.min() >= 0 and both.max() < classes)):
        span = f"{both.min()} to {both.max()}" if len(both) else "none"
        raise DataError(
            "class-numbers",
            "these are not the true and predicted classes of the same samples.",
            why=f"{len(rows)} true and {len(columns)} predicted ones, numbers {span}, {classes} classes",
            fix=f"pass as many of the one as of the other, 0 to {classes - 1} (of logits take the argmax)",
        )
    return np.bincount(rows * classes + columns, minlength=classes * classes).reshape(classes, classes)


def per_class(matrix: np.ndarray[Any, Any], labels: list[str]) -> list[ClassRow]:
    """Precision, recall and F1 of each class of a confusion matrix."""
    right, guessed, there = matrix.diagonal(), matrix.sum(axis=0), matrix.sum(axis=1)
    return [
        ClassRow(
            label,
            precision=_share(right[k], guessed[k]),
            recall=_share(right[k], there[k]),
            f1=_share(2 * right[k], guessed[k] + there[k]),
            samples=int(there[k]),
        )
        for k, label in enumerate(labels)
    ]


def accuracy(matrix: np.ndarray[Any, Any]) -> float:
    """Share of all samples that lie on the diagonal."""
    return _share(matrix.trace(), matrix.sum())


def _share(part: np.integer[Any] | int, whole: np.integer[Any] | int) -> float:
    return float(part) / float(whole) if whole else 0.0
