"""The forward of divided layers: each rank computes its share with plain tensors, and communicates around it.

    colwise     x -> [copy] -> rows of W       -> a share of the features           backward: all-reduce of x's gradient
    rowwise     a share of the features -> columns of W -> [all-reduce] + b         backward: no communication
    gather      colwise followed by [all-gather] of its output; rowwise preceded by [split] of its input
    shared      colwise with fewer key-value heads than ranks: a rank computes one head of the whole W, whose gradient is summed
    vocabulary  rows of the embedding; tokens of other ranks give 0 -> [all-reduce]
    sequence    blocks hold a share of the positions: [all-gather] before an attention or MLP, [reduce and split] after it

Parameters are DTensors on the `tp` mesh. In a forward, `to_local` gives a plain tensor of this rank's share, through which
gradients flow back. So optimizers, clipping, checkpoints and FSDP2 see DTensors, and the model's own code sees plain tensors.

Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation", 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.base.errors import TrainError
from paceline.parallel.differentiable import Differentiable
from paceline.parallel.mixtures import averaged_dims
from paceline.torch_internals.dtensor import mixtures_refused
from paceline.torch_internals.modules import parameter_table
from paceline.world.sharded import is_sharded, quietly
from paceline.world.transport import transport_of
from paceline_large.module_shell import Shell
from paceline_large.products import linear, product_of
from paceline_large.random_streams import RandomStreams
from paceline_large.torch_internals.hooks import is_seen_by_a_mode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_PARTIAL = "_tensor_partial"  # an attribute of modules, see `mark`
SEQUENCE = 1  # the dimension of positions: activations are [batch, positions, features]


# -- communication with a backward pass ----------------------------------------------------------------------------
# Each backward pass is made of these functions, too, so that gradients of gradients are right. A collective that is called
# directly would be no part of the graph of the second backward pass.


class _CopyToRanks(Differentiable):
    """Returns its input. In the backward pass gradients are summed over the ranks, as each rank has that of its share only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Sum.call(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Sum(Differentiable):
    """Returns the sum over the ranks, in place if nobody else needs the input. The backward pass returns the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        summed = _writable(x)
        if summed is x:
            ctx.mark_dirty(x)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            gradient = _CopyToRanks.call(gradient, ctx.group)
        return gradient, None


class _OwnGradient(Differentiable):
    """Returns its input. The backward pass returns a copy of the gradient, which shares memory with nothing else.

    `x + a + b` hands `a` and `b` one gradient. torch keeps it for one of them and copies it for the other, but it does not
    see the tensors inside of DTensors: both would keep it, and the next micro-batch would add its gradients of both into it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # No view: embeddings with `max_norm` change their weight in place.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clone()


class _Gather(Differentiable):
    """Gathers all shares along `dim`.

    The backward pass returns this rank's share of the gradient without communication: what follows the gather is computed
    on every rank alike, so that all ranks have the same gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Split.call(gradient, ctx.dim, ctx.group), None, None


class _Split(Differentiable):
    """Returns this rank's share along `dim` of a tensor that all ranks hold. The backward pass gathers all shares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return _share(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Gather.call(gradient, ctx.dim, ctx.group), None, None


def _writable(x: Tensor) -> Tensor:
    """Returns `x` if it may be overwritten, else a copy: selective recomputation keeps products of matrices for later."""
    if is_seen_by_a_mode():
        return x.clone()
    return x


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    parts[dist.get_rank(group)] = x
    transport_of(group, x.device).gather_parts(parts).wait()
    return torch.cat(parts, dim)


def _share(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


# -- layers -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Region:
    """One attention or MLP at run time.

    Attributes:
        group: the tensor-parallel ranks.
        streams: their random numbers.
        split: whether the code between the colwise and the rowwise layers computes on this rank's share of the features.
        sequence: whether the output is divided by position.
        numbers: attributes that count heads or features: module, name, value for the whole model, value on this rank.
    """

    group: dist.ProcessGroup
    streams: RandomStreams
    split: bool = True
    sequence: bool = False
    numbers: list[tuple[nn.Module, str, int, int]] = field(default_factory=list)
    _source: Tensor | None = None
    _entered: Tensor | None = None
    _open: bool = False

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """Prepares an input of colwise layers. Layers with the same input (q, k and v) share one all-reduce of its gradient."""
        if training and self.split and not self._open:
            self._open = True
            self.streams.open()
        if self._source is not x:
            self._source = x
            self._entered = _CopyToRanks.call(x, self.group)
        assert self._entered is not None
        return self._entered

    def leave(self) -> None:
        """Called at the end of the rowwise layer, where the region ends."""
        self._source = self._entered = None
        if self._open:
            self._open = False
            self.streams.close()

    def count(self, whole: bool) -> None:
        """Sets the numbers of heads and features to those of the whole model, or of this rank."""
        for module, name, all_of_them, here in self.numbers:
            setattr(module, name, all_of_them if whole else here)


def _linear(layer: nn.Module, x: Tensor, weight: Tensor, transposed: bool, bias: Tensor | None = None) -> Tensor:
    # The weight of transformers' `Conv1D` is [features in, features out].
    if transposed:
        weight = weight.t()
    return linear(layer, x, weight, bias)


def _share_of_features(parameter: DTensor) -> Tensor:
    """Returns what a rank of tensor parallelism has of a parameter, gathered over the ranks that read different samples.

    The gradient that comes back is the mean over these.
    """
    mesh = parameter.device_mesh
    averaged = averaged_dims(mesh)
    if not any(averaged):
        return parameter.to_local()
    from torch.distributed.tensor import Partial, Replicate

    whole_rows: list[Placement] = []
    of_gradient: list[Placement] = []
    for is_averaged, placement in zip(averaged, parameter.placements, strict=True):
        whole_rows.append(Replicate() if is_averaged else placement)
        of_gradient.append(Partial("avg") if is_averaged else placement)
    with quietly():
        return parameter.redistribute(mesh, whole_rows).to_local(grad_placements=of_gradient)


def _matrix(layer: nn.Module) -> Tensor:
    """Returns this rank's share of a weight as a plain tensor, through which gradients flow back to the DTensor.

    The layer itself multiplies by it or looks up its rows, so that its gradient is a new tensor.
    """
    weight = layer.weight
    assert is_sharded(weight)
    return _share_of_features(weight)


def _plain(parameter: DTensor) -> Tensor:
    """Returns this rank's share of a parameter that is used in any way, as `_matrix` does."""
    return _OwnGradient.call(_share_of_features(parameter))


def _bias(layer: nn.Module) -> Tensor | None:
    bias = layer.bias
    if bias is None:
        return None
    assert is_sharded(bias)
    return _plain(bias)


def colwise(region: Region, transposed: bool) -> Callable[..., Any]:
    """Returns the forward of a linear layer of which this rank computes some output features."""

    def forward(self: nn.Module, original: Callable[..., Tensor], x: Tensor) -> Tensor:
        if not is_sharded(self.weight):
            return original(x)
        y = _linear(self, region.enter(x, self.training), _matrix(self), transposed, _bias(self))
        if region.split:
            return y
        return _Gather.call(y, -1, region.group)

    return forward


def shared_heads(region: Region, transposed: bool, heads: int) -> Callable[..., Any]:
    """Returns the forward of a key or value projection with fewer heads than ranks: this rank computes one of them.

    Every rank holds the whole weight. Of its gradient a rank has the part of its own queries, so that the sum over the ranks
    is the whole gradient: over those that compute the same head, and over the heads.

    Source: Megatron-LM, where ranks replicate the key-value heads if there are fewer of them.
    """

    def forward(self: nn.Module, original: Callable[..., Tensor], x: Tensor) -> Tensor:
        if not is_sharded(self.weight):
            return original(x)
        weight = _matrix(self)
        bias = _bias(self)
        if not region.split:
            return _linear(self, x, weight, transposed, bias)
        rank = dist.get_rank(region.group)
        head = rank * heads // dist.get_world_size(region.group)
        dim_of_outputs = int(transposed)
        weight = _CopyToRanks.call(weight, region.group).chunk(heads, dim_of_outputs)[head]
        if bias is not None:
            bias = _CopyToRanks.call(bias, region.group).chunk(heads)[head]
        return _linear(self, region.enter(x, self.training), weight, transposed, bias)

    return forward


def rowwise(region: Region, transposed: bool) -> Callable[..., Any]:
    """Returns the forward of a linear layer of which this rank has some input features."""

    def forward(self: nn.Module, original: Callable[..., Tensor], x: Tensor) -> Tensor:
        if not is_sharded(self.weight):
            return original(x)
        if not region.split:
            x = _Split.call(x, -1, region.group)
        try:
            # [batch, positions, features out], of which each rank has one summand.
            summand = _linear(self, x, _matrix(self), transposed)
            if product_of(self) is not None:
                summand = summand.clone()  # torchao's functions put out views, which cannot be summed in place
            y = _Sum.call(summand, region.group)
            if region.sequence:
                y = _Split.call(y, SEQUENCE, region.group)
        finally:
            # `torch.utils.checkpoint` ends a recomputation by an exception, as soon as the last tensor of a block is saved.
            region.leave()
        # The bias is added after the sum, so that it is added once.
        bias = _bias(self)
        if bias is None:
            return y
        if region.sequence:
            # Each rank adds it to its own positions only, so its gradients must be summed.
            bias = _CopyToRanks.call(bias, region.group)
        return y + bias.to(y.dtype)

    return forward


def head(region: Region, transposed: bool, mesh: DeviceMesh | None) -> Callable[..., Any]:
    """Returns the forward of the layer that computes logits. With a mesh the logits stay divided, as a DTensor."""

    def forward(self: nn.Module, original: Callable[..., Tensor], x: Tensor) -> Tensor:
        if not is_sharded(self.weight):
            return original(x)
        y = _linear(self, _CopyToRanks.call(x, region.group), _matrix(self), transposed, _bias(self))
        if mesh is None:
            return _Gather.call(y, -1, region.group)
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False)

    return forward


def vocabulary(region: Region) -> Callable[..., Any]:
    """Returns the forward of an embedding of which this rank has some rows."""

    def forward(self: nn.Module, original: Callable[..., Tensor], tokens: Tensor) -> Tensor:
        if not is_sharded(self.weight):
            return original(tokens)
        weight = _matrix(self)
        rows = weight.shape[0]
        start = dist.get_rank(region.group) * rows
        here = tokens - start
        elsewhere = (here < 0) | (here >= rows)
        padding = cast("int | None", self.padding_idx)
        if padding is not None:
            padding -= start
            if not 0 <= padding < rows:
                padding = None  # another rank has this row
        # Tokens of other ranks look up row 0, and their result is then set to 0.
        embedded = F.embedding(here.masked_fill(elsewhere, 0), weight, padding)
        return _Sum.call(embedded.masked_fill(elsewhere.unsqueeze(-1), 0), region.group)

    return forward


def undivided(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Returns the forward of a module that may read undivided parameters (see `mark`): inside, they are plain tensors."""

    def forward(self: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        def refusal(operation: str) -> TrainError:
            return TrainError(
                "tensor-mixed",
                f"{type(self).__name__}.forward computes with a divided parameter itself, by `{operation}`.",
                why="tp divides this parameter, and only the module that owns it computes with its part",
                fix="call the module instead of reading its weight; for an embedding or a head, "
                "options={'tensor': {'vocabulary': False}} leaves it whole",
            )

        with plain_parameters(self, group), mixtures_refused(refusal):
            return original(*args, **kwargs)

    return forward


def mark(module: nn.Module, partial: Region | bool) -> None:
    """Marks a module whose parameters every rank holds.

    Args:
        module: the module.
        partial: whether it computes on this rank's share of heads or positions, so that its gradients must be summed; inside
            of an attention or MLP that is so while this is split.
    """
    vars(module)[_PARTIAL] = partial


def _is_partial(module: nn.Module) -> bool:
    partial: Region | bool = vars(module)[_PARTIAL]
    if isinstance(partial, Region):
        return partial.split
    return partial


def marked(module: nn.Module | None) -> bool:
    """Returns whether `mark` was called on a module."""
    return module is not None and _PARTIAL in vars(module)


@contextmanager
def plain_parameters(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """While it is open, undivided parameters that the module's forward may read are plain tensors.

    They are its own and its children's (`self.positions.weight[:length]`); gradients flow through them to the DTensors.
    """
    replaced: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
    for child in (module, *module.children()):
        owner = child
        if isinstance(child, Shell):
            owner = child.held  # in a pipeline stage
        if not marked(owner):
            continue
        slots = parameter_table(owner)
        for name, parameter in slots.items():
            # A mesh of several dimensions has those of FSDP2. A child gathers its parameters in its own forward; those of this
            # module are gathered by now, unless it is called by itself, outside of a pass of the model.
            if is_sharded(parameter) and (child is module or parameter.device_mesh.ndim == 1):
                local = _plain(parameter)
                if _is_partial(owner):
                    local = _CopyToRanks.call(local, group)
                replaced.append((slots, name, parameter, local))
    for slots, name, _, local in replaced:
        slots[name] = local
    try:
        yield
    finally:
        # Not if FSDP2 has put the sharded parameter back after a child's forward.
        for slots, name, parameter, local in replaced:
            if slots[name] is local:
                slots[name] = parameter


# -- positions --------------------------------------------------------------------------------------------------


def whole_positions(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Returns the forward of an attention or MLP in a block that is divided by position: it gathers its first tensor."""

    def forward(self: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if not is_divided(self):
            return original(*args, **kwargs)
        args, kwargs = _first_tensor(args, kwargs, lambda x: _Gather.call(x, SEQUENCE, group))
        return original(*args, **kwargs)

    return forward


def block_positions(
    group: dist.ProcessGroup, streams: RandomStreams, first: bool, last: bool, divided: Callable[[int], None]
) -> Any:
    """Returns the forward of a block that is divided by position: the first block splits, the last one gathers."""

    def forward(self: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if not is_divided(self):
            return original(*args, **kwargs)

        def split(x: Tensor) -> Tensor:
            divided(x.shape[SEQUENCE])
            return _Split.call(x, SEQUENCE, group)

        if first:
            args, kwargs = _first_tensor(args, kwargs, split)
        streams.open()
        try:
            output = original(*args, **kwargs)
        finally:
            streams.close()
        if not last:
            return output
        if isinstance(output, Tensor):
            return _Gather.call(output, SEQUENCE, group)
        return type(output)((_Gather.call(output[0], SEQUENCE, group), *output[1:]))

    return forward


def is_divided(module: nn.Module) -> bool:
    """Returns whether the module's parameters are DTensors now; inside of `full_parameters` they are not."""
    return any(is_sharded(parameter) for parameter in module.parameters())


def _first_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces the first tensor among the arguments, wherever it is passed."""
    values = (*args, *kwargs.values())
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if first is None:
        return args, kwargs
    changed = change(first)

    # An attention may get one tensor three times, as query, key and value. It is gathered once, and replaced everywhere.
    def replaced(value: object) -> object:
        return changed if value is first else value

    new_kwargs = {name: replaced(value) for name, value in kwargs.items()}
    return tuple(map(replaced, args)), new_kwargs
