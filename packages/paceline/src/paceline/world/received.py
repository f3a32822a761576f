"""Makes tensors of the bytes that ranks have sent to each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.world.arrived import Arrived, RowCounts
from paceline.world.form import Form


def concatenate(leaves: Sequence[Tensor], form: Form, arrived: Arrived) -> list[Tensor]:
    """Returns each leaf of all ranks, concatenated along dim 0.

    Args:
        leaves: this rank's, for dtypes and the sizes of other dims.
        form: says which of them travelled on the device.
        arrived: what each rank sent.
    """
    if arrived.alike:
        return _concatenate_alike(leaves, form, arrived)
    # Where in the bytes of each rank the next leaf begins, on the CPU and on the device.
    cpu_offsets = [0] * len(arrived.sent)
    device_offsets = [0] * len(arrived.sent)
    joined = []
    for number, leaf in enumerate(leaves):
        place, offset = arrived.cpu, cpu_offsets
        if number in form.on_device:
            place, offset = arrived.device, device_offsets
        shape = leaf.shape[1:]
        row_bytes = shape.numel() * leaf.element_size()
        rows = [abs(count) for count in arrived.rows_of(number)]  # -1 says 0-dim: one row
        # The empty tensor lets `torch.cat` work where no rank sent a byte.
        parts = [torch.empty(0, dtype=torch.uint8, device=leaf.device)]
        if place is not None:
            for rank, count in enumerate(rows):
                start = place.starts[rank] + offset[rank]
                parts.append(place.buffer[start : start + count * row_bytes])
                offset[rank] += count * row_bytes
        data = torch.cat(parts)
        joined.append(data.view(leaf.dtype).view(sum(rows), *shape))
    return joined


def _concatenate_alike(leaves: Sequence[Tensor], form: Form, arrived: Arrived) -> list[Tensor]:
    """`concatenate` where all ranks sent as many rows: a few tensor operations, however many ranks there are."""
    num_ranks = len(arrived.sent)
    starts = {False: 0, True: 0}  # of the next leaf in the bytes of each rank, on the CPU and on the device
    joined = []
    for number, leaf in enumerate(leaves):
        on_device = number in form.on_device
        place = arrived.device if on_device else arrived.cpu
        rows = abs(arrived.sent[0].rows[number])  # -1 says 0-dim: one row
        shape = leaf.shape[1:]
        num_bytes = rows * shape.numel() * leaf.element_size()
        if place is None:  # no rank has a byte there
            data = torch.empty(0, dtype=torch.uint8, device=leaf.device)
        elif num_ranks * num_bytes == place.buffer.numel():
            data = place.buffer  # a single leaf lies there in rank order already
        else:
            table = place.buffer.view(num_ranks, -1)  # one row for each rank, with all its leaves
            start = starts[on_device]
            data = table[:, start : start + num_bytes].clone(memory_format=torch.contiguous_format).view(-1)
            starts[on_device] += num_bytes
        joined.append(data.view(leaf.dtype).view(num_ranks * rows, *shape))
    return joined


def real_rows(gathered: Sequence[Tensor], arrived: Arrived, counts: RowCounts) -> list[Tensor]:
    """Returns what `concatenate` has gathered, without filler.

    Args:
        gathered: the leaves of all ranks, and no others before them.
        arrived: what each rank sent.
        counts: the rows of the batch from which they were computed.
    """
    if counts.are_all_real:
        return list(gathered)
    real = []
    for number, leaf in enumerate(gathered):
        sent_rows = arrived.rows_of(number)
        parts = leaf.split([abs(count) for count in sent_rows])
        kept = counts.num_kept(sent_rows)
        real.append(torch.cat([part[:count] for part, count in zip(parts, kept, strict=True)]))
    return real


def tensors_from(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors with the dtypes and shapes of `like`, from their bytes one after the other."""
    tensors = []
    start = 0
    for leaf in like:
        end = start + leaf.numel() * leaf.element_size()
        # Cloned, because a view of a wider type must begin at a multiple of its size.
        tensors.append(data[start:end].clone().view(leaf.dtype).view(leaf.shape))
        start = end
    return tensors
