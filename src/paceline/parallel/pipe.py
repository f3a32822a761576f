"""`Pipe`: runs batches through the stages of one model.

    first batch of a shape   `_walk`: one micro-batch goes through all stages without gradients; every rank learns the
                             shapes, so that torch's stages and schedule are built for them and never guess
    forward_backward         the schedule: micro-batches forward and backward, as `torch.distributed.pipelining` orders them
    evaluate                 `_walk` with the whole batch; its output goes to all ranks along `pp`

Shapes that differ between ranks hang or abort in a collective, so nothing is sent whose shape the receiver has not
been told.
"""

from __future__ import annotations

import math
import pickle
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from inspect import Parameter, signature
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import PacelineError, PlanError
from paceline.base.log import warn_once
from paceline.parallel.copies import Copies
from paceline.parallel.microbatches import Part
from paceline.parallel.schedules import build
from paceline.parallel.stages import Hidden, Leave, Spec, Stage, Stages, Visit, specs
from paceline.plan.pipeline import SCHEDULES, choose, rank_of
from paceline.torch_internals.fsdp import kept_gathered
from paceline.world.tree import describe, first_rows, map_leaves, map_tensors, tensors

_KEPT = 4  # schedules with their buffers, of the shapes that came last


class Meter:
    """Seconds that this rank computed, of those that its batches took.

    Attributes:
        busy_s, total_s: summed over batches.
    """

    def __init__(self) -> None:
        self.busy_s = self.total_s = 0.0

    @property
    def bubble(self) -> float:
        """The share of time in which this rank waited or communicated."""
        return 1 - self.busy_s / self.total_s if self.total_s else 0.0


