"""What DeepSpeed's scripts use around their engine: comm, zero, parameters' values, recomputation, loaders, the device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from paceline.base.errors import ConfigError, DataError
from paceline.base.log import forget_warnings
from paceline.testing import run_ranks
from paceline_deepspeed import checkpointing, comm, process_groups, surroundings, values, zero
from paceline_deepspeed.consolidation import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from paceline_deepspeed.device import get_accelerator
from paceline_deepspeed.initialize import initialize
from paceline_deepspeed.processes import init_distributed


def _config(stage: int, optimizer: str = "AdamW") -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }


def _engine(stage: int, seed: int = 0, init: bool = False):
    torch.manual_seed(seed)
    with zero.Init(enabled=init, config_dict_or_path={}):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return initialize(model=model, config=_config(stage))[0]


def _step(engine, finish: bool = True) -> None:
    torch.manual_seed(100 + engine.accelerator.process_index)
    engine.backward(engine(torch.randn(2, 5)).square().mean())
    if finish:
        engine.step()


# -- comm ------------------------------------------------------------------------------------------------------------


def _communicate() -> None:
    init_distributed("nccl")
    rank, size = comm.get_rank(), comm.get_world_size()
    own = torch.full((2,), float(rank + 1))
    assert comm.all_reduce(own.clone(), prof=True, log_name="mine", debug="here") is None
    total = own.clone()
    assert comm.inference_all_reduce(total, op=comm.ReduceOp.SUM) is total
    assert total.tolist() == [size * (size + 1) / 2] * 2
    found = torch.empty(2 * size)
    comm.all_gather_into_tensor(output_tensor=found, tensor=own)
    assert found.tolist() == [float(r + 1) for r in range(size) for _ in range(2)]
    part = torch.empty(2)
    comm.reduce_scatter_tensor(part, torch.ones(2 * size), prof=False)
    assert part.tolist() == [float(size)] * 2
    swapped = torch.empty(size)
    comm.all_to_all_single(swapped, tensor=torch.full((size,), float(rank)))
    assert swapped.tolist() == [float(r) for r in range(size)]
    objects = [None] * size
    comm.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    comm.all_reduce_coalesced([own, torch.ones(1)])
    works = comm.all_gather_coalesced([torch.empty(2 * size)], [own], async_op=True)
    works.wait()
    assert works.is_completed()
    group = comm.new_group([0])
    assert comm.get_all_ranks_from_group(group) == [0] and comm.get_global_rank(None, size - 1) == size - 1
    comm.monitored_barrier()
    comm.barrier()
    assert comm.get_local_rank() == comm.get_local_rank_from_launcher() == rank
    assert comm.initialize_mesh_device((size,), ("data",)).size() == size
    assert comm.is_available() and comm.is_initialized() and comm.has_all_gather_into_tensor()
    assert comm.get_world_group() is torch.distributed.group.WORLD


def test_comm_takes_deepspeeds_arguments():
    for world in (1, 2):
        run_ranks(_communicate, world=world)


# -- zero ------------------------------------------------------------------------------------------------------------


def _gather(stage: int) -> None:
    engine = _engine(stage)
    rank = engine.accelerator.process_index
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    weight = dict(engine.module.named_parameters())["0.weight"]
    inputs = torch.ones(2, 5)
    outputs = engine.module(inputs)

    with zero.GatheredParameters(engine.module.parameters()):
        for _ in range(2):  # trl generates so
            torch.testing.assert_close(engine.module(inputs), outputs)
            assert all(type(parameter.data) is torch.Tensor for parameter in engine.module.parameters())
    torch.testing.assert_close(engine.module(inputs), outputs)
    with zero.GatheredParameters(engine.module.parameters()):
        for name, parameter in engine.module.named_parameters():
            assert parameter.shape == before[name].shape and type(parameter.data) is torch.Tensor
            torch.testing.assert_close(parameter.data, before[name])
        torch.testing.assert_close((weight.data + torch.ones(7, 5)).sum().item(), (before["0.weight"] + 1).sum().item())

    with zero.GatheredParameters(weight, modifier_rank=1):
        if rank == 1:
            engine.module[0].weight.data.fill_(3.0)
    after = engine.module_state_dict()
    assert after["0.weight"].eq(3.0).all() and torch.equal(after["2.weight"], before["2.weight"])

    with zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        if rank == 0:
            weight.mul_(2)  # the name that was taken outside of the block
    assert engine.module_state_dict()["0.weight"].eq(6.0).all()

    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.load_state_dict(before)
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, before[name])
    with zero.GatheredParameters(engine.module.parameters()):
        with zero.GatheredParameters(weight, modifier_rank=1):
            engine.module[0].weight.data.fill_(float(rank))
        assert engine.module[0].weight.eq(1.0).all()
    assert engine.module_state_dict()["0.weight"].eq(1.0).all()
    with (
        zero.GatheredParameters(nn.Linear(2, 2).weight, modifier_rank=0),
        zero.GatheredParameters(weight, enabled=False),
    ):
        pass
    zero.register_external_parameter(engine.module, weight)
    _step(engine)


def _gather_kept_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    old_weight = model[0].weight
    engine = initialize(model=model, model_parameters=model.parameters(), config=_config(3))[0]
    rank = engine.accelerator.process_index
    before = engine.module_state_dict()["0.weight"]

    weight = engine.module[0].weight
    with zero.GatheredParameters([weight]):
        assert weight.tolist() == before.tolist() and weight.detach().numpy().shape == (7, 5)
        assert type(weight.data.cpu().clone()) is torch.Tensor and weight.full_tensor().shape == (7, 5)

    with zero.GatheredParameters([old_weight]):
        assert torch.equal(old_weight, before)
    with zero.GatheredParameters(old_weight, modifier_rank=1):
        if rank == 1:
            old_weight.data.fill_(3.0)
    assert engine.module_state_dict()["0.weight"].eq(3.0).all()
    with zero.GatheredParameters(weight, modifier_rank=0):
        if rank == 0:
            weight.data = torch.full((7, 5), 4.0)
    assert values.safe_get_full_fp32_param(old_weight).eq(4.0).all()
    with pytest.raises(ZeroDivisionError), zero.GatheredParameters(weight, modifier_rank=0):
        weight.data.fill_(5.0)
        raise ZeroDivisionError
    assert values.safe_get_full_fp32_param(weight).eq(5.0).all()

    _step(engine, finish=False)
    gradient = values.safe_get_full_grad(weight)
    with zero.GatheredParameters([weight, old_weight]):
        assert torch.equal(values.safe_get_full_grad(old_weight), gradient)
    engine.step()

    part = values.safe_get_local_fp32_param(weight)
    outputs = engine.module(torch.ones(2, 5))  # until their backward pass the model has whole parameters
    assert torch.equal(values.safe_get_local_fp32_param(engine.module[0].weight), part)
    outputs.sum().backward()


def _ask_for_the_status() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    old_weight = model[0].weight
    engine = initialize(model=model, model_parameters=model.parameters(), config=_config(3))[0]
    weight = engine.module[0].weight
    assert weight.ds_shape == (7, 5) and weight.ds_numel == 35
    assert len({parameter.ds_id for parameter in engine.module.parameters()}) == 4

    for parameter in (weight, old_weight):
        assert parameter.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
        with zero.GatheredParameters([parameter]):
            assert parameter.ds_status == zero.ZeroParamStatus.AVAILABLE
            with zero.GatheredParameters([parameter]):
                pass
            assert parameter.ds_status == zero.ZeroParamStatus.AVAILABLE
            assert engine.module[0].weight.ds_status == zero.ZeroParamStatus.AVAILABLE
        assert parameter.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE

    # trl reads a weight of the head in the model's forward pass, and again in the backward pass.
    statuses = []
    engine.module[1].register_forward_hook(lambda *_: statuses.append(engine.module[2].weight.ds_status))
    _step(engine)
    _step(engine)
    assert statuses == [zero.ZeroParamStatus.AVAILABLE] * 2
    assert engine.module[2].weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE

    # So does trl before and after it generates.
    with zero.GatheredParameters(engine.module.parameters()):
        offload = engine.optimizer.parameter_offload
        assert not list(offload.module.ds_external_parameters())
        for _, parameter in offload.module.named_parameters(recurse=True):
            parameter.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks = []
        engine.module(torch.ones(2, 5))
        offload._register_deepspeed_module(offload.module)
    _step(engine)


def test_parameters_say_at_stage_3_whether_they_are_available():
    run_ranks(_ask_for_the_status, world=2)


def test_gathered_parameters_are_plain_under_each_name_that_a_script_has():
    run_ranks(_gather_kept_parameters, world=2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gathered_parameters_are_whole_and_their_changes_reach_all_ranks(stage):
    run_ranks(_gather, world=2, args=(stage,))


def _ask_before_initialize() -> None:
    built = nn.Linear(2, 2)
    with zero.Init(config_dict_or_path={}):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with zero.Init(enabled=False):
        plain = nn.Linear(1, 1)
    weight = model[0].weight
    assert weight.ds_shape == (7, 5) and weight.ds_numel == 35
    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    assert len({parameter.ds_id for parameter in model.parameters()}) == 4
    assert not hasattr(nn.Linear(1, 1).weight, "ds_id") and not hasattr(plain.weight, "ds_id")
    with zero.Init(built):
        pass
    assert built.weight.ds_numel == 4

    with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            weight.data.fill_(0.5)
    engine = initialize(model=model, config=_config(3))[0]
    assert engine.module_state_dict()["0.weight"].eq(0.5).all()
    assert engine.module[0].weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    _step(engine)


def test_a_parameter_says_that_it_is_divided_as_soon_as_it_is_built():
    run_ranks(_ask_before_initialize, 2)


def _built(stage: int) -> dict:
    return _engine(stage, init=True).module_state_dict()


def test_zero_init_gives_the_values_that_a_script_has_without_it():
    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).state_dict()
    for world in (1, 2):
        for state in run_ranks(_built, world=world, args=(3,)):
            for name, value in wanted.items():
                assert torch.equal(state[name], value)


def _values(stage: int) -> dict[str, torch.Tensor]:
    engine = _engine(stage)
    parameter = dict(engine.module.named_parameters())["0.weight"]
    assert values.safe_get_full_optimizer_state(parameter, "exp_avg") is None
    _step(engine)
    _step(engine, finish=False)
    found = {
        "value": values.safe_get_full_fp32_param(parameter),
        "grad": values.safe_get_full_grad(parameter),
        "exp_avg": values.safe_get_full_optimizer_state(parameter, "exp_avg"),
    }
    assert all(each.shape == (7, 5) and each.dtype == torch.float32 for each in found.values())
    local = values.safe_get_local_optimizer_state(parameter, "exp_avg")
    assert local.numel() == (35 if stage == 0 else 20 if engine.accelerator.process_index == 0 else 15)
    assert values.safe_get_local_fp32_param(parameter).numel() == (local.numel() if stage == 3 else 35)
    assert values.safe_get_local_grad(parameter) is not None

    values.safe_set_full_fp32_param(parameter, found["value"] + 1)
    values.safe_set_full_grad(parameter, found["grad"] * 2)
    values.safe_set_full_optimizer_state(parameter, found["exp_avg"] * 3, "exp_avg")
    torch.testing.assert_close(values.safe_get_full_fp32_param(parameter), found["value"] + 1)
    torch.testing.assert_close(values.safe_get_full_grad(parameter), found["grad"] * 2)
    torch.testing.assert_close(values.safe_get_full_optimizer_state(parameter, "exp_avg"), found["exp_avg"] * 3)
    values.safe_set_local_optimizer_state(parameter, torch.zeros_like(local), "exp_avg")
    values.safe_set_local_grad(parameter, torch.zeros_like(values.safe_get_local_grad(parameter)))
    values.safe_set_local_fp32_param(parameter, values.safe_get_local_fp32_param(parameter) - 1)
    torch.testing.assert_close(values.safe_get_full_fp32_param(parameter), found["value"])
    assert not values.safe_get_full_optimizer_state(parameter, "exp_avg").any()
    engine.step()
    return found


def test_values_of_a_parameter_are_the_same_at_every_stage():
    wanted = run_ranks(_values, world=2, args=(0,))[0]
    for stage in (1, 2, 3):
        for found in run_ranks(_values, world=2, args=(stage,)):
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, msg=f"{name} at stage {stage}")


# -- checkpoints as whole weights --------------------------------------------------------------------------------------


def _saved(folder: str) -> dict:
    engine = _engine(3)
    engine.module[0].bias.requires_grad_(False)
    engine.save_checkpoint(folder)
    return engine.module_state_dict()


def test_whole_weights_of_a_checkpoint_of_ours(tmp_path):
    (wanted, _) = run_ranks(_saved, world=2, args=(str(tmp_path / "ckpts"),))
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpts")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ckpts", tmp_path / "whole", tag="global_step0")
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    load_state_dict_from_zero_checkpoint(model, tmp_path / "whole")
    for name, value in wanted.items():
        assert torch.equal(found[name], value) and torch.equal(model.state_dict()[name], value)
    # As users of DeepSpeed do it, by the script that lies beside the checkpoint.
    command = [sys.executable, "zero_to_fp32.py", ".", "out", "--safe_serialization"]
    subprocess.run(command, cwd=tmp_path / "ckpts", check=True, timeout=100)
    written = load_file(tmp_path / "ckpts" / "out" / "model.safetensors")
    assert written.keys() == wanted.keys() and all(torch.equal(written[name], value) for name, value in wanted.items())
    subprocess.run([*command, "--exclude_frozen_parameters"], cwd=tmp_path / "ckpts", check=True, timeout=100)
    trained = load_file(tmp_path / "ckpts" / "out" / "model.safetensors")
    assert trained.keys() == wanted.keys() - {"0.bias"}
    assert (
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpts", exclude_frozen_parameters=True).keys()
        == trained.keys()
    )


# -- recomputation ---------------------------------------------------------------------------------------------------


def _recompute(block: dict) -> str:
    import contextlib
    import io

    forget_warnings()
    config = {**_config(0), "activation_checkpointing": block}
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(3))
    engine = initialize(model=layers, config=config)[0]
    assert checkpointing.is_configured()

    def run(again: bool) -> torch.Tensor:
        torch.manual_seed(3)
        x = torch.ones(2, 6, requires_grad=True)
        for layer in engine.module:
            x = checkpointing.checkpoint(layer, x) if again else layer(x)
        engine.zero_grad()
        x.sum().backward()
        return engine.module[0][0].weight.grad.clone()

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        torch.testing.assert_close(run(True), run(False))
    return said.getvalue()


def test_recomputed_functions_draw_again_what_they_drew_and_are_timed():
    (quiet,) = run_ranks(_recompute, world=1, args=({"cpu_checkpointing": True},))
    assert "fwd" not in quiet
    (told,) = run_ranks(_recompute, world=1, args=({"profile": True},))
    assert told.count("time (ms) | fwd: ") == 3 and told.count("time (ms) | backward: ") == 3


def _streams() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    checkpointing.model_parallel_cuda_manual_seed(5)
    outside = torch.rand(2)
    checkpointing.model_parallel_cuda_manual_seed(5)
    with tracker.fork():
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), outside)  # a stream of its own
    with tracker.fork():
        assert not torch.equal(torch.rand(2), first)  # which goes on
    for wrong in (lambda: tracker.add("model-parallel-rng", 1), lambda: tracker.fork("other").__enter__()):
        with pytest.raises(ConfigError) as caught:
            wrong()
        assert caught.value.code == "deepspeed-stream"
    with pytest.raises(ConfigError) as caught:
        checkpointing.configure(None, contiguous_checkpointing=True)
    assert caught.value.code == "deepspeed-checkpointing"
    checkpointing.configure(None, deepspeed_config=_config(0) | {"activation_checkpointing": {"profile": False}})
    checkpointing.reset()


def test_random_streams():
    run_ranks(_streams, world=1)


# -- small names -----------------------------------------------------------------------------------------------------


def test_repeating_loader(caplog):
    forget_warnings()
    data = list(range(4))
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    loader = surroundings.RepeatingLoader(DataLoader(data, batch_size=2, sampler=sampler))
    assert len(loader) == 2 and iter(loader) is loader
    passes = [[next(loader).tolist() for _ in range(2)] for _ in range(3)]
    assert passes[0] == passes[1] == passes[2]  # as under DeepSpeed, but said
    assert "in the order of the pass before" in caplog.text and caplog.text.count("set_epoch") == 1
    with pytest.raises(DataError) as caught:
        next(surroundings.RepeatingLoader([]))
    assert caught.value.code == "deepspeed-loader-empty"


def test_the_device_has_deepspeeds_names():
    device = get_accelerator()
    assert device is get_accelerator()
    kind = device.device_name()
    assert device.is_available() and device.current_device_name().startswith(kind) and device.device_count() >= 1
    assert device.communication_backend_name() and device.is_bf16_supported() in (True, False)
    device.set_device(0), device.synchronize(), device.empty_cache(), device.reset_peak_memory_stats()
    assert device.memory_allocated() >= 0 and 0 < device.available_memory() <= device.total_memory()
    device.manual_seed(3)
    state = device.get_rng_state()
    drawn = torch.rand(1, device=kind)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(1, device=kind), drawn)
    with device.stream(device.Stream()):
        pass
    assert torch.float32 in device.supported_dtypes() and device.on_accelerator(drawn)


def test_small_names(capsys):
    with surroundings.OnDevice(torch.bfloat16, "meta"):
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    assert surroundings.set_z3_leaf_modules(model, [nn.Tanh]) == [model[1]]
    assert surroundings.get_z3_leaf_modules(model) == [model[1]] and not surroundings.z3_leaf_module(model)
    surroundings.recursive_setattr(model, "0.weight", nn.Parameter(torch.ones(1, 1)))
    assert surroundings.recursive_getattr(model, "0.weight").item() == 1

    @surroundings.instrument_w_nvtx
    def double(x: int) -> int:
        return 2 * x

    assert double(2) == 4
    assert process_groups.get_data_parallel_world_size() == process_groups.get_model_parallel_world_size() == 1
