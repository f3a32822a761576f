"""What the compat layer's classes do that the recorded programs do not show: arguments, states, faults not kept."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from warm_python import python3

from paceline import CheckpointError, CompatError, ConfigError
from paceline.base import env
from paceline.config import Given, resolve_launch
from paceline.testing import run_ranks
from paceline_accelerate import (
    checkpoint,
    errors,
    host,
    memory,
    nested,
    operations,
    random_streams,
    surroundings,
)
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.arguments import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from paceline_accelerate.commands.config.default import write_basic_config
from paceline_accelerate.data_loader import prepare_data_loader, skip_first_batches
from paceline_accelerate.deepspeed_plugin import DeepSpeedPlugin
from paceline_accelerate.gradient_state import GradientState
from paceline_accelerate.kinds import DDPCommunicationHookType, DistributedType, DynamoBackend, PrecisionType
from paceline_accelerate.loader_classes import DataLoaderShard, DataLoaderStateMixin
from paceline_accelerate.plugins import TorchDynamoPlugin
from paceline_accelerate.state import AcceleratorState, PartialState
from paceline_accelerate.tracking import GeneralTracker, filter_trackers

pytestmark = pytest.mark.usefixtures("fresh_states")


def loader_of(count: int = 8, batch: int = 2) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(float(count)).unsqueeze(1)), batch_size=batch)


# -- loops ---------------------------------------------------------------------------------------------------


class Windows(DataLoaderStateMixin):
    """A loader of a script's own, as accelerate's documentation lets one be written."""

    def __init__(self, rows: int, total_batch_size: int, accelerator: Accelerator) -> None:
        self.dataset, self.total_batch_size = range(rows), total_batch_size
        self.gradient_state = accelerator.gradient_state

    def __iter__(self):
        self.begin()
        for start in range(0, len(self.dataset), self.total_batch_size):
            self.end_of_dataloader = start + self.total_batch_size >= len(self.dataset)
            yield start
        self.end()


def shown_by(state: GradientState) -> tuple[bool, bool, int]:
    return state.in_dataloader, state.end_of_dataloader, state.remainder


def test_a_loader_of_the_scripts_own_tells_of_its_loop() -> None:
    accelerator = Accelerator(cpu=True)
    state = accelerator.gradient_state
    loader = Windows(10, 4, accelerator)
    # As accelerate 1.15 answers, before the loop, in it and after it.
    assert (loader.end_of_dataloader, loader.remainder) == (False, -1)
    shown = [shown_by(state) for _ in loader]
    assert shown == [(True, False, 2), (True, False, 2), (True, True, 2)]
    assert shown_by(state) == (False, False, -1)
    assert (loader.end_of_dataloader, loader.remainder) == (True, 2)
    loader.reset()
    assert (loader.end_of_dataloader, loader.remainder) == (False, -1)


def test_loops_call_what_a_class_of_the_scripts_own_has_overridden() -> None:
    calls = []

    class Noted(DataLoaderShard):
        def begin(self):
            calls.append("begin")
            super().begin()

        def end(self):
            calls.append("end")
            super().end()

        def reset(self):
            calls.append("reset")
            super().reset()

    loader = Noted(TensorDataset(torch.arange(4.0)), batch_size=2)
    assert [batch.tolist() for (batch,) in loader] == [[0.0, 1.0], [2.0, 3.0]]
    assert calls == ["begin", "reset", "end"]
    for _ in loader:
        break
    assert calls == ["begin", "reset", "end"] * 2


# -- arguments -----------------------------------------------------------------------------------------------


def test_arguments_that_are_not_carried_are_refused_all_at_once() -> None:
    with pytest.raises(CompatError) as caught:
        Accelerator(
            deepspeed_plugin=object(),
            megatron_lm_plugin=object(),
            gradient_accumulation_steps=2,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
            kwargs_handlers=[GradScalerKwargs(), GradScalerKwargs(), object()],
        )
    assert [problem.code for problem in caught.value.problems] == ["compat-argument"] * 5
    assert "give one `DeepSpeedPlugin`" in str(caught.value) and "'pp': 2" in str(caught.value)


def test_two_arguments_for_one_thing_are_refused_by_their_names() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2)
    with pytest.raises(CompatError, match="cannot pass in both `deepspeed_plugin` and `deepspeed_plugins`"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, deepspeed_plugins={"teacher": plugin})


def test_an_argument_beats_the_variable_of_the_precision_but_not_that_of_the_window() -> None:
    with env.patched({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8", "ACCELERATE_MIXED_PRECISION": "fp16"}):
        said = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
        AcceleratorState._reset_state(reset_partial_state=True)
        unsaid = Accelerator(cpu=True)
    assert (said.gradient_accumulation_steps, said.mixed_precision) == (8, "bf16")
    assert (unsaid.gradient_accumulation_steps, unsaid.mixed_precision) == (8, "fp16")


def test_batch_norms_keep_their_statistics_as_under_accelerate_unless_somebody_asks(monkeypatch) -> None:
    name = "options.batch_norm.statistics"
    unasked = next(each for each in Accelerator(cpu=True).plan.decisions if each.field == name)
    assert (unasked.value, unasked.source, unasked.where) == ("local", "default", "as under accelerate")
    monkeypatch.setenv("PACELINE_OPTIONS", "{batch_norm: {statistics: synced}}")
    assert Accelerator(cpu=True).plan.options["batch_norm"] == {"statistics": "synced"}


def test_keyword_bundles_reach_what_they_are_for() -> None:
    ddp = DistributedDataParallelKwargs(
        find_unused_parameters=True, comm_hook=DDPCommunicationHookType.BF16, comm_state_option={"a": 1}
    )
    assert ddp.options() == {"comm_hook": "bf16", "comm_state": {"a": 1}}
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        kwargs_handlers=[ddp, GradScalerKwargs(init_scale=8.0), InitProcessGroupKwargs(timeout=timedelta(seconds=7))],
        dynamo_backend=DynamoBackend.NO,
    )
    assert accelerator.plan.options["replicate"] == ddp.options()
    assert accelerator.scaler_handler.init_scale == 8.0
    assert accelerator.settings.timeout_s == 7.0
    assert not TorchDynamoPlugin(backend="no") and TorchDynamoPlugin(backend="inductor")
    assert ProfileKwargs(with_flops=True).to_kwargs() == {"with_flops": True}


def test_fp16_has_no_effect_on_the_cpu_as_there(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    values = torch.full((1, 1), 1 / 3)
    assert torch.equal(model(values), values @ model.weight.T), "it computes in float32"
    assert accelerator.scaler is None and not accelerator.native_amp and accelerator.mixed_precision == "fp16"
    accelerator.save_state(tmp_path / "run")
    assert "scaler.pt" not in os.listdir(tmp_path / "run")


def test_split_batches_of_an_old_script_has_no_effect_but_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert not Accelerator(cpu=True, split_batches=True).split_batches
    assert "DataLoaderConfiguration(split_batches=True)" in caplog.text


def test_enumerations_compare_with_strings() -> None:
    assert PrecisionType.FP16 == "fp16" and "bf16" in PrecisionType and "int7" not in PrecisionType
    assert str(PrecisionType.NO) == "no" and str(DistributedType.NO) == "DistributedType.NO"
    assert "fp8" in PrecisionType.list()


# -- states --------------------------------------------------------------------------------------------------


def test_a_second_accelerator_has_its_own_window_and_the_precision_of_the_first() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
    second = Accelerator(cpu=True)
    assert (first.gradient_accumulation_steps, first.state.mixed_precision) == (4, "bf16")
    assert (second.gradient_accumulation_steps, second.mixed_precision) == (1, "bf16")
    with pytest.raises(ValueError, match="initialized with mixed_precision='bf16'") as caught:
        Accelerator(cpu=True, mixed_precision="no")
    assert isinstance(caught.value, CompatError) and caught.value.code == "compat-argument"
    first.gradient_state._set_sync_gradients(False)
    assert not first.sync_gradients and second.sync_gradients and GradientState().sync_gradients
    assert AcceleratorState().mixed_precision == "bf16"


def test_what_is_pickled_names_the_librarys_classes(serve) -> None:
    serve("accelerate")
    import accelerate
    from accelerate.utils import DistributedType as served_type

    for value in (accelerate.PartialState(cpu=True), accelerate.DataLoaderConfiguration(), served_type.MULTI_GPU):
        written = pickle.dumps(value)
        assert b"accelerate" in written and b"paceline" not in written
        assert type(pickle.loads(written)) is type(value)
    accelerate.PartialState._reset_state()


def test_states_before_an_accelerator() -> None:
    assert PartialState._shared_state == {}
    assert GradientState().sync_gradients and GradientState().num_steps == 1 and not GradientState().in_dataloader
    state = PartialState(cpu=True)
    assert state.distributed_type == DistributedType.NO and state.device.type == "cpu" and state.backend is None
    assert PartialState._shared_state and PartialState().world is state.world
    with pytest.raises(ValueError, match="initialize your accelerator via"):
        AcceleratorState()
    AcceleratorState._reset_state()
    assert Accelerator(cpu=True).state.deepspeed_plugin is None and AcceleratorState().deepspeed_plugin is None
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {} == AcceleratorState._shared_state


def test_gradient_state_follows_the_loader_and_forgets_it_after_a_break() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(5))
    ends, state = [], accelerator.gradient_state
    for _ in loader:
        ends.append((state.end_of_dataloader, state.remainder))
    assert ends == [(False, 1), (False, 1), (True, 1)]
    for _ in loader:
        break
    assert not state.in_dataloader and not state.end_of_dataloader and state.remainder == -1


# -- prepare and the loop ------------------------------------------------------------------------------------


def test_what_prepare_does_not_know_passes_through() -> None:
    accelerator = Accelerator(cpu=True)
    things = [None, "text", [1], {"a": 1}, object(), 3]
    assert accelerator.prepare(*things) == tuple(things)
    assert accelerator.prepare(things[4]) is things[4]


def test_optimizers_in_any_order_and_unprepared_ones() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    model = accelerator.prepare(model)
    before = model.weight.item()
    for each in (optimizer, other):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        each.step()
        each.zero_grad()
    assert model.weight.item() == pytest.approx(before - 2)
    assert accelerator._models == [model] and accelerator._optimizers == [optimizer]


def test_loaders_of_the_function_and_of_the_class() -> None:
    loader = prepare_data_loader(loader_of(5), num_processes=2, process_index=1, even_batches=True)
    assert [row[0].flatten().tolist() for row in loader] == [[2.0, 3.0], [1.0, 2.0]]
    rest = skip_first_batches(dataloader=Accelerator(cpu=True).prepare(loader_of()), num_batches=3)
    assert [row[0].flatten().tolist() for row in rest] == [[6.0, 7.0]]


def test_even_batches_can_be_turned_off_on_the_way() -> None:
    def rows():
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(loader_of(5))
        with accelerator.join_uneven_inputs([], even_batches=False):
            inside = [row[0].flatten().tolist() for row in loader]
        after = [row[0].flatten().tolist() for row in loader]
        accelerator.even_batches = False
        return inside, after, [row[0].flatten().tolist() for row in accelerator.prepare(loader_of(5))]

    first, second = run_ranks(rows, world=2)
    assert first == ([[0.0, 1.0], [4.0]], [[0.0, 1.0], [4.0, 0.0]], [[0.0, 1.0], [4.0]])
    assert second[1] == [[2.0, 3.0], [1.0, 2.0]]


def test_values_of_0_dim_tensors_are_cut_with_the_rows_of_the_last_batch_as_there() -> None:
    def gathered():
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(loader_of(5))
        return [
            [each.tolist() for each in accelerator.gather_for_metrics((row.flatten(), row.sum()))] for (row,) in loader
        ]

    expected = [[[0.0, 1.0, 2.0, 3.0], [1.0, 5.0]], [[4.0], [4.0]]]
    assert run_ranks(gathered, world=2) == [expected, expected]


def test_the_scheduler_steps_once_for_each_process_and_says_nothing() -> None:
    def steps():
        seen = []
        handler = logging.Handler()
        handler.emit = lambda record: seen.append(record.getMessage())
        logging.getLogger("paceline.compat").addHandler(handler)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
        return scheduler.get_last_lr(), seen

    assert run_ranks(steps, world=2) == [([0.5**4], [])] * 2


def test_ranks_wait_and_save_after_end_training(tmp_path: Path) -> None:
    def after(folder):
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
        accelerator.init_trackers("run")
        accelerator.end_training()
        # The example scripts of transformers go on like this.
        accelerator.wait_for_everyone()
        return accelerator.gather(torch.tensor([accelerator.process_index])).tolist()

    assert run_ranks(after, world=2, args=(str(tmp_path),)) == [[0, 1]] * 2


def test_the_comm_hook_of_a_script_runs() -> None:
    def gradient():
        handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        model = nn.Linear(1, 1)
        model = accelerator.prepare(model)
        accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
        return accelerator.unwrap_model(model).weight.grad.item()

    assert run_ranks(gradient, world=2) == [1.5, 1.5]


def test_refusals_of_methods() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="compat-argument"):
        accelerator.lomo_backward(torch.ones(()), 0.1)
    with accelerator.maybe_context_parallel(buffers=[]), accelerator.autocast():
        assert accelerator.deepspeed_ulysses_dl_adapter(1, 2) == 1
    assert not accelerator.verify_device_map(nn.Linear(1, 1))


# -- checkpoints ---------------------------------------------------------------------------------------------


def saving(folder: Path, **options) -> Accelerator:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(folder), **options))
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader_of())
    return accelerator


def test_both_forms_of_weights_unless_the_script_says_which(tmp_path: Path) -> None:
    accelerator = saving(tmp_path)
    for safe, names in (
        (None, {"model.safetensors", "pytorch_model.bin"}),
        (True, {"model.safetensors"}),
        (False, {"pytorch_model.bin"}),
    ):
        folder = accelerator.save_state(tmp_path / str(safe), safe_serialization=safe)
        assert set(os.listdir(folder)) == names | {"optimizer.bin", "random_states_0.pkl"}
    weights = torch.load(tmp_path / "None" / "pytorch_model.bin", weights_only=True)
    assert set(weights) == {"weight", "bias"}
    assert set(torch.load(tmp_path / "None" / "optimizer.bin", weights_only=True)) == {"state", "param_groups"}


def test_a_folder_keeps_what_others_put_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    saving(tmp_path).save_state(tmp_path / "run")
    assert (tmp_path / "run" / "mine.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["run"], "nothing is left beside it"


def weights_after_load(folder: Path) -> torch.Tensor:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.load_state(folder)
    return accelerator.unwrap_model(model).weight.detach().clone()


@pytest.mark.parametrize("older", ["native", "both forms"])
def test_a_save_replaces_the_files_of_the_save_before(tmp_path: Path, older: str) -> None:
    """Else a load takes the older weights: it prefers safetensors to torch's form, and a manifest to both."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    if older == "native":
        from paceline import Accelerator as Native

        native = Native(cpu=True)
        native.prepare(nn.Linear(2, 1))
        native.save_state(tmp_path / "run")
    else:
        saving(tmp_path).save_state(tmp_path / "run")
    accelerator = saving(tmp_path)
    accelerator.save_state(tmp_path / "run", safe_serialization=False)
    assert set(os.listdir(tmp_path / "run")) == {
        "mine.txt", "pytorch_model.bin", "optimizer.bin", "random_states_0.pkl",
    }  # fmt: skip
    model = accelerator.unwrap_model(accelerator.preparation.models[0])
    assert torch.equal(weights_after_load(tmp_path / "run"), model.weight)


