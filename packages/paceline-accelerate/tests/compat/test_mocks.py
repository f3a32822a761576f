"""Tests of scripts replace parts of accelerate: by `unittest.mock`, by assignment, and by subclasses."""

from __future__ import annotations

import importlib
import pickle
import tempfile
from collections import OrderedDict
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.arguments import DataLoaderConfiguration, GradScalerKwargs, KwargsHandler
from paceline_accelerate.available import is_npu_available, is_wandb_available
from paceline_accelerate.gradient_state import GradientState
from paceline_accelerate.loader_classes import DataLoaderDispatcher, DataLoaderShard
from paceline_accelerate.loading import load_checkpoint_in_model
from paceline_accelerate.optimizer import AcceleratedOptimizer
from paceline_accelerate.recipes import FP8RecipeKwargs, TERecipeKwargs
from paceline_accelerate.split import split_part
from paceline_accelerate.state import AcceleratorState, PartialState
from paceline_accelerate.tracking import GeneralTracker

pytestmark = pytest.mark.usefixtures("fresh_states")


# -- names of modules ----------------------------------------------------------------------------------------


def test_a_function_that_a_test_replaces_is_called_by_other_functions(serve) -> None:
    serve("accelerate")
    memory = importlib.import_module("accelerate.utils.memory")
    original = memory.clear_device_cache
    with patch("accelerate.utils.memory.clear_device_cache") as replacement:
        assert memory.release_memory(1) == [None] and replacement.called
    memory.clear_device_cache = lambda **options: "mine"
    assert memory.clear_device_cache() == "mine"
    memory.clear_device_cache = original
    assert memory.clear_device_cache is original and memory.release_memory() == []


def test_a_name_that_a_test_replaces_in_a_package_or_a_class_stays_ours_elsewhere(serve) -> None:
    serve("accelerate")
    package, memory = (importlib.import_module(f"accelerate.{name}") for name in ("utils", "utils.memory"))
    with patch("accelerate.utils.release_memory", return_value="mine"):
        assert package.release_memory() == "mine" and memory.release_memory() == []
    with patch("accelerate.accelerator.Accelerator"):
        assert isinstance(Accelerator(cpu=True), Accelerator)


def test_modules_of_others_are_found_in_those_of_accelerate(serve) -> None:
    serve("accelerate")
    with patch("accelerate.state.os.environ", {}), patch("accelerate.utils.modeling.nn", None):
        pass
    with patch("accelerate.utils.modeling.logger.warning") as warn:
        importlib.import_module("accelerate.utils.modeling").get_max_memory({0: 10})
    assert warn.called
    assert not hasattr(importlib.import_module("accelerate"), "os")


def test_questions_for_packages_are_one_function_each_and_folders_are_no_answer(serve, tmp_path, monkeypatch) -> None:
    serve("accelerate")
    imports = importlib.import_module("accelerate.utils.imports")
    assert imports.is_wandb_available is is_wandb_available
    is_npu_available.cache_clear()
    (tmp_path / "trackio_here").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not imports._is_package_available("trackio_here") and imports._is_package_available("torch")


# -- the accelerator -----------------------------------------------------------------------------------------


def test_properties_of_the_accelerator_can_be_replaced() -> None:
    with patch.object(Accelerator, "device", new_callable=PropertyMock, return_value=torch.device("meta")):
        assert Accelerator(cpu=True).device.type == "meta"

    class Placed(Accelerator):
        @property
        def device(self) -> torch.device:
            return torch.device("cpu", 0)

    assert Placed(cpu=True).device.index == 0
    with pytest.raises(AttributeError):
        Accelerator(cpu=True).device = "cpu"


def test_an_accelerator_follows_its_state() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.num_processes = 4
    accelerator.state.process_index = 2
    assert (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process) == (4, 2, False)
    with accelerator.split_between_processes(list(range(8))) as part:
        assert part == [4, 5]
    AcceleratorState._reset_state(reset_partial_state=True)
    assert accelerator.num_processes == 1


def test_methods_of_a_subclass_are_decorated_before_there_is_an_accelerator() -> None:
    class MyAccelerator(Accelerator):
        @Accelerator.on_main_process
        def on_main(self, value: int) -> int:
            return value + 1

        @Accelerator.on_local_main_process
        def on_local_main(self) -> str:
            return "local"

    accelerator = MyAccelerator(cpu=True)
    assert accelerator.on_main(1) == 2 and accelerator.on_local_main() == "local"
    # A single process runs everything, whatever a test lets it believe.
    with patch.object(PartialState, "is_main_process", new_callable=PropertyMock, return_value=False):
        assert accelerator.on_main(1) == 2
    for wrong in (lambda: Accelerator.on_main_process(len), accelerator.on_main_process):
        with pytest.raises(ValueError, match="needs a function"):
            wrong()


def test_a_prepared_loader_can_be_pickled() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2))
    copy = pickle.loads(pickle.dumps(loader))
    assert type(copy) is type(loader) and [batch.tolist() for (batch,) in copy] == [[0.0, 1.0], [2.0, 3.0]]


def test_the_list_of_loaders_of_the_gradient_state_can_be_set() -> None:
    state = GradientState()
    loader = DataLoader([1, 2])
    state.dataloader_references = [None, loader]
    assert state.active_dataloader is loader
    state.dataloader_references = [None]
    assert not state.in_dataloader


