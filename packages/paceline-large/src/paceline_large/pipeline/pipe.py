"""`Pipe`: runs batches through the stages of one model.

    first batch of a shape   `_walk`: one micro-batch runs through all stages without gradients. Every rank learns the shapes,
                             for which torch's stages and schedule are then built
    forward_backward         the schedule of `torch.distributed.pipelining`: micro-batches forward and backward
    finish_reduction         sums the gradients of parameters that several stages hold
    evaluate                 `_walk` with the whole batch; all ranks along `pp` get the output

A receive of a wrong shape hangs or aborts. So a tensor is only sent after the receiver was told its shape.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import PacelineError, PlanError
from paceline.base.log import warn_once
from paceline.parallel.data.owned_states import mark_states
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.parallel.microbatches import BatchPart
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.parallel.strategy import Runner
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision
from paceline.torch_internals.tensors import (
    are_hooks_taken_over,
    has_hooks_after,
    has_users_gradient_hooks,
    take_over_hooks,
)
from paceline.world.collectives import Collectives
from paceline.world.forward import override_forward
from paceline.world.generators import generator_states
from paceline.world.pending_gradients import PendingGradients
from paceline.world.tree import Tree, children, describe, first_rows, map_tensors, rebuild, tensors
from paceline_large.hooks_on_parts import HooksOnParts
from paceline_large.pipeline.copies import Copies
from paceline_large.pipeline.schedules import build
from paceline_large.pipeline.sources import ReadPlaceholder, Sources
from paceline_large.pipeline.specs import Described, Spec, empty, specs
from paceline_large.pipeline.split import SCHEDULES, choose, rank_of
from paceline_large.pipeline.stages import EndOfStage, Hidden, Stage, Stages, Visit
from paceline_large.pipeline.timing import Meter
from paceline_large.torch_internals.gathered import kept_gathered
from paceline_large.torch_internals.hooks import FORWARD, FORWARD_PRE
from paceline_large.torch_internals.pipelining import stage_class

_KEPT = 4  # how many schedules are kept with their buffers: those of the last shapes


class Pipe(Runner):
    """The stages of one model on this rank, and the ways to run them.

    Args:
        model: pruned to this rank's stages; its `forward` is replaced.
        stages: of this rank.
        copies: parameters that several ranks hold.
        schedule: the name of the schedule.
        microbatches: the largest number of micro-batches in a batch.
        peers: the ranks that gather shards of parameters together, and so must run the same number of passes; None if
            parameters are not sharded.
        facts: of the whole model.
        names: the keys of the whole model's state dict, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        copies: Copies,
        schedule: str,
        microbatches: int,
        peers: Collectives | None,
        facts: ModelFacts,
        names: Sequence[str],
        others_answer: bool,
    ) -> None:
        super().__init__(model)
        self._others_answer = others_answer
        self.stages = stages
        self.owners = copies.collectives
        self.begins = stages.begins
        self.first_blocks = tuple(stages.first)
        self.meter: Meter | None = None
        self._copies = copies
        self._phase: Callable[[str], AbstractContextManager[Any]] | None = None  # told what a stage computes
        self._schedule = schedule
        self._microbatches = microbatches
        self._peers = peers
        self._names = names
        self._tied = facts.tied
        self._loss_dtype = torch.float64 if "float64" in facts.dtypes else torch.float32
        placement = SCHEDULES[schedule].placement
        self._rank_of_stage = [rank_of(stage, self.owners.size, placement) for stage in range(stages.count)]
        # For each shape of micro-batches that was probed: the outputs of all units, and the report of each stage.
        self._shapes: dict[str, tuple[dict[str, list[Any]], list[_StageReport]]] = {}
        self._evaluated: set[str] = set()  # shapes of batches, and whether the model was in training
        self._built: OrderedDict[tuple[str, int, str], Any] = OrderedDict()
        self._trained: list[bool] = []  # of each parameter of this rank, whether it was trained in the last call
        self._batch: Sequence[BatchPart] = []  # the micro-batches under way
        self._give_back_hooks: Callable[[], None] = lambda: None
        self._loss: Callable[[Any, Any], Tensor] | None = None
        self._losses: list[Tensor] = []
        self._inner = model.forward
        # A script may compile the prepared model, whose stages communicate: that is nothing to trace.
        override_forward(model, "pipeline", torch.compiler.disable(self._forward))
        forward: Any = model.forward
        forward.__func__.pipe = self  # see `timing.measure`

    # -- training ----------------------------------------------------------------------------------------------

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Lets the optimizer's `state_dict()` say that it has the states of this rank's layers only."""
        mark_states(adapter.optimizer)
        return []

    def forward_backward(self, batch: BatchPart, loss_fn: Callable[..., Tensor], factor: Tensor, mean: bool) -> Tensor:
        """Runs one batch through the schedule; see `Runner.forward_backward`.

        Raises:
            PlanError: `pipeline-rows`, `pipeline-order`, `pipeline-hidden`, `pipeline-skip`, `pipeline-calls`.
        """
        given = (batch.inputs, batch.named)
        rows = first_rows(given)
        if rows is None:
            raise PlanError(
                "pipeline-rows",
                "a pipeline divides a batch into micro-batches, but this one has no tensor with rows.",
                why=f"the batch is {describe(given)}",
                fix="pass the samples as tensors whose dim 0 counts them",
            )
        # Ranks that gather shards together must run the same number of micro-batches, so this number must divide the rows of
        # each of them.
        common = rows
        if self._peers is not None:
            rows_of_peers = self._peers.gather(torch.tensor([rows])).tolist()
            common = math.gcd(*rows_of_peers)
        name, count = choose(self._schedule, self._microbatches, common, self.owners.size)
        if name != self._schedule:
            warn_once(
                "parallel",
                f"pipeline: a batch of {rows} rows makes {count} equal micro-batches at most, which {self._schedule} does "
                f"not take; {name} runs it. Use batches of a multiple of {self._microbatches} rows.",
            )
        size = rows // count
        parts = [_rows_of(batch, rows, begin, begin + size) for begin in range(0, rows, size)]
        self._begin(loss_fn, factor, mean, count)
        self._run(name, parts)
        return self._total(mean)

    def forward_backward_each(
        self, parts: Sequence[BatchPart], loss_fn: Callable[..., Tensor], factor: Tensor, mean: bool
    ) -> Tensor:
        """Runs micro-batches as they are; see `Runner.forward_backward_each`."""
        self._begin(loss_fn, factor, mean, len(parts))
        schedule = SCHEDULES[self._schedule]
        for alike in self._alike(parts):
            # Not every schedule takes every number of micro-batches: some need rounds of equal size.
            name = schedule.name
            if not schedule.takes(len(alike), self.owners.size):
                name = schedule.otherwise
            self._run(name, alike)
        return self._total(mean)

    def _alike(self, parts: Sequence[BatchPart]) -> list[list[BatchPart]]:
        """Groups micro-batches of the same shape, since the buffers of a schedule are for one shape.

        If the groups of ranks that gather shards together would differ, each micro-batch is a group of its own, so that all
        of these ranks run the same number of passes in the same order.
        """
        by_shape: dict[str, list[BatchPart]] = {}
        for part in parts:
            by_shape.setdefault(describe(part[:2]), []).append(part)
        if self._peers is not None:
            # Shapes are compared by their number in order of appearance: the ranks may have other shapes, as long as the
            # same micro-batches are alike on each of them.
            shapes = list(by_shape)
            own_order = [shapes.index(describe(part[:2])) for part in parts]
            orders = self._peers.gather(torch.tensor([own_order])).tolist()
            if any(order != own_order for order in orders):
                return [[part] for part in parts]
        return list(by_shape.values())

    def _begin(self, loss_fn: Callable[..., Tensor], factor: Tensor, mean: bool, count: int) -> None:
        """Sets the loss function for the micro-batches of one call: each loss is multiplied by its share of `factor`."""
        share = factor.detach() / (count if mean else 1)
        self._losses = []  # stays empty on ranks without the last stage

        def scaled_loss(output: object, micro_target: object) -> Tensor:
            loss = loss_fn(output, micro_target)
            self._losses.append(loss.detach().to(self._loss_dtype))
            return loss * share

        self._loss = scaled_loss
        self._forget_what_was_frozen()
        self._copies.begin()  # before a probe, after which FSDP2's unsharded parameters may be in place of the shards

    def _forget_what_was_frozen(self) -> None:
        """Begins anew where a script has frozen or unfrozen parameters since the last call: other stages get gradients then.

        A rank sees those of its own stages only. Ranks: all along `pp`.
        """
        trained = [parameter.requires_grad for parameter in self.module.parameters()]
        own = torch.tensor([[float(trained != self._trained)]], device=self.owners.device)
        self._trained = trained
        if self.owners.gather(own).any():
            self._shapes.clear()
            self._built.clear()

    def _total(self, mean: bool) -> Tensor:
        """Returns the loss of all micro-batches, from the rank of the last stage. Ranks: all along `pp`.

        Raises:
            PlanError: `pipeline-changed`.
        """
        self._loss = None
        # Ranks without the last stage pass a number that the broadcast replaces.
        losses = torch.stack(self._losses or [torch.zeros((), device=self.owners.device, dtype=self._loss_dtype)])
        reduced = losses.mean() if mean else losses.sum()
        own = torch.stack([reduced, torch.full_like(reduced, self._copies.changed())])
        # [ranks, 2]
        rows = self.owners.gather(own.unsqueeze(0))
        if rows[:, 1].any():
            self._copies.refuse_changes()
        total: Tensor = rows[self._rank_of_stage[-1], 0]
        return total

    def _run(self, name: str, parts: list[BatchPart]) -> None:
        """Runs micro-batches of one shape through a schedule."""
        count = len(parts)
        self._batch = parts
        schedule = self._scheduled((name, count, describe(parts[0][:2])))
        # torch's schedule would cut the batch itself. It cuts these numbers instead, and `_micro_pass` looks up the
        # micro-batch of a number: every stage needs the arguments, not only the first one.
        numbers = torch.arange(count)
        metered = nullcontext() if self.meter is None else self.meter.batch()
        # Hooks on gradients see that of the batch, and not that of a micro-batch.
        self._give_back_hooks()
        give_back_before = _put_gradient_hooks_by(self.module.parameters())
        give_back_after = _put_later_hooks_by(self.module.parameters())

        def give_back() -> None:
            give_back_before()
            give_back_after()

        self._give_back_hooks = give_back
        try:
            with metered, _gathered(self.module, name):
                schedule.step(micro=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            # torch's schedule wraps the error of a stage in a RuntimeError. An error of ours is raised as it is, with its fix.
            if isinstance(error.__cause__, PacelineError):
                raise error.__cause__ from None
            raise
        finally:
            self._batch = []

    def _scheduled(self, key: tuple[str, int, str]) -> Any:
        """Returns the schedule for batches of a shape, with its stages and their buffers."""
        name, count, shape = key
        is_new = shape not in self._shapes
        if self._peers is not None:
            # A probe gathers shards too, so it runs on all peers or on none.
            is_new = self._peers.any(is_new)
        if is_new:
            self._probe(shape)
        outputs, reports = self._shapes[shape]
        self.stages.outputs = outputs
        if key in self._built:
            self._built.move_to_end(key)
            return self._built[key]

        # Schedules that split a backward pass begin with the gradient of the stage's input. So the input must require a
        # gradient, even if no stage before it is trained.
        trains = [report.trains or SCHEDULES[name].halves for report in reports]
        given_on = [report.sends for report in reports]
        given_on[-1] = Spec((), torch.float32)  # the last stage gives a loss
        stages = []
        for stage in self.stages.own:
            # The shapes are passed to torch's stage as meta tensors; otherwise it would exchange them by messages of its own.
            # A hidden state requires a gradient if any stage up to the one that sends it is trained.
            arguments: Any = ()
            if stage > 0:
                arguments = empty(given_on[stage - 1], "meta", any(trains[:stage]))
            stages.append(
                stage_class()(
                    self.computing,
                    Stage(self._micro_pass(stage), self.stages.modules(stage), self._shared),
                    stage,
                    self.stages.count,
                    self.owners.device,
                    input_args=arguments,
                    output_args=empty(given_on[stage], "meta", any(trains[: stage + 1])),
                    group=self.owners.group,
                )
            )
        self._built[key] = build(name, stages, count, lambda loss, number: loss)
        if len(self._built) > _KEPT:
            self._built.popitem(last=False)
        return self._built[key]

    def _shared(self) -> Iterator[nn.Parameter]:
        """Returns the parameters that belong to no unit, which all ranks hold."""
        inside: set[int] = set()
        for stage in self.stages.own:
            for module in self.stages.modules(stage):
                inside.update(map(id, module.parameters()))
        return (parameter for parameter in self.module.parameters() if id(parameter) not in inside)

    def _micro_pass(self, stage: int) -> Callable[[tuple[Tensor, ...], int], Hidden]:
        def run(arrived: tuple[Tensor, ...], number: int) -> Hidden:
            args, kwargs, target = self._batch[number]
            received = self._received(stage, arrived)
            args, kwargs = self.stages.arguments(received, args, kwargs)
            with self.stages.entering(Visit(stage, received)):
                output = self.module(*args, **kwargs)
            if stage < self.stages.count - 1:
                return self.stages.hidden(stage, output)
            assert self._loss is not None
            return self._loss(output, target)

        return run

    def _received(self, stage: int, arrived: tuple[Tensor, ...]) -> Hidden | None:
        """Returns a received hidden state as a tensor or a tuple, as the stage before has sent it.

        The form is that of any probed shape: it is the same for all shapes.
        """
        if not arrived:
            return None
        _, reports = next(iter(self._shapes.values()))
        was_tuple = isinstance(reports[stage - 1].sends, tuple)
        return arrived if was_tuple else arrived[0]

    def follow(self, phase: Callable[[str], AbstractContextManager[Any]]) -> None:
        """From now on opens `phase` around what the stages compute."""
        self._phase = phase

    def finish_reduction(self) -> None:
        """Sums the gradients of parameters that several stages hold, after other strategies have averaged them."""
        self._copies.sum()
        self._give_back_hooks()

    def pending_gradients(self) -> PendingGradients:
        """Returns gradients of such parameters that are summed already, and how many ranks have the same sum."""
        return self._copies.pending_gradients()

    def restore_pending(self, pending: PendingGradients) -> None:
        """Restores these gradients."""
        self._copies.restore_pending(pending)

    def owned_elsewhere(self) -> set[int]:
        """Returns the `id` of each parameter that a stage on a lower rank holds, too."""
        return self._copies.owned_elsewhere()

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of the whole model, in the order of the user's model. Ranks: all along `pp`; each gets it."""
        # Every rank announces the names and shapes of its state. The tensors are broadcast one rank after the other, so that
        # no rank ever holds more than the full state and one rank's part.
        own: dict[str, Any] = {}
        for name, value in state.items():
            own[name] = Described.of(value) if isinstance(value, Tensor) else value
        full: dict[str, Any] = {}
        for rank, part in enumerate(self.owners.gather_object(own)):
            described: dict[str, Described] = {}
            for name, value in part.items():
                if name in full:
                    continue
                full[name] = value
                if isinstance(value, Described):
                    described[name] = value
            if self.owners.rank == rank:
                sent = [state[name] for name in described]
            else:
                sent = [description.empty(self.owners.device) for description in described.values()]
            full |= zip(described, self.owners.broadcast(sent, src=rank), strict=True)
        # Ranks may hold a tied parameter under different names. All its names get the same tensor, as in the user's model.
        for names_of_one in self._tied:
            present = [name for name in names_of_one if name in full]
            for name in present:
                full[name] = full[present[0]]
        # The model's own keys come first, in its order; then whatever a rank has added.
        in_order = (*self._names, *full)
        return {name: full[name] for name in in_order if name in full}

    @contextmanager
    def full_parameters(self, writeback: bool) -> Iterator[None]:
        """Refuses random numbers that are written into a stage's parameters. Ranks: all along `pp`.

        Raises:
            PlanError: `pipeline-draws`.
        """
        if not writeback:
            yield
            return
        before = generator_states(self._device())
        yield
        after = generator_states(self._device())
        drew = not all(map(torch.equal, before, after))
        if self._others_answer and self.owners.any(drew):
            raise PlanError(
                "pipeline-draws",
                "random numbers were drawn inside `full_parameters` for parameters that stages of a pipeline hold.",
                why=f"pp={self.owners.size}; each stage draws for its own parameters only, so its first parameter gets "
                "the numbers that one process gives to the first parameter of the model",
                fix="on all ranks draw the values of the whole model in a plain copy, made before `prepare`, and load them: "
                "`model.load_state_dict(copy.state_dict())`",
            )

    def _device(self) -> torch.device:
        """Returns where the parameters of this rank lie."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    # -- shapes, and evaluation ----------------------------------------------------------------------------------

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes the model's output for a whole batch. Ranks: all along `pp`; each gets the output.

        Raises:
            PlanError: `pipeline-forward`, if gradients are enabled.
        """
        if torch.is_grad_enabled():
            raise PlanError(
                "pipeline-forward",
                "a pipeline's output has no backward pass of its own: forward and backward run together.",
                why=f"pp={self.owners.size}, and gradients are enabled",
                fix="train with `accelerator.forward_backward(model, batch, loss_fn)`; evaluate inside `torch.no_grad()`",
            )
        # What results depend on is looked at once for each shape, in training and in evaluation: each operation takes longer.
        shape = f"{self.module.training} {describe((args, kwargs))}"
        output, _ = self._walk(args, kwargs, self._pass, shape not in self._evaluated)
        self._evaluated.add(shape)
        # The structure of the output goes first: the other ranks allocate tensors by it, which the broadcast then fills.
        last = self._rank_of_stage[-1]
        if self.owners.rank == last:
            self.owners.broadcast_object(specs(output), src=last)
            self.owners.broadcast(tensors(output), src=last)
            return output
        described = self.owners.broadcast_object(None, src=last)
        places = empty(described, self.owners.device)
        arrived = iter(self.owners.broadcast(tensors(places), src=last))
        return map_tensors(lambda _: next(arrived), places)

    def _probe(self, shape: str) -> None:
        """Learns the shapes of one kind of micro-batch. Buffers and random number generators are restored afterwards."""
        args, kwargs, _ = self._batch[0]
        # A forward pass may change buffers, such as the statistics of batch norms, and this one is no training step.
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        devices: list[torch.device] = []
        device_type = "cuda"  # the default of `fork_rng`, which it does not use if `devices` is empty
        if self.owners.device.type != "cpu":
            devices = [self.owners.device]
            device_type = self.owners.device.type
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device_type):
            _, reports = self._walk(args, kwargs, self.module, True)
        for buffer, before in buffers:
            buffer.copy_(before)
        for report in reports:
            for text in report.hooks:
                warn_once("parallel", text)
        self._shapes[shape] = self.stages.outputs, reports

    def _walk(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any], is_new: bool
    ) -> tuple[Any, list[_StageReport]]:
        """Runs a batch through all stages, one after the other. Ranks: all along `pp`; if one raises, all raise.

        Args:
            args, kwargs: of the model.
            call: the model, or its own forward.
            is_new: whether it is unknown what the outputs of stages depend on.

        Returns:
            The output, None on ranks without the last stage; and the report of each stage. The shapes of the outputs of all
            units are in `stages.outputs`, where the stubs of later stages read them.
        """
        rank = self.owners.rank
        owners = self._rank_of_stage
        group = self.owners.group
        reports: list[_StageReport] = []
        self.stages.outputs = {}
        hidden = None
        output = None
        # All ranks go through all stages in the same order: the owner receives a hidden state and computes, its report is
        # broadcast, and then it sends its output to the next owner.
        for stage, owner in enumerate(owners):
            report: _StageReport | Exception | None = None
            if rank == owner:
                if stage and owners[stage - 1] != rank:
                    hidden = empty(reports[-1].sends, self.owners.device)
                    for tensor in tensors(hidden):
                        dist.recv(tensor, dist.get_global_rank(group, owners[stage - 1]), group)
                # The tensors of a rehearsal have no values, which might be those of placeholders.
                sources = Sources() if is_new and self._others_answer else None
                output, report = self._run_stage(stage, hidden, args, kwargs, call, sources)
            # The report is sent before the tensors: it tells the receiver their shapes, or the error that was raised instead.
            if rank == owner or self._others_answer:
                report = self.owners.broadcast_object(report, src=owner)
            else:
                # In a rehearsal nobody runs this stage. Its blocks are assumed to return the shapes that it would receive.
                before = reports[-1]
                imagined: dict[str, list[Any]] = {}
                for unit in self.stages.units:
                    if unit.stage == stage:
                        imagined[unit.name] = [before.sends]
                report = _StageReport(imagined, before.sends, before.trains)
            if isinstance(report, Exception):
                raise report
            assert report is not None
            self.stages.outputs |= report.outputs
            reports.append(report)
            if rank == owner and stage + 1 < len(owners):
                hidden = output
                if owners[stage + 1] != rank:
                    for tensor in tensors(output):
                        dist.send(tensor, dist.get_global_rank(group, owners[stage + 1]), group)
        # On other ranks `output` is the hidden state of their own last stage.
        if rank != owners[-1]:
            output = None
        return output, reports

    def _run_stage(
        self,
        stage: int,
        hidden: Hidden | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        sources: Sources | None,
    ) -> tuple[Any, _StageReport | Exception]:
        """Runs one stage. Returns its output, and a report for the other ranks; or an error, which all ranks raise."""
        recorded: dict[str, list[Any]] = {}
        is_last = stage == self.stages.count - 1
        args, kwargs = self.stages.arguments(hidden, args, kwargs)
        try:
            with self.stages.entering(Visit(stage, hidden, recorded, sources)):
                try:
                    with nullcontext() if sources is None else sources:
                        output = call(*args, **kwargs)
                        if not is_last:
                            output = self.stages.hidden(stage, output)
                except ReadPlaceholder as error:
                    raise self.stages.was_read(error) from error
                if sources is not None:
                    self.stages.check(output)
        except Exception as error:
            # Not raised here: the other ranks wait for a report, and raise this error with this rank.
            return None, _sendable(error)
        parameters = list(self._shared())
        for module in self.stages.modules(stage):
            parameters += module.parameters()
        trains = any(parameter.requires_grad for parameter in parameters)
        if is_last:
            return output, _StageReport(recorded, None, trains)
        return output, _StageReport(recorded, specs(output), trains, self._hooks_before(stage).found())

    def _hooks_before(self, stage: int) -> HooksOnParts:
        """Returns what tells of hooks of a stage that is not the last one."""
        hooks = HooksOnParts(
            f"tensors on the processes of stage {stage} alone. The loss is computed in the last stage, where a penalty or a "
            "feature that this hook keeps is missing. Compute it from the output of the model, or choose a plan without `pp`."
        )
        names = {module: name for name, module in self.module.named_modules()}
        for unit in self.stages.modules(stage):
            for module in unit.modules():
                hooks.add(names[module], module, (FORWARD_PRE, FORWARD))
        return hooks

    def _pass(self, *args: object, **kwargs: object) -> Any:
        """Runs the user's forward up to the end of the current stage."""
        try:
            return self._inner(*args, **kwargs)
        except EndOfStage as leave:
            return leave.hidden

    def _forward(self, model: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """The forward of the prepared model: the pass of a stage if one is running, otherwise an evaluation."""
        if model is not self.module:
            raise PlanError(
                "pipeline-copy",
                f"a copy of {type(model).__name__} cannot run: the pipeline runs the model that was prepared.",
                why=f"pp={self.owners.size}, and a copy has no other stages",
                fix="copy the model before `prepare`, and prepare the copy too",
            )
        if self.stages.visit is None:
            return self.evaluate(args, kwargs)
        return self._pass(*args, **kwargs)

    # -- time ------------------------------------------------------------------------------------------------------

    def computing(self, phase: str) -> Any:
        """Returns the context in which a stage computes, for `measure` and for the phases of a step."""
        if self.meter is not None:
            return self.meter.computing()
        if self._phase is not None:
            return self._phase(phase)
        return nullcontext()


def _rows_of(batch: BatchPart, rows: int, begin: int, end: int) -> BatchPart:
    """Returns one micro-batch: these rows of tensors whose dim 0 is the number of rows, and these entries of lists of samples.

    Everything else is the same for each micro-batch.
    """

    def has_rows(value: object) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows

    def cut(value: Tree) -> Tree:
        if isinstance(value, Tensor):
            return value[begin:end] if has_rows(value) else value
        inner = children(value)
        if inner is None:
            return value
        # Texts, dicts of boxes, tensors of other lengths: an entry for each sample. Tensors that all have rows are fields.
        with_dims = [tensor for tensor in tensors(value) if tensor.ndim]
        are_fields = any(map(has_rows, inner)) or (bool(with_dims) and all(map(has_rows, with_dims)))
        if type(value) in (list, tuple) and len(value) == rows and not are_fields:
            return value[begin:end]
        return rebuild(value, list(map(cut, inner)))

    inputs, named, target = batch
    return BatchPart(tuple(map(cut, inputs)), {name: cut(value) for name, value in named.items()}, cut(target))


@dataclass(frozen=True)
class _StageReport:
    """The facts about a stage that all ranks need.

    Attributes:
        outputs: the outputs of each of its units, as structures of `Spec`.
        sends: the hidden state for the next stage, as a structure of `Spec`; None for the last stage.
        trains: whether it has a parameter that requires a gradient.
        hooks: what is to be said of hooks of the script's in it.
    """

    outputs: dict[str, list[Any]]
    sends: Any
    trains: bool
    hooks: Sequence[str] = ()


def _sendable(error: Exception) -> Exception:
    """Returns the error itself if it can be pickled, else a RuntimeError with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    # A class of the script may raise anything while it is pickled or rebuilt. The message reaches the other ranks anyway.
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def _gathered(model: nn.Module, schedule: str) -> Iterator[None]:
    """Keeps FSDP2's parameters gathered while a schedule runs that splits backward passes.

    The half that computes the gradients of weights needs the same parameter objects that the forward pass has used.
    """
    # FSDP2 is looked up and not imported: if it was never imported, no module is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not SCHEDULES[schedule].halves:
        yield
        return
    units = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    with kept_gathered(units):
        yield


def _put_gradient_hooks_by(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Lets the hooks of parameters wait for several backward passes.

    Parameters whose hooks wait already are left out.

    Returns:
        A function that calls them with the gradients of all these passes, and gives them back.
    """
    put_by = [GradientHooks(parameter) for parameter in parameters if has_users_gradient_hooks(parameter)]

    def give_back() -> None:
        for hooks in put_by:
            if hooks.is_open:
                hooks.call()
                hooks.put_back()
            hooks.release()
        put_by.clear()

    return give_back


def _put_later_hooks_by(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Keeps autograd from calling what `register_post_accumulate_grad_hook` has got, for several backward passes.

    Tensors whose hooks were taken over already are left out.

    Returns:
        A function that gives the hooks back and calls those of tensors that got a gradient, once each.
    """
    reached: set[Tensor] = set()
    put_by: list[tuple[Tensor, dict[int, Callable[[Tensor], None]], Callable[[], None]]] = []
    for tensor in tensors:
        if has_hooks_after(tensor) and not are_hooks_taken_over(tensor):
            put_by.append((tensor, *take_over_hooks(tensor, reached.add)))

    def give_back() -> None:
        for tensor, hooks, end in put_by:
            end()
            if tensor in reached:
                for hook in list(hooks.values()):
                    hook(tensor)
        put_by.clear()

    return give_back