class Pipe:
    """The stages of one model on this rank, and the ways to run them.

    Args:
        model: pruned to its stages; its `forward` is replaced.
        stages: of this rank.
        copies: parameters that several ranks hold.
        schedule: name of the schedule.
        microbatches: in one batch, at most.
        collectives: of the ranks along `pp`.
        peers: of the ranks that gather shards of parameters together, which must pass equally often; None where
            parameters are whole.
        device: of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        copies: Copies,
        schedule: str,
        microbatches: int,
        collectives: Any,
        peers: Any,
        device: torch.device,
    ) -> None:
        self.model, self.stages, self.copies = model, stages, copies
        self.meter: Meter | None = None
        self.phase: Callable[[str], AbstractContextManager[Any]] | None = None  # told what a stage computes
        self._schedule, self._microbatches = schedule, microbatches
        self._collectives, self._peers, self._device = collectives, peers, device
        self._owners = [
            rank_of(stage, collectives.size, SCHEDULES[schedule].placement) for stage in range(stages.count)
        ]
        self._shapes: dict[Any, tuple[dict[str, list[Any]], list[Any]]] = {}
        self._built: OrderedDict[Any, Any] = OrderedDict()
        self._batch: list[Any] = []  # a `Part` for each micro-batch
        self._loss: Callable[[Any, Any], Tensor] | None = None
        self._losses: list[Tensor] = []
        self._inner = model.forward
        _replace_forward(model, self)

    # -- training ----------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        target: Any,
        loss_fn: Callable[..., Tensor],
        factor: Tensor,
        mean: bool,
    ) -> Tensor:
        """One batch forward and backward; see `Pipeline.forward_backward`."""
        rows = first_rows((inputs, named))
        if rows is None:
            raise PlanError(
                "pipeline-rows",
                "a pipeline divides a batch into micro-batches, but this one has no tensor with rows.",
                why=f"the batch is {describe((inputs, named))}",
                fix="pass the samples as tensors whose dim 0 counts them",
            )
        common = rows if self._peers is None else math.gcd(*self._peers.gather(torch.tensor([rows])).tolist())
        name, count = choose(self._schedule, self._microbatches, common, self._collectives.size)
        if name != self._schedule:
            warn_once(
                "parallel",
                f"pipeline: a batch of {rows} rows makes {count} equal micro-batches at most, which {self._schedule} does "
                f"not take; {name} runs it. Use batches of a multiple of {self._microbatches} rows.",
            )
        size = rows // count
        parts = [
            map_tensors(
                lambda t, at=at: t[at : at + size] if t.ndim and t.shape[0] == rows else t, Part(inputs, named, target)
            )
            for at in range(0, rows, size)
        ]
        self._begin(loss_fn, factor.detach() / count if mean else factor.detach())
        self._run(name, parts)
        return self._total(mean, count)

    def each(self, parts: Sequence[Part], loss_fn: Callable[..., Tensor], factor: Tensor, mean: bool) -> Tensor:
        """Micro-batches as they are, forward and backward; see `Pipeline.forward_backward_each`."""
        self._begin(loss_fn, factor.detach() / len(parts) if mean else factor.detach())
        for alike in self._alike(parts):
            takes = SCHEDULES[self._schedule].takes(len(alike), self._collectives.size)
            self._run(self._schedule if takes else SCHEDULES[self._schedule].otherwise, alike)
        return self._total(mean, len(parts))

    def _alike(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Micro-batches of one shape together: a schedule's buffers are for one. Where peers that gather shards together
        would find others than this rank, each stands alone, so that all pass in the same order."""
        found: dict[str, list[Part]] = {}
        for part in parts:
            found.setdefault(describe(part[:2]), []).append(part)
        if self._peers is not None:
            own = [list(found).index(describe(part[:2])) for part in parts]
            if len(set(map(tuple, self._peers.gather(torch.tensor([own])).tolist()))) > 1:
                return [[part] for part in parts]
        return list(found.values())

    def _begin(self, loss_fn: Callable[..., Tensor], share: Tensor) -> None:
        self._losses = []

        def weighed(output: Any, micro_target: Any) -> Tensor:
            loss = loss_fn(output, micro_target)
            self._losses.append(loss.detach().float())
            return loss * share

        self._loss = weighed
        self.copies.begin()  # before a probe, which may leave whole parameters in the place of divided ones

    def _total(self, mean: bool, count: int) -> Tensor:
        self._loss = None
        losses = torch.stack(self._losses) if self._losses else torch.zeros(count, device=self._device)
        total: Tensor = self._collectives.broadcast(losses.mean() if mean else losses.sum(), src=self._owners[-1])
        return total

    def _run(self, name: str, parts: list[Part]) -> None:
        """Micro-batches of one shape through a schedule."""
        count, self._batch = len(parts), parts
        schedule = self._scheduled((name, count, describe(parts[0][:2])))
        numbers = torch.arange(count)
        try:
            with self._metered(), _gathered(self.model, name):
                schedule.step(micro=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, PacelineError):
                raise error.__cause__ from None
            raise
        finally:
            self._batch = []

    def _scheduled(self, key: Any) -> Any:
        """The schedule for batches of a shape, with its stages and their buffers."""
        name, count, shape = key
        new = shape not in self._shapes
        if new if self._peers is None else self._peers.any(new):
            self._probe(shape)
        outputs, hidden = self._shapes[shape]
        self.stages.outputs = outputs
        if key in self._built:
            self._built.move_to_end(key)
            return self._built[key]
        made = []
        for stage in self.stages.own:
            # Halves of a backward pass begin at the stage's input, so that must have a gradient though nothing before trains.
            trains = [trained or SCHEDULES[name].halves for _, trained in hidden]
            given = () if stage == 0 else _empty(hidden[stage - 1][0], "meta", any(trains[:stage]))
            last = stage == self.stages.count - 1
            gives = Spec((), torch.float32) if last else hidden[stage][0]
            module = Stage(self._micro_pass(stage), self.stages.modules(stage), self._shared)
            made.append(
                _stage_class()(
                    self,
                    module,
                    stage,
                    self.stages.count,
                    self._device,
                    input_args=given,
                    output_args=_empty(gives, "meta", any(trains[: stage + 1])),
                    group=self._collectives.group,
                )
            )
        self._built[key] = build(name, made, count, lambda loss, number: loss)
        if len(self._built) > _KEPT:
            self._built.popitem(last=False)
        return self._built[key]

    def _shared(self) -> Iterator[nn.Parameter]:
        inside = {
            id(p) for stage in self.stages.own for module in self.stages.modules(stage) for p in module.parameters()
        }
        return (parameter for parameter in self.model.parameters() if id(parameter) not in inside)

    def _micro_pass(self, stage: int) -> Callable[[tuple[Tensor, ...], int], Hidden]:
        def run(arrived: tuple[Tensor, ...], number: int) -> Hidden:
            args, kwargs, target = self._batch[number]
            received = self._received(stage, arrived)
            args, kwargs = self.stages.arguments(received, args, kwargs)
            with self.stages.entering(Visit(stage, received)):
                output = self.model(*args, **kwargs)
            if stage < self.stages.count - 1:
                return self.stages.hidden(stage, output)
            assert self._loss is not None
            return self._loss(output, target)

        return run

    def _received(self, stage: int, arrived: tuple[Tensor, ...]) -> Hidden | None:
        """What a stage got, in the form in which the one before sent it; that never changes, other than shapes."""
        if not arrived:
            return None
        _, hidden = next(iter(self._shapes.values()))
        return arrived if isinstance(hidden[stage - 1][0], tuple) else arrived[0]

    # -- shapes, and evaluation ----------------------------------------------------------------------------------

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output for a whole batch. Ranks: all along `pp`; all get it.

        Raises:
            PlanError: `pipeline-forward`, with gradients enabled.
        """
        if torch.is_grad_enabled():
            raise PlanError(
                "pipeline-forward",
                "a pipeline's output has no way back: its forward and backward run together.",
                why=f"pp={self._collectives.size}, and gradients are enabled",
                fix="train with `accelerator.forward_backward(model, batch, loss_fn)`; evaluate inside `torch.no_grad()`",
            )
        output, _, _ = self._walk(args, kwargs, self._pass)
        src = self._owners[-1]
        mine = self._collectives.rank == src
        told = self._collectives.broadcast_object(specs(output) if mine else None, src=src)
        own = tensors(output) if mine else []
        if not mine:
            map_leaves(lambda leaf: own.append(leaf.empty(self._device)) if isinstance(leaf, Spec) else None, told)
        arrived = iter(self._collectives.broadcast(own, src=src))
        return output if mine else map_leaves(lambda leaf: next(arrived) if isinstance(leaf, Spec) else leaf, told)

    def _probe(self, shape: str) -> None:
        """Learns the shapes of one kind of micro-batch, and leaves no trace in buffers and random streams."""
        args, kwargs, _ = self._batch[0]
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            _, outputs, hidden = self._walk(args, kwargs, self.model)
        for buffer, before in buffers:
            buffer.copy_(before)
        self._shapes[shape] = outputs, hidden

    def _walk(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> tuple[Any, dict[str, list[Any]], list[tuple[Any, bool]]]:
        """A batch through all stages, one after the other.

        Returns the output (None on ranks without the last stage); what each unit gave; and for each stage what it
        sends, and whether it has parameters to train. Where one rank raises, all do.
        """
        rank, owners, group = self._collectives.rank, self._owners, self._collectives.group
        known: dict[str, list[Any]] = {}
        sent: list[tuple[Any, bool]] = []
        self.stages.outputs = known
        hidden = output = None
        for stage, owner in enumerate(owners):
            told: Any = None
            if rank == owner:
                if stage and owners[stage - 1] != rank:
                    hidden = _empty(sent[-1][0], self._device)
                    for each in tensors(hidden):
                        dist.recv(each, dist.get_global_rank(group, owners[stage - 1]), group)
                told = self._told(stage, hidden, args, kwargs, call)
                if not isinstance(told, Exception):
                    output, told = told
            told = self._collectives.broadcast_object(told, src=owner)
            if isinstance(told, Exception):
                raise told
            recorded, spec, trains = told
            known |= recorded
            sent.append((spec, trains))
            if rank == owner and stage + 1 < len(owners):
                hidden = output
                if owners[stage + 1] != rank:
                    for each in tensors(output):
                        dist.send(each, dist.get_global_rank(group, owners[stage + 1]), group)
        return (output if rank == owners[-1] else None), known, sent

    def _told(
        self, stage: int, hidden: Hidden | None, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Runs a stage; its output, and what others must know of it; or the error that they must raise too."""
        recorded: dict[str, list[Any]] = {}
        args, kwargs = self.stages.arguments(hidden, args, kwargs)
        try:
            with self.stages.entering(Visit(stage, hidden, recorded)):
                output = call(*args, **kwargs)
                last = stage == self.stages.count - 1
                output = output if last else self.stages.hidden(stage, output)
                self.stages.check(stage, output, hidden)
        except Exception as error:  # it is raised again, on every rank
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                return RuntimeError(f"{type(error).__name__}: {error}")
            return error
        trains = any(p.requires_grad for module in self.stages.modules(stage) for p in module.parameters())
        trains = trains or any(p.requires_grad for p in self._shared())
        return output, (recorded, None if last else specs(output), trains)

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        """The user's forward, up to the end of the stage at hand."""
        try:
            return self._inner(*args, **kwargs)
        except Leave as leave:
            return leave.hidden

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `model(...)` does: a stage's pass inside of one, an evaluation otherwise."""
        return self.evaluate(args, kwargs) if self.stages.visit is None else self._pass(*args, **kwargs)

    # -- time ------------------------------------------------------------------------------------------------------

    def computing(self, phase: str) -> Any:
        """Around each piece of a stage's computation: takes its time while somebody measures."""
        if self.meter is not None:
            return self._timed("busy_s")
        return nullcontext() if self.phase is None else self.phase(phase)

    def _metered(self) -> Any:
        return nullcontext() if self.meter is None else self._timed("total_s")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        _wait(self._device)
        begin = time.perf_counter()
        yield
        _wait(self._device)
        setattr(self.meter, name, getattr(self.meter, name) + time.perf_counter() - begin)


