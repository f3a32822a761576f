"""What we rely on of what torch's objects were told."""

import torch
from torch import nn

from paceline.torch_internals import modules
from paceline_accelerate.torch_internals import kept


def test_buffers_that_a_state_dict_leaves_out_are_known() -> None:
    module = nn.Module()
    module.register_buffer("count", torch.zeros(1))
    module.register_buffer("mask", torch.zeros(1), persistent=False)
    assert kept.non_persistent_buffers(module) == {"mask"} and list(module.state_dict()) == ["count"]


def test_a_scheduler_counts_its_steps() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    scheduler.step()
    assert kept.times_stepped(scheduler) == 2


def test_a_wrap_policy_knows_its_classes() -> None:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    classes = kept.wrapped_classes(ModuleWrapPolicy({nn.Linear}))
    assert classes is not None and set(classes) == {nn.Linear}
    assert kept.wrapped_classes(lambda module, recurse, nonwrapped_numel: True) is None


def test_a_copy_of_a_compiled_module_has_another_original() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled = torch.compile(first, backend="eager")
    assert modules.compiled_original(compiled) is first and modules.compiled_original(first) is None
    copied = kept.with_compiled_original(compiled, second)
    assert modules.compiled_original(copied) is second and modules.compiled_original(compiled) is first
    assert copied.weight is second.weight
