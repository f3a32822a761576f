"""torch keeps the operations of divided losses in one table for the process."""

import gc

import torch
from torch.distributed.tensor import DTensor

from paceline_large.torch_internals.loss_parallel import divide_losses_for


class Owner:
    """Something that wants divided losses."""


def enabled() -> bool:
    return torch.ops.aten._log_softmax.default in DTensor._op_dispatcher._custom_op_handlers


def test_losses_are_divided_as_long_as_some_owner_lives() -> None:
    assert not enabled(), "torch: loss_parallel() no longer adds to DTensor._op_dispatcher._custom_op_handlers on entry"
    one, other = Owner(), Owner()
    divide_losses_for(one)
    divide_losses_for(other)
    assert enabled()
    del one
    gc.collect()
    assert enabled()
    del other
    gc.collect()
    assert not enabled()
    again = Owner()
    divide_losses_for(again)
    assert enabled()
    del again
