"""What `offload` does to a model: states and steps of its optimizers, and its activations, are in host memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PrepareError
from paceline.base.files import expanded
from paceline.parallel.optimizer_adapter import OptimizerAdapter, closure_refused
from paceline.parallel.stand_ins import original, stand_in, stand_ins
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.plan.plan import Decision
from paceline.plan.rules import origin
from paceline.planner.estimate import Need, estimate
from paceline.torch_internals.grad_scaler import check_before_step
from paceline.world.param_groups import inner_optimizers, is_elementwise
from paceline.world.sharded import local
from paceline_large.offload.activation_copies import ActivationCopies
from paceline_large.offload.disk_room import refuse_small_disk, states_bytes
from paceline_large.offload.mapped_file import disk_error, written_per_second
from paceline_large.offload.offload import OffloadOptions, moves_states, parameters_on_disk
from paceline_large.offload.parameters_on_disk import ParametersOnDisk
from paceline_large.offload.states_on_disk import StatesOnDisk


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Lets blocks save their activations on the host, if the plan says so; `bind` changes the model's optimizers."""
    options: OffloadOptions = context.options
    if context.plan.offloads_activations and _moves(context, options):
        pinned = options.pin_memory and context.device.type != "cpu"
        copies = ActivationCopies(context.device, pinned, context.events.kept_on_host)
        modules = dict(model.named_modules())
        for name in context.facts.blocks or ("",):
            copies.attach(modules[name])
    return OffloadedModel(model, context)


def _moves(context: Context, options: OffloadOptions) -> bool:
    """Returns whether the memory of the device is another than that of the host."""
    return context.runtime.accelerated(context.device) or options.always


