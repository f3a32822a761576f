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


def test_tensors_are_replaced_under_their_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    modules.change_tensors(module, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    assert module[0].weight.dtype == module[1].running_mean.dtype == torch.float64


def test_the_functions_that_load_a_module_are_its_methods_and_hooks() -> None:
    module = nn.Linear(2, 2)
    called = []
    module.register_load_state_dict_pre_hook(lambda *_: called.append("before"))
    module.register_load_state_dict_post_hook(lambda *_: called.append("after"))
    assert modules.loading_functions(module)[0] == module.load_state_dict
    for function in modules.loading_functions(module)[2:]:
        function(module, None)
    assert called == ["before", "after"]


def test_compiled_modules_are_seen() -> None:
    plain, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped = torch.compile(plain, backend="eager")
    assert modules.inside_compiled(wrapped) is plain and modules.inside_compiled(plain) is None
    in_place.compile(backend="eager")
    assert modules.is_compiled_in_place(in_place) and not modules.is_compiled_in_place(nn.Sequential(in_place))
    assert not modules.is_compiled(nn.Sequential(plain))
    assert modules.is_compiled(nn.Sequential(plain, in_place))
    assert modules.is_compiled(nn.Sequential(plain, wrapped))