def test_a_kill_between_the_files_of_a_save_leaves_no_mix(tmp_path: Path) -> None:
    """The next one that reads or saves there moves the rest."""
    program = """
import os, sys
import torch
from paceline_accelerate.accelerator import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
torch.nn.init.ones_(model.weight)
accelerator.save_state(sys.argv[1])
torch.nn.init.zeros_(model.weight)
replace, moved = os.replace, []

def dying(source, target, **where):
    replace(source, target, **where)
    moved.extend([target] if os.path.dirname(target) == sys.argv[1] else [])
    if len(moved) == 2:
        os._exit(9)

os.replace = dying
accelerator.save_state(sys.argv[1])
"""
    folder = tmp_path / "run"
    killed = subprocess.run([python3(), "-c", program, str(folder)], timeout=100, check=False)
    assert killed.returncode == 9
    assert weights_after_load(folder).abs().sum() == 0 and os.listdir(tmp_path) == ["run"]
    assert torch.load(folder / "pytorch_model.bin")["weight"].abs().sum() == 0
    assert set(os.listdir(folder)) == {"model.safetensors", "pytorch_model.bin", "optimizer.bin", "random_states_0.pkl"}


@pytest.mark.needs("hosts")
def test_behind_a_url_the_files_are_the_native_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate itself reads no URL. Before, the state went into a local folder of that name."""
    monkeypatch.chdir(tmp_path)
    accelerator = saving(tmp_path / "project")
    saved: list[Any] = []
    accelerator.run.events.saved.subscribe(saved.append)
    place = f"memory://{tmp_path.name}/run"
    assert accelerator.save_state(place) == place
    model = accelerator.unwrap_model(accelerator.preparation.models[0])
    before = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    accelerator.load_state(place)
    assert torch.equal(model.weight, before) and os.listdir(tmp_path) == []
    accelerator.save_state(tmp_path / "local")
    assert [save.path for save in saved] == [place, str(tmp_path / "local")], "and who follows the run hears of each"


def test_automatic_names_go_on_after_a_load_and_in_a_new_run(tmp_path: Path) -> None:
    first = saving(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    for _ in range(3):
        first.save_state()
    first.load_state()
    assert first.save_state().name == "checkpoint_3"
    again = saving(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    again.load_state()
    assert again.save_state().name == "checkpoint_4"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_3", "checkpoint_4"]
    chosen = saving(tmp_path, automatic_checkpoint_naming=True, iteration=9)
    chosen.load_state()
    assert chosen.save_state().name == "checkpoint_9", "a number that the script has chosen stays after a load"


def test_a_killed_save_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """A process that ends between two files leaves a folder of its own, which nobody reads, and its number."""
    program = """
