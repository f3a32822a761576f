"""`Flops`: how much one training step computes, and where in the model.

What torch's operators compute is known by their shapes (`torch.utils.flop_counter`): matrix products, convolutions and
attention, two operations for a multiply-accumulate. Nothing else counts: no bias, activation, norm or loss.

counting step    operators are counted where they run, so in the backward pass as well, and what is computed again there
timing step      the one after it, with nothing but moments taken around each module's forward: counting would slow it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from paceline.observe.clock import Clock, HostClock, Moment
from paceline.observe.flops_text import text
from paceline.observe.operations import Part, Profile
from paceline.observe.phases import Listener
from paceline.torch_internals import dispatch
from paceline.torch_internals.dispatch import Operation
from paceline.world.tree import map_tensors


class Flops(Listener):
    """Counts and times one step of a run.

    Args:
        step: number of the step that is counted, from 1; the one after it is timed.
        depth: how deep the text goes into the tree; -1: all the way.
        top: modules that the text lists at each depth.
        detailed: whether the text holds the tree.
        file: where the text is written instead of being told.
        clock: takes the moments.
        totals: of a number of each of this rank: the sum over the ranks of one copy of the model, and over all. Ranks: all.
        tell: is given the text.

    Attributes:
        profile: what was found; None until the step has ended.
        complete: whether the timing step has ended too.
        words: makes the text of a profile; None: ours.
    """

    def __init__(
        self,
        step: int = 2,
        depth: int = -1,
        top: int = 1,
        detailed: bool = True,
        file: str | None = None,
        clock: Clock | None = None,
        totals: Callable[[int], tuple[int, int]] = lambda own: (own, own),
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.step = step
        self.depth = depth
        self.top = top
        self.detailed = detailed
        self.file = file
        self.profile: Profile | None = None
        self.complete = False
        self.words: Callable[[Profile], str] | None = None
        self._clock = clock or HostClock()
        self._totals, self._tell = totals, tell
        self._models: list[tuple[nn.Module, int]] = []
        self._number = 1
        self._phase = "rest"
        self._counter: Counter | None = None
        self._tree: Tree | None = None
        self._moments: list[tuple[str, Moment]] = []
        self._micro = 0

    def follow_model(self, model: nn.Module, parameters: int | None = None) -> None:
        """Takes a model into the profile.

        Args:
            model: the module that the user wrote.
            parameters: elements of the whole model, of which this rank may hold some modules alone.
        """
        self._models.append((model, count_parameters(model) if parameters is None else parameters))
        if self._number == self.step:
            self._counter = Counter()
            self._follow()

    # -- what phases tell ----------------------------------------------------------------------------------------

    def to(self, phase: str) -> None:
        before = self._phase
        self._phase = phase
        if self._tree is None:
            return
        self._moments.append((phase, self._clock.now()))
        if self._counter is not None and (before in COUNTED) != (phase in COUNTED):
            if phase in COUNTED:
                self._counter.__enter__()
            else:
                self._counter.__exit__(None, None, None)
        self._tree.open = phase == "forward"

    def micro_batch(self) -> None:
        self._micro += 1

    def stepped(self) -> None:
        # Hooks are there before the step begins: it may begin in a call of the model, which would not see them.
        if self._number + 1 == self.step:
            self._follow()
        if self._counter is not None and self.profile is None and self._tree is not None:
            counter = self._counter
            copy, everywhere = self._totals(counter.forward)
            parameters = sum(count for _, count in self._models)
            counts = (counter.forward, counter.backward, counter.recomputed, copy, everywhere)
            self.profile = Profile(self._tree.take(), parameters, self._number, self._micro, *counts)

    def ended(self) -> None:
        if self.profile is not None and not self.complete:
            self._take_times()
            if self._counter is None:
                self._finish()
        self._number += 1
        self._micro = 0
        self._counter = Counter() if self._number == self.step else None
        if self._tree is not None:
            self._tree.restart(self._counter)
            self._moments.clear()

    def finish(self) -> None:
        """At the end of training: what is known of a step that was counted, but after which none was timed."""
        if self.profile is not None and not self.complete:
            self._finish()
        self._leave()

    def _follow(self) -> None:
        self._leave()
        self._tree = Tree([model for model, _ in self._models], self._clock, self._counter)

    def _leave(self) -> None:
        if self._tree is not None:
            self._tree.remove()
        self._tree = None

    def _take_times(self) -> None:
        assert self._tree is not None and self.profile is not None
        self._moments.append(("", self._clock.now()))
        self._clock.wait(self._moments[-1][1])
        ms_by_phase: dict[str, float] = {}
        for (phase, begin), (_, end) in pairwise(self._moments):
            ms_by_phase[phase] = ms_by_phase.get(phase, 0.0) + self._clock.ms(begin, end)
        self.profile.take_times(self._tree.take(), ms_by_phase)

    def _finish(self) -> None:
        self.complete = True
        self._leave()
        if self._tell is None:
            return
        if self.file is None:
            self._tell(self.text())
        else:
            Path(self.file).write_text(self.text() + "\n", encoding="utf-8")

    def text(self) -> str:
        """The profile in words; "" before there is one."""
        if self.profile is None:
            return ""
        return self.words(self.profile) if self.words else text(self.profile, self.depth, self.top, self.detailed)


COUNTED = ("forward", "backward", "reduce")


class Counter(dispatch.TorchDispatchMode):
    """Counts operations while it is entered.

    Attributes:
        forward, backward, recomputed: operations outside of a backward pass; in one; of forward computing done again in one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0
        self.recomputed = 0
        self._parts: list[Part] = []  # those that are being called, the outermost first

    def enter_part(self, part: Part) -> None:
        """From here on what is computed belongs to `part` too."""
        part.called()
        self._parts.append(part)

    def leave_part(self) -> None:
        """The part that was entered last has ended."""
        if self._parts:
            self._parts.pop()

    def __torch_dispatch__(
        self,
        operation: Operation,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if dispatch.has_wrapper(types):
            return NotImplemented  # of a DTensor the operators on this rank's part count, which come next
        formula = formulas().get(dispatch.overloads_of(operation))
        if formula is None:
            # Composite operators come in parts already, unless there is no autograd that takes them apart.
            if torch.is_inference_mode_enabled():
                with self:
                    result = dispatch.taken_apart(operation, args, kwargs)
                if result is not NotImplemented:
                    return result
            return operation(*args, **kwargs)
        result = operation(*args, **kwargs)
        self._count(int(formula(*args, **kwargs, out_val=result)))
        return result

    def _count(self, flops: int) -> None:
        if not dispatch.is_in_backward_pass():
            self.forward += flops
            for part in self._parts:
                part.count(flops)
        elif torch.is_grad_enabled():  # as only a forward pass does that is run again
            self.recomputed += flops
        else:
            self.backward += flops


@cache
def formulas() -> Mapping[Operation, Callable[..., int]]:
    """torch's formulas by operator, and for attention on CPUs and fused recurrent layers, which it has none for."""
    counters: dict[Operation, Callable[..., int]] = dict(flop_registry)
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
        on_cpu = name.replace("attention", "attention_for_cpu")
        counters.setdefault(dispatch.aten(on_cpu), counters[dispatch.aten(name)])
    for layer, weights_of in (("mkldnn_rnn_layer", _two_matrices), ("_cudnn_rnn", _list_of_matrices)):
        counters.setdefault(dispatch.aten(layer), partial(_recurrent, 1, weights_of))
        counters.setdefault(dispatch.aten(f"{layer}_backward"), partial(_recurrent, 2, weights_of))
    return counters


def _two_matrices(first: torch.Tensor, second: torch.Tensor, *rest: object) -> Sequence[torch.Tensor]:
    return first, second


def _list_of_matrices(weights: Sequence[torch.Tensor], *rest: object) -> Sequence[torch.Tensor]:
    return weights


def _recurrent(
    passes: int, weights_of: Callable[..., Sequence[torch.Tensor]], rows: torch.Tensor, *args: Any, **kwargs: object
) -> int:
    """Each row of each step meets each weight once. Shape of `rows`: [steps, batch, features], or the first two swapped."""
    elements = sum(weight.numel() for weight in weights_of(*args) if weight.dim() == 2)
    return passes * 2 * rows.shape[0] * rows.shape[1] * elements


class Tree:
    """Parts of models, with hooks that take their times and say which are open.

    Attributes:
        open: whether calls count: forward passes that record gradients, not those that are run again.
    """

    def __init__(self, models: Sequence[nn.Module], clock: Clock, counter: Counter | None = None) -> None:
        self.open = False
        self._clock, self._counter = clock, counter
        self._calls: list[Part] = []
        self._taken: list[tuple[Part, Moment, Moment]] = []
        self._begun: list[Moment] = []
        self._hooks: list[RemovableHandle] = []
        self._roots = [self._part(model, "") for model in models]

    def _part(self, module: nn.Module, name: str) -> Part:
        part = Part(name, type(module).__name__, count_parameters(module))
        for child_name, child in module.named_children():
            part.children.append(self._part(child, f"{name}.{child_name}" if name else child_name))

        def before(*_: object) -> None:
            if self.open and not dispatch.is_in_backward_pass():  # else it is run again, in a backward pass
                self._calls.append(part)
                self._begun.append(self._clock.now())
                if self._counter is not None:
                    self._counter.enter_part(part)

        def after(*_: object) -> None:
            if not any(called is part for called in self._calls):
                return
            # Those inside it that are still open were left by an exception which runs no hooks: the end of a stage.
            while self._leave_one() is not part:
                pass

        self._hooks.append(module.register_forward_pre_hook(before))
        self._hooks.append(module.register_forward_hook(after, always_call=True))
        return part

    def _leave_one(self) -> Part:
        part = self._calls.pop()
        self._taken.append((part, self._begun.pop(), self._clock.now()))
        if self._counter is not None:
            self._counter.leave_part()
        return part

    def restart(self, counter: Counter | None) -> None:
        """Takes times anew, and counts with another counter or none."""
        self._counter = counter
        self._taken.clear()
        for root in self._roots:
            root.clear_times()

    def take(self) -> Part:
        """The tree with its times; waits for the device. Several models are the children of one part."""
        for part, begin, end in self._taken:
            self._clock.wait(end)
            part.add_time(self._clock.ms(begin, end))
        self._taken.clear()
        if len(self._roots) == 1:
            return self._roots[0]
        together = Part("", "models", children=self._roots)
        for root in self._roots:
            together.add(root)
        together.calls = 1
        return together

    def remove(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def count_parameters(module: nn.Module) -> int:
    """Elements of all parameters, tied ones once; of divided ones all."""
    return sum(parameter.numel() for parameter in module.parameters())


def of(model: nn.Module, *args: Any, **kwargs: Any) -> Profile:
    """What one forward pass of a model computes; on the meta device too, where nothing is computed at all.

    Args:
        model: any module; the pass runs in the mode that it is in, without gradients.
        args, kwargs: for its forward; tensors are moved to the meta device where the model is.

    Example:
        >>> of(torch.nn.Linear(10, 5), torch.randn(8, 10)).macs
        400
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        args, kwargs = map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
    with counted([model]) as (counter, tree), torch.no_grad():
        model(*args, **kwargs)
    part = tree.take()
    counts = (counter.forward, counter.backward, counter.recomputed, counter.forward, counter.forward)
    return Profile(part, count_parameters(model), 0, 1, *counts, forward_ms=part.latency_ms)


@contextmanager
def counted(models: Sequence[nn.Module], clock: Clock | None = None) -> Iterator[tuple[Counter, Tree]]:
    """While it is open, what is computed is counted and timed."""
    counter = Counter()
    tree = Tree(models, clock or HostClock(), counter)
    tree.open = True
    try:
        with counter:
            yield counter, tree
    finally:
        tree.remove()
