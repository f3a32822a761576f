"""Small answers of accelerate's that scripts may lean on: overridden methods, odd optimizers, refusals, private names."""

from __future__ import annotations

import enum
import json
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.base import env
from paceline.launch.notebook import notebook_launcher
from paceline.testing import run_ranks
from paceline.world.layout import Layout
from paceline_accelerate import errors, nested
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.arguments import DataLoaderConfiguration, ProfileKwargs
from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin
from paceline_accelerate.host import CPUInformation, get_cpu_distributed_information
from paceline_accelerate.kinds import BaseEnum, CustomDtype, DynamoBackend, LoggerType, PrecisionType, RNGType
from paceline_accelerate.module_sizes import dtype_byte_size
from paceline_accelerate.parallelism_config import ParallelismConfig
from paceline_accelerate.plugins import TorchTensorParallelPlugin
from paceline_accelerate.tracking import GeneralTracker, MLflowTracker
from paceline_accelerate.wrapping import extract_model_from_parallel

pytestmark = pytest.mark.usefixtures("fresh_states")


def rows(count: int = 10) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(3.0 * count).view(count, 3)), batch_size=4)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, rows(), torch.optim.lr_scheduler.StepLR(optimizer, 1)


# -- prepare -------------------------------------------------------------------------------------------------


class Noting(Accelerator):
    """Notes which of its methods `prepare` calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__(cpu=True)

    def prepare_model(self, model: Any, **options: Any) -> Any:
        self.calls.append("model")
        return super().prepare_model(model, **options)

    def prepare_optimizer(self, optimizer: Any, **options: Any) -> Any:
        self.calls.append("optimizer")
        return super().prepare_optimizer(optimizer, **options)

    def prepare_data_loader(self, data_loader: Any, **options: Any) -> Any:
        self.calls.append("loader")
        return super().prepare_data_loader(data_loader, **options)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        self.calls.append("scheduler")
        return super().prepare_scheduler(scheduler)


def test_prepare_calls_the_methods_of_a_scripts_own_class() -> None:
    accelerator = Noting()
    model, optimizer, loader, scheduler = accelerator.prepare(*parts(), device_placement=[True] * 4)
    assert accelerator.calls == ["model", "optimizer", "loader", "scheduler"]
    before = model.weight.detach().clone()
    for (batch,) in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert not torch.equal(before, model.weight) and scheduler.get_last_lr() != [0.1]
    assert accelerator.prepare(model) is model and accelerator.calls.count("model") == 1


def test_prepare_calls_prepare_one_twice_for_each_object() -> None:
    passes = []

    class Own(Accelerator):
        def _prepare_one(self, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
            passes.append(first_pass)
            return super()._prepare_one(obj, first_pass, device_placement)

    results = Own(cpu=True).prepare(*parts())
    assert passes == [True] * 4 + [False] * 4 and len(results) == 4


def optimizer_of_a_divided_model() -> tuple[list[str], bool]:
    accelerator = Noting()
    model, optimizer = parts()[:2]
    optimizer, model = accelerator.prepare(optimizer, model)
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return accelerator.calls, own == {id(parameter) for parameter in model.parameters()}


@pytest.mark.slow
def test_an_optimizer_follows_parameters_that_a_plan_replaces_with_their_model() -> None:
    assert (
        run_ranks(optimizer_of_a_divided_model, 2, env={"PACELINE_SHARD": "2"}) == [(["model", "optimizer"], True)] * 2
    )


# -- optimizers and loaders ----------------------------------------------------------------------------------


class Plain(torch.optim.SGD):
    """An optimizer whose `zero_grad` takes nothing."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


def test_an_optimizer_whose_zero_grad_takes_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, Plain(model.parameters(), 0.1))
    for prepared in (optimizer, pickle.loads(pickle.dumps(optimizer))):
        for group in prepared.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        prepared.zero_grad()
        assert all(parameter.grad is None for group in prepared.param_groups for parameter in group["params"])


def test_a_loader_has_no_remainder_before_its_first_loop() -> None:
    loader = Accelerator(cpu=True).prepare(rows())
    assert loader.remainder == -1
    list(loader)
    assert loader.remainder == 2
    assert loader.adjust_state_dict_for_prefetch() is None


# -- trackers ------------------------------------------------------------------------------------------------


class Mine(GeneralTracker):
    """A script's own tracker."""

    name = "mine"
    requires_logging_directory = False
    tracker = "wrapped"


def test_without_trackers_there_is_a_blank_one() -> None:
    accelerator = Accelerator(cpu=True)
    tracker = accelerator.get_tracker("wandb")
    assert type(tracker) is GeneralTracker and tracker.log({"loss": 1.0}) is None
    assert type(accelerator.get_tracker("wandb", unwrap=True)) is GeneralTracker


