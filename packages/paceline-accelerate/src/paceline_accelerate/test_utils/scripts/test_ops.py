"""Checks the operations of `accelerate.utils` between all processes: gather, broadcast, pad and reduce."""

from __future__ import annotations

import torch

from paceline_accelerate.operations import broadcast, gather, gather_object, pad_across_processes, reduce
from paceline_accelerate.state import PartialState


def main() -> None:
    """Runs the checks.

    Raises:
        AssertionError: where an operation gives something else than expected.
    """
    state = PartialState()
    size, rank = state.num_processes, state.process_index
    ranks = list(range(size))
    local = torch.tensor([float(rank), 1.0], device=state.device)

    state.print("**Operations**")
    expected_rows = [[float(other_rank), 1.0] for other_rank in ranks]
    assert gather(local).view(size, 2).tolist() == expected_rows, "gather"
    # A list, because accelerate joins the lists of all processes.
    assert gather_object([rank]) == ranks, "gather_object"
    assert broadcast(local.clone()).tolist() == [0.0, 1.0], "broadcast"

    padded = pad_across_processes(torch.ones(rank + 1, device=state.device))
    assert padded.tolist() == [1.0] * (rank + 1) + [0.0] * (size - rank - 1), "pad_across_processes"

    total = float(sum(ranks))
    mean = reduce(local.clone(), "mean").cpu()
    assert reduce(local.clone(), "sum").tolist() == [total, float(size)], "reduce to the sum"
    assert torch.allclose(mean, torch.tensor([total / size, 1.0])), "reduce to the mean"
    state.print("All operations are as expected.")


if __name__ == "__main__":
    main()
