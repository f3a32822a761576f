"""`Replicas`: finds out that ranks which should train the same model have come apart, and says in what.

Nothing in a loop keeps a rank from deciding by its own numbers: a learning rate that follows its own loss, a batch that it
leaves out, noise that only it draws. The gradients are averaged all the same, and the runs of all ranks look healthy.

    when                 after the 1st, 2nd, 4th, ... 64th and then each 64th backward pass whose gradients were averaged, and
                         before the script saves
    each rank tells      where it is in its loader, the steps and settings of its optimizers, and norms of its parameters;
                         and what its first losses were, which `LossWeights` judges
    must be equal        places, steps and settings on all ranks; norms, up to rounding, on those that hold the same parts

    a loop or a gather   in or after which there was no such pass: a script may write weights itself. Each rank leaves what it
                         would tell in the store, and the last one warns; no rank waits

The ranks count passes, because all of them take part in each: ranks that have left out different batches are still in the same
pass, and would wait for each other anywhere else.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.base.errors import TrainError
from paceline.base.log import logger, warn_once
from paceline.optim.loss_weights import is_compared
from paceline.world import rendezvous
from paceline.world.layout import AXES
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import local
from paceline.world.written_numbers import WrittenNumbers

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from paceline.optim.optimizer import PreparedOptimizer
    from paceline.optim.uncounted import SeenLoss
    from paceline.run.run import Run

_SURE = 64  # passes after which no other numbers of samples are expected
# The norms of equal parameters may differ where hosts add in another order.
_ROUNDING = 1e-5
_NUMBERS = count()

Settings = tuple[tuple[str, float], ...]  # of one group of parameters


@dataclass(frozen=True)
class Whereabouts:
    """What one rank tells the others.

    Attributes:
        part: where the rank stands on the axes along which ranks hold different parts of the model.
        position: epoch and samples of the loader whose loop runs; () outside of all loops.
        steps: of each optimizer, and a number that says after which backward passes they were taken.
        settings: numbers in each group of each optimizer.
        norms: of the parameters of each model that trains, frozen ones too, each parameter with another weight.
        stage: as `part`, the same on ranks that hold rows of the same parameters.
        written: a sum of what the script wrote into such rows, and of norms before steps that ranks share.
        losses: how much elements of the first losses count.
    """

    part: tuple[int, ...]
    position: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    settings: tuple[tuple[Settings, ...], ...]
    norms: tuple[float, ...]
    stage: tuple[int, ...]
    written: float
    losses: tuple[SeenLoss, ...] = ()


class Replicas:
    """Compares the ranks of one run, at a few of its backward passes.

    Args:
        run: the run, on several processes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._passes = 0
        self._equal_after = 0  # the last pass after which all were equal
        self._is_uneven = False
        self._number = next(_NUMBERS)
        self._looks = 0
        self._passes_at_look = 0
        self._written = WrittenNumbers()
        run.events.before_step.subscribe(self._note_gradients)
        run.events.loop_over.subscribe(lambda loader, finished: self._look() if finished else None)
        run.events.gathered.subscribe(lambda *_: self._look())
        self._histories: weakref.WeakKeyDictionary[PreparedOptimizer, int] = weakref.WeakKeyDictionary()
        # After which pass the gradients of an optimizer were noted.
        self._noted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """While it is open, ranks may take different numbers of steps."""
        before, self._is_uneven = self._is_uneven, True
        try:
            yield
        finally:
            self._is_uneven = before
            self._written.forget()

    def passed(self) -> None:
        """Called after each backward pass whose gradients were averaged. Ranks: all.

        Raises:
            TrainError: `replicas-differ`, on every rank.
        """
        if not self._run.prepared.models:
            return  # nothing is trained together, and a rank may run passes alone
        self._passes += 1
        for optimizer in self._run.prepared.optimizers:
            # A rank that leaves out one step now and another rank one later have taken as many.
            history = self._histories.get(optimizer, 0)
            self._histories[optimizer] = (31 * history + optimizer.steps) % (1 << 61)
        if is_compared(self._passes):
            self.compare()

    def compare(self) -> None:
        """Compares the ranks now. Ranks: all.

        Raises:
            TrainError: `replicas-differ`, on every rank.
        """
        if not self._are_equal():
            return
        own_state = self._state(self._run.gradients.loss_weights.take())
        self._written.forget()
        states: list[Whereabouts] = self._run.collectives.gather_object(own_state)
        # Ranks that read the same samples compute the same loss, or one of them does, with the last stage of a pipeline.
        by_data_index: dict[int, tuple[SeenLoss, ...]] = {}
        for rank, state in enumerate(states):
            index = self._run.plan.layout.data_index(rank)
            by_data_index[index] = by_data_index.get(index) or state.losses
        losses = list(by_data_index.values())
        # After an epoch, or so many passes, the ranks have seen all numbers of samples that batches have.
        is_sure = self._passes >= _SURE or states[0].position[:1] > (0,)
        self._run.gradients.loss_weights.judge(losses, is_sure)
        why = difference(states)
        if not why:
            self._equal_after = self._passes
            return
        what = "ranks that should train the same model have come apart."
        why.append(f"seen after backward pass {self._passes}; the last comparison without a difference: {self._last()}")
        fix = (
            'decide by a value that is the same on all ranks, such as `accelerator.reduce(loss.detach(), "mean")`, and draw '
            "what changes weights by the same seed on each rank"
        )
        if self._run.plan.semantics.diverging_ranks == "warned":
            warn_once("train", f"{what} {'; '.join(why)}. To mend it, {fix}.")
            return
        raise TrainError("replicas-differ", what, why=why, fix=fix)

    def _are_equal(self) -> bool:
        """Returns whether ranks should be equal now."""
        # Where runs of several widths are compared, an error here would hide what that comparison finds.
        return not (self._is_uneven or self._run.runtime.compares_widths) and self._run.gradients.replicas_equal

    def _look(self) -> None:
        """Compares the ranks through the store, if no gradients were averaged since the last look."""
        was_averaged = self._passes != self._passes_at_look
        self._passes_at_look = self._passes
        if was_averaged or not self._run.prepared.models or not self._are_equal():
            return
        self._looks += 1
        if not is_compared(self._looks):
            return
        store = rendezvous.part(f"replicas/{self._number}/{self._looks}")
        size = self._run.world.size
        told = pickle.dumps((self._passes, self._state(()))).hex()
        # The store is on rank 0, which may have ended.
        with contextlib.suppress(dist.DistNetworkError):
            store.set(str(self._run.world.rank), told)
            if store.add("told", 1) < size:
                return
            answers = [pickle.loads(bytes.fromhex(store.get(str(rank)).decode())) for rank in range(size)]
            # A rank may run a loop alone.
            in_one_place = len({(passes, state.position) for passes, state in answers}) == 1
            why = difference([state for _, state in answers]) if in_one_place else []
            if why:
                logger("train").warning(
                    "ranks that should train the same model have come apart: %s. Average what a loop writes itself, such as "
                    "gradients of `torch.autograd.grad`: `gradients = accelerator.reduce(gradients, 'mean')`.", why[0],
                )  # fmt: skip

    def _last(self) -> str:
        return f"after pass {self._equal_after}" if self._equal_after else "none"

    def _note_gradients(self, optimizer: Optimizer) -> None:
        """Notes what a step begins with of which each rank takes a part: ranks must have the same."""
        if self._run.plan.layout.shard == 1 or not (is_compared(self._passes) or is_compared(self._passes + 1)):
            return
        # A `step` that calls another class's begins twice; then the optimizer holds this rank's rows.
        if self._noted.get(optimizer) == self._passes:
            return
        self._noted[optimizer] = self._passes
        # Optimizers of other runs, too, are about to step.
        if any(optimizer in (entry.optimizer, *entry.stepped_through) for entry in self._run.prepared.optimizers):
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    self._written.note(parameter)
                    self._written.note(parameter.grad)

    def _state(self, losses: Sequence[SeenLoss]) -> Whereabouts:
        run = self._run
        position = run.active_loaders.place
        steps = []
        settings = []
        for optimizer in run.prepared.optimizers:
            steps.append((optimizer.steps, self._histories.get(optimizer, 0)))
            settings.append(tuple(map(_numbers, optimizer.param_groups)))
        norms = [_norm(model.module) for model in run.prepared.models]
        coordinate = run.plan.layout.coordinate(run.world.rank)
        stage = tuple(coordinate[name] for name, axis in AXES.items() if axis.divides_parameters)
        rows = (coordinate["shard"], coordinate["cp"]) if run.plan.fully_sharded else ()  # FSDP2 divides over both
        written = float(self._written.total)
        told = (position, tuple(steps), tuple(settings), tuple(norms), stage, written, tuple(losses))
        return Whereabouts((*stage, *rows), *told)