import os, sys
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.arguments import ProjectConfiguration

class Killed:
    def state_dict(self):
        os._exit(9)
    def load_state_dict(self, state):
        pass

accelerator = Accelerator(project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True))
accelerator.prepare(__import__("torch").nn.Linear(1, 1))
accelerator.register_for_checkpointing(Killed())
accelerator.save_state()
"""
    killed = subprocess.run([python3(), "-c", program, str(tmp_path)], timeout=100, check=False)
    assert killed.returncode == 9
    assert os.listdir(tmp_path / "checkpoints") == [".checkpoint_0.partial"]
    saved = saving(tmp_path, automatic_checkpoint_naming=True).save_state()
    assert os.listdir(tmp_path / "checkpoints") == [saved.name]


def test_two_runs_with_automatic_names_in_one_folder(tmp_path: Path) -> None:
    """Each checkpoint is of one run: a number that another save has taken is not used."""
    first = saving(tmp_path, automatic_checkpoint_naming=True)
    second = saving(tmp_path, automatic_checkpoint_naming=True)
    names = []

    def save_the_other(models, weights, folder) -> None:
        names.append(second.save_state().name)

    first.register_save_state_pre_hook(save_the_other)
    assert first.save_state().name == "checkpoint_0" and names == ["checkpoint_1"]


def test_a_limit_removes_only_what_the_run_and_its_predecessors_have_saved(tmp_path: Path) -> None:
    first = saving(tmp_path, automatic_checkpoint_naming=True)
    first.save_state()
    second = saving(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    second.save_state()
    second.save_state()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0", "checkpoint_2"]
    second.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    second.save_state()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_3"], "it goes on from the first run"


def test_a_failed_save_leaves_the_old_checkpoints(tmp_path: Path) -> None:
    accelerator = saving(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    accelerator.save_state()

    class Unsaved:
        def state_dict(self):
            raise OSError(28, "No space left on device")

        def load_state_dict(self, state):
            pass

    accelerator.register_for_checkpointing(Unsaved())
    with pytest.raises(OSError, match="No space"):
        accelerator.save_state()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


def test_the_state_of_a_registered_object_may_have_a_numpy_array(tmp_path: Path) -> None:
    class Words:
        """Holds what numpy's random streams hold, which accelerate reads too."""

        def __init__(self) -> None:
            self.words = numpy.arange(3, dtype=numpy.uint32)

        def state_dict(self) -> dict[str, object]:
            return {"words": self.words}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.words = state["words"]

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    registered = Words()
    accelerator.register_for_checkpointing(registered)
    accelerator.save_state(tmp_path / "state")
    registered.words = numpy.zeros(3, dtype=numpy.uint32)
    accelerator.load_state(tmp_path / "state")
    assert registered.words.tolist() == [0, 1, 2]
    streams = surroundings.load(tmp_path / "state" / "random_states_0.pkl")
    assert len(streams["numpy_random_seed"]) == 5