def test_log_with_holds_a_scripts_own_tracker_itself() -> None:
    accelerator = Accelerator(cpu=True, log_with=[mine := Mine()])
    assert accelerator.log_with == [mine]
    accelerator.init_trackers("project")
    with pytest.raises(ValueError, match="tracker-unknown"):
        accelerator.get_tracker("other")


@pytest.mark.needs("lens")
def test_mlflows_arguments_go_by_position() -> None:
    tracker = MLflowTracker("experiment", "folder", "run", {"a": "b"}, True, "name", "text")
    assert tracker.init_kwargs == {
        "logging_dir": "folder", "run_id": "run", "tags": {"a": "b"}, "nested_run": True, "run_name": "name",
        "description": "text",
    }  # fmt: skip


# -- refusals, values and private names ----------------------------------------------------------------------


def test_an_unknown_activity_and_an_unknown_node_are_value_errors() -> None:
    with pytest.raises(ValueError, match="zz"):
        ProfileKwargs(activities=["zz"]).build()
    with pytest.raises(ValueError, match="node_rank must be less than the number of nodes"):
        notebook_launcher(print, num_processes=2, node_rank=5, num_nodes=2)


def test_which_enumerations_hold_strings() -> None:
    assert not issubclass(BaseEnum, str) and issubclass(BaseEnum, enum.Enum)
    assert LoggerType.WANDB != "wandb" and "wandb" in LoggerType and str(RNGType.TORCH) == "torch"
    assert CustomDtype.FP8 != "fp8" and dtype_byte_size(CustomDtype.INT4) == 0.5
    assert PrecisionType.BF16 == "bf16" and DynamoBackend.INDUCTOR == "INDUCTOR"


def test_one_value_is_concatenated_to_itself_and_an_exception_says_what_it_was_given() -> None:
    assert nested.concatenate([1]) == 1
    with pytest.raises(TypeError):
        nested.concatenate([1, 2])
    error = errors.DistributedOperationException("hi")
    assert str(error) == "hi" and error.args == ("hi",) and str(pickle.loads(pickle.dumps(error))) == "hi"


def test_save_hooks_can_be_looked_at_and_taken_out(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_save_state_pre_hook(lambda *arguments: pytest.fail("it was taken out"))
    assert len(accelerator._save_model_state_pre_hook) == 1 and not accelerator._load_model_state_pre_hook
    accelerator._save_model_state_pre_hook.clear()
    accelerator.save_state(tmp_path / "state")


# -- arguments and files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, -1])
def test_a_window_has_at_least_one_step(steps: int) -> None:
    with pytest.raises(ValueError, match=f"accumulate cannot be {steps}"):
        Accelerator(cpu=True, gradient_accumulation_steps=steps)


def test_an_object_that_is_no_parallelism_config_is_refused() -> None:
    with pytest.raises(TypeError, match="parallelism_config cannot be a str"):
        Accelerator(cpu=True, parallelism_config="tp")


def test_whole_and_divided_states_are_all_that_version_2_has() -> None:
    with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="local_state_dict")


def test_a_parallelism_config_as_json_holds_fields_alone() -> None:
    assert ParallelismConfig(cp_size=2).to_json()["cp_handler"] == {"cp_comm_strategy": "allgather"}


def test_the_index_of_shards_is_written_as_by_accelerate(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size=300)
    text = (tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert text.index("0.bias") < text.index("0.weight")


def test_a_model_alone_is_loaded_from_the_folder_of_a_training(tmp_path: Path) -> None:
    training = Accelerator(cpu=True)
    trained = nn.Linear(2, 1)
    training.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    training.save_state(tmp_path / "run")
    evaluating = Accelerator(cpu=True)
    model = evaluating.prepare(nn.Linear(2, 1))
    evaluating.load_state(tmp_path / "run", map_location="on_device")
    assert torch.equal(model.weight, trained.weight)


@pytest.mark.parametrize("stops_at", [0, 2])
def test_a_loop_after_load_state_reads_the_whole_epoch(tmp_path: Path, stops_at: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(6)), batch_size=2))
    for step, _ in enumerate(loader):
        if step == stops_at:
            break
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert [rows.tolist() for (rows,) in loader] == [[0, 1], [2, 3], [4, 5]]
    accelerator.load_state(tmp_path)
    assert [rows.tolist() for (rows,) in accelerator.skip_first_batches(loader, 2)] == [[4, 5]]


