"""`Flops` counts how much one training step computes, and where in the model.

The shapes of torch's operators tell what they compute (`torch.utils.flop_counter`): matrix products, convolutions and
attention, with two operations for a multiply-accumulate. Nothing else counts: no bias, activation, norm or loss.

counting step    operators are counted as they run, in the backward pass too, with the recomputation there
timing step      the step after it, which only takes the time around each module's forward, since counting would slow it
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

from paceline.plan.fqn import joined
from paceline.torch_internals import dispatch
from paceline.torch_internals.dispatch import Operation
from paceline.world.tree import map_tensors
from paceline_lens.observe.clock import Clock, HostClock, Moment
from paceline_lens.observe.flops_text import text
from paceline_lens.observe.operations import ModulePart, Profile
from paceline_lens.observe.phases import PhaseListener
from paceline_lens.torch_internals import operations


class Flops(PhaseListener):
    """Counts and times one step of a run.

    Args:
        step: the number of the step that is counted, from 1; the one after it is timed.
        depth: how deep the text goes into the tree of modules; -1 shows all of it.
        top: the number of modules that the text lists at each depth.
        detailed: whether the text contains the tree.
        file: the file for the text; None passes it to `tell`.
        clock: measures times.
        totals: takes a number of this rank, and returns its sum over the ranks of one copy of the model and over all ranks.
            Ranks: all.
        tell: gets the text.

    Attributes:
        profile: the result; None until the counted step has ended.
        complete: whether the timed step has ended, too.
        words: makes the text of a profile; None takes the default.
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
        self._totals = totals
        self._tell = tell
        self._models: list[tuple[nn.Module, int]] = []
        self._number = 1
        self._phase = "rest"
        self._counter: Counter | None = None
        self._tree: Tree | None = None
        self._moments: list[tuple[str, Moment]] = []
        self._micro = 0

    def follow_model(self, model: nn.Module, parameters: int | None = None) -> None:
        """Adds a model to the profile.

        Args:
            model: the module that the user wrote.
            parameters: the number of elements of the whole model; this rank may hold only some of its modules.
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
        # The counter is entered once for neighbouring phases that count. Outside of them, in the loader or the optimizer, it
        # would count work that is no part of the model.
        if self._counter is not None and (before in COUNTED) != (phase in COUNTED):
            if phase in COUNTED:
                self._counter.__enter__()
            else:
                self._counter.__exit__(None, None, None)
        self._tree.open = phase == "forward"

    def micro_batch(self) -> None:
        self._micro += 1

    def stepped(self) -> None:
        # The hooks must exist before the step begins: if it begins inside a call of the model, that call would miss them.
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
        """Reports a step that was counted, if training ends before another one could be timed."""
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
        """Returns the profile as text; "" if there is none yet."""
        if self.profile is None:
            return ""
        if self.words is not None:
            return self.words(self.profile)
        return text(self.profile, self.depth, self.top, self.detailed)


COUNTED = ("forward", "backward", "reduce")


class Counter(dispatch.TorchDispatchMode):
    """Counts operations while it is entered.

    Attributes:
        forward: the operations outside of a backward pass.
        backward: the operations in a backward pass, without recomputation.
        recomputed: the operations of forward passes that a backward pass runs again.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0
        self.recomputed = 0
        self._parts: list[ModulePart] = []  # those that are being called, the outermost first

    def enter_part(self, part: ModulePart) -> None:
        """Makes all operations from here on count for `part`, too."""
        part.calls += 1
        self._parts.append(part)

    def leave_part(self) -> None:
        """Ends the part that was entered last."""
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
        if operations.has_wrapper(types):
            return NotImplemented  # a DTensor calls the operators on its local tensor next, and those are counted
        formula = formulas().get(operations.overloads_of(operation))
        if formula is None:
            # Autograd decomposes composite operators before they arrive here. In inference mode there is no autograd, so that
            # they are decomposed here.
            if torch.is_inference_mode_enabled():
                with self:
                    result = operations.taken_apart(operation, args, kwargs)
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
                part.flops += flops
        elif torch.is_grad_enabled():  # in a backward pass, only a forward pass that is run again records gradients
            self.recomputed += flops
        else:
            self.backward += flops


