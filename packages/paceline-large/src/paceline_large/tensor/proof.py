"""Compares a divided attention or MLP with the undivided one, once, on its first input.

The code between the divided layers is the model's own, and may need all features: `y.view(B, T, C)` with the C of its input,
a norm over all features, a number of heads under an unknown name. So the module runs once with unsharded parameters and once
divided, without gradients. The input of its rowwise layer in the divided run must be this rank's share of that in the other
run. If it is not, the layers stay divided, but every rank computes the code between them on all features: the results are
the same, at more work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.log import logger
from paceline.parallel.divided_parameters import whole_parameters
from paceline_large.evaluation import evaluating
from paceline_large.products import product_of
from paceline_large.tensor.styles import Region, is_divided

_SIMPLE = (Tensor, int, float, bool, str, type(None))


@dataclass(eq=False)
class Proof:
    """The comparison for all modules that have the same class and the same layers: the first one is tested for all.

    Attributes:
        name: FQN of the first module.
        every: all regions of the model.
        regions: the regions of the modules to which the result applies.
        done: whether the comparison was made.
    """

    name: str
    every: list[Region]
    regions: list[Region] = field(default_factory=list)
    done: bool = False

    def run(
        self, module: nn.Module, last: nn.Module, region: Region, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """Compares both runs, and stops splitting the regions if they differ. Ranks: all tensor-parallel ranks."""
        if self.done or torch.compiler.is_compiling() or not is_divided(module):
            return
        self.done = True
        if not _simple((args, kwargs)):
            return  # an argument such as a cache would be changed by a second run
        reason = self._compare(module, last, region, lambda: original(*args, **kwargs))
        # All ranks must decide alike: a rank that splits the region would be summed with ranks that compute all of it.
        failures = torch.tensor(int(bool(reason)), device=next(module.parameters()).device)
        dist.all_reduce(failures, op=dist.ReduceOp.MAX, group=region.group)
        if not failures.item():
            return
        for failed in self.regions:
            failed.split = False
            failed.count(whole=True)
        logger("parallel").warning(
            "%s cannot compute a share of its heads or features (%s): its layers are divided, and what lies between "
            "them is computed whole on each rank. Code that counts with the outputs of its own layers, such as "
            "`q.view(*q.shape[:2], -1, head_dim)`, can be split.",
            self.name,
            reason or "another rank's part differs",
        )

    def _compare(self, module: nn.Module, last: nn.Module, region: Region, forward: Callable[[], Any]) -> str:
        """Returns why the input of the rowwise layer is not this rank's share of the undivided one; "" if it is."""
        inputs_of_last: list[Tensor] = []
        with ExitStack() as stack:
            hook = last.register_forward_pre_hook(lambda _, inputs: inputs_of_last.append(inputs[0]))
            stack.callback(hook.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(module))
            with whole_parameters(module), whole_counts(self.every):
                forward()
            whole = inputs_of_last.pop()
            inputs_of_last.clear()
            # An error here means that the model's code cannot compute on a share of the features. Its type is not known.
            try:
                forward()
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                region.leave()
                # A bare `assert` has no message.
                message = str(error) or type(error).__name__
                return message.splitlines()[0]
        computed = inputs_of_last[-1]
        width = dist.get_world_size(region.group)
        expected = whole.chunk(width, -1)[dist.get_rank(region.group)]
        if expected.shape != computed.shape:
            return f"it makes the shape {tuple(computed.shape)} of {tuple(expected.shape)}"
        if not expected.numel():
            return ""
        # Sums in another order round differently, by a small part of the values. Code that needs all features gives an error
        # of the size of the values themselves.
        tolerance = 1e-3
        in_half = expected.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(expected.device.type)
        in_float8 = any(product_of(layer) is not None for layer in module.modules())
        if in_half or in_float8:
            tolerance = 0.1
        difference = float((expected.float() - computed.float()).abs().max())
        if difference <= tolerance * float(whole.float().abs().max()):
            return ""
        return f"its numbers differ by {difference:.2g}"


def _simple(value: object) -> bool:
    """Returns whether a value consists of tensors and plain values only."""
    if isinstance(value, (tuple, list)):
        return all(map(_simple, value))
    if isinstance(value, dict):
        return all(map(_simple, value.values()))
    return isinstance(value, _SIMPLE)


@contextmanager
def whole_counts(regions: list[Region]) -> Iterator[None]:
    """While it is open, the modules have the numbers of heads of the whole model."""
    for region in regions:
        region.count(whole=True)
    try:
        yield
    finally:
        for region in regions:
            region.count(whole=not region.split)
