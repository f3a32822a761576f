"""`Stages`: a model that is split into stages, each of which runs the user's own `forward` with the modules that it holds.

Nothing is traced. A model is a chain of *blocks* and, around them, *units*: the outermost modules with parameters
(embeddings, the last norm, the head). Each of them belongs to one stage. In the other stages a stub takes its place, so that
all names stay. A later stage gets the batch, too, and runs `forward` from its start:

    unit of an earlier stage   its stub returns a placeholder of the right shape; a result that depends on it is refused
    code without parameters    runs in every stage: masks, positions and rotary tables are computed again
    first block of the stage   its first argument is replaced by the hidden state that was received. If the code around the
                               blocks uses this argument afterwards, too (`x = x + block(x)`), it is written into it
    first block of the next    its stub ends the pass with an exception that carries its first argument, the hidden state

Parameters of the root, or of a module that contains blocks, are held by all ranks; their gradients are summed.

A model whose `forward` only calls its blocks may have two further attributes (a list of layers that is split into stages
has both):

    model.pipeline_begin(n)    a context manager; inside, `forward(hidden)` runs from block n on. Then the only stub that is
                               called is the one that ends the pass, and later stages do not need the batch
    model.pipeline_apart       True if this rank has built values for its own stage only; the others are on the meta device
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.errors import PlanError
from paceline.plan.fqn import inside, listed, parent
from paceline.torch_internals.modules import child_table
from paceline.torch_internals.tensors import is_view
from paceline.world.tree import Tree, describe, tensors
from paceline_large.module_shell import Shell
from paceline_large.pipeline.sources import ReadPlaceholder, Sources
from paceline_large.pipeline.specs import Spec, placeholder, specs
from paceline_large.pipeline.split import matching


class EndOfStage(BaseException):
    """Leaves `forward` at the end of a stage, with the hidden state. A BaseException, so that no model catches it."""

    def __init__(self, hidden: object) -> None:
        self.hidden = hidden


Hidden = Tensor | tuple[Tensor, ...]  # the hidden state that one stage sends to the next
_RECEIVED = (
    "hidden state"  # the source of the argument that stands for the received hidden state; no module is called so
)


@dataclass
class Visit:
    """One pass of one stage through `forward`.

    Attributes:
        stage: the number of the stage.
        received: the hidden state from the stage before; None in the first stage.
        recorded: the outputs of each unit of the stage, call by call; None if they are not recorded.
        sources: follows what is computed from placeholders; None if that is known from an earlier pass.
        entered: whether the pass has reached the stage's first block.
        calls: how often each stub was called so far.
        stood_in: the units and parameters of other stages for which there were placeholders.
    """

    stage: int
    received: Hidden | None
    recorded: dict[str, list[Any]] | None = None
    sources: Sources | None = None
    entered: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    stood_in: list[str] = field(default_factory=list)

    def stand_in(self, name: str, value: object) -> Any:
        """Returns a placeholder, after its source was recorded."""
        self.stood_in.append(name)
        if self.sources is not None:
            for tensor in tensors(value):
                self.sources.set(tensor, frozenset([name]))
        return value


class Stub(nn.Module):
    """Takes the place of a module that another stage holds, with its plain attributes (a layer's type or number)."""

    def __init__(
        self, name: str, stands_for: nn.Module, call: Callable[..., Any], held_module: nn.Module | None = None
    ) -> None:
        super().__init__()
        for key, value in vars(stands_for).items():
            if not (key.startswith("_") or callable(value) or isinstance(value, Tensor)):
                self.__dict__[key] = value
        self.__dict__["_site"] = (name, call)
        # Code outside of the module may read a parameter of it, such as `pos.weight[:9]`. A stub that stands for another
        # stub takes over its table.
        own = {key: Spec.of(parameter) for key, parameter in stands_for.named_parameters(recurse=False)}
        self.__dict__["_tables"] = own or vars(stands_for).get("_tables", {})
        if held_module is not None:
            # The module of another stage of this rank: its parameters must be found here, although it is not called.
            self._modules["held"] = held_module

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Returns a placeholder of the module's output, or ends the pass."""
        name, call = self.__dict__["_site"]
        return call(name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            site, call = self.__dict__.get("_site", ("?", None))
            spec = self.__dict__.get("_tables", {}).get(name)
            stages = getattr(call, "__self__", None)
            if spec is not None and spec.dtype.is_floating_point and isinstance(stages, Stages) and stages.visit:
                return stages.borrow(f"{site}.{name}", spec)
            raise AttributeError(
                f"{site}.{name} is held by another stage of the pipeline; to hold {site} in all of them, set "
                f"options={{'pipeline': {{'keep': ['{site}']}}}}"
            ) from error

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        """Leaves values to the stage that holds the module: a script loads them on all ranks."""
        if "held" in self._modules:
            own = [key for key in state_dict if key.startswith(prefix)]
            state_dict.update({f"{prefix}held.{key.removeprefix(prefix)}": state_dict[key] for key in own})

    def extra_repr(self) -> str:
        return "in another stage"


@dataclass
class StageUnit:
    """A module that one stage holds.

    Attributes:
        name: its FQN.
        stage: the stage that holds it.
        slots: the `_modules` dictionary of its parent.
        key: its key there.
        module: the module, or a stub if another rank holds it.
    """

    name: str
    stage: int
    slots: dict[str, nn.Module | None]
    key: str
    module: nn.Module


# The `_modules` of a parent, the key in it, the module there while a stage runs, and the module there between passes.
Swap = tuple[dict[str, nn.Module | None], str, nn.Module, nn.Module]


class Stages:
    """The stages of one model that this rank holds.

    Args:
        model: changed in place: units of other ranks become stubs.
        blocks: the names of the blocks, in order.
        begins: the numbers of the blocks with which stages begin.
        own: the numbers of this rank's stages, ascending.
        keep: patterns of modules that every stage holds.
        device: the device of placeholders.

    Attributes:
        count: the number of stages.
        first: the name of the first block of each stage.
        units: of all stages, in order of definition.
        visit: the pass that is running, or None.
        outputs: the outputs of units, as structures of `Spec`; to be set before a pass from a recorded pass.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        begins: Sequence[int],
        own: Sequence[int],
        keep: Sequence[str],
        device: torch.device,
    ) -> None:
        self.count = len(begins)
        self.own = tuple(own)
        self.first = [blocks[begin] for begin in begins]
        self.begins = tuple(begins)
        self._begin_at = getattr(model, "pipeline_begin", None)
        self.visit: Visit | None = None
        self.outputs: dict[str, list[Any]] = {}
        self._blocks = frozenset(blocks)
        self._writes: set[int] = set()  # stages into whose first argument the received hidden state is written
        self._device = device
        ends = (*begins[1:], len(blocks))
        stage_of_block: dict[str, int] = {}
        for stage, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            stage_of_block |= dict.fromkeys(blocks[begin:end], stage)
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        on_all_stages: set[str] = set()
        for pattern in keep:
            on_all_stages.update(matching(pattern, names))
        self.units: list[StageUnit] = []
        _find(model, "", stage_of_block, on_all_stages, 0, self.units)
        self._stage_of = {unit.name: unit.stage for unit in self.units}
        self._real: dict[str, nn.Module] = {}
        for unit in self.units:
            if unit.stage in self.own:
                self._real[unit.name] = unit.module
            else:
                unit.module = self._stub(unit)
                unit.slots[unit.key] = unit.module
        self._swaps: dict[tuple[int, bool], list[Swap]] = {}

    def _stub(self, unit: StageUnit, held_module: nn.Module | None = None) -> Stub:
        return Stub(unit.name, unit.module, self._at_stub, held_module)

    def holds(self, name: str, stages: Sequence[int]) -> bool:
        """Returns whether one of `stages` holds a parameter or buffer. All stages hold those that are in no unit."""
        for unit in self.units:
            if name.startswith(f"{unit.name}."):
                return unit.stage in stages
        return True

    def modules(self, stage: int) -> list[nn.Module]:
        """Returns the units of one of this rank's stages."""
        return [self._real[unit.name] for unit in self.units if unit.stage == stage]

    # -- a pass ------------------------------------------------------------------------------------------------

    @contextmanager
    def entering(self, visit: Visit) -> Iterator[Visit]:
        """While it is open, the model is the stage `visit.stage`."""
        begin: AbstractContextManager[Any] = nullcontext()
        if self._begin_at is not None:
            begin = self._begin_at(self.begins[visit.stage])
            visit.entered = True
        self._follow_replaced()
        swaps = self._swaps_of(visit.stage, visit.recorded is not None)
        for slots, key, there, _ in swaps:
            slots[key] = there
        self.visit = visit
        try:
            with begin:
                yield visit
        finally:
            # Also after an error: the user's code may use the model's modules afterwards.
            self.visit = None
            for slots, key, _, back in swaps:
                slots[key] = back

    def arguments(self, received: Hidden | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the arguments for the model: the batch, or the hidden state if the model can begin at a block."""
        starts_at_first_block = self._begin_at is not None and received is not None
        if starts_at_first_block:
            return (received,), {}
        return args, kwargs

    def _follow_replaced(self) -> None:
        """Takes the modules that a script has put in the places of units since the last pass, such as another head.

        All ranks put it there, and one of them holds it: the others get their stubs back after the pass.
        """
        for unit in self.units:
            there = unit.slots.get(unit.key)
            if unit.stage in self.own and there is not None and there is not unit.module:
                unit.module = self._real[unit.name] = there
                self._swaps.clear()

    def _swaps_of(self, stage: int, record: bool) -> list[Swap]:
        """Returns the modules that are replaced while a stage runs.

        They are made at the stage's first pass, since later strategies may replace modules until then.
        """
        if (stage, record) not in self._swaps:
            swaps: list[Swap] = []
            for unit in self.units:
                there: Stub | Shell
                gets_hidden_state = stage > 0 and unit.name == self.first[stage]
                if unit.stage != stage:
                    there = self._stub(unit, self._real.get(unit.name))
                elif self._begin_at is None and (record or gets_hidden_state):
                    there = Shell(unit.name, unit.module, self._at_unit)
                else:
                    continue  # the module itself runs
                there.train(unit.module.training)
                swaps.append((unit.slots, unit.key, there, unit.module))
            self._swaps[stage, record] = swaps
        return self._swaps[stage, record]

    def _at_stub(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = self.visit
        owner = self._stage_of[name]
        if visit is None:
            raise PlanError(
                "pipeline-elsewhere",
                f"{name} was called by itself, but this rank holds stage {', '.join(map(str, self.own))} of the pipeline.",
                why=f"{name} is in stage {owner}",
                fix="call the prepared model as a whole; every rank gets its output",
            )
        # The next stage begins here: an exception leaves the user's `forward` with the hidden state.
        has_computed = visit.entered or visit.stage == 0
        if owner == visit.stage + 1 and name == self.first[owner] and has_computed:
            arguments = (*args, *kwargs.values(), None)  # None: `hidden` refuses a call without arguments
            raise EndOfStage(arguments[0])
        if owner > visit.stage or visit.entered:
            raise PlanError(
                "pipeline-order",
                f"{name} runs while stage {visit.stage} of the pipeline does, but stage {owner} holds it.",
                why=f"modules belong to the stage of the last block defined before them, and stage {visit.stage} begins "
                f"with {self.first[visit.stage]}",
                fix=f"define it in the model where it runs, or set options={{'pipeline': {{'keep': ['{name}']}}}}",
            )
        # An earlier stage has computed this module. `forward` needs an output to continue; a placeholder of the same shape is
        # enough, since the first block of this stage gets the received hidden state instead.
        number = visit.calls.get(name, 0) + 1
        visit.calls[name] = number
        outputs = self.outputs.get(name, [])
        if number > len(outputs):
            raise PlanError(
                "pipeline-calls",
                f"{name} is called more often for this micro-batch than for the first one of its shape.",
                why=f"this is call {number}, and the first micro-batch made {len(outputs)}. Stage {visit.stage} of the "
                f"pipeline does not hold {name}, and knows the shapes of the outputs of that micro-batch only",
                fix=f"call it the same number of times for all data, or hold it in all stages: "
                f"options={{'pipeline': {{'keep': ['{name}']}}}}",
            )
        return visit.stand_in(name, placeholder(outputs[number - 1], self._device))

    def borrow(self, name: str, spec: Spec) -> Tensor:
        """Returns a placeholder for a parameter of another stage. `check` refuses a result that depends on it."""
        assert self.visit is not None
        value: Tensor = self.visit.stand_in(name, spec.placeholder(self._device))
        return value

    def _at_unit(self, name: str, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = self.visit
        assert visit is not None
        if name == self.first[visit.stage] and not visit.entered:
            visit.entered = True
            if visit.received is not None and args:
                self._write_received(visit, args[0])
                args = (visit.received, *args[1:])
            elif visit.received is not None:
                first = next(iter(kwargs))
                self._write_received(visit, kwargs[first])
                kwargs = {**kwargs, first: visit.received}
        output = unit(*args, **kwargs)
        if visit.recorded is not None:
            visit.recorded.setdefault(name, []).append(specs(output))
        return output

    def _write_received(self, visit: Visit, argument: object) -> None:
        """Writes the received hidden state into the placeholder that the first block of the stage is called with.

        The code around the blocks still has this tensor and may add to it what the block returns. In a pass whose sources are
        followed it is always written; later only in stages whose output depends on it.
        """
        if visit.sources is None and visit.stage not in self._writes:
            return
        received = tensors(visit.received)
        places = tensors(argument)
        if list(map(Spec.of, places)) != list(map(Spec.of, received)):
            return  # `check` refuses an output that depends on it
        for place, value in zip(places, received, strict=True):
            if visit.sources is not None:
                # A tensor with values of its own, such as one of the batch, is left alone. And where several elements are one
                # in memory, or the tensor is a part of a larger one, its memory is more than these values.
                if not visit.sources.of(place) or place.untyped_storage().nbytes() != place.numel() * place.itemsize:
                    continue
                visit.sources.set(place, frozenset([_RECEIVED]))
            if place.requires_grad:
                if is_view(place):
                    raise PlanError(
                        "pipeline-skip",
                        f"stage {visit.stage} of the pipeline cannot write the hidden state where the code around the blocks "
                        "uses it.",
                        why=f"the first argument of {self.first[visit.stage]} is a view (by `transpose` or the like) of what "
                        "parameters of the model itself have computed",
                        fix="move these parameters into a module, which `forward` calls before the blocks",
                    )
                # What it was computed from gets no gradient. Autograd would give it one of zero, and times NaN.
                place.detach_()
            place.copy_(value)

    def hidden(self, stage: int, output: object) -> Hidden:
        """Returns the contiguous hidden state that a stage sends: a tensor, or a tuple of tensors.

        Raises:
            PlanError: `pipeline-hidden`.
        """
        sent: tuple[object, ...] = (output,)
        if type(output) is tuple:
            sent = output
        tensors_sent = [tensor for tensor in sent if isinstance(tensor, Tensor)]
        if not sent or len(tensors_sent) < len(sent):
            raise PlanError(
                "pipeline-hidden",
                f"stage {stage} of the pipeline ends with {describe(output)}, not with a tensor or a tuple of tensors.",
                why=f"the first argument of {self.first[min(stage + 1, self.count - 1)]} is what is sent to the next stage; "
                "its forward must come there, and call it with the hidden state first",
                fix="name the blocks that run one after the other: options={'pipeline': {'blocks': 'layers.*'}}",
            )
        # torch.distributed sends contiguous tensors only.
        if isinstance(output, Tensor):
            return output.contiguous()
        return tuple(tensor.contiguous() for tensor in tensors_sent)

    def check(self, output: object) -> None:
        """Refuses a stage whose output depends on values of other stages besides the hidden state.

        Raises:
            PlanError: `pipeline-skip`.
        """
        visit = self.visit
        assert visit is not None
        assert visit.sources is not None
        sources = visit.sources.of(output)
        if _RECEIVED in sources:
            self._writes.add(visit.stage)
        elsewhere = sources - {_RECEIVED}
        if elsewhere:
            raise self._skipped(visit, elsewhere)
        # Where a kernel was not seen, the output is NaN. If the received hidden state is not finite, the user's own numbers
        # are the cause.
        if visit.stood_in and not _finite(output) and (visit.received is None or _finite(visit.received)):
            raise self._skipped(visit, frozenset(visit.stood_in))

    def was_read(self, error: ReadPlaceholder) -> PlanError:
        """Returns the error for code outside of the modules that decides by a value which this stage does not have."""
        assert self.visit is not None
        return self._skipped(self.visit, error.sources - {_RECEIVED} or frozenset(["the hidden state"]))

    def _skipped(self, visit: Visit, sources: frozenset[str]) -> PlanError:
        stage = visit.stage
        units = [unit.name for unit in self.units if unit.name in sources]
        parameters = sorted(sources - set(units))
        if not units:
            return PlanError(
                "pipeline-skip",
                f"stage {stage} of the pipeline computes with {parameters[0]}, which another stage holds.",
                why=f"the result depends on {', '.join(parameters)}, read without calling the module",
                fix=f"hold it in all stages: options={{'pipeline': {{'keep': ['{parent(parameters[0])}']}}}}",
            )
        blocks = [name for name in units if name in self._blocks]
        if blocks:
            fix = (
                "hand a sum over blocks on in a tuple that is their first argument, `x, total = block((x, total))`; and use "
                "the input of a block after its call only, `y = block(x)` and then `x = scale * x + y`"
            )
        else:
            fix = f"hold it in all stages, which compute it again: options={{'pipeline': {{'keep': {units}}}}}"
        return PlanError(
            "pipeline-skip",
            f"stage {stage} of the pipeline uses what an earlier stage computed besides the hidden state.",
            why="stages send each other the first argument of their first block only, and the result depends on the output of "
            f"{listed(units)}",
            fix=fix,
        )


def _finite(tree: Tree) -> bool:
    floats = [tensor for tensor in tensors(tree) if tensor.is_floating_point()]
    return all(bool(tensor.isfinite().all()) for tensor in floats)


def _find(
    module: nn.Module,
    prefix: str,
    stage_of_block: dict[str, int],
    skipped: set[str],
    stage: int,
    units: list[StageUnit],
) -> int:
    """Collects the units inside a module, in order of definition.

    A module that is defined between two blocks belongs to the stage of the block before it, and a module before all blocks
    to stage 0: it is not known where `forward` uses it.

    Args:
        module: of the model, or the model.
        prefix: what names of its children begin with.
        stage_of_block: of each block, by its name.
        skipped: names of modules that are no units, since all stages hold them.
        stage: of the last block before the module.
        units: to which they are added.

    Returns:
        The stage of the last block so far.
    """
    for key, child in child_table(module).items():
        name = f"{prefix}{key}"
        if child is None or name in skipped:
            continue
        holds_blocks = any(inside(block, name) for block in stage_of_block)
        if name in stage_of_block:
            stage = stage_of_block[name]
        elif holds_blocks or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            # `forward` iterates over a container, or indexes it, so that a stub cannot take its place.
            stage = _find(child, f"{name}.", stage_of_block, skipped, stage, units)
            continue
        elif next(child.parameters(), None) is None:
            continue
        units.append(StageUnit(name, stage, child_table(module), key, child))
    return stage


class Stage(nn.Module):
    """One stage as a module for torch's `PipelineStage`: it calls `run(received tensors, micro-batch)`."""

    def __init__(
        self,
        run: Callable[[tuple[Tensor, ...], int], Hidden],
        modules: Sequence[nn.Module],
        shared: Callable[[], Iterable[nn.Parameter]],
    ) -> None:
        super().__init__()
        self._run = run
        self.units = nn.ModuleList(modules)
        self._shared = shared

    def forward(self, *received: Tensor, micro: Tensor) -> Hidden:
        """Runs one micro-batch, given by its number."""
        return self._run(received, int(micro))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters of its units, and those that all stages hold."""
        yield from self.units.parameters()
        yield from self._shared()