def test_a_folder_of_another_run_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    saving(tmp_path).save_state(tmp_path / "run")
    other = Accelerator(cpu=True)
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    other.prepare(*models)
    before = models[0].weight.clone()
    with pytest.raises(CompatError, match=r"(?s)\[compat-checkpoint\].*models: 2 here, 1 in the folder"):
        other.load_state(tmp_path / "run")
    with pytest.raises(TypeError, match="Unsupported optimizer map location"):
        other.load_state(tmp_path / "run", map_location="cuda")
    assert torch.equal(before, models[0].weight)
    with pytest.raises(CheckpointError, match="checkpoint-missing"):
        other.load_state(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="checkpoint-unnamed"):
        other.save_state()


def test_hooks_can_take_models_out_and_write_their_own_files(tmp_path: Path) -> None:
    accelerator = saving(tmp_path)

    def save(models, weights, folder):
        weights.pop()
        Path(folder, "adapter").mkdir()
        torch.save(models[0].state_dict(), Path(folder, "adapter", "own.bin"))

    handle = accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(lambda models, folder: models.pop())
    accelerator.save_state(tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == ["adapter", "optimizer.bin", "random_states_0.pkl"]
    accelerator.load_state(tmp_path / "run")
    handle.remove()
    accelerator.save_state(tmp_path / "next")
    assert "model.safetensors" in os.listdir(tmp_path / "next")


def test_the_epoch_comes_back_and_the_place_in_it_to_stateful_loaders_alone(tmp_path: Path) -> None:
    def run(stateful: bool):
        config = DataLoaderConfiguration(use_stateful_dataloader=stateful, data_seed=3)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        data = TensorDataset(torch.arange(6.0))
        return accelerator, accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True))

    for stateful in (False, True):
        accelerator, loader = run(stateful)
        list(loader)
        seen = []
        for (row,) in loader:
            seen.append(row.tolist())
            if len(seen) == 1:
                accelerator.save_state(tmp_path / str(stateful))
        accelerator, loader = run(stateful)
        accelerator.load_state(tmp_path / str(stateful))
        rows = [row.tolist() for (row,) in (loader if stateful else skip_first_batches(loader, 1))]
        assert rows == seen[1:]


