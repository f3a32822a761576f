"""The process-wide side of `torch.distributed.tensor.parallel.loss_parallel`, which is a context manager.

It writes the operations of `cross_entropy` for divided logits into ONE table of the process, and leaving it takes them out
again, whoever else has entered it meanwhile. So it is entered once, and left when nobody wants it any more.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack

_wanted_by = 0
_entered = ExitStack()


def divide_losses_for(owner: object) -> None:
    """Lets `cross_entropy` take divided logits for as long as `owner` lives."""
    from torch.distributed.tensor.parallel import loss_parallel

    global _wanted_by
    if _wanted_by == 0:
        _entered.enter_context(loss_parallel())
    _wanted_by += 1
    weakref.finalize(owner, _leave)


def _leave() -> None:
    global _wanted_by
    _wanted_by -= 1
    if _wanted_by == 0:
        _entered.close()
