"""`OptimizerAdapter`: everything that is done to one optimizer of the user's. Its `step` lists the order.

    strategies declare, in `bind`      refuse, swap, choose_kernels, step_in_parts, after_step, forget, surround
    a preparation declares             follow_groups
    the adapter replaces               `step`, `zero_grad` and `add_param_group`, each at most once, and methods of the user's
                                       own class

No strategy replaces a method itself. What a strategy adds to a step is one line here, wherever it comes in the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.base.errors import TrainError
from paceline.torch_internals.optimizers import step_inside_of_hooks, step_without_hooks
from paceline.torch_internals.tensors import times_written
from paceline.world.param_groups import inner_optimizers, parameters_of

Act = Callable[[Optimizer], None]
Swap = Callable[[Optimizer], AbstractContextManager[Any]]
Parts = Callable[[Optimizer], Sequence[AbstractContextManager[Any]]]
Surroundings = Callable[[str], AbstractContextManager[Any]]
Stepped = Callable[[Iterable[Tensor]], list[Tensor]]
_SWITCHES = ("train", "eval")  # of schedule-free optimizers, which write parameters by the states of their steps
_ADAPTER = "_paceline_adapter"  # attribute of the functions that take the place of methods


class OptimizerAdapter:
    """What is done to one optimizer.

    Args:
        optimizer: it holds the prepared parameters.

    Attributes:
        optimizer: the same.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._refusals: list[Act] = []
        self._swaps: list[Swap] = []
        self._kernels: list[Act] = []
        self._parts: Parts | None = None
        self._afterwards: list[Act] = []
        self._forgets: list[Callable[[bool], None]] = []
        self._surroundings: dict[str, list[Surroundings]] = {}  # by the name of a method
        self._followers: list[tuple[Stepped, Act]] = []
        self._installed: set[str] = set()  # names of the methods that are replaced

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerAdapter:
        """Returns the adapter of an optimizer that was prepared before, without what was declared then; or a new one."""
        adapter = cls.known(optimizer)
        if adapter is None:
            return cls(optimizer)
        for declared in (adapter._refusals, adapter._swaps, adapter._kernels, adapter._afterwards, adapter._forgets):
            declared.clear()
        adapter._surroundings.clear()
        adapter._followers.clear()
        adapter._parts = None
        return adapter

    @classmethod
    def known(cls, optimizer: Optimizer) -> OptimizerAdapter | None:
        """Returns the adapter of an optimizer that was prepared before, by any run of this process; None for any other."""
        for method in (optimizer.step, optimizer.add_param_group):
            adapter = getattr(method, _ADAPTER, None)
            if isinstance(adapter, cls) and adapter.optimizer is optimizer:
                return adapter
        return None

    # -- what strategies declare -----------------------------------------------------------------------------------

    def refuse(self, check: Act) -> None:
        """Lets `check` raise before each step, after the user's hooks."""
        self._refusals.append(check)
        self._install_step()

    def swap(self, swap: Swap) -> None:
        """Makes the optimizer take each step inside of `swap(optimizer)`; what was declared last is entered first.

        Args:
            swap: the context of the step, which begins after the user's hooks before it, and ends before those after it.

        A swap that was declared already counts once. The closure of a step is called before it, since it computes gradients of
        the model's parameters, which the optimizer does not hold inside. One that calls it twice, or after it has changed
        parameters, is refused (`step-closure`).

        An optimizer that steps through others is left as it is: each of these is adapted, and outside of their steps its own
        code works on the parameters.
        """
        if inner_optimizers(self.optimizer):
            return
        if swap not in self._swaps:
            self._swaps.append(swap)
            self._install_step()
        for name in filter(partial(hasattr, self.optimizer), _SWITCHES):
            self._install(name, partial(self._surrounded, name))

    def choose_kernels(self, choose: Act) -> None:
        """Lets `choose` change the groups just before the kernels run, when the optimizer holds what it steps."""
        self._kernels.append(choose)
        self._install_step()

    def step_in_parts(self, parts: Parts) -> None:
        """Makes the kernels of each step run several times, for some of the parameters each time.

        Args:
            parts: returns a context for each part, in which the groups hold the parameters of it; at least one.

        It is for optimizers of torch's that are elementwise: their `step` counts nothing but in the states of parameters.
        """
        self._parts = parts
        self._install_step()

    @property
    def parts(self) -> Parts | None:
        """What `step_in_parts` was called with, as for another model of the same optimizer."""
        return self._parts

    def after_step(self, act: Act) -> None:
        """Calls `act` after each step, before the user's hooks."""
        self._afterwards.append(act)
        self._install_step()

    def forget(self, forget: Callable[[bool], None]) -> None:
        """Lets `zero_grad` also call `forget` with its `set_to_none`, which clears gradients that are not in `.grad`."""
        self._forgets.append(forget)
        self._install("zero_grad", self._zero_grad)

    def surround(self, surroundings: Surroundings) -> None:
        """Runs each public method of the user's own class inside of `surroundings(its name)`; torch's run as ever."""
        for name in dir(type(self.optimizer)):
            if name.startswith("_") or not self._is_own(name):
                continue
            self._surroundings.setdefault(name, []).append(surroundings)
            if name == "step":
                self._install_step()
            elif name == "zero_grad":
                self._install(name, self._zero_grad)
            elif name == "add_param_group":
                self._install(name, self._add_param_group)
            else:
                self._install(name, partial(self._surrounded, name))

    def follow_groups(self, stepped: Stepped, bind: Act) -> None:
        """Lets `add_param_group` call `bind` afterwards, since a new group may have parameters of another model.

        Args:
            stepped: returns what the optimizer steps of given parameters, which a pass may have gathered.
            bind: declares what strategies do for models that are new to the optimizer.
        """
        self._followers.append((stepped, bind))
        self._install("add_param_group", self._add_param_group)

    @contextmanager
    def binding(self) -> Iterator[None]:
        """While it is open, strategies of one model declare what they do; it is entered after all that is declared so far.

        The models may come in any order, as each strategy changes parameters of its own model only. What is declared for the
        whole optimizer, such as `step_local_parts`, sees the parameters before strategies do, also if a model comes later.
        """
        outer_swaps = self._swaps
        self._swaps = []
        try:
            yield
        finally:
            self._swaps = [swap for swap in self._swaps if swap not in outer_swaps] + outer_swaps

    # -- what the methods do ---------------------------------------------------------------------------------------

    def _step(self, plain: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Takes one step. This is the order of everything that happens in it."""
        optimizer = self.optimizer
        opened = ExitStack()
        entered = False

        def begin(*_: object) -> None:
            nonlocal entered
            if entered:  # the hook runs twice if a step calls the step of its superclass
                return
            entered = True
            # 3. Gradients that are not final are refused.
            for check in self._refusals:
                check(optimizer)
            # 4. The optimizer gets what this rank steps, where this rank steps it.
            for swap in reversed(self._swaps):
                opened.enter_context(swap(optimizer))
            # 5. Kernels that suit these tensors.
            for choose in self._kernels:
                choose(optimizer)
            # 6. The kernels; those of the last part are called below.
            if self._parts is not None:
                *first_parts, last_part = self._parts(optimizer)
                for part in first_parts:
                    with part:
                        step_without_hooks(optimizer)
                opened.enter_context(last_part)
            if computed is not None:
                computed.watch(optimizer)

        def end(*_: object) -> None:
            # 7. The optimizer gets the parameters back, and what was stepped is shared with the other ranks.
            opened.close()
            for act in self._afterwards:
                act(optimizer)

        computed: _ComputedLoss | None = None
        holds_others = bool(self._swaps) or self._parts is not None
        if not holds_others and "step" not in self._surroundings:
            return step_inside_of_hooks(optimizer, partial(plain, *args, **kwargs), begin, end)
        with self._surroundings_of("step"), opened:
            # 1. The loss, if it is computed here.
            if holds_others:
                computed, args, kwargs = self._with_loss(args, kwargs)
            # 2. The user's hooks before a step; 6. the kernels; 8. the user's hooks after it.
            return step_inside_of_hooks(optimizer, partial(plain, *args, **kwargs), begin, end)

    def _with_loss(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_ComputedLoss | None, tuple[Any, ...], dict[str, Any]]:
        """Calls the closure among the arguments of a step, if there is one.

        Returns:
            The loss, and the arguments with it in the place of the closure.
        """
        closure = next(filter(callable, (*args, *kwargs.values())), None)
        if closure is None:
            return None, args, kwargs
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise closure_refused(self.optimizer)
        with torch.enable_grad():
            computed = _ComputedLoss(self.optimizer, closure())
        # An optimizer of the user's own may take further arguments.
        new_args = tuple(computed if argument is closure else argument for argument in args)
        new_kwargs = {name: computed if value is closure else value for name, value in kwargs.items()}
        return computed, new_args, new_kwargs

    def _zero_grad(self, plain: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        with self._surroundings_of("zero_grad"):
            result = plain(*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        for forget in self._forgets:
            forget(bool(set_to_none))
        return result

    def _add_param_group(self, plain: Callable[..., Any], param_group: dict[str, Any]) -> None:
        members = param_group["params"]
        # A set is refused by torch, since its order differs between runs.
        if self._followers and not isinstance(members, set):
            param_group["params"] = self._stepped_members([members] if isinstance(members, Tensor) else list(members))
        with self._surroundings_of("add_param_group"):
            plain(param_group)
        # An optimizer that steps through others may share the list of its groups with them: then they have got this one, too.
        for optimizer in (self.optimizer, *inner_optimizers(self.optimizer)):
            adapter = self.known(optimizer)
            if adapter is not None:
                for _, bind in adapter._followers:
                    bind(optimizer)

    def _stepped_members(self, members: list[Any]) -> list[Any]:
        """Returns the members of a new group, tensors or pairs of a name and a tensor, with what is stepped of each."""
        tensors = [member[1] if isinstance(member, tuple) else member for member in members]
        for stepped, _ in self._followers:
            tensors = stepped(tensors)
        # Parameters that were given with names stay so.
        pairs = zip(members, tensors, strict=True)
        return [(member[0], tensor) if isinstance(member, tuple) else tensor for member, tensor in pairs]

    def _surrounded(self, name: str, plain: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        with self._surroundings_of(name), self._as_in_a_step() if name in _SWITCHES else ExitStack():
            return plain(*args, **kwargs)

    @contextmanager
    def _as_in_a_step(self) -> Iterator[None]:
        """While it is open, the optimizer holds what this rank steps, of parameters without a gradient, too. Ranks: all."""
        without = [parameter for parameter in parameters_of(self.optimizer) if parameter.grad is None]
        for parameter in without:
            parameter.grad = torch.zeros_like(parameter)  # a step leaves out, and does not share, what has none
        try:
            with ExitStack() as opened:
                for swap in reversed(self._swaps):
                    opened.enter_context(swap(self.optimizer))
                yield
        finally:
            for parameter in without:
                parameter.grad = None
            for act in self._afterwards:
                act(self.optimizer)

    def _surroundings_of(self, name: str) -> ExitStack:
        stack = ExitStack()
        for surroundings in self._surroundings.get(name, ()):
            stack.enter_context(surroundings(name))
        return stack

    # -- how they get their place ----------------------------------------------------------------------------------

    def _is_own(self, name: str) -> bool:
        """Returns whether a method is of the user's own class."""
        method = getattr(self.optimizer, name)
        return isinstance(method, MethodType) and not method.__module__.startswith("torch.")

    def _install_step(self) -> None:
        self._install("step", self._step)

    def _install(self, name: str, replacement: Callable[..., Any]) -> None:
        """Puts `replacement(original, ...)` in the place of a method, once."""
        if name in self._installed:
            return
        self._installed.add(name)
        plain = getattr(self.optimizer, name)

        @wraps(plain)  # copies the mark by which torch's schedulers recognise a step that they count
        def method(_: Optimizer, *args: object, **kwargs: object) -> Any:
            return replacement(plain, *args, **kwargs)

        setattr(method, _ADAPTER, self)
        setattr(self.optimizer, name, MethodType(method, self.optimizer))


class _ComputedLoss:
    """Takes the place of a closure that was called before. The optimizer may call it once, before it changes anything."""

    def __init__(self, optimizer: Optimizer, loss: object) -> None:
        self._optimizer = optimizer
        self._loss = loss
        self._versions: list[int] | None = None

    def watch(self, optimizer: Optimizer) -> None:
        """Records the parameters as the step finds them."""
        self._versions = _versions(optimizer)

    def __call__(self) -> object:
        if self._versions != _versions(self._optimizer):
            raise closure_refused(self._optimizer)
        self._versions = None
        return self._loss


def _versions(optimizer: Optimizer) -> list[int]:
    """Returns a number for each parameter that differs once it was changed in place."""
    return [times_written(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def closure_refused(optimizer: Optimizer) -> TrainError:
    """Returns the error for an optimizer that computes the loss in its step."""
    return TrainError(
        "step-closure",
        f"{type(optimizer).__name__} cannot step with a closure under this plan.",
        why="it calls the closure several times, or after it has changed parameters. Its states are divided over ranks (shard) "
        "or stay on the host (offload), and during a step it holds other tensors than the model's parameters, for which a "
        "closure would compute gradients",
        fix="use plan={'zero': 0, 'shard': 1} without offload; or call `step()` without a closure, if it has one",
    )


def step_held(optimizer: Optimizer) -> TrainError:
    """Returns the error for an optimizer whose gradients have not been reduced."""
    return TrainError(
        "step-held",
        f"{type(optimizer).__name__} would step gradients that were not reduced over the ranks.",
        why="the last backward pass ran inside of `no_sync` (or LocalSGD), was not `accelerator.backward`, or failed. Under "
        "this plan each rank steps a part of the parameters, and would use the gradients of its own samples only",
        fix="call `accelerator.backward(loss)` outside of `no_sync` before each step, or clear the gradients: "
        "`optimizer.zero_grad()`",
    )