def test_saving_and_loading_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    with caplog.at_level("INFO", "accelerate.accelerator"):
        accelerator.save_state(tmp_path / "saved")
        accelerator.load_state(tmp_path / "saved")
    logged = [record.getMessage() for record in caplog.records if record.name == "accelerate.accelerator"]
    saved = tmp_path / "saved"
    assert logged == [f"[RANK 0] Saving current state to {saved}", f"[RANK 0] Loading states from {saved}"]


def test_a_native_checkpoint_is_read_too(tmp_path: Path) -> None:
    from paceline import Accelerator as Native

    native = Native(cpu=True)
    model = native.prepare(nn.Linear(2, 1))
    native.save_state(tmp_path / "run")
    accelerator = Accelerator(cpu=True)
    other = accelerator.prepare(nn.Linear(2, 1))
    accelerator.load_state(tmp_path / "run")
    assert torch.equal(model.weight, other.weight)


def test_each_rank_saves_into_its_own_folder(tmp_path: Path) -> None:
    def save():
        checkpoint._COME_S = 0.1  # rank 1 waits so long for a folder that rank 0 does not make
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Linear(2, 1))
        own = tmp_path / f"rank_{accelerator.process_index}"
        saved = accelerator.save_state(own)
        accelerator.wait_for_everyone()
        refused = False
        if accelerator.process_index:
            try:
                accelerator.load_state(own)
            except FileNotFoundError as error:
                refused = "random streams alone" in str(error)
        return str(saved) == str(own), sorted(os.listdir(own)), refused

    first, second = run_ranks(save, world=2)
    assert first[0] and "model.safetensors" in first[1] and "random_states_1.pkl" not in first[1]
    assert second == (True, ["random_states_1.pkl"], True)