class OffloadedModel(AppliedStrategy):
    """One model, whose optimizers step on the host, and whose states and parameters may be on disk.

    Raises:
        TrainError: `offload-disk`, if nothing can be written there.
    """

    def __init__(self, model: nn.Module, context: Context) -> None:
        super().__init__(model)
        self._context = context
        self._device = context.device
        self._options: OffloadOptions = context.options
        self._moves_states = moves_states(context.plan)
        # Where files are; None for memory, and in a rehearsal, which has no files.
        self._folder: Path | None = None
        self._written_per_second = 0.0
        if context.plan.disk_folder and context.runtime.keeps_files:
            self._folder = expanded(context.plan.disk_folder)
            try:
                self._written_per_second = written_per_second(self._folder)
            except OSError as error:
                raise disk_error(str(self._folder), error, f"what {context.facts.name} needs cannot be kept") from None
        self.states: list[StatesOnDisk] = []  # one for each optimizer
        self._parameters: ParametersOnDisk | None = None
        if parameters_on_disk(context.plan):
            self._parameters = ParametersOnDisk(model, self._folder, context.events.kept_on_host)

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Makes the optimizer step on the host, and part by part if its states are on disk.

        Raises:
            TrainError: `step-closure`, for LBFGS, which steps with a closure; `offload-disk`.
            PrepareError: `offload-elementwise`, `offload-room`.
        """
        if not self._moves_states:
            return []
        if self._parameters is not None:
            self._parameters.take_up()
            return self._step_from_disk(adapter)
        on_host = self._step_on_host(adapter)
        if not self._context.plan.disk_folder:
            return on_host
        return [*on_host, *self._step_from_disk(adapter)]

    def _step_from_disk(self, adapter: OptimizerAdapter) -> list[Decision]:
        optimizer = adapter.optimizer
        kind = type(optimizer)
        # The step of another class may count steps, or sum over parameters, in attributes of its own.
        is_known = kind.__module__.startswith(("torch.optim.", "paceline"))
        if inner_optimizers(optimizer) or not is_elementwise(optimizer) or not is_known:
            raise PrepareError(
                "offload-elementwise",
                f"{kind.__name__} cannot step part by part, so its states cannot be on disk.",
                why=f"{origin(self._context.plan, 'offload')}; of an optimizer that is not torch's, or may look at a whole "
                "parameter, a part of a step may be no part of the result",
                fix="use an elementwise optimizer of torch, such as AdamW, or `--offload optimizer`, which uses memory",
            )
        states = adapter.parts  # as another model of the same optimizer has made it
        if not isinstance(states, StatesOnDisk):
            part_bytes = int(self._options.part_mb * 2**20)
            states = StatesOnDisk(self._folder, part_bytes, self._context.events.kept_on_host)
            adapter.step_in_parts(states)
            adapter.after_step(states.refuse_lost_disk)
        if self._parameters is not None:
            states.step_with(self._parameters)
        self.states.append(states)
        if self._folder is not None:
            states.expect(states_bytes(self._context, self.module, optimizer))
            refuse_small_disk(self._context, self._folder, kind.__name__, self._bytes_to_come())
        field = f"optimizer.{kind.__name__}.on_disk"
        return [Decision(field, "yes", "derived", reason=self._time_on_disk())]

    def _bytes_to_come(self) -> int:
        """Returns the bytes that optimizers of this run have still to write."""
        all_states = set(self.states)
        for applied in self._context.siblings():
            if isinstance(applied, OffloadedModel):
                all_states.update(applied.states)
        return sum(states.num_bytes_to_come for states in all_states)

    def _time_on_disk(self) -> str:
        """Says where files are, and how much time reading and writing them takes."""
        plan = self._context.plan
        reason = f"in files without names in {plan.disk_folder}"
        if self._folder is None:
            return reason
        rate = self._written_per_second
        seconds = f"{estimate(plan, Need((self._context.facts,))).disk_traffic / rate:.2g} s"
        return (
            f"{reason}; {rate / 1e6:.0f} MB/s were written there just now, so with Adam a step takes {seconds} longer"
        )

    def _step_on_host(self, adapter: OptimizerAdapter) -> list[Decision]:
        optimizer = adapter.optimizer
        field = f"optimizer.{type(optimizer).__name__}.offloaded"
        if not _moves(self._context, self._options):
            return [Decision(field, "no", "derived", reason="nothing was moved: the device is the host")]
        if isinstance(optimizer, torch.optim.LBFGS):
            raise closure_refused(optimizer)
        for group in optimizer.param_groups:
            # On the CPU torch's own choice is a slow loop over parameters, so the fused kernel is taken if the choice is open.
            if group.get("fused", False) is None and group.get("foreach") is None and not group.get("differentiable"):
                group["fused"] = True
        pinned = self._options.pin_memory and self._device.type != "cpu"
        host = _OnHost(self.module, pinned, self._context.events.kept_on_host)
        adapter.swap(host.stepping)
        # torch puts loaded states on the device of the parameters.
        optimizer.register_load_state_dict_post_hook(host.take_states)
        check_before_step(optimizer)
        return [Decision(field, "yes", "derived", reason="its states live in the host's memory, and it steps there")]


class _OnHost:
    """Copies on the host of the tensors that one optimizer steps.

    Args:
        model: the model of the parameters.
        pinned: whether the copies lie in page-locked memory.
        kept_on_host: called with each copy.
    """

    def __init__(self, model: nn.Module, pinned: bool, kept_on_host: Callable[[Tensor], object]) -> None:
        self._kept_on_host = kept_on_host
        self._pinned = pinned
        self._own = set(model.parameters())
        self._copies: dict[tuple[int, str], Tensor] = {}

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """While it is open, the optimizer holds copies on the host; afterwards the parameters have their new values."""
        numbers = count()

        def copy(parameter: Tensor) -> Tensor:
            place = next(numbers)  # in the order of the groups, so the same in each step
            if parameter.grad is None or original(parameter) not in self._own:
                return parameter
            data = self._copy(place, "data", parameter.detach())
            return stand_in(parameter, data, self._copy(place, "grad", local(parameter.grad)))

        self.take_states(optimizer)
        with stand_ins(optimizer, copy) as pairs:
            # Copies to page-locked memory are asynchronous, and the optimizer on the CPU must not read before they end.
            if pairs and pairs[0][0].device.type != "cpu":
                torch.accelerator.synchronize(pairs[0][0].device)
            yield
        # No wait here: the next forward pass is queued behind these copies, on the same stream.
        for parameter, stand in pairs:
            parameter.detach().copy_(stand.detach(), non_blocking=True)

    def take_states(self, optimizer: Optimizer) -> None:
        """Moves the states of the model's parameters to the host, also the number of steps: a fused step wants it there."""
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, Tensor) or original(parameter) not in self._own:
                continue
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(_HOST)
                    self._kept_on_host(state[key])

    def _copy(self, place: int, what: str, tensor: Tensor) -> Tensor:
        # The memory is used again in each step, because to allocate page-locked memory is slow.
        copy = self._copies.get((place, what))
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            # torch's fused kernels for the CPU need parameter and gradient in one layout (`optim.rebind`).
            copy = torch.empty_like(
                tensor, device=_HOST, pin_memory=self._pinned, memory_format=torch.contiguous_format
            )
            self._copies[(place, what)] = copy
            self._kept_on_host(copy)
        return copy.copy_(tensor, non_blocking=True)


_HOST = torch.device("cpu")
