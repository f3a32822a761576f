"""What a script reads of a divided tensor as a number, and what it draws into one, is that of the whole tensor.

    `grad.norm().item()`, `float`, `if`     torch reads this rank's part of a sum, or of the elements, without a word
    `.tolist()`, `.numpy()`, f"{norm:.3f}"  torch refuses them
    `.max()`, `.norm(inf)`                  torch fails on a rank without a row of the tensor, and the other ranks would wait
    `parameter.data.normal_()`              torch draws into each part by itself; on the CPU all parts get the same numbers
    `torch.save(model.state_dict(), path)`  torch writes this rank's part, without a word; a warning says so

Most of these are operators on DTensors, and DTensor has one place for functions that run in the place of an operator. In the
same place stands what runs where a divided tensor meets a whole one (`mixtures.py`).
"""

from __future__ import annotations

import copyreg
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import CheckpointError
from paceline.base.log import warn_once
from paceline.parallel.divided_parameters import part_of
from paceline.parallel.mixtures import MIXTURES
from paceline.torch_internals.dispatch import aten
from paceline.torch_internals.dtensor import answer, answer_mixtures, compile_beside_parts, local_tensor, unanswered
from paceline.world.sharded import is_sharded, whole
from paceline.world.tree import map_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

# `bernoulli_` and dropouts are left out: `tensor` gives each part of an activation masks of its own.
_DRAWS_IN_PLACE = ("normal_", "uniform_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_")
PICKLED_BY_ONE_RANK = (
    "save with `save_state()` on all ranks and load with `load_state`, or let each rank write and read its own file"
)
_DRAWS_LIKE = ("rand_like", "randn_like", "randint_like")
# They have no value for no element; the norms, if they are that of the largest.
_EXTREMES = ("max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "_foreach_max", "median", "nanmedian")
_NORMS = ("linalg_vector_norm", "_foreach_norm")


@cache
def answer_for_whole_tensors() -> None:
    """Lets the operators answer so, for all DTensors of this process."""
    from torch.distributed.tensor import DTensor

    copyreg.pickle(DTensor, _pickled)
    torch.serialization.add_safe_globals([unpickled])
    # DTensor has no method of its own for these, and those of a tensor refuse it.
    for method in (tolist, numpy, __format__, __str__):
        setattr(DTensor, method.__name__, method)
    answer(aten("_local_scalar_dense").default, _read)
    for names, function in ((_DRAWS_IN_PLACE, _draw_in_place), (_DRAWS_LIKE, _draw_like)):
        for name in names:
            packet = aten(name)
            for overload in packet.overloads():
                if not overload.endswith("out"):
                    answer(getattr(packet, overload), function)
    for name in ("view", "_unsafe_view", "unbind"):
        packet = aten(name)
        for overload in packet.overloads():
            if not overload.endswith("out"):
                answer(getattr(packet, overload), _look)
    for name in (*_EXTREMES, *_NORMS):
        is_norm = name in _NORMS
        packet = aten(name)
        for overload in packet.overloads():
            if not overload.endswith(("out", "other")):
                _answer_extremes(getattr(packet, overload), is_norm)
    answer_mixtures(MIXTURES)
    compile_beside_parts()


def tell_of_parts() -> None:
    """Warns once that a pickle has a part only. Ranks that write a file each, and read it again, lose nothing."""
    warn_once(
        "parallel",
        "something of which each rank has a part was pickled, as by `torch.save(model.state_dict(), path)`. The file has the "
        "part of this rank only, and no plain model can load it. On all ranks call "
        "`state = accelerator.get_state_dict(model)`, which is whole, and then save it on one; "
        "`accelerator.save_state(folder)` on all ranks saves optimizers, too",
    )


def _pickled(tensor: DTensor) -> Any:
    if _is_cut(tensor.placements):
        tell_of_parts()
        return unpickled, (_place(tensor), *tensor.__reduce_ex__(2)[:2])
    return tensor.__reduce_ex__(2)


def _place(tensor: DTensor) -> tuple[int, ...]:
    """Returns which part of the tensor this rank has, by its coordinates along the dims of the mesh that cut it.

    () in a process that is no rank, which only looks at the tensor.
    """
    if not dist.is_initialized():
        return ()
    # A mesh that was pickled has the coordinates of the rank that wrote it.
    (coordinates,) = (tensor.device_mesh.mesh == dist.get_rank()).nonzero().tolist() or [()]
    cut = zip(coordinates, tensor.placements, strict=False)
    return tuple(coordinate for coordinate, placement in cut if _is_cut([placement]))


def unpickled(place: tuple[int, ...], rebuild: Any, arguments: Any) -> DTensor:
    """Makes a divided tensor of what a rank has pickled, and refuses the part of another rank.

    Raises:
        CheckpointError: `checkpoint-part`.
    """
    tensor: DTensor = rebuild(*arguments)
    own = _place(tensor)
    if own == place or () in (own, place):
        return tensor
    raise CheckpointError(
        "checkpoint-part",
        f"a file has another rank's part of a tensor of shape {list(tensor.shape)}.",
        why=f"the rank with part {place} has pickled it, as by `torch.save(optimizer.state_dict(), path)`; this one has {own}",
        fix=PICKLED_BY_ONE_RANK,
    )


def _read(operation: Any, args: tuple[DTensor], _: object) -> Any:
    """Reads the only element. Ranks: all that have a part, unless each has the whole."""
    tensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return operation(local_tensor(tensor))
    return operation(whole(tensor))


def tolist(tensor: DTensor) -> Any:
    """Returns the whole tensor as nested lists. Ranks: all that have a part."""
    return whole(tensor.detach()).tolist()


def numpy(tensor: DTensor, *, force: bool = False) -> Any:
    """Returns the whole tensor as an array of its own. Ranks: all that have a part."""
    if tensor.requires_grad and not force:
        return local_tensor(tensor).detach().requires_grad_().numpy()  # raises torch's error, which says what to do
    return whole(tensor.detach()).numpy(force=force)


def __format__(tensor: DTensor, form: str) -> str:
    """Formats a number. Ranks: all that have a part. Any other tensor shows its part, as `repr` does."""
    if tensor.dim():
        return object.__format__(tensor, form)
    return format(tensor.item(), form)


def __str__(tensor: DTensor) -> str:
    """Shows the whole of a number. Ranks: all that have a part. Any other tensor shows its part, as `repr` does."""
    if tensor.dim():
        return repr(tensor)
    return str(whole(tensor.detach()))


def _look(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Gives another look at a divided tensor, such as `flatten`: of the whole where torch has none of the parts. Ranks: all."""
    tensor: DTensor = args[0]
    try:
        return unanswered(operation, args, keywords)
    except RuntimeError:
        # Rows that are divided unevenly, or twice, or along the dim that disappears.
        if not _is_cut(tensor.placements):
            raise
    return operation(_everywhere(tensor), *args[1:], **keywords)


def _everywhere(tensor: DTensor) -> DTensor:
    """Returns the tensor with the whole of it on each rank. Ranks: all."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    return DTensor.from_local(whole(tensor.detach()), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _answer_extremes(operation: Any, is_norm: bool) -> None:
    """Lets an operator look at whole tensors where some rank has no element. Ranks: all that have a part."""

    def of_elements(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        order = args[1] if len(args) > 1 else keywords.get("ord", 2)
        if is_norm and abs(order) != math.inf:
            return before(operation, args, keywords)
        looked_at = map_tensors(lambda tensor: _everywhere(tensor) if _has_empty_part(tensor) else tensor, args[0])
        return before(operation, (looked_at, *args[1:]), keywords)

    before = answer(operation, of_elements)


def _has_empty_part(tensor: Tensor) -> TypeGuard[DTensor]:
    """Returns whether some rank has no element of a tensor that is not empty."""
    if not is_sharded(tensor) or not tensor.numel():
        return False
    ranks_along: Counter[int] = Counter()
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if hasattr(placement, "dim"):
            ranks_along[placement.dim] = max(1, ranks_along[placement.dim]) * size
    for dim, ranks in ranks_along.items():
        rows = tensor.shape[dim]
        rows_of_part = -(-rows // ranks)
        if rows_of_part * (ranks - 1) >= rows and ranks > 1:
            return True
    return False


def _is_cut(placements: Sequence[Placement]) -> bool:
    return not all(placement.is_replicate() or placement.is_partial() for placement in placements)


def _draw_in_place(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    own = local_tensor(tensor)
    if own.is_meta or not _is_cut(tensor.placements):
        operation(own, *args[1:], **keywords)
        return tensor
    drawn = torch.empty(tensor.shape, dtype=own.dtype, device=own.device)
    operation(drawn, *args[1:], **keywords)
    own.copy_(part_of(drawn, tensor))
    return tensor


def _draw_like(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate

    tensor: DTensor = args[0]
    own = local_tensor(tensor)
    # A tensor whose parts are to be added up has no parts of a draw: each rank has all of it.
    placements: list[Placement] = [
        Replicate() if placement.is_partial() else placement for placement in tensor.placements
    ]
    like = own if own.is_meta else torch.empty(tensor.shape, dtype=own.dtype, device=own.device)
    drawn = operation(like, *args[1:], **keywords)
    if not own.is_meta and _is_cut(placements):
        drawn = part_of(drawn, tensor)
    return DTensor.from_local(
        drawn, tensor.device_mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
