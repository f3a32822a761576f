"""What a forked process must do before it computes with torch."""

from __future__ import annotations

import torch


def renew_threads(count: int | None = None) -> None:
    """Gives a forked process a pool of threads of its own, in place of its parent's, whose threads it does not have.

    torch replaces that pool at its next use, but not safely: where several threads of autograd come first, and at the same
    time, one of them finds no pool, and the process aborts ("Invalid thread pool!"). So the main thread uses it at once.

    Args:
        count: of threads; None keeps the number of the parent.
    """
    torch.set_num_threads(torch.get_num_threads() if count is None else count)
