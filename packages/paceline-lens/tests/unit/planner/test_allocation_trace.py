"""The trace of allocations: what came, went and was resized, the peak, and kinds that are known only afterwards."""

import torch

from paceline.world.sharded import plain_tensors
from paceline_lens.forecast.allocation_trace import AllocationTrace


def entered(allocations: AllocationTrace, elements: int) -> torch.Tensor:
    tensor = torch.zeros(elements)
    allocations.enter(tensor)
    return tensor


def test_the_peak_is_the_most_that_lived_at_once():
    allocations = AllocationTrace()
    first = entered(allocations, 1000)
    second = entered(allocations, 1000)
    del first
    third = entered(allocations, 1000)
    peak = allocations.peak()
    assert peak.total == 8000  # two of them at a time, never three
    del second, third
    assert allocations.peak(allocations.mark).total == 0


def test_kinds_are_put_on_afterwards_and_the_stronger_one_counts():
    allocations = AllocationTrace()
    weight = entered(allocations, 100)
    gradient = entered(allocations, 100)
    scratch = entered(allocations, 50)
    allocations.label([gradient], "communication")
    allocations.label([weight], "parameters")
    allocations.label([gradient], "gradients")
    allocations.label([weight], "communication")
    at_peak = allocations.peak().at_peak
    assert {name: count for name, count in at_peak.items() if count} == {
        "parameters": 400,
        "gradients": 400,
        "activations": 200,
    }
    del scratch


def test_a_part_of_a_run_has_its_own_peak():
    allocations = AllocationTrace()
    entered(allocations, 1000)
    kept = entered(allocations, 10)
    mark = allocations.mark
    more = entered(allocations, 20)
    assert allocations.peak().total == 4000
    assert allocations.peak(mark).total == 120
    del kept, more


def test_views_share_and_resizing_counts():
    allocations = AllocationTrace()
    whole = entered(allocations, 100)
    view = whole[:50]
    allocations.enter(view)
    assert allocations.peak().total == 400
    whole.untyped_storage().resize_(0)
    allocations.resized(whole.untyped_storage())
    assert allocations.peak(allocations.mark).total == 0
    del view


def test_a_plain_tensor_is_its_only_part():
    tensor = torch.zeros(1)
    (part,) = plain_tensors(tensor).values()
    assert part is tensor


def test_memory_of_a_stream_of_its_own_is_not_given_to_another():
    allocations = AllocationTrace()
    message = entered(allocations, 1024)
    allocations.on_stream(message, "gather")
    del message
    first = entered(allocations, 1024)
    peak = allocations.peak()
    assert (peak.total, peak.reserved) == (4096, 8192)
    del first
