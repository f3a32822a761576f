"""`Flops`: how much one training step computes, and where in the model.

What torch's operators compute is known by their shapes (`torch.utils.flop_counter`): matrix products, convolutions and
attention, two operations for a multiply-accumulate. Nothing else counts: no bias, activation, norm or loss.

counting step    operators are counted where they run, so in the backward pass as well, and what is computed again there
timing step      the one after it, with nothing but moments taken around each module's forward: counting would slow it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry

from paceline.observe.clock import Clock, HostClock
from paceline.observe.flops_text import text
from paceline.observe.operations import Part, Profile


class Flops:
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
        self.step, self.depth, self.top, self.detailed, self.file = step, depth, top, detailed, file
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
        self._moments: list[tuple[str, Any]] = []
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
        """See `observe.phases.Listener`."""
        before, self._phase = self._phase, phase
        if self._tree is None:
            return
        self._moments.append((phase, self._clock.now()))
        if self._counter is not None and (before in _COUNTED) != (phase in _COUNTED):
            if phase in _COUNTED:
                self._counter.__enter__()
            else:
                self._counter.__exit__(None, None, None)
        self._tree.open = phase == "forward"

    def micro_batch(self) -> None:
        """See `observe.phases.Listener`."""
        self._micro += 1

    def stepped(self) -> None:
        """See `observe.phases.Listener`."""
        # Hooks are there before the step begins: it may begin in a call of the model, which would not see them.
        if self._number + 1 == self.step:
            self._follow()
        if self._counter is not None and self.profile is None and self._tree is not None:
            counter, model = self._counter, self._tree.take()
            self.profile = Profile(model, sum(count for _, count in self._models), self._number, self._micro)
            self.profile.forward, self.profile.backward = counter.forward, counter.backward
            self.profile.recomputed = counter.recomputed
            self.profile.copy, self.profile.everywhere = self._totals(counter.forward)

    def ended(self) -> None:
        """See `observe.phases.Listener`."""
        if self.profile is not None and not self.complete:
            self._take_times()
            if self._counter is None:
                self._finish()
        self._number, self._micro = self._number + 1, 0
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
        spent: dict[str, float] = {}
        for (name, begin), (_, end) in zip(self._moments, self._moments[1:], strict=False):
            spent[name] = spent.get(name, 0.0) + self._clock.ms(begin, end)
        self.profile.model = self._tree.take()
        self.profile.forward_ms, self.profile.pipeline_ms = spent.get("forward", 0.0), spent.get("pipeline", 0.0)
        self.profile.backward_ms = spent.get("backward", 0.0) + spent.get("reduce", 0.0)
        self.profile.step_ms = spent.get("clip", 0.0) + spent.get("step", 0.0)
        self.profile.total_ms = sum(spent.values())

    def _finish(self) -> None:
        self.complete = True
        self._leave()
        if self.file is not None and self._tell is not None:
            with open(self.file, "w", encoding="utf-8") as out:
                out.write(self.text() + "\n")
        elif self._tell is not None:
            self._tell(self.text())

    def text(self) -> str:
        """The profile in words; "" before there is one."""
        if self.profile is None:
            return ""
        return self.words(self.profile) if self.words else text(self.profile, self.depth, self.top, self.detailed)


_COUNTED = ("forward", "backward", "reduce")


class Counter(TorchDispatchMode):
    """Counts operations while it is entered.

    Attributes:
        forward, backward, recomputed: operations outside of a backward pass; in one; of forward computing done again in one.
        open: parts of the tree that are being called.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = self.recomputed = 0
        self.open: list[Part] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # of a DTensor the operators on this rank's part count, which come next
        packet = getattr(func, "_overloadpacket", func)
        formula = formulas().get(packet)
        if formula is None:
            # Composite operators come in parts already, unless there is no autograd that takes them apart.
            if torch.is_inference_mode_enabled() and isinstance(func, torch._ops.OpOverload) and func._can_decompose():
                with self:
                    parts = func.decompose(*args, **kwargs)
                    if parts is not NotImplemented:
                        return parts
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self._count(int(formula(*args, **kwargs, out_val=out)))
        return out

    def _count(self, flops: int) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.forward += flops
            for part in self.open:
                part.flops += flops
        elif torch.is_grad_enabled():  # as only a forward pass does that is run again
            self.recomputed += flops
        else:
            self.backward += flops


