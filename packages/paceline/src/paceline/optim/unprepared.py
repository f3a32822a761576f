"""Says once that a model was never prepared, so that each process trains one of its own.

    the first step of an optimizer that steps no prepared model     the norms of its weights and of its gradients
    the ranks' answers, in the store                                equal weights, other gradients? then rank 0 warns

No rank waits for another: an answer is written once, and rank 0 looks at the steps that follow. Gradients that something else
averages, such as a DistributedDataParallel of the script's own, are equal on all ranks. Parameters that the script divides
itself are not equal. Neither causes a warning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from paceline.base.log import logger
from paceline.base.wording import worded
from paceline.world import rendezvous
from paceline.world.param_groups import parameters_of
from paceline.world.places import user_frame
from paceline.world.sharded import is_sharded
from paceline.world.world import World

# The norms of several tensors and not one: gradients that were clipped have the same norm as a whole on all ranks.
_TENSORS = 16
_LOOKS = 100  # steps at which rank 0 looks for the others' answers
_TOLERANCE = 1e-3  # of a norm; hosts of another kind may round otherwise
_NUMBERS = count()


class UnpreparedModels:
    """Looks for one behind the optimizers of this process.

    Args:
        world: of all ranks.
        is_prepared: whether an optimizer steps a prepared model.
    """

    def __init__(self, world: World, is_prepared: Callable[[Optimizer], bool]) -> None:
        self._world = world
        self._is_prepared = is_prepared
        self._number = next(_NUMBERS)
        self._store: Any = None
        self._looks_left = _LOOKS
        self._place = ""
        self._of_prepared: WeakSet[Optimizer] = WeakSet()

    def look(self, optimizer: Optimizer) -> None:
        """Called before any optimizer of this process steps."""
        if self._looks_left == 0 or optimizer in self._of_prepared or not dist.is_initialized():
            return
        if self._is_prepared(optimizer):
            self._of_prepared.add(optimizer)
            return
        self._looks_left -= 1
        if self._store is None:
            self._answer(optimizer)
        elif self._world.is_main:
            self._compare()

    def _answer(self, optimizer: Optimizer) -> None:
        """Writes what this rank steps."""
        norms = _norms(optimizer)
        frame = user_frame()
        if norms is None or frame is None:
            return
        self._place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self._store = rendezvous.part(f"unprepared-model/{self._number}")
        self._store.set(str(self._world.rank), json.dumps(norms))

    def _compare(self) -> None:
        """Warns, once every rank has answered."""
        keys = [str(rank) for rank in range(self._world.size)]
        if not self._store.check(keys):
            return
        self._looks_left = 0
        answers = [json.loads(self._store.get(key)) for key in keys]
        weights, gradients = zip(*answers, strict=True)
        if _all_close(weights) and not _all_close(gradients):
            logger("optim").warning(
                worded(
                    "the optimizer that steps in %s holds no parameters of a prepared model, and its gradients differ between "
                    "the %d processes: each process trains a model of its own. Prepare both before the loop: "
                    "`model, optimizer = accelerator.prepare(model, optimizer)`."
                ),
                self._place, self._world.size,
            )  # fmt: skip


def _norms(optimizer: Optimizer) -> tuple[list[float], list[float]] | None:
    """Norms of the first weights that have gradients, and of these gradients; None where they cannot be compared."""
    stepped = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    weights: list[float] = []
    gradients: list[float] = []
    for parameter in stepped[:_TENSORS]:
        assert parameter.grad is not None
        if is_sharded(parameter) or parameter.grad.is_sparse:
            return None
        weights.append(float(torch.linalg.vector_norm(parameter.detach())))
        gradients.append(float(torch.linalg.vector_norm(parameter.grad)))
    if not stepped or not all(map(math.isfinite, weights + gradients)):
        return None
    return weights, gradients


def _all_close(norms_of_ranks: tuple[list[float], ...]) -> bool:
    """Returns whether all ranks have the same norms but for rounding."""
    first = norms_of_ranks[0]
    for norms in norms_of_ranks[1:]:
        if len(norms) != len(first):
            return False
        for norm, other in zip(norms, first, strict=True):
            if not math.isclose(norm, other, rel_tol=_TOLERANCE, abs_tol=1e-8):
                return False
    return True
