"""What we rely on of the private side of modules."""

import torch
from torch import nn

from paceline.torch_internals import modules


def test_what_is_written_to_a_table_is_what_the_module_has() -> None:
    module = nn.Module()
    module.bias = nn.Parameter(torch.ones(2))
    module.register_parameter("missing", None)
    module.register_buffer("count", torch.zeros(1))
    module.child = nn.Linear(2, 2)
    assert list(modules.parameter_table(module)) == ["bias", "missing"]
    plain = torch.full((2,), 3.0)  # `module.bias = plain` is a TypeError
    modules.parameter_table(module)["bias"] = plain
    modules.buffer_table(module)["count"] = torch.ones(1)
    replaced = modules.child_table(module)["child"] = nn.Identity()
    assert module.bias is plain and module.count.item() == 1 and module.child is replaced


def test_buffers_that_a_state_dict_leaves_out_are_known() -> None:
    module = nn.Module()
    module.register_buffer("count", torch.zeros(1))
    module.register_buffer("mask", torch.zeros(1), persistent=False)
    assert modules.non_persistent_buffers(module) == {"mask"} and list(module.state_dict()) == ["count"]


def test_compiled_modules_are_seen() -> None:
    plain, in_place, wrapped = nn.Linear(2, 2), nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")
    in_place.compile(backend="eager")
    assert modules.is_compiled_in_place(in_place) and not modules.is_compiled_in_place(nn.Sequential(in_place))
    assert not modules.is_compiled(nn.Sequential(plain))
    assert modules.is_compiled(nn.Sequential(plain, in_place))
    assert modules.is_compiled(nn.Sequential(plain, wrapped))
