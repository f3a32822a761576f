"""What the plan says of optimizers that enlarge the rounding in which several processes differ from one.

Their kinds are known by attributes and by the libraries that they are from, so that none of them is imported here.
"""

from __future__ import annotations

from math import inf

import torch
from torch.optim import Optimizer

from paceline.plan.plan import Decision


def decisions_about(optimizer: Optimizer) -> list[Decision]:
    """Says what of the numbers of an optimizer depends on the number of processes, and which parameters Muon steps."""
    return [*_of_orthogonal_steps(optimizer), *_of_low_bit_states(optimizer)]


def _of_orthogonal_steps(optimizer: Optimizer) -> list[Decision]:
    """Of Muon and its like: a class of ours says by `iterates_in` in which dtype it makes matrices orthogonal."""
    iterates_in = getattr(optimizer, "iterates_in", "bfloat16" if isinstance(optimizer, torch.optim.Muon) else "")
    if not iterates_in:
        return []
    field = f"optimizer.{type(optimizer).__name__}"
    reason = (
        f"n processes add gradients in another order than one, and the Newton-Schulz iteration in {iterates_in} enlarges that "
        "rounding; nothing else depends on their number"
    )
    decisions = [Decision(f"{field}.numbers", "equal up to rounding", "derived", reason=reason)]
    if not isinstance(optimizer, torch.optim.Muon):
        num_matrices = sum(len(group["params"]) for group in optimizer.param_groups if not group["elementwise"])
        num_others = sum(len(group["params"]) for group in optimizer.param_groups if group["elementwise"])
        reason = f"Adam steps {num_others} others: embeddings, heads and what is no matrix"
        decisions.append(Decision(f"{field}.matrices", num_matrices, "derived", reason=reason))
    return decisions


def _of_low_bit_states(optimizer: Optimizer) -> list[Decision]:
    """Of states in 8 bits or fewer: codes, with one scale for each block of consecutive values."""
    if not _has_low_bit_states(optimizer):
        return []
    reason = (
        "each block of states lies in one parameter, which is stepped whole; n processes add gradients in another order than "
        "one, and a state that is rounded to another code enlarges that rounding (below 1 % of a step)"
    )
    return [Decision(f"optimizer.{type(optimizer).__name__}.numbers", "equal up to rounding", "derived", reason=reason)]


def _has_low_bit_states(optimizer: Optimizer) -> bool:
    # By the names of modules: both libraries are imported only by those who use them.
    libraries = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if "torchao" in libraries:
        return float(getattr(optimizer, "block_size", inf)) < inf
    if "bitsandbytes" in libraries:
        return getattr(getattr(optimizer, "args", None), "optim_bits", 32) < 32
    return False