def test_free_memory_forgets_the_count_of_steps() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    with accelerator.accumulate():
        assert accelerator.step == 1
    accelerator.free_memory()
    assert accelerator.step == 0


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_is_prepared_again_after_free_memory_is_saved(tmp_path, precision) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    prepared = accelerator.prepare(*parts())
    accelerator.free_memory()
    assert accelerator.prepare(*prepared) == prepared
    accelerator.save_state(tmp_path)
    assert {"model.safetensors", "optimizer.bin", "scheduler.bin"} <= {path.name for path in tmp_path.iterdir()}
    assert [len(accelerator._models), len(accelerator._optimizers), len(accelerator._dataloaders)] == [1, 1, 1]


def test_a_model_with_strategies_is_prepared_again_as_it_is() -> None:
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2))
    (entry,) = accelerator.run.prepared.models
    accelerator.free_memory()
    accelerator.prepare(model)
    assert accelerator.run.prepared.models == [entry]
    copied = pickle.loads(pickle.dumps(model._paceline_entry))
    assert copied.entry is None, "an entry belongs to one model"


def test_what_an_earlier_accelerator_prepared_follows_the_windows_of_the_later_one(tmp_path) -> None:
    earlier = Accelerator(cpu=True)
    model, optimizer, loader, _ = earlier.prepare(*parts())
    later = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert later.prepare(model, optimizer, loader) == (model, optimizer, loader)
    changes = []
    for (row,) in loader:
        before = model.weight.clone()
        with later.accumulate(model):
            later.backward(model(row).sum())
            optimizer.step()
            optimizer.zero_grad()
        changes.append(not torch.equal(before, model.weight))
    assert changes == [False, True, True], "the window ends with the epoch, too"
    later.save_state(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def weight_after_a_new_optimizer() -> tuple[list[int], float]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.free_memory()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for value in (1.0, 2.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), value + accelerator.process_index)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return [len(accelerator._models), len(accelerator._optimizers)], accelerator.unwrap_model(model).weight.item()


def test_a_new_optimizer_brings_back_the_model_that_free_memory_forgot() -> None:
    (counts, weight), (_, other_weight) = run_ranks(weight_after_a_new_optimizer, world=2)
    assert counts == [1, 1]
    assert weight == other_weight, "gradients were averaged over the ranks"


def test_gathering_objects_on_one_process_cuts_a_tensor() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(rows())
    kept = [accelerator.gather_for_metrics(torch.ones(4), use_gather_object=True).tolist() for _ in loader]
    assert kept == [[1.0] * 4, [1.0] * 4, [1.0] * 2]


def numbers_of_gathered_losses() -> list[int]:
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(range(8), batch_size=4))
    return [len(accelerator.gather_for_metrics(torch.zeros(4))) for _ in loader]


def test_a_mean_loss_that_is_repeated_by_the_batch_size_counts_in_a_full_last_batch() -> None:
    assert run_ranks(numbers_of_gathered_losses, world=2) == [[8, 8]] * 2


class DroppingBatches:
    """Batches of four; the last short one is left out, and the loader does not know it (as in sentence-transformers)."""

    batch_size = 4
    drop_last = False

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1, 2, 3]
        yield [4, 5, 6, 7]


def losses_of_dropping_batches() -> list[list[float]]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(range(9), batch_sampler=DroppingBatches()))
    return [accelerator.gather_for_metrics(batch.float().mean().repeat(4)).tolist() for batch in loader]


def test_losses_count_on_all_ranks_if_a_sampler_drops_the_last_batch() -> None:
    assert run_ranks(losses_of_dropping_batches, world=2) == [[[1.5] * 4 + [5.5] * 4]] * 2


