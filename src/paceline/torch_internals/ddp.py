"""The private side of `DistributedDataParallel`: its reducer and the sizes of its buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def check_finished(model: DistributedDataParallel) -> None:
    """Raises torch's RuntimeError where the last backward pass left gradients that were not averaged."""
    model._check_reducer_finalized()


def buckets_of(model: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """How DDP divides parameters into buckets, once it knows in which order their gradients come.

    Args:
        parameters: all that are reduced, in the order in which their gradients come.

    Returns the positions in `parameters` of each bucket's members.
    """
    tensors: list[torch.Tensor] = list(parameters)
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, _bucket_limits(model), [False] * len(tensors))
    return [list(bucket) for bucket in buckets]


def _bucket_limits(model: DistributedDataParallel) -> list[int]:
    """Bytes of the first bucket, and of all others."""
    if hasattr(model, "_bucket_config"):
        return [model._bucket_config.first_bucket_bytes_cap, model._bucket_config.bucket_bytes_cap]
    # torch 2.11 has no such object: the first bucket is small where the size is the default.
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else model.bucket_bytes_cap
    return [first, model.bucket_bytes_cap]


def replace_reducer(model: DistributedDataParallel, place: Callable[[nn.Parameter], int], final: bool) -> None:
    """Puts a new reducer in the place of a model's.

    Args:
        place: where a parameter's gradient comes; the parameters are reduced in this order.
        final: buckets follow that order from the start, and not from the second step on.
    """
    built, expect_sparse = model._build_params_for_reducer()
    order = sorted(range(len(built)), key=lambda number: place(built[number]))
    expect_sparse = [expect_sparse[number] for number in order]
    built = [built[number] for number in order]
    model._ddp_init_helper(built, expect_sparse, model._build_debug_param_to_name_mapping(built), model.static_graph)
    if final:
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()


def reduce_in_hook(model: DistributedDataParallel) -> None:
    """Reduces in a hook, whose answer is there at once: DDP's own reducer waits for one that an imaginary group never gives."""

    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and knows only its own
        dist.all_reduce(bucket.buffer(), group=group)
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(bucket.buffer())
        return answer

    model.register_comm_hook(model.process_group, hook)
