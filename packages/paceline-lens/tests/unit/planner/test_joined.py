"""Which bytes operations move where a compiler joins them."""

import torch

from paceline_lens.forecast.joined import JoinedBytes

KIB = 1024


def counted(joined, name, read, written, phase="forward"):
    return joined.of_joined(name, phase, read, written, sum(tensor.nbytes for tensor in (*read, *written)))


def test_results_that_only_joined_operations_read_are_not_written():
    joined = JoinedBytes()
    first, second, third = (torch.zeros(256) for _ in range(3))
    assert counted(joined, "aten::mul", [first], [second]) == KIB
    assert counted(joined, "aten::add", [first, second], [third]) == KIB  # the other is in registers
    assert joined.of_others([third]) == KIB  # a product reads it
    assert joined.of_others([third]) == 0
    # A later pass reads what was written for it.
    assert counted(joined, "aten::mul", [second], [torch.zeros(256)], "backward") == 2 * KIB


def test_a_sum_over_everything_ends_a_kernel():
    joined = JoinedBytes()
    source, scaled, scale = torch.zeros(256), torch.zeros(256), torch.zeros(())
    counted(joined, "aten::mul", [source], [scaled])
    assert counted(joined, "aten::amax", [scaled], [scale]) == KIB  # it is written
    assert counted(joined, "aten::div", [scaled, scale], [torch.zeros(256)]) == KIB  # and read again


def test_some_operations_are_joined_with_no_other():
    joined = JoinedBytes()
    pairs = torch.zeros(128, dtype=torch.complex64)
    assert counted(joined, "aten::mul", [pairs], [pairs]) == 2 * KIB
    rows = torch.zeros(256)
    assert counted(joined, "fsdp::all_gather_copy_in", [rows], [rows]) == 2 * KIB