def test_the_main_process_can_save_alone(tmp_path: Path) -> None:
    def train():
        accelerator = Accelerator(cpu=True)
        model, optimizer = nn.Linear(1, 1), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(3):
            accelerator.backward(model(torch.ones(1, 1) * (accelerator.process_index + step)).sum())
            optimizer.step()
            # Diffusers' training scripts save like this. Here all ranks save in the last step.
            if accelerator.is_main_process or step == 2:
                accelerator.save_state(tmp_path / f"step_{step}")
                accelerator.save_model(model, tmp_path / "model")
        accelerator.wait_for_everyone()
        accelerator.load_state(tmp_path / "step_1")
        files = [sorted(os.listdir(tmp_path / f"step_{step}")) for step in (1, 2)]
        accelerator.states.save(str(tmp_path / "native"))
        for folder in ("step_1", "native"):
            accelerator.load_state(tmp_path / folder)
            # The first gradients after it are averaged in a loop without `accelerator.backward`, too.
            model(torch.ones(1, 1) * accelerator.process_index).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.unwrap_model(model).weight.item(), files

    first, second = run_ranks(train, world=2)
    assert first == second
    alone, together = first[1]
    assert "random_states_1.pkl" not in alone
    assert together == sorted([*alone, "random_states_1.pkl"])
    assert sorted(os.listdir(tmp_path)) == ["model", "native", "step_0", "step_1", "step_2"]


