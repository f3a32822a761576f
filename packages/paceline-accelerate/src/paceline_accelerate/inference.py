"""`prepare_pippy`: runs forward passes of one model on several processes, each of which computes some of its layers.

torch traces the model and cuts the trace into stages (`torch.distributed.pipelining.pipeline`), and its GPipe schedule runs the
micro-batches through them. A trace is valid for one size of micro-batch only, that of the example. A batch of any size is
therefore cut into micro-batches of that size, and the last one is filled up with rows that are dropped from the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.plan.blocks import repeated_blocks
from paceline.world import tree as trees
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.module_sizes import compute_module_sizes
from paceline_accelerate.state import PartialState


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Rows of the first tensor among the arguments of a forward pass; None where there is no tensor."""
    return trees.first_rows((tuple(args or ()), dict(kwargs or {})))


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: Sequence[Any] | None = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Lets the processes compute the model's forward passes together, without gradients. Ranks: all, with equal weights.

    Afterwards all ranks call the model together. Only rank 0's arguments are used; they may have any number of rows. The last
    rank gets the output and the others get None; with `gather_output` all get it, on their own devices. The output is a
    tensor or a tuple of tensors, because torch's trace drops the structure of mappings. One process runs the model unchanged.

    Args:
        model: on the CPU, in evaluation mode. Each rank moves its stage alone to its device.
        split_points: names of the modules with which stages 1, 2, ... begin; "auto" divides the bytes evenly.
        no_split_module_classes: names of classes that "auto" does not divide; None means the repeated blocks.
        example_args: arguments of one micro-batch; later calls pass arguments of the same structure.
        example_kwargs: likewise, by name.
        num_chunks: micro-batches that are on their way at once; None is one for each process.
        gather_output: whether all ranks get the output.

    Returns:
        The same model, with the attributes `hf_split_points` and `pippy_stage` (torch's schedule).

    Raises:
        CompatValueError: `compat-argument`, where the split does not fit the processes, or the example has no tensor.
    """
    state = PartialState()
    if state.num_processes == 1:
        vars(model)["hf_split_points"] = []
        return model

    args = tuple(example_args or ())
    kwargs = dict(example_kwargs or {})
    rows = find_pippy_batch_size(args, kwargs)
    if not rows:
        raise CompatValueError(
            "compat-argument",
            "prepare_pippy() was given no example.",
            why="torch traces the model with it, and there is no tensor with rows in `example_args` and `example_kwargs`",
            fix="pass one micro-batch: `prepare_pippy(model, example_args=(inputs[:1],))`",
        )
    points = _split_points(model, split_points, state.num_processes, no_split_module_classes)
    chunks = num_chunks or state.num_processes
    schedule = _schedule(model, points, args, kwargs, chunks, state)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _forward(schedule, rows * chunks, gather_output, args, kwargs)

    vars(model).update(hf_split_points=points, pippy_stage=schedule, forward=forward)
    return model


def _split_points(
    model: nn.Module, split_points: str | list[str] | None, stages: int, no_split_module_classes: list[str] | None
) -> list[str]:
    """Returns the names of the modules with which stages 1, 2, ... begin, and checks them."""
    if split_points == "auto":
        points = _even_points(model, stages, no_split_module_classes)
    elif isinstance(split_points, str):
        points = [split_points]
    else:
        points = list(split_points or ())
    modules = dict(model.named_modules())
    unknown = [name for name in points if name not in modules]
    if unknown or len(points) != stages - 1:
        why = f"{len(points)} points ({', '.join(points)}) divide it into {len(points) + 1} stages"
        if unknown:
            why = f"it has no module {', '.join(unknown)}"
        raise CompatValueError(
            "compat-argument",
            f"the model cannot be divided among {stages} processes.",
            why=why,
            fix=f"name the {stages - 1} modules with which the stages after the first begin: `split_points=[...]`",
        )
    return points


def _even_points(model: nn.Module, stages: int, no_split_module_classes: list[str] | None) -> list[str]:
    """Chooses split points so that the stages have about the same number of bytes."""
    if no_split_module_classes is None:
        blocks = [model.get_submodule(name) for name in repeated_blocks(model)]
        no_split_module_classes = [type(block).__name__ for block in blocks]
    sizes = compute_module_sizes(model)
    points: list[str] = []
    before = 0
    for name in _parts(model, set(no_split_module_classes)):
        size = sizes.get(name, 0)
        share = sizes[""] * (len(points) + 1) / stages
        # A part belongs to the stage that contains its middle byte.
        if before > 0 and len(points) < stages - 1 and before + size / 2 >= share:
            points.append(name)
        before += size
    return points


def _parts(module: nn.Module, whole_classes: set[str], prefix: str = "") -> Iterator[str]:
    """Yields the names of the modules that are not divided, in the order of their definition."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child).__name__ in whole_classes or next(child.children(), None) is None:
            yield path
        else:
            yield from _parts(child, whole_classes, f"{path}.")


def _schedule(
    model: nn.Module, points: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int, state: PartialState
) -> Any:
    """Makes torch's schedule for the stage of this rank."""
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    traced = pipeline(model, mb_args=args, mb_kwargs=kwargs, split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
    stage = traced.build_stage(state.process_index, device=state.device)
    return ScheduleGPipe(stage, n_microbatches=chunks)


@torch.no_grad()
def _forward(
    schedule: Any, rows_of_a_pass: int, gather_output: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs one batch through all stages, in as many passes of the schedule as are needed."""
    state = PartialState()
    rows = state.collectives.broadcast_object(find_pippy_batch_size(args, kwargs))
    if not rows:
        raise CompatValueError(
            "compat-argument",
            "a model of prepare_pippy() was called without a batch.",
            why="rank 0 passed no tensor with rows",
            fix="pass the batch on rank 0, as the example was passed",
        )
    outputs = []
    for begin in range(0, rows, rows_of_a_pass):
        if state.process_index == 0:
            some_args, some_kwargs = _rows((args, kwargs), rows, begin, begin + rows_of_a_pass, state.device)
            output = schedule.step(*some_args, **some_kwargs)
        else:
            output = schedule.step()
        outputs.append(output)
    joined = _joined(outputs, rows) if state.is_last_process else None
    if not gather_output:
        return joined
    # The output is sent as an object, because only the last rank knows its structure and shapes.
    received = state.collectives.broadcast_object(trees.to_device(joined, "cpu"), src=state.num_processes - 1)
    return trees.to_device(received, state.device)


def _rows(tree: Any, rows: int, begin: int, end: int, device: torch.device) -> Any:
    """Cuts rows `begin` to `end` out of all tensors of a batch; rows beyond its end repeat the last row."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim > 0 and tensor.shape[0] == rows:
            numbers = torch.arange(begin, end, device=tensor.device).clamp(max=rows - 1)
            tensor = tensor[numbers]
        return tensor.to(device)

    return trees.map_tensors(cut, tree)


def _joined(outputs: list[Any], rows: int) -> Any:
    """Joins the outputs of several passes, without the rows that only filled up the last pass."""
    joined: list[Any] = []
    for leaves in zip(*map(trees.leaves, outputs), strict=True):
        if isinstance(leaves[0], torch.Tensor) and leaves[0].ndim > 0:
            joined.append(torch.cat(leaves)[:rows])
        else:
            joined.append(leaves[0])
    return trees.unflatten(outputs[0], joined)