def _numbers(group: Mapping[str, Any]) -> Settings:
    """Returns the numbers in a group of parameters, such as its learning rate."""
    numbers = []
    for name, value in group.items():
        # With which kernels a rank steps depends on its parts of the parameters (`parallel.fused_kernels`).
        if name in ("params", "fused", "foreach"):
            continue
        for one in value if isinstance(value, (tuple, list)) else [value]:
            is_number = isinstance(one, (int, float)) or (isinstance(one, torch.Tensor) and one.numel() == 1)
            if is_number:
                numbers.append((name, float(one)))
    return tuple(numbers)


@torch.no_grad()
def _norm(model: torch.nn.Module) -> float:
    """Returns a weighted sum of the norms of this rank's parts of the parameters; 0 if the model is frozen.

    Frozen parameters of other models count, as a `forward` may write them.
    """
    norms = []
    parameters = list(model.parameters())
    for parameter in parameters if any(parameter.requires_grad for parameter in parameters) else ():
        part = local(parameter)
        # Frozen ones may have no norm: those in float8, and tensors of a library's own class, such as quantised ones.
        is_plain = type(part) in (torch.Tensor, torch.nn.Parameter) and part.element_size() > 1
        is_plain |= parameter.requires_grad
        has_norm = is_plain and (part.is_floating_point() or part.is_complex())
        if has_norm and part.numel() and not part.is_meta:
            norms.append(torch.linalg.vector_norm(part).double())
    if not norms:
        return 0.0
    device = norms[0].device
    stacked = torch.stack([norm.to(device) for norm in norms])
    # Ranks whose parameters have changed places, or of which one is larger and another smaller, have another sum.
    weights = torch.linspace(1, 2, len(norms), dtype=torch.float64, device=device)
    return float(stacked @ weights)