# -- trackers ------------------------------------------------------------------------------------------------


@pytest.mark.needs("lens")
def test_a_tracker_of_the_scripts_own(tmp_path: Path) -> None:
    class Mine(GeneralTracker):
        name, tracker, requires_logging_directory = "mine", "wrapped", False

        def __init__(self):
            super().__init__()
            self.seen = []

        def store_init_configuration(self, values):
            self.seen.append(values)

        def log(self, values, step=None, **kwargs):
            self.seen.append((values, step))

        def finish(self):
            self.seen.append("finished")

    accelerator = Accelerator(cpu=True, log_with=[mine := Mine(), "jsonl"], project_dir=tmp_path)
    accelerator.init_trackers("run", config={"a": 1})
    accelerator.log({"loss": torch.tensor(0.5)}, step=3, log_kwargs={})
    assert accelerator.get_tracker("mine") is mine and accelerator.get_tracker("mine", unwrap=True) == "wrapped"
    assert len(accelerator.trackers) == 2 and accelerator.trackers[0] is mine and mine in list(accelerator.trackers)
    accelerator.end_training()
    assert mine.seen == [{"a": 1}, ({"loss": 0.5}, 3), "finished"]
    assert filter_trackers(["wandb", "jsonl", mine]) == ["jsonl", mine]


def test_tensorboard_leaves_out_what_it_cannot_show(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run", config={"rate": 0.1, "folder": tmp_path, "sizes": (1, 2)})
    # Diffusers' scripts log the decay of an average that has no value before its first step.
    accelerator.log({"ema_decay": None, "rows": [1, 2], "loss": 0.5}, step=3)
    accelerator.end_training()
    (settings,) = tmp_path.glob("run/*/hparams.yml")
    assert settings.read_text() == f"folder: {tmp_path}\nrate: 0.1\nsizes:\n- 1\n- 2\n"
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]


# -- functions -----------------------------------------------------------------------------------------------


def test_nested_batches() -> None:
    batch = {"a": torch.ones(3, 2), "b": [torch.zeros(3)], "words": ["x"]}
    assert nested.find_batch_size(batch) == nested.ignorant_find_batch_size(batch) == 3
    assert nested.find_device(batch).type == "cpu"
    with pytest.raises(TypeError):
        nested.find_batch_size(["x"])
    with pytest.raises(TypeError, match="unsupported type <class 'str'> passed"):
        nested.recursively_apply(lambda t: t, batch, error_on_other_type=True)
    assert nested.slice_tensors(batch, slice(0, 1))["b"][0].shape == (1,)
    kept = nested.send_to_device(batch, "meta", skip_keys="a")
    assert not kept["a"].is_meta and kept["b"][0].is_meta
    half = nested.convert_outputs_to_fp32(lambda: {"y": torch.ones(1, dtype=torch.float16)})
    assert half()["y"].dtype == torch.float32


