"""Proves a divided attention or MLP once, with its first input, against the whole one.

What lies between the divided layers is the model's own code, which may count on the whole: `y.view(B, T, C)` with the C of
its input, a norm over all features, heads counted under an unknown name. So the module runs once with whole parameters and
once divided, without gradients; what reaches its rowwise layer must be this rank's share of what reaches it there. Where it
is not, the ranks divide the layers alone, and compute what lies between them whole: the same numbers, at more work.
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
from paceline.parallel.tensor.styles import Region, is_divided
from paceline.world.forward import evaluating

_SIMPLE = (Tensor, int, float, bool, str, type(None))


@dataclass(eq=False)
class Proof:
    """Of all modules with one class and the same layers: one is proven, and its verdict is theirs.

    Attributes:
        name: FQN of the first.
        every: all regions of the model.
        regions: of the modules that the verdict is for.
        done: whether the verdict is there.
    """

    name: str
    every: list[Region]
    regions: list[Region] = field(default_factory=list)
    done: bool = False

    def run(
        self, module: nn.Module, last: nn.Module, region: Region, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """Compares, and gives up splitting where the two differ. Ranks: all tensor-parallel peers, in a forward pass."""
        if self.done or torch.compiler.is_compiling() or not is_divided(module):
            return
        self.done = True
        if not _simple((args, kwargs)):
            return  # a cache, say, which running twice would change
        reason = self._compare(module, last, region, lambda: original(*args, **kwargs))
        # Ranks that split a region where others compute it whole would sum shares with wholes, so all follow the worst.
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
        """Why this rank's input of the rowwise layer is not its share of the whole one; "" where it is."""
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
            # What the user's code raises where it meets a share for a whole is not known beforehand, and is the answer.
            try:
                forward()
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                region.leave()
                return str(error).splitlines()[0]
        computed = inputs_of_last[-1]
        width = dist.get_world_size(region.group)
        expected = whole.chunk(width, -1)[dist.get_rank(region.group)]
        if expected.shape != computed.shape:
            return f"it makes the shape {tuple(computed.shape)} of {tuple(expected.shape)}"
        if not expected.numel():
            return ""
        # Sums in another order round differently; code that needs the whole is off by as much as the numbers are large.
        tolerance = 1e-3
        if expected.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(expected.device.type):
            tolerance = 0.1
        difference = float((expected.float() - computed.float()).abs().max())
        if difference <= tolerance * float(whole.float().abs().max()):
            return ""
        return f"its numbers differ by {difference:.2g}"


def _simple(value: object) -> bool:
    """Whether the value is made of tensors and plain values alone."""
    if isinstance(value, (tuple, list)):
        return all(map(_simple, value))
    if isinstance(value, dict):
        return all(map(_simple, value.values()))
    return isinstance(value, _SIMPLE)


@contextmanager
def whole_counts(regions: list[Region]) -> Iterator[None]:
    """While it is open, modules count the heads of the whole model."""
    for region in regions:
        region.count(whole=True)
    try:
        yield
    finally:
        for region in regions:
            region.count(whole=not region.split)