def test_trackers_compare_as_a_list_and_can_be_added() -> None:
    class Noted(GeneralTracker):
        name = "noted"
        requires_logging_directory = False

        def __init__(self) -> None:
            self.values: list[Any] = []

        @property
        def tracker(self) -> list[Any]:
            return self.values

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
            self.values.append((values, step))

    accelerator = Accelerator(cpu=True)
    assert accelerator.trackers == []
    tracker = Noted()
    accelerator.trackers.append(tracker)
    accelerator.log({"loss": 1.0}, step=2)
    assert accelerator.trackers == [tracker] and tracker.values == [({"loss": 1.0}, 2)]


@pytest.mark.needs("deepspeed")
def test_the_optimizer_of_a_deepspeed_engine_is_an_accelerated_one() -> None:
    from paceline_accelerate.deepspeed_wrappers import DeepSpeedOptimizerWrapper

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    assert isinstance(DeepSpeedOptimizerWrapper(optimizer), AcceleratedOptimizer)


# -- handlers ------------------------------------------------------------------------------------------------


def test_a_handler_that_is_no_dataclass_has_its_attributes() -> None:
    class Plain(KwargsHandler):
        def __init__(self, value: int = 1) -> None:
            self.value = value

    assert Plain(2).to_dict() == {"value": 2} and Plain(2).to_kwargs() == {"value": 2} and Plain().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=2.0).to_kwargs() == {"init_scale": 2.0}


def test_recipes_check_their_fields(monkeypatch) -> None:
    with (
        pytest.warns(FutureWarning, match="TERecipeKwargs"),
        pytest.raises(ValueError, match="`backend` must be one of"),
    ):
        FP8RecipeKwargs(backend="AO")
    with pytest.raises(ImportError, match="TransformerEngine is not available"):
        TERecipeKwargs()
    monkeypatch.setattr("paceline_accelerate.recipes.is_transformer_engine_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "3")
    recipe = TERecipeKwargs(fp8_format="e4m3")
    assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len) == (3, "E4M3", 1024)
    assert recipe.override_linear_precision == (False, False, False)
    with pytest.raises(ValueError, match="`amax_compute_algo` must be one of"):
        TERecipeKwargs(amax_compute_algo="min")


def test_the_backend_of_8_bits_is_that_of_its_variable(monkeypatch) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.fp8_backend == "NO"
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    assert accelerator.fp8_backend == "AO"


# -- warnings ------------------------------------------------------------------------------------------------


def test_weights_that_a_model_does_not_use_are_named_in_a_warning(caplog) -> None:
    model = nn.Linear(2, 1)
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        torch.save({**model.state_dict(), "other": torch.ones(1)}, file.name)
        load_checkpoint_in_model(model, file.name)
    [record] = caplog.records
    assert record.name == "accelerate.utils.modeling" and "['other']" in record.getMessage()


# -- small answers that tests of scripts ask for -------------------------------------------------------------


def test_a_part_of_a_mapping_is_of_its_class() -> None:
    parts = [split_part(OrderedDict(a=[1, 2, 3]), rank, 2) for rank in range(2)]
    assert parts == [OrderedDict(a=[1, 2]), OrderedDict(a=[3])] and type(parts[0]) is OrderedDict


def test_a_dispatched_loader_keeps_its_remainder_after_the_loop() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader([1, 2, 3], batch_size=2))
    assert loader.remainder == -1
    seen = [loader.remainder for _ in loader]
    assert seen == [-1, 1] and loader.remainder == 1
    for _ in loader:
        break
    assert loader.remainder == -1


def test_attributes_of_a_loop_can_be_set_until_the_next_loop() -> None:
    loader = DataLoaderShard([1, 2, 3], batch_size=2)
    loader.end_of_dataloader = True
    loader.remainder = 7
    assert (loader.end_of_dataloader, loader.remainder) == (True, 7)
    assert [loader.end_of_dataloader for _ in loader] == [False, True] and loader.remainder == 1


def test_the_gradient_state_shows_all_loaders_of_nested_loops() -> None:
    accelerator = Accelerator(cpu=True)
    outer, inner = accelerator.prepare(DataLoader([1]), DataLoader([2]))
    for _ in outer:
        for _ in inner:
            assert accelerator.gradient_state.dataloader_references == [None, outer, inner]
    assert accelerator.gradient_state.dataloader_references == [None]


def test_a_dispatched_loader_shows_how_it_slices() -> None:
    loader = DataLoaderDispatcher([1, 2], slice_fn=max)
    assert loader.slice_fn is max and loader.state.num_processes == 1


def test_an_optimizer_without_an_accelerator_follows_the_gradient_state() -> None:
    model = nn.Linear(1, 1)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    before = model.weight.item()
    GradientState()._set_sync_gradients(False)
    model(torch.ones(1, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.item() == before and model.weight.grad is not None
    GradientState()._set_sync_gradients(True)
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.item() != before and model.weight.grad is None


def test_the_scaler_of_an_optimizer_may_be_one_that_is_off() -> None:
    model = nn.Linear(1, 1)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for off in (None, torch.amp.GradScaler("cpu", enabled=False)):
        optimizer.scaler = off  # as imagen-pytorch assigns it in each step
    assert optimizer.scaler is None
    with pytest.raises(ValueError, match="cannot be replaced"):
        optimizer.scaler = torch.amp.GradScaler("cpu")