def _empty(spec: Any, device: torch.device | str, requires_grad: bool = False) -> Any:
    """Tensors of some kinds; whole numbers and masks have no gradients."""
    return map_leaves(
        lambda leaf: leaf.empty(device, requires_grad and leaf.dtype.is_floating_point), spec
    )  # fmt: skip


@contextmanager
def _gathered(model: nn.Module, schedule: str) -> Iterator[None]:
    """Keeps FSDP2's parameters whole while a schedule takes backward passes in halves: the half for weights looks for
    the very parameters that the forward pass used."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    units = [m for m in model.modules() if fsdp is not None and isinstance(m, fsdp.FSDPModule)]
    if not (units and SCHEDULES[schedule].halves):
        yield
        return
    with kept_gathered(units):
        yield


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _replace_forward(model: nn.Module, pipe: Pipe) -> None:
    """Makes `model(...)` go through the pipe; the module stays the same object with the same names."""
    original = model.forward

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not model:
            raise PlanError(
                "pipeline-copy",
                f"a copy of {type(self).__name__} cannot run: the pipeline runs the model that was prepared.",
                why=f"pp={len(pipe.stages.first)}, and a copy has no other stages",
                fix="copy the model before `prepare`, and prepare the copy too",
            )
        return pipe.call(args, kwargs)

    told = signature(original)
    first = Parameter("self", Parameter.POSITIONAL_ONLY)
    forward.__signature__ = told.replace(parameters=[first, *told.parameters.values()])  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)  # type: ignore[method-assign]


@cache
def _stage_class() -> type:
    """torch's stage, which tells its pipe when it computes."""
    from torch.distributed.pipelining import PipelineStage

    class Timed(PipelineStage):
        def __init__(self, pipe: Pipe, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._pipe = pipe

        def _post_metadata_inference_cleanup(self) -> None:
            """torch drops gradients here, those of an open window too; with the shapes given nothing has added to them."""
            for module in self.submod.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            before = [(parameter, parameter.grad) for parameter in self.submod.parameters()]
            super()._post_metadata_inference_cleanup()
            for parameter, gradient in before:
                parameter.grad = gradient

        def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with self._pipe.computing("forward"):
                return super().forward_one_chunk(*args, **kwargs)

        def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with self._pipe.computing("backward"):
                return super().backward_one_chunk(*args, **kwargs)

        def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with self._pipe.computing("backward"):
                return super().backward_weight_one_chunk(*args, **kwargs)

    return Timed
