"""Defaults and arguments that a script written for DeepSpeed relies on without naming them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import CompatError
from paceline_deepspeed import comm
from paceline_deepspeed.initialize import initialize
from paceline_deepspeed.offload_states import OffloadDeviceEnum, OffloadStateTypeEnum, get_state_devices
from paceline_deepspeed.optimizers import DeepSpeedCPULion, FusedLion, build
from paceline_deepspeed.pipe import PipelineModule
from paceline_large.optim.lion import Lion


def test_lion_has_deepspeeds_betas() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    for made in (FusedLion(weights), build("Lion", {"lr": 0.1}, weights)):
        assert type(made) is Lion and isinstance(made, FusedLion)
        assert made.defaults["betas"] == (0.9, 0.999)


def test_a_loading_function_of_the_script_is_called() -> None:
    def load(src: dict[str, Any], dst: nn.Module) -> None:
        dst.load_state_dict({name.removeprefix("old."): value for name, value in src.items()})

    engine, *_ = initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1}, dist_init_required=False)
    engine.load_module_state_dict({"module": {"old.weight": torch.ones(1, 2), "old.bias": torch.ones(1)}}, True, load)
    assert engine.module.weight.tolist() == [[1.0, 1.0]]


# Answers of DeepSpeed 0.19.8's engine on one process: all of them on a default config, then those that other configs change.
_RECORDED = json.loads((Path(__file__).parent / "deepspeed_reference" / "engine_answers.json").read_text())
# Here the scale is what a loss is multiplied with; without fp16 that is 1.
_DIFFERENT = {"loss_scale"}
# Here using them is refused: what they describe is not carried.
_REFUSED = {
    *(
        "aio_config",
        "cpuadam_cores_perc",
        "curriculum_learning_config",
        "data_efficiency_config",
        "data_sampling_config",
    ),
    *(
        "get_compile_time",
        "random_ltd_config",
        "tensor_parallel_config",
        "clip_fp32_gradients",
        "buffered_allreduce_fallback",
    ),
    *("compile_autosp", "compile_autotp"),
}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("which", _RECORDED)
def test_the_engine_answers_as_deepspeeds(which: str) -> None:
    engine, *_ = initialize(model=nn.Linear(4, 4), config=_RECORDED[which]["config"], dist_init_required=False)
    recorded = {**_RECORDED["default"]["answers"], **_RECORDED[which]["answers"]}
    answers = {}
    for name in recorded.keys() - _DIFFERENT - _REFUSED:
        asked = getattr(engine, name)
        answers[name] = _plain(asked() if callable(asked) else asked)
    assert answers == {name: recorded[name] for name in answers}


def _engine(config: dict[str, Any] | None = None) -> Any:
    return initialize(model=nn.Linear(2, 1), config=config or {"train_batch_size": 1}, dist_init_required=False)[0]


@pytest.mark.parametrize("name", sorted(_REFUSED | {"set_data_post_process_func"}))
def test_methods_of_what_is_not_carried_are_refused(name: str) -> None:
    with pytest.raises(CompatError, match=f"DeepSpeedEngine.{name} is not carried"):
        getattr(_engine(), name)()


def test_a_state_may_lack_the_keys_that_are_allowed_to() -> None:
    engine = _engine()
    bias = engine.module.bias.tolist()
    engine.load_module_state_dict({"weight": torch.ones(1, 2)}, allowed_missing_keys=["bias"])
    assert engine.module.weight.tolist() == [[1.0, 1.0]] and engine.module.bias.tolist() == bias
    with pytest.raises(RuntimeError, match="bias"):
        engine.load_module_state_dict({"weight": torch.ones(1, 2)})


def test_the_state_goes_into_a_dict_under_a_prefix() -> None:
    state: dict[str, Any] = {"other": 1}
    assert _engine().module_state_dict(state, "model.") is state
    assert set(state) == {"other", "model.weight", "model.bias"}
    with pytest.raises(CompatError, match="keep_vars"):
        _engine().module_state_dict(keep_vars=True)


def test_offload_blocks_are_given_where_states_are_moved() -> None:
    moved = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}
    engine = _engine({"train_batch_size": 1, "zero_optimization": moved})
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_use_cpu_optimizer()
    assert engine.zero_offload_param() is None


def test_states_that_are_on_the_host_stay_there() -> None:
    engine = _engine({"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    parameters = [parameter.tolist() for parameter in engine.module.parameters()]
    # OpenRLHF calls the optimizer's.
    for owner in (engine, engine.optimizer):
        owner.offload_states(include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params])
        assert get_state_devices(engine, OffloadStateTypeEnum.optim_states) == {torch.device("cpu")}
        owner.reload_states(non_blocking=True)
    assert [parameter.tolist() for parameter in engine.module.parameters()] == parameters
    assert OffloadStateTypeEnum("lp_params") == "lp_params"
    with pytest.raises(CompatError, match="compat-name"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)


def test_a_loader_of_the_engine() -> None:
    engine = _engine({"train_micro_batch_size_per_gpu": 2})
    assert [len(batch) for batch in engine.deepspeed_io(torch.arange(6.0))] == [2, 2, 2]
    assert [batch.tolist() for batch in engine.deepspeed_io(torch.arange(4.0), 4, "eval")] == [[0.0, 1.0, 2.0, 3.0]]


def test_cpu_lion_takes_deepspeeds_argument() -> None:
    assert isinstance(DeepSpeedCPULion(model_params=[nn.Parameter(torch.zeros(2))]), FusedLion)


def test_a_pipeline_makes_pairs_of_what_its_iterator_gives() -> None:
    model = PipelineModule([nn.Linear(2, 1)], num_stages=1, loss_fn=nn.functional.mse_loss)
    config = {"train_batch_size": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = initialize(model=model, config=config, dist_init_required=False)
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.set_has_attention_mask(True)
    engine.reset_activation_shape()
    loss = engine.train_batch(iter([{"x": torch.ones(3, 2), "y": torch.zeros(3, 1)}]))
    assert loss.item() > 0 and engine.get_additional_losses() is None
    assert engine.get_pipeline_parallel_rank() == 0


def test_the_log_of_communication_is_switched_and_forgotten() -> None:
    config = {"train_batch_size": 1, "comms_logger": {"enabled": True}}
    engine, *_ = initialize(model=nn.Linear(2, 1), config=config)
    comm.configure(enabled=False)
    comm.reset_log()
    comm.all_reduce(torch.ones(1))
    assert not comm.has_comm_data()
    comm.configure(enabled=True)
    comm.all_reduce(torch.ones(1))
    assert comm.get_logged_comm_ops() == ["all_reduce"]
    comm.reset_log()
    assert not comm.has_comm_data()
    whole, part = torch.zeros(2), torch.ones(2)
    comm.allgather_fn(output_tensor=whole, input_tensor=part, debug="test")
    comm.reduce_scatter_fn(output_tensor=part, tensor=whole + 1, prof=False, debug="test")
    assert whole.tolist() == [1.0, 1.0] and part.tolist() == [2.0, 2.0]
    engine.destroy()
    comm.destroy_process_group()


def test_the_services_that_start_scripts_are_known_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    services = (
        ("AZUREML_EXPERIMENT_ID", comm.in_aml),
        ("SM_TRAINING_ENV", comm.in_aws_sm),
        ("DLTS_JOB_ID", comm.in_dlts),
    )
    for variable, started_there in services:
        monkeypatch.delenv(variable, raising=False)
        assert not started_there()
        monkeypatch.setenv(variable, "x")
        assert started_there()
