"""`Recorder`: the `Runtime` of a process whose run is recorded. It changes as little as two runs need to be comparable.

    settings    a loader's batch size is that of all ranks together: every width reads the same global batches
    dropout     drops nothing (`quiet.py`): ranks draw for their own rows, so no two widths could agree
    float64     on request: the same weights and batches, computed in double precision, so that rounding all but vanishes
    files       none are written, and no checkpoint is looked for

`runtime.use` makes it the `Runtime` of its process. It subscribes to the events of the run; hooks on the models and on torch's
optimizers record the rest. What is recorded is in `recording.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.base import env as environment
from paceline.checkpoint.state.module_state import clean, unwrap
from paceline.config import RunSettings
from paceline.data.unprepared import iterated_loaders
from paceline.launch.job import Target
from paceline.launch.worker.worker import become, leave
from paceline.plan.facts import model_facts
from paceline.run.run import Run
from paceline.world import runtime
from paceline.world.param_groups import parameters_of
from paceline.world.runtime import Runtime
from paceline.world.tree import map_tensors, tensors
from paceline_lens.verify.quiet import Quiet, nudge_weights
from paceline_lens.verify.recording import Event, Recording, number_of, prefix_of
from paceline_lens.verify.sketch import digest, rows, sketch

# Names of torch's autograd functions. A loss with one of them was divided by the script, perhaps by its micro-batches.
_DIVIDING = ("DivBackward0", "MulBackward0")


class Recorder(Runtime):
    """Records one process of a run.

    Args:
        folder: where the recording goes, as `rank<n>.json`.
        steps: steps of the first optimizer after which the script is ended.
        double: computes in float64.
        nudge: changes each initial weight by this part of itself, up or down: how fast does rounding grow?
        as_written: changes nothing but files: for a comparison with a script that knows nothing of Paceline.
    """

    keeps_files = False

    def __init__(
        self, folder: Path, steps: int, *, double: bool = False, nudge: float = 0.0, as_written: bool = False
    ) -> None:
        self.recording = Recording(bare=not as_written)
        self.compares_widths = not as_written
        self._as_written = as_written
        self._folder = folder
        self._steps = steps
        self._double = double
        self._nudge = nudge
        self._quiet = Quiet(drops_nothing=not as_written)
        self._names: dict[int, str] = {}  # by id of a parameter
        self._models: list[nn.Module] = []  # those that were prepared, as the user wrote them
        self._optimizers: list[torch.optim.Optimizer] = []
        self._step: Event = {}
        self._run: Run | None = None
        self._looked = False
        # Since the last backward pass: the generators at the first forward pass, and whether rows got draws of their own.
        self._random_before: dict[str, str] = {}
        self._has_drawn_for_rows = False
        self._engine_divides = False

    # -- the run ---------------------------------------------------------------------------------------------

    def run(self, target: Target, compat: str) -> None:
        """Runs the script in this process, which ends without returning from here once the script has taken enough steps."""
        local_rank = environment.get("LOCAL_RANK") or 0
        self.watch(lambda: become(target.on(local_rank), compat))

    def watch(self, work: Callable[[], object]) -> None:
        """Runs `work` and writes the recording, however it ends."""
        runtime.use(self)
        self.recording.rank = environment.get("RANK") or 0
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        try:
            with self._quiet:
                work()
        finally:
            self.recording.write(self._folder)

    # -- the surroundings ------------------------------------------------------------------------------------

    def settings(self, settings: RunSettings) -> RunSettings:
        """Makes the global batch the same for every width, and turns mixed precision off if the run computes in float64."""
        self.recording.bare = False
        if self._as_written:
            return replace(settings, resume="no")
        precision = "no" if self._double else settings.mixed_precision
        return replace(settings, split_batches=not self._engine_divides, mixed_precision=precision, resume="no")

    def foreign_config(self, library: str, config: Any) -> Any:
        """Notes that an engine has a config. Its loader then yields the batches of one rank, which must not be split again."""
        self._engine_divides = True
        return config

    # -- what happens in the run -----------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """Follows the run."""
        run.events.preparing.subscribe(self._preparing)
        run.events.prepared.subscribe(lambda models: self._prepared(run))
        run.events.backward.subscribe(self._backward)
        run.events.logged.subscribe(self._logged)
        run.events.gathered.subscribe(self._gathered)
        run.events.stepped.subscribe(lambda optimizer: self._stepped(run))

    def _preparing(self, models: Sequence[nn.Module]) -> None:
        """Records the models as the script made them, before they are changed."""
        for model in models:
            is_recorded = any(model is earlier for earlier in self._models)
            if is_recorded:
                continue
            self._add_model(model)

    def _add_model(self, model: nn.Module) -> None:
        """Records a model as the script made it, and from now on the rows that it is called with."""
        prefix = prefix_of(len(self._models))
        facts = model_facts(model)
        self.recording.random_layers += [f"{prefix}{name} ({kind})" for name, kind in facts.random_layers]
        self.recording.batch_norms += [f"{prefix}{name}" for name in facts.batch_norms]
        # The first model's precision decides how large a difference by rounding may be.
        if not self._models and facts.dtypes:
            self.recording.dtype = facts.dtypes[0].removeprefix("torch.")
        # Parameters on the meta device get their values only when they are prepared.
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        if not on_meta:
            self.recording.add("initial", weights=_sketches(_named(model.named_parameters(), prefix)))
            self._change(model)
        self._models.append(model)
        model.register_forward_pre_hook(self._forward, with_kwargs=True)

    def _change(self, model: nn.Module) -> None:
        """Converts a model to float64, or changes its weights by one rounding, if this run is to do so."""
        if self._double:
            model.double()
        if self._nudge:
            nudge_weights(model.parameters(), self._nudge)

    def _prepared(self, run: Run) -> None:
        """Records the plan."""
        self._run = run
        recording = self.recording
        layout = run.plan.layout
        recording.accumulate = run.plan.accumulate
        recording.width = layout.width
        recording.data_index = layout.data_index(recording.rank)
        for decision in run.plan.decisions:
            if decision.field == "batch_norm.statistics":
                recording.batch_norm_statistics = str(decision.value)
        self._names.clear()
        recording.trainable = []
        for number, entry in enumerate(run.prepared.models):
            parameters = _named(unwrap(entry.module).named_parameters(), prefix_of(number))
            for name, parameter in parameters.items():
                self._names[id(parameter)] = name
                if parameter.requires_grad:
                    recording.trainable.append(name)
        self.recording.add("prepared", random=self._random())

    def batches(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Records the rows of each batch; filler comes last."""
        if self._as_written:
            # A plain script has no prepared loader: the rows that the models are called with are compared.
            yield from steps
            return
        for batch, mark in steps:
            info = mark.info
            self.recording.add("batch", rows=rows(batch), real=info.real[info.index], rank_rows=list(info.real))
            # The rows were recorded before: their digests must be those of the runs in the script's precision.
            if self._double:
                batch = map_tensors(_double, batch)
            yield batch, mark

    def _backward(self, loss: Tensor, scaled: Tensor, num_items: object) -> None:
        """Records the loss."""
        self._look_for_loaders()
        items = None if num_items is None else float(num_items)  # type: ignore[arg-type]
        is_divided = type(loss.grad_fn).__name__ in _DIVIDING
        draws = self._draws()
        self.recording.add(
            "backward", loss=_number(loss), scaled=_number(scaled), items=items, divided=is_divided, draws=draws
        )

    def _draws(self) -> list[str]:
        """Returns the generators from which this pass drew numbers.

        torch's counts only if a draw had a number for each row: one number that all rows share does not depend on the ranks.
        """
        before = self._random_before
        self._random_before = {}
        draws = ["torch"] if self._has_drawn_for_rows else []
        self._has_drawn_for_rows = False
        # Without a forward pass since the last call, there is no state to compare with.
        if before:
            state = self._random()
            draws += [name for name in ("numpy", "python") if state[name] != before[name]]
        return draws

    def _logged(self, values: Mapping[str, object], step: int | None) -> None:
        """Records numbers that are logged."""
        numbers: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                numbers[str(name)] = _number(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                numbers[str(name)] = float(value)
        self.recording.add("logged", values=numbers, step=step)

    def _gathered(self, how: str, result: object) -> None:
        """Records how many rows came out."""
        with_rows = [leaf for leaf in tensors(result) if leaf.dim() > 0]
        num_rows = len(with_rows[0]) if with_rows else 0
        self.recording.add("gathered", how=how, num_rows=num_rows)

    def _stepped(self, run: Run) -> None:
        """Notes whether the loop declares its micro-batches."""
        # An engine divides losses by the micro-batches of its config.
        self.recording.declared = run.gradients.declared or self._engine_divides

    # -- forward passes ----------------------------------------------------------------------------------------

    def _forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Records the rows that a model is called with, and whether this pass draws random numbers."""
        self._quiet.stream = ""
        event = self.recording.add(
            "forward",
            rows=rows((args, kwargs)),
            training=module.training,
            grad=torch.is_grad_enabled(),
            stream="",
        )

        def note_stream(stream: str) -> None:
            if not event["stream"]:  # the first one that the forward pass drew from
                event["stream"] = stream

        self._quiet.tell = note_stream
        # Only passes that are trained on: an evaluation may draw what it wants. The first of several micro-batches counts.
        if torch.is_grad_enabled() and not self._random_before:
            self._random_before = self._random()
        self._quiet.tell_draw = lambda drawn: self._note_draw(drawn, len(event["rows"]))

    def _note_draw(self, drawn: Tensor, num_rows: int) -> None:
        # In a model that takes all tokens of all rows together, the first dimension is a multiple of the rows.
        if drawn.dim() and num_rows and len(drawn) % num_rows == 0 and torch.is_grad_enabled():
            self._has_drawn_for_rows = True

    def _look_for_loaders(self) -> None:
        """Notes the samplers of loaders that the script iterates without having prepared them, once."""
        if not self._looked:
            self._looked = True
            prepared = [] if self._run is None else self._run.prepared.loaders
            self.recording.samplers = [type(loader.sampler).__name__ for loader in iterated_loaders(prepared)]

    # -- steps ---------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Records the gradients, which are final here: averaged, corrected, unscaled and clipped."""
        number = number_of(optimizer, self._optimizers)
        gradients = {name: p.grad for name, p in self._parameters(optimizer).items() if p.grad is not None}
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self._step = self.recording.add("step", optimizer=number, rates=rates, gradients=_sketches(gradients))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Records the new weights, and ends the script if the first optimizer has taken enough steps."""
        buffers: dict[str, Tensor] = {}
        for number, model in enumerate(self._models):
            for name, buffer in _named(model.named_buffers(), prefix_of(number)).items():
                # Integers, such as a count of batches, do not depend on rounding or ranks.
                if buffer.is_floating_point() and not buffer.is_meta:
                    buffers[name] = buffer
        weights = _sketches(self._parameters(optimizer))
        self._step |= {"weights": weights, "buffers": _sketches(buffers), "random": self._random()}
        taken = sum(event["optimizer"] == 0 for event in self.recording.of_kind("step"))
        # A script that has no `Accelerator` when it steps is one for `BareRecorder`: this run has nothing more to find out.
        if self.recording.bare or (self._step["optimizer"] == 0 and taken >= self._steps):
            self.recording.write(self._folder)
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # a rank that ended earlier would close connections that others still use
            leave(0)

    def _parameters(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Returns the parameters of an optimizer by their names in the models; those of no prepared model get numbers."""
        by_name: dict[str, Tensor] = {}
        for parameter in parameters_of(optimizer):
            name = self._names.get(id(parameter), f"unprepared[{len(by_name)}]")
            by_name[name] = parameter
        return by_name

    def _random(self) -> dict[str, str]:
        """Returns digests of the states of this process's generators."""
        name, keys, *place = np.random.get_state()
        return {
            "torch": digest(torch.get_rng_state().numpy().tobytes()),
            "numpy": digest(repr((name, place)).encode() + np.asarray(keys).tobytes()),
            "python": digest(repr(random.getstate()).encode()),
        }


def _named(pairs: Iterator[tuple[str, Tensor]], prefix: str) -> dict[str, Tensor]:
    return {prefix + clean(name): tensor for name, tensor in pairs}


def _sketches(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: sketch(tensor) for name, tensor in tensors.items()}


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _number(tensor: Tensor) -> float:
    return float(tensor.detach().sum().double())