@cache
def formulas() -> Mapping[Operation, Callable[..., int]]:
    """Returns torch's formulas by operator, and more for attention on CPUs and fused recurrent layers, which torch lacks."""
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
    """Counts a recurrent layer, in which each row of each time step is multiplied with each weight once.

    Shape:
        rows: [steps, batch, features], or with the first two dimensions swapped.
    """
    elements = sum(weight.numel() for weight in weights_of(*args) if weight.dim() == 2)  # biases have one dimension
    # A multiply-accumulate is two operations. The backward pass multiplies with each weight twice: for the gradient of the
    # rows, and for that of the weight.
    return passes * 2 * rows.shape[0] * rows.shape[1] * elements


class Tree:
    """The modules of models as parts, with hooks that measure their times and tell which of them are being called.

    Attributes:
        open: whether calls count; those count that belong to a forward pass, and not to recomputation.
    """

    def __init__(self, models: Sequence[nn.Module], clock: Clock, counter: Counter | None = None) -> None:
        self.open = False
        self._clock = clock
        self._counter = counter
        self._calls: list[ModulePart] = []
        self._taken: list[tuple[ModulePart, Moment, Moment]] = []
        self._begun: list[Moment] = []
        self._hooks: list[RemovableHandle] = []
        self._roots = [self._part(model, "") for model in models]

    def _part(self, module: nn.Module, name: str) -> ModulePart:
        part = ModulePart(name, type(module).__name__, count_parameters(module))
        for child_name, child in module.named_children():
            part.children.append(self._part(child, joined(name, child_name)))

        def before(*_: object) -> None:
            if self.open and not dispatch.is_in_backward_pass():  # in a backward pass, it is a recomputation
                self._calls.append(part)
                self._begun.append(self._clock.now())
                if self._counter is not None:
                    self._counter.enter_part(part)

        def after(*_: object) -> None:
            if not any(called is part for called in self._calls):
                return
            # Modules inside this one may still be open: the exception that ends the stage of a pipeline runs no hooks there.
            while self._leave_one() is not part:
                pass

        self._hooks.append(module.register_forward_pre_hook(before))
        self._hooks.append(module.register_forward_hook(after, always_call=True))
        return part

    def _leave_one(self) -> ModulePart:
        part = self._calls.pop()
        self._taken.append((part, self._begun.pop(), self._clock.now()))
        if self._counter is not None:
            self._counter.leave_part()
        return part

    def restart(self, counter: Counter | None) -> None:
        """Clears the times, and counts with another counter or with none."""
        self._counter = counter
        self._taken.clear()
        for root in self._roots:
            root.clear_times()

    def take(self) -> ModulePart:
        """Returns the tree with its times, for which it waits for the device. Several models become children of one part."""
        for part, begin, end in self._taken:
            self._clock.wait(end)
            part.latency_ms += self._clock.ms(begin, end)
        self._taken.clear()
        if len(self._roots) == 1:
            return self._roots[0]
        together = ModulePart("", "models", children=self._roots)
        for root in self._roots:
            together.add(root)
        together.calls = 1
        return together

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def count_parameters(module: nn.Module) -> int:
    """Returns the number of elements of all parameters; tied ones count once, and sharded ones in full."""
    return sum(parameter.numel() for parameter in module.parameters())


def of(model: nn.Module, *args: Any, **kwargs: Any) -> Profile:
    """Counts what one forward pass of a model computes; it also works on the meta device, where nothing is computed.

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
    """Counts and times the forward passes of the models inside the context."""
    counter = Counter()
    tree = Tree(models, clock or HostClock(), counter)
    tree.open = True
    try:
        with counter:
            yield counter, tree
    finally:
        tree.remove()
