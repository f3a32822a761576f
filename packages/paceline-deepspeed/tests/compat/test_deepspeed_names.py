"""DeepSpeed's names are all there; what is not carried says so when it is used, and never before."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import paceline_deepspeed as table
from paceline import CompatError
from paceline.compat import install


@pytest.fixture(autouse=True)
def served(serve) -> None:
    serve("deepspeed")


def test_every_name_of_the_real_library_can_be_imported() -> None:
    for module, names in table.modules().items():
        served = importlib.import_module(module)
        for name in names:
            assert hasattr(served, name), f"{module}.{name}"
        assert set(dir(served)) == names


def test_the_version_in_numbers() -> None:
    import deepspeed

    numbers = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert ".".join(map(str, numbers)) == deepspeed.__version__ == table.VERSION
    assert deepspeed.__git_hash__ == deepspeed.__git_branch__ == "unknown"


def test_names_that_are_carried_exist_in_the_real_library() -> None:
    known = {name for names in table.modules().values() for name in names}
    for entry in table.carried():
        module, _, name = entry.rpartition(".")
        assert name in known and (not module or module in table.modules()), entry


def test_a_name_may_mean_another_thing_in_another_module(monkeypatch) -> None:
    ours = {"configure": "paceline.compat:install", "deepspeed.comm.configure": "paceline_doors.served:Server"}
    monkeypatch.setattr(next(each for each in sys.meta_path if hasattr(each, "carried")), "carried", ours)
    import deepspeed

    assert deepspeed.comm.configure.__name__ == "Server"
    assert deepspeed.checkpointing.configure is install


def test_what_scripts_catch_is_an_exception() -> None:
    names = [f"{module}:{name}" for module, names in table.modules().items() for name in names]
    caught = [name for name in names if name.endswith(("Exception", "Error"))]
    for module, _, name in (each.partition(":") for each in caught):
        assert issubclass(getattr(importlib.import_module(module), name), Exception), name
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    with pytest.raises(ZeRORuntimeException):
        raise CompatError("compat-name", "something is not carried.")


def test_constants_have_their_values() -> None:
    from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
    from deepspeed.runtime.config import ADAM_OPTIMIZER, DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.constants import (
        GRADIENT_CLIPPING,
        GRADIENT_CLIPPING_DEFAULT,
        ROUTE_TRAIN,
        TRAIN_BATCH_SIZE_DEFAULT,
    )

    config = {"gradient_clipping": 0.5}
    assert config[GRADIENT_CLIPPING] == 0.5 and GRADIENT_CLIPPING_DEFAULT == 1.0 and TRAIN_BATCH_SIZE_DEFAULT is None
    assert (ROUTE_TRAIN, OPTIMIZER_STATE_DICT) == ("train", "optimizer_state_dict")
    assert ADAM_OPTIMIZER == "adam" and ADAM_OPTIMIZER in DEEPSPEED_OPTIMIZERS
    with pytest.raises(ImportError):
        from deepspeed.runtime.constants import NO_SUCH_CONSTANT  # noqa: F401


def test_small_functions_that_scripts_call_by_themselves(tmp_path) -> None:
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.moe import utils as experts
    from deepspeed.runtime.activation_checkpointing.checkpointing import detach_variable
    from deepspeed.runtime.utils import ensure_directory_exists, move_to_device
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.runtime.zero.utils import is_zero_param

    view = torch.ones(100, requires_grad=True)[:2]
    copied = clone_tensors_for_torch_save({"a": [view, 3]})["a"]
    assert copied[0].untyped_storage().nbytes() == 8 and not copied[0].requires_grad and copied[1] == 3
    moved = move_to_device({"a": [torch.ones(2)]}, "meta")["a"][0]
    kept = torch.ones(2)
    assert moved.is_meta and move_to_device((kept,), "cpu", lambda _: True)[0] is kept
    inputs = detach_variable((torch.ones(1, requires_grad=True) * 2, torch.ones(1), "x"))
    assert inputs[0].is_leaf and inputs[0].requires_grad and not inputs[1].requires_grad and inputs[2] == "x"
    ensure_directory_exists(str(tmp_path / "a" / "b" / "file"))
    assert (tmp_path / "a" / "b").is_dir()
    layer = torch.nn.Linear(2, 2)
    groups = [{"params": list(layer.parameters())}]
    assert not is_zero_param(layer.weight) and not experts.is_moe_param(layer.weight)
    assert experts.has_moe_layers(layer) == (False, 0) and not experts.is_moe_param_group(groups[0])
    assert experts.split_params_into_different_moe_groups_for_optimizer(groups[0]) == groups
    torch.serialization.add_safe_globals([ZeroStageEnum])
    assert ZeroStageEnum(2) is ZeroStageEnum.gradients and ZeroStageEnum.weights == 3


def test_a_name_that_is_not_carried_names_the_native_way() -> None:
    import deepspeed

    for use, way in (
        (deepspeed.init_inference, "save_16bit_model"),
        (deepspeed.moe.layer.MoE, "divided by ZeRO"),
        (deepspeed.set_autotp_mode, "autotp_size"),
        (deepspeed.sequence.layer.DistributedAttention, "plan={'cp': 2}"),
    ):
        with pytest.raises(CompatError, match=r"is not carried by Paceline") as raised:
            use()
        assert way in str(raised.value)
    with pytest.raises(ImportError, match="Did you mean: 'initialize'"):
        from deepspeed import initialise  # noqa: F401


def test_a_model_is_saved_as_scripts_of_random_ltd_save_it() -> None:
    from deepspeed.runtime.data_pipeline.data_routing.helper import (
        convert_to_random_ltd,
        remove_random_ltd_state_dict,
        save_without_random_ltd,
    )

    model = torch.nn.Linear(2, 1)
    engine = torch.nn.DataParallel(model)  # has its model under the name that an engine has it under
    for given in (model, engine):
        assert save_without_random_ltd(given).keys() == {"weight", "bias"}
    saved_elsewhere = {"layers.0.random_ltd_layer.weight": 1, "head.weight": 2}
    assert remove_random_ltd_state_dict(saved_elsewhere) == {"layers.0.weight": 1, "head.weight": 2}
    with pytest.raises(CompatError, match="is not carried by Paceline"):
        convert_to_random_ltd(model, torch.nn.Linear)


def test_leaf_modules_are_marked() -> None:
    from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules, z3_leaf_module

    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    assert set_z3_leaf_modules(model, [torch.nn.Linear]) == get_z3_leaf_modules(model) == [model[0]]
    assert unset_z3_leaf_modules(model, ["Linear"]) == [model[0]] and not z3_leaf_module(model[0])
    with pytest.raises(ValueError, match="Conv1d"):
        set_z3_leaf_modules(model, [torch.nn.Conv1d])
    assert set_z3_leaf_modules(model, [torch.nn.Conv1d], raise_if_not_found=False) == []


def test_kernels_of_optimizers_need_no_compiler() -> None:
    from deepspeed.ops.adam.cpu_adam import CPUAdamBuilder
    from deepspeed.ops.op_builder import AsyncIOBuilder, FusedAdamBuilder
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    assert CPUAdamBuilder().is_compatible() and CPUAdamBuilder().load(verbose=True).__name__ == "cpu_adam"
    assert isinstance(ALL_OPS["fused_adam"], FusedAdamBuilder)
    assert not AsyncIOBuilder().is_compatible()
    with pytest.raises(CompatError, match="'async_io' is not carried"):
        AsyncIOBuilder().load()


def test_a_config_has_its_keys_as_attributes() -> None:
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    given = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    config = DeepSpeedConfig(given)
    assert deepspeed.DeepSpeedConfig is DeepSpeedConfig
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.world_size) == (8, 4, 1)
    assert (config.gradient_accumulation_steps, config.gradient_clipping, config.steps_per_print) == (2, 1.0, None)
    assert config.zero_enabled and config.zero_optimization_stage == config.zero_config.stage == 3
    assert config.zero_config.offload_param.device == "cpu" and config.zero_config.offload_optimizer is None
    assert config.bfloat16_config.enabled and not config.float16_config.enabled
    assert config.optimizer_name == "adamw" and config.optimizer_params["lr"] == 0.1 and config.scheduler_name is None
    assert not config.monitor_config.enabled and not config.monitor_config.csv_monitor.enabled
    assert config._param_dict == given
    assert not hasattr(config, "no_such_attribute")
    with pytest.raises(ValueError, match="train_batch_size"):
        DeepSpeedConfig({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2})


def test_gradients_are_clipped_by_themselves() -> None:
    from deepspeed.runtime.utils import clip_grad_norm_, get_global_norm

    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    assert clip_grad_norm_([parameter], max_norm=1.0).item() == 4.0
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert get_global_norm([3.0, 4.0]) == 5.0