def _differ(value: float, other: float, rounding: float = 0.0) -> bool:
    """Whether two numbers differ. Two NaN do not: that is another fault."""
    if math.isnan(value) and math.isnan(other):
        return False
    return not math.isclose(value, other, rel_tol=rounding)


def difference(states: Sequence[Whereabouts]) -> list[str]:
    """Returns what two ranks have that should be equal, in words; [] if nothing differs."""
    first = states[0]
    seen: dict[tuple[int, ...], int] = {}  # part of the model -> the first rank that holds it
    for rank, state in enumerate(states):
        if state.position != first.position:
            return [f"rank 0 is at {_place(first)}, and rank {rank} at {_place(state)}: one has left out a batch"]
        if state.steps != first.steps:
            words = f"rank 0 has taken {_steps(first)}, and rank {rank} {_steps(state)}"
            return [f"{words}, not after the same backward passes"]
        other = seen.setdefault(state.part, rank)
        words = _of_settings(first, rank, state) or _of_norms(other, states[other], rank, state)
        stage = [earlier.written for earlier in states[:rank] if earlier.stage == state.stage]
        if not words and stage and _differ(stage[0], state.written, _ROUNDING):
            numbers = f"the sum of their norms is {state.written:.8g} on rank {rank}, and {stage[0]:.8g} on another"
            words = f"numbers or values that the script wrote into parameters or gradients differ: {numbers}"
        if words:
            return [words]
    return []


def _of_settings(first: Whereabouts, rank: int, state: Whereabouts) -> str:
    for number, (groups, others) in enumerate(zip(first.settings, state.settings, strict=True)):
        for place, (group, theirs) in enumerate(zip(groups, others, strict=False)):
            for (name, value), (_, other) in zip(group, theirs, strict=False):
                if _differ(value, other):
                    where = f"group {place} of optimizer {number}"
                    return f"`{name}` in {where} is {value:g} on rank 0, and {other:g} on rank {rank}"
    return ""


def _of_norms(other: int, same_part: Whereabouts, rank: int, state: Whereabouts) -> str:
    for number, (norm, theirs) in enumerate(zip(same_part.norms, state.norms, strict=True)):
        if _differ(norm, theirs, _ROUNDING):
            norms = f"norms of {norm:.8g} on rank {other}, and {theirs:.8g} on rank {rank}"
            return f"the parameters of model {number} have {norms}"
    return ""


def _place(state: Whereabouts) -> str:
    if not state.position:
        return "no batch of a prepared loader"
    epoch, samples = state.position
    return f"sample {samples} of epoch {epoch}"


def _steps(state: Whereabouts) -> str:
    return ", ".join(f"{steps} steps of optimizer {number}" for number, (steps, _) in enumerate(state.steps))