@cache
def formulas() -> Mapping[Any, Callable[..., int]]:
    """torch's formulas by operator, and for attention on CPUs and fused recurrent layers, which it has none for."""
    aten = torch.ops.aten
    known = dict(flop_registry)
    for device in ("for_cpu", "for_cpu_backward"):
        name = f"_scaled_dot_product_flash_attention_{device}"
        like = aten._scaled_dot_product_flash_attention
        like = aten._scaled_dot_product_flash_attention_backward if device.endswith("backward") else like
        if hasattr(aten, name) and like in known:
            known.setdefault(getattr(aten, name), known[like])
    known.setdefault(aten.mkldnn_rnn_layer, lambda rows, *weights, **_: _recurrent(rows, weights[:2]))
    known.setdefault(aten.mkldnn_rnn_layer_backward, lambda rows, *weights, **_: 2 * _recurrent(rows, weights[:2]))
    known.setdefault(aten._cudnn_rnn, lambda rows, weights, *_, **__: _recurrent(rows, weights))
    known.setdefault(aten._cudnn_rnn_backward, lambda rows, weights, *_, **__: 2 * _recurrent(rows, weights))
    return known


def _recurrent(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """Each row of each step meets each weight once. Shape of `rows`: [steps, batch, features], or the first two swapped."""
    return 2 * rows.shape[0] * rows.shape[1] * sum(weight.numel() for weight in weights if weight.dim() == 2)


class Tree:
    """Parts of models, with hooks that take their times and say which are open.

    Attributes:
        open: whether calls count: forward passes that record gradients, not those that are run again.
    """

    def __init__(self, models: Sequence[nn.Module], clock: Clock, counter: Counter | None = None) -> None:
        self.open = False
        self._clock, self._counter = clock, counter
        self._calls: list[Part] = []
        self._taken: list[tuple[Part, Any, Any]] = []
        self._begun: list[Any] = []
        self._hooks: list[Any] = []
        self._roots = [self._part(model, "") for model in models]

    def _part(self, module: nn.Module, name: str) -> Part:
        part = Part(name, type(module).__name__, count_parameters(module))
        for child_name, child in module.named_children():
            part.children.append(self._part(child, f"{name}.{child_name}" if name else child_name))

        def before(*_: Any) -> None:
            if self.open and torch._C._current_graph_task_id() == -1:  # else it is run again, in a backward pass
                self._calls.append(part)
                self._begun.append(self._clock.now())
                if self._counter is not None:
                    part.calls += 1
                    self._counter.open.append(part)

        def after(*_: Any) -> None:
            if not any(each is part for each in self._calls):
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
        if self._counter is not None and self._counter.open:
            self._counter.open.pop()
        return part

    def restart(self, counter: Counter | None) -> None:
        """Takes times anew, and counts with another counter or none."""
        self._counter = counter
        self._taken.clear()
        for root in self._roots:
            for _, part in root.walk():
                part.latency_ms = 0.0

    def take(self) -> Part:
        """The tree with its times; waits for the device. Several models are the children of one part."""
        for part, begin, end in self._taken:
            self._clock.wait(end)
            part.latency_ms += self._clock.ms(begin, end)
        self._taken.clear()
        if len(self._roots) == 1:
            return self._roots[0]
        roots = [(part.flops, part.latency_ms, part.parameters) for part in self._roots]
        flops, ms, parameters = (sum(column) for column in zip(*roots, strict=True)) if roots else (0, 0.0, 0)
        return Part("", "models", int(parameters), int(flops), float(ms), 1, self._roots)

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
    meta = any(parameter.is_meta for parameter in model.parameters())
    if meta:
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    with counted([model]) as (counter, tree), torch.no_grad():
        model(*args, **kwargs)
    return _found(counter, tree, count_parameters(model))


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


def _found(counter: Counter, tree: Tree, parameters: int) -> Profile:
    model = tree.take()
    profile = Profile(model, parameters, 0, 1, counter.forward, counter.backward, counter.recomputed)
    profile.copy = profile.everywhere = counter.forward
    profile.forward_ms = model.latency_ms
    return profile
