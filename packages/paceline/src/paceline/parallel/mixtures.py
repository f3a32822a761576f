"""A divided tensor that meets a whole one, as where a script computes with parameters outside of passes.

    `average.lerp_(parameter.data, 0.1)`                average: of a model that was not prepared
    `(fisher * (parameter - old) ** 2).sum()`           a penalty; fisher, old: whole
    `F.linear(x, model.head.weight)`                    as `model.head(x)` does

torch refuses the mixture. Here the operation runs on whole tensors: divided ones are gathered for it, its results are whole,
and what it writes into divided ones reaches the parts of all ranks. The whole tensor may be of this rank alone, such as the
activations of its own samples.

Under autograd, the gradient of the divided tensor is the mean over the ranks that read different samples, as after the
backward pass of a prepared model: each rank has a loss of its own, with a factor of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.log import warn_once
from paceline.parallel.divided_parameters import part_of
from paceline.torch_internals.dispatch import written_arguments
from paceline.torch_internals.dtensor import local_tensor, lost_view
from paceline.torch_internals.tensors import has_gradient_hook, hook_gradient
from paceline.world.layout import AXES
from paceline.world.places import user_frame
from paceline.world.sharded import is_sharded, quietly, whole
from paceline.world.tree import map_leaves, tensors
from paceline.world.written_numbers import note_numbers, note_written

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def needs_whole_tensors(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Returns whether torch cannot run an operation with divided tensors.

    It gets whole ones, too, or some that are divided over other ranks, or it writes into a view that would be lost.
    """
    met = tensors((args, keywords))
    plain = [tensor for tensor in met if not is_sharded(tensor)]
    meshes = {tensor.device_mesh for tensor in met if is_sharded(tensor)}
    if len(meshes) > 1 or any(tensor.dim() for tensor in plain):
        return True
    written = tensors(written_arguments(operation, args, keywords))
    if written:
        return any(not is_sharded(tensor) or lost_view(tensor) is not None for tensor in written)
    # torch takes a number for the same on all ranks, and goes on with parts. Two numbers may be a loss and a penalty, of which
    # one is this rank's.
    return bool(plain) and all(tensor.numel() == 1 for tensor in met)


def on_whole_tensors(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Runs the operation on whole tensors, and writes what it has written into parts. Ranks: all that have a part."""
    # Whole tensors by those that they stand for; of a lost view, also what it is a view of.
    gathered: dict[DTensor, Tensor] = {}

    def gather(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        if leaf not in gathered:
            if torch.is_grad_enabled():
                divide_gradient(leaf)
            note_written(leaf)
            view = lost_view(leaf)
            if view is None:
                gathered[leaf] = whole(leaf.detach())
            else:
                base, take = view
                gathered[leaf] = take(gather(base))
        return gathered[leaf]

    result = operation(*map_leaves(gather, args), **map_leaves(gather, keywords))
    for written in tensors(written_arguments(operation, args, keywords)):
        if is_sharded(written):
            _write_parts(written, gathered)
            _compare_ranks(gathered[written].detach(), written.device_mesh)
    parts = {id(value): part for part, value in gathered.items()}
    return map_leaves(lambda leaf: parts.get(id(leaf), leaf), result)


# What `answer_mixtures` gets.
MIXTURES = (needs_whole_tensors, on_whole_tensors, note_numbers)


def _write_parts(written: DTensor, gathered: dict[DTensor, Tensor]) -> None:
    local_tensor(written).copy_(part_of(gathered[written], written))
    view = lost_view(written)
    if view is not None:
        _write_parts(view[0], gathered)


def _compare_ranks(value: Tensor, mesh: DeviceMesh) -> None:
    """Warns once if ranks have computed different whole tensors, of which each has written its own part.

    Ranks: all of the mesh.
    """
    if value.is_meta:
        return
    norm = torch.linalg.vector_norm(value.double())
    largest = torch.stack([norm, -norm])
    for dim in range(mesh.ndim):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    most, least = largest.tolist()
    if math.isclose(most, -least, rel_tol=1e-5) or math.isnan(most):
        return
    frame = user_frame()
    place = "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"
    warn_once(
        "parallel",
        "a tensor that is written into a divided parameter or gradient differs between the processes, of which each keeps its "
        "part. Write what all of them have: average what comes of a process's own samples, `accelerator.reduce(tensor, "
        f"'mean')`, and draw by one seed{place}",
    )


def divide_gradient(tensor: DTensor) -> None:
    """Lets gradients from outside of passes arrive divided as the tensor is: whole ones as their mean, and others, too.

    A whole gradient comes from an operation with whole tensors, and one that is divided in another way from a slice of rows.
    """
    if not tensor.requires_grad or divides_gradient(tensor):
        return
    # The hook does not hold the tensor, which holds the hook.
    mesh = tensor.device_mesh
    # A sum that is still open has no parts: each rank has the whole gradient.
    from torch.distributed.tensor import Replicate

    placements = tuple(Replicate() if placement.is_partial() else placement for placement in tensor.placements)

    def divide(gradient: Tensor) -> Tensor | None:
        if not is_sharded(gradient):
            return _mean(gradient, mesh, placements)
        if gradient.placements != placements:
            with quietly():
                return gradient.redistribute(mesh, placements)
        return None

    hook_gradient(tensor, divide)


def divides_gradient(tensor: DTensor) -> bool:
    """Returns whether `divide_gradient` was called for the tensor."""
    return has_gradient_hook(tensor, "divide_gradient.<locals>.divide")


def averaged_dims(mesh: DeviceMesh) -> list[bool]:
    """Returns for each dim of a mesh whether gradients are averaged along it."""
    # A dim of several axes has all of their names.
    axes = [AXES[name.split("_")[0]] for name in mesh.mesh_dim_names or ()]
    return [axis.averages_gradients for axis in axes]


def _mean(gradient: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    given: list[Placement] = []
    for is_averaged in averaged_dims(mesh):
        given.append(Partial("avg") if is_averaged else Replicate())
    with quietly():
        return DTensor.from_local(gradient, mesh, given, run_check=False).redistribute(mesh, placements)