def test_the_environment() -> None:
    with surroundings.patch_environment(accelerate_test="yes"):
        assert surroundings.parse_flag_from_env("ACCELERATE_TEST")
        with surroundings.clear_environment():
            assert surroundings.parse_choice_from_env("ACCELERATE_TEST", "none") == "none"
            assert host.get_int_from_env(["RANK"], 4) == 4
    assert not surroundings.parse_flag_from_env("ACCELERATE_TEST")
    assert surroundings.str_to_bool("on") == 1 and surroundings.str_to_bool("no", to_bool=True) is False

    @surroundings.purge_accelerate_environment
    def leak():
        env.export({"ACCELERATE_LEAK": "1"})

    leak()
    assert "ACCELERATE_LEAK" not in env.snapshot()


def test_versions_and_other_things() -> None:
    assert surroundings.is_torch_version(">=", "2.0") and not surroundings.compare_versions("torch", "<", "2.0")
    assert surroundings.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"c": 2, "b": 1}}
    assert surroundings.get_pretty_name(nn.Linear) == "Linear"
    assert memory.release_memory(1, 2) == [None, None] and memory.should_reduce_batch_size(MemoryError())
    assert not surroundings.tqdm(range(1), main_process_only=False, disable=True).n


def test_write_basic_config_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "sub/default_config.json"
    assert write_basic_config("bf16", str(path)) == path
    assert write_basic_config("fp16", str(path)) is False
    found = resolve_launch([Given("config", str(path), "command line", "--config")], {})
    assert found.run.mixed_precision == "bf16"
    assert isinstance(found.launch.procs, int)


def test_write_basic_config_of_an_unknown_precision(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no, fp8, fp16 or bf16") as caught:
        write_basic_config("fp4", str(tmp_path / "c.json"))
    assert caught.value.code == "compat-argument"


def test_write_basic_config_where_nothing_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        write_basic_config("no", str(tmp_path / "file" / "c.json"))
    assert caught.value.code == "config-write"


def test_the_config_file_is_one_that_we_read(tmp_path: Path) -> None:
    from paceline.config import files

    path = write_basic_config("fp16", str(tmp_path / "default_config.yaml"))
    assert path == tmp_path / "default_config.yaml"
    assert write_basic_config("no", str(path)) is False, "an existing file is left as it is"
    content = files.read(str(path))
    assert not content.problems and {"mixed_precision", "num_processes"} <= {each.name for each in content.given}


def test_reduce_returns_a_copy_on_one_process_too() -> None:
    total = torch.ones(2)
    operations.reduce({"total": total})["total"].add_(1)
    assert total.tolist() == [1.0, 1.0]


def test_objects_between_processes() -> None:
    def talk():
        rank = PartialState(cpu=True).process_index
        filled = operations.broadcast_object_list([rank, "x"], from_process=1)
        torch.manual_seed(rank)
        random_streams.synchronize_rng_states(["torch"])
        return json.dumps(
            [
                operations.gather_object([rank]),
                filled,
                operations.reduce(torch.tensor(rank + 1.0)).item(),
                torch.rand(1).item(),
            ]
        )

    first, second = run_ranks(talk, world=2)
    assert first == second and json.loads(first)[:3] == [[0, 1], [1, "x"], 1.5]


# -- errors --------------------------------------------------------------------------------------------------


def test_errors_of_the_door_travel_between_processes() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert len(kinds) > 8
    for kind in kinds:
        first = ("a sentence.",) if kind is errors.DistributedOperationException else ("compat-argument", "a sentence.")
        error = kind(*first, why="a reason", fix="a way")
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied)) == (kind, str(error))


def test_a_loader_takes_its_state_by_keyword() -> None:
    import inspect

    from paceline_accelerate.loader_classes import DataLoaderAdapter

    assert "state_dict" in inspect.signature(DataLoaderAdapter.load_state_dict).parameters
