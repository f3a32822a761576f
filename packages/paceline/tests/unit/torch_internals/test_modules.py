"""What we rely on of the private side of modules."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

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


def test_tensors_are_replaced_under_their_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    modules.change_tensors(module, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    assert module[0].weight.dtype == module[1].running_mean.dtype == torch.float64


def test_what_loads_a_state_dict_is_known() -> None:
    module = nn.Linear(2, 2)
    assert modules.loading_functions(module) == [module._load_from_state_dict]
    module.register_load_state_dict_pre_hook(before := lambda *_: None)
    module.register_load_state_dict_post_hook(after := lambda *_: None)
    _, first, last = modules.loading_functions(module)
    assert getattr(first, "hook", first) is before and last is after


def test_batch_norms_of_all_kinds_have_one_base_class() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, modules.BatchNormBase)
    assert modules.BatchNormBase.__name__ == "_BatchNorm"  # by which `plan/facts.py` knows it without torch


def test_compiled_modules_are_seen() -> None:
    plain, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped = torch.compile(plain, backend="eager")
    assert modules.compiled_original(wrapped) is plain and modules.compiled_original(plain) is None
    in_place.compile(backend="eager")
    assert modules.is_compiled_in_place(in_place) and not modules.is_compiled_in_place(nn.Sequential(in_place))
    assert not modules.is_compiled(nn.Sequential(plain))
    assert modules.is_compiled(nn.Sequential(plain, in_place))
    assert modules.is_compiled(nn.Sequential(plain, wrapped))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_layers_whose_weight_is_computed() -> None:
    utils = nn.utils
    normed = [utils.weight_norm(nn.Linear(2, 2)), utils.spectral_norm(nn.Linear(2, 2))]
    parametrized = [
        utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
        utils.parametrizations.orthogonal(nn.Linear(2, 2)),
    ]
    pruned = nn.Linear(2, 2)
    prune.identity(pruned, "weight")
    model = nn.ModuleList([*normed, *parametrized, pruned, nn.BatchNorm1d(2)])
    parts = dict(model.named_modules())
    computing = [name for name, part in parts.items() if modules.computes_weight(part)]
    assert computing == ["0", "1", "2.parametrizations.weight", "3.parametrizations.weight"]
    assert [name for name, part in parts.items() if modules.iterates(part)] == ["1", "2.parametrizations.weight.0"]
