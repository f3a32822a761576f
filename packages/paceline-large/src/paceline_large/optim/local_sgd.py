"""`LocalSGD`: each rank takes its own steps, and every few steps the ranks average their parameters.

    with LocalSGD(...)      gradients are not synchronised in this block
      step() 1 .. n-1       nothing is communicated
      step() n              one reduction of all trainable parameters, coalesced
    on leaving              one more, so that the ranks end alike

Less traffic for somewhat noisier training: Stich, "Local SGD Converges Fast and Communicates Little", 2018. With an outer
optimizer, the average difference since the last reduction is its gradient: Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import ConfigError, PlanError
from paceline.base.log import warn_once
from paceline.config.keywords import checked_keywords
from paceline.optim.accumulate import Accumulation
from paceline.plan.plan import Decision
from paceline.world.sharded import is_sharded

Outer = Callable[[list[Tensor]], Optimizer]


class _Accelerator(Protocol):
    """What is used of an Accelerator; this package does not know the facade."""

    gradients: Accumulation

    @property
    def run(self) -> Any: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def sync_gradients(self) -> bool: ...
    def reduce(self, tensor: list[Tensor], reduction: Literal["mean"]) -> list[Tensor]: ...
    def register_for_checkpointing(self, *objects: Any) -> None: ...


@checked_keywords
class LocalSGD:
    """Averages parameters every `local_sgd_steps` optimizer steps instead of gradients at every one.

    Args:
        accelerator: the run's.
        model: a prepared model.
        local_sgd_steps: optimizer steps between two averages.
        enabled: False leaves the loop as it is without LocalSGD.
        outer: returns an optimizer of the parameters that it gets (DiLoCo). It takes a step in place of each average; its
            gradients are the means over ranks of what the parameters have lost since its last step. Construct the object
            once, before `resume`: checkpoints then have the state of that optimizer, and what each rank has alone.

    Ranks: all must enter, take the same number of steps and leave. The loop's batches should be of equal size on all
    ranks: an average over ranks counts each alike.

    Raises:
        ConfigError: `local-sgd-steps`, `local-sgd-outer`. PlanError: `local-sgd-plan`, for parameters that are divided over
            ranks.

    Example:
        with LocalSGD(accelerator, model, local_sgd_steps=8) as local:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    optimizer.zero_grad()
                    local.step()
    """

    def __init__(
        self,
        accelerator: _Accelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        outer: Outer | None = None,
    ) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise ConfigError(
                "local-sgd-steps",
                f"LocalSGD cannot average every {local_sgd_steps!r} steps.",
                why=f"local_sgd_steps = {local_sgd_steps!r}; it is a whole number, 1 or more",
                fix="LocalSGD(accelerator, model, local_sgd_steps=8)",
            )
        divided = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
        layout = getattr(getattr(accelerator, "plan", None), "layout", None)
        why = ""
        if divided:
            why = f"{len(divided)} parameters are divided over ranks, the first being {divided[0]}"
        elif layout is not None and layout.shard > 1:
            why = f"shard={layout.shard}: each rank steps a part of the parameters, so none takes steps of its own"
        if enabled and why:
            raise PlanError(
                "local-sgd-plan",
                "LocalSGD needs a plan under which every rank holds and steps the whole model.",
                why=why,
                fix="use a plan with only `replicate`, or LocalSGD(..., enabled=False)",
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        # An outer optimizer changes what is trained on one process, too.
        self.enabled = enabled and (accelerator.num_processes > 1 or outer is not None)
        self.steps = 0
        self._unsynchronised = ExitStack()
        self._is_open = False
        self._outer: OuterStep | None = None
        run = accelerator.run
        if self.enabled:
            reason = (
                "each process takes steps on its own samples, so that the weights depend on the number of processes"
            )
            run.events.backward.subscribe(self._note_pass)
            run.note(Decision("local_sgd", f"an average every {local_sgd_steps} steps", "code", reason=reason))
            if outer is None:
                run.events.saved.subscribe(self._tell_of_save)
        if enabled and outer is not None:
            self._outer = OuterStep(accelerator, model, outer)
            accelerator.register_for_checkpointing(self)

    def _tell_of_save(self, saved: object) -> None:
        """Warns that a checkpoint lacks what each rank has alone: its optimizer's states, and steps since the last average."""
        has_states = any(entry.optimizer.state for entry in self.accelerator.run.prepared.optimizers)
        if self.steps and (has_states or not self.accelerator.gradients.replicas_equal):
            warn_once(
                "optim",
                "a checkpoint of a run with LocalSGD has the parameters and the optimizer of the first process alone, and a "
                "resumed run goes on from these on all processes: its numbers are others than without the save. With "
                "`LocalSGD(..., outer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))`, which takes the same averages, "
                "a checkpoint has what each process has alone.",
            )

    def __enter__(self) -> Self:
        if self.enabled:
            # Not `no_sync`, in which hooks get the mean gradients of all ranks.
            held = self.accelerator.run.prepared.hold_gradients([self.model], alone=True)
            self._unsynchronised.enter_context(held)
            self._is_open = True
        return self

    def _note_pass(self, *_: object) -> None:
        """Notes that ranks differ from here on: a hook may take a step of this rank within the backward pass."""
        if self._is_open:
            self.accelerator.gradients.mark_replicas(equal=False)

    def step(self) -> None:
        """Counts an optimizer step; call it after `optimizer.step()`. Calls within an accumulation window do not count."""
        if self.accelerator.sync_gradients:
            self.count_step()

    def count_step(self) -> None:
        """Counts a step, and averages after every `local_sgd_steps` of them. Ranks: all."""
        self.steps += 1
        if self.enabled:
            self.accelerator.gradients.mark_replicas(equal=False)
            if self.steps % self.local_sgd_steps == 0:
                self._average()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsynchronised.close()
        self._is_open = False
        # After an error the other ranks may never arrive, and nobody needs the average.
        are_apart = self.steps % self.local_sgd_steps or not self.accelerator.gradients.replicas_equal
        if self.enabled and kind is None and are_apart:
            self._average(at_end=True)

    @torch.no_grad()
    def _average(self, *, at_end: bool = False) -> None:
        if self._outer is not None:
            self._outer.step(moves_alone=not at_end)
        else:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            values = [parameter.detach() for parameter in trained]
            means = self.accelerator.reduce(values, reduction="mean")
            for parameter, mean in zip(trained, means, strict=True):
                parameter.copy_(mean)
        self.accelerator.gradients.mark_replicas(equal=True)

    # -- in a checkpoint, with an outer optimizer ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps, the state of the outer optimizer, and what this rank has alone. Ranks: all."""
        state: dict[str, Any] = {"steps": self.steps}
        if self._outer is not None:
            state |= self._outer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. Ranks: all; on another number of ranks each goes on with what rank 0 had."""
        self.steps = state["steps"]
        if self._outer is not None:
            self._outer.load_state_dict(state)


class OuterStep:
    """The steps of an outer optimizer, which has its own copy of the parameters.

    Args:
        accelerator: the run's.
        model: a prepared model.
        outer: as in `LocalSGD`.

    Raises:
        ConfigError: `local-sgd-outer`.
    """

    def __init__(self, accelerator: _Accelerator, model: nn.Module, outer: Outer) -> None:
        self._accelerator = accelerator
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._copies = [parameter.detach().clone().requires_grad_() for parameter in self._trained]
        optimizer = outer(self._copies) if callable(outer) else None
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "local-sgd-outer",
                "LocalSGD got no outer optimizer.",
                why=f"outer = {outer!r}; it is a function that gets parameters and returns a torch.optim.Optimizer",
                fix="pass outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)",
            )
        self.optimizer: Optimizer = optimizer

    def step(self, *, moves_alone: bool = True) -> None:
        """Takes a step along the mean difference of all ranks, after which all have the same parameters. Ranks: all.

        Args:
            moves_alone: whether it takes a step, by its momentum, where there is no difference.
        """
        # Differences are small, so that their mean has more digits than that of the parameters.
        differences = [copy - parameter for copy, parameter in zip(self._copies, self._trained, strict=True)]
        means = self._accelerator.reduce(differences, reduction="mean")
        if moves_alone or any(bool(mean.any()) for mean in means):
            torch.autograd.backward(self._copies, means)  # which become the gradients
            self.optimizer.step()
            self.optimizer.zero_grad()
        for copy, parameter in zip(self._copies, self._trained, strict=True):
            parameter.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; ranks have different ones only below their number in `ranks`."""
        own: dict[str, Any] = {"optimizers": {name: dict(state) for name, state in self._inner_states().items()}}
        if not self._accelerator.gradients.replicas_equal:
            own["parameters"] = [parameter.detach() for parameter in self._trained]
        return {
            "copies": [copy.detach() for copy in self._copies],
            "outer": self.optimizer.state_dict(),
            "num_ranks": self._accelerator.num_processes,
            "ranks": {str(self._accelerator.process_index): own},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        for copy, saved in zip(self._copies, state["copies"], strict=True):
            copy.copy_(saved)
        self.optimizer.load_state_dict(state["outer"])
        if state["num_ranks"] != self._accelerator.num_processes:
            warn_once(
                "optim",
                f"{state['num_ranks']} ranks have saved a run with LocalSGD, and {self._accelerator.num_processes} go on: "
                "each begins with the inner optimizer of rank 0. The outer optimizer goes on as it was.",
            )
            return
        own = state["ranks"][str(self._accelerator.process_index)]
        for name, inner_state in self._inner_states().items():
            for key, value in own["optimizers"].get(name, {}).items():
                present = inner_state.get(key)
                if isinstance(present, Tensor) and present.shape == value.shape:
                    present.copy_(value)
                else:
                    inner_state[key] = value
        if "parameters" in own:
            for parameter, saved in zip(self._trained, own["parameters"], strict=True):
                parameter.copy_(saved)
            self._accelerator.gradients.mark_replicas(equal=False)

    def _inner_states(self) -> dict[str, dict[str, Any]]:
        """Returns the states of the optimizers that step the model, by numbers of the optimizer and of the parameter."""
        states = {}
        for number, entry in enumerate(self._accelerator.run.prepared.optimizers):
            for inner_number, optimizer in enumerate([entry.optimizer, *entry.stepped_through]):
                for place, parameter in enumerate(self._trained):
                    if parameter in optimizer.state:
                        states[f"{number}.{inner_number}.{place}"] = optimizer.state[parameter]
        return states