def test_a_device_that_is_not_there_is_shown_and_refused_by_prepare(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:64")
    accelerator = Accelerator()
    assert str(accelerator.state.device) == "cuda:64"
    with pytest.raises(ValueError, match="cannot be trained on 'cuda:64'"):
        accelerator.prepare(nn.Linear(2, 1))


def test_a_loader_and_an_optimizer_say_what_they_belong_to() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    model = nn.Linear(2, 1)
    optimizer, loader = accelerator.prepare(
        torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(range(5), batch_size=2)
    )
    assert optimizer.gradient_state.num_steps == 1 and optimizer.accelerator_state.mixed_precision == "no"
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert loader.end_of_dataloader, "until the next loop begins, as under accelerate"
    assert loader.dl_state_dict == loader.state_dict()
    next(iter(loader))
    assert not loader.end_of_dataloader


def test_words_of_errors_that_scripts_look_for(tmp_path: Path) -> None:
    from paceline_accelerate.data_loader import prepare_data_loader
    from paceline_accelerate.memory import find_executable_batch_size
    from paceline_accelerate.module_tensors import find_tied_parameters, set_module_tensor_to_device

    accelerator = Accelerator(cpu=True)
    meta = nn.Linear(2, 2, device="meta")

    @find_executable_batch_size
    def train(batch_size: int, name: str) -> None:
        raise AssertionError

    questions = {
        "Batch size was passed into `train`": lambda: train(128, "a"),
        "Item at index 1 is a `list`": lambda: accelerator.register_for_checkpointing(nn.Linear(1, 1), []),
        "`device_placement` should be a list with 1 elements": lambda: accelerator.prepare(1, device_placement=[]),
        "does not exist": lambda: accelerator.load_state(tmp_path / "nowhere"),
        "we need a `value`": lambda: set_module_tensor_to_device(meta, "weight", "cpu"),
        "a tensor of shape torch.Size([3])": lambda: set_module_tensor_to_device(meta, "weight", "cpu", torch.ones(3)),
        "round multiple of the number of processes": lambda: prepare_data_loader(
            rows(), num_processes=3, split_batches=True
        ),
        "is not a valid dtype": lambda: dtype_byte_size("foo"),
        "requires a TorchContextParallelConfig": lambda: ParallelismConfig(cp_size=2, cp_handler="ring"),
    }
    for words, question in questions.items():
        with pytest.raises((ValueError, TypeError)) as error:
            question()
        assert words in str(error.value), f"{words!r} is not in {error.value}"

    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight, tied[1].bias = tied[0].weight, tied[0].bias
    assert find_tied_parameters(tied) == [["0.bias", "1.bias"], ["0.weight", "1.weight"]]


def test_where_processes_meet_does_not_matter_to_who_they_are(monkeypatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert get_cpu_distributed_information() == CPUInformation(3, 4, 1, 2)


def test_recursive_extraction_unwraps_every_attribute_named_module() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    leaf = nn.Linear(1, 1)
    assert extract_model_from_parallel(Wrapper(Wrapper(leaf)), recursive=True) is leaf
    model = nn.Sequential(Wrapper(nn.Sequential(Wrapper(leaf))))
    assert extract_model_from_parallel(model, recursive=True)[0][0] is leaf
    wrapper = Wrapper(leaf)
    assert extract_model_from_parallel(wrapper) is wrapper


def _calls_of_private_names(monkeypatch) -> list[str]:
    """What `prepare` calls of the methods that a library has put into the classes, in order."""
    calls = []

    def around(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def replaced(self, *args):
            calls.append(name)
            return original(self, *args)

        monkeypatch.setattr(kind, name, replaced)

    around(Accelerator, "_prepare_fsdp2")
    around(ParallelismConfig, "_validate_accelerator")
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        parallelism_config=ParallelismConfig(dp_shard_size=dist.get_world_size()),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    assert accelerator.state._prepare_backend() == ("gloo", accelerator.distributed_type)
    assert accelerator.is_composable_parallelism_enabled
    loss = torch.tensor(float(accelerator.process_index))
    assert accelerator.torch_device_mesh is accelerator.state.device_mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch does not like the joined names that accelerate uses
        dist.all_reduce(loss, group=accelerator.torch_device_mesh["dp_cp"].get_group())
    assert loss == sum(range(accelerator.num_processes))
    return calls


def test_private_methods_that_libraries_replace_are_called() -> None:
    def work() -> list[str]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            return _calls_of_private_names(monkeypatch)

    assert run_ranks(work, 2) == [["_validate_accelerator", "_prepare_fsdp2"]] * 2


def test_axes_that_the_launcher_asks_for_are_shown_and_local_main_processes_save() -> None:
    def work() -> tuple[object, ...]:
        on_hosts_of_one = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
        with env.patched(on_hosts_of_one):
            plain = Accelerator(cpu=True)
            saves = (plain.should_save_model, plain.parallelism_config)
        with env.patched({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}):
            launched = Accelerator(cpu=True)
        axes = launched.state.parallelism_config
        assert axes is launched.parallelism_config
        by_plugin = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
        mesh = by_plugin.torch_device_mesh
        return saves, launched.should_save_model, axes.dp_shard_size, by_plugin.parallelism_config.tp_size, mesh.size()

    assert run_ranks(work, 2) == [((True, None), True, 2, 2, 2)] * 2


def test_sizes_that_leave_out_ranks_take_those_of_the_plan() -> None:
    axes = ParallelismConfig(tp_size=2)
    axes.cover(Layout(replicate=2, shard=2, tp=2))
    assert (axes.dp_replicate_size, axes.dp_shard_size, axes.total_size) == (2, 2, 8)
