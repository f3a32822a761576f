"""`accelerate.Accelerator` as a subclass of Paceline's, with accelerate's arguments, names and behaviour.

batches      the last global batch is filled up with the first samples; the loss is a plain mean, divided by the steps
scheduler    it steps once for each process                                         (preparation.py)
gather       one process gets its values back unchanged; of 0-dim tensors each of several processes gives one value
checkpoints  they have accelerate's files                                           (checkpoint.py)
state        it shows this very accelerator; a second accelerator does not touch it (state.py)
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base import env as environment
from paceline.base.parts import require
from paceline.run.run import Run, live_runs
from paceline_accelerate.accelerator_arguments import UNSAID, AcceleratorArguments, checked_placement
from paceline_accelerate.accelerator_base import AcceleratorBase
from paceline_accelerate.arguments import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from paceline_accelerate.checkpoint import Folder
from paceline_accelerate.data_loader import skip_first_batches
from paceline_accelerate.deepspeed_plugin import DeepSpeedPlugin
from paceline_accelerate.device_map import check_alone
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin
from paceline_accelerate.gradient_state import GradientState
from paceline_accelerate.hooks import has_offloaded_params
from paceline_accelerate.kinds import FP8BackendType
from paceline_accelerate.metrics import gather_for_metrics
from paceline_accelerate.module_sizes import convert_file_size_to_int
from paceline_accelerate.offloaded_state import save_whole_model
from paceline_accelerate.operations import gather, pad_across_processes, reduce
from paceline_accelerate.parallelism_config import ParallelismConfig, no_rank_along, rank_along
from paceline_accelerate.participation import ParticipantByState
from paceline_accelerate.plugins import TorchDynamoPlugin, TorchTensorParallelPlugin
from paceline_accelerate.preparation import AcceleratePreparation
from paceline_accelerate.state import AcceleratorState
from paceline_accelerate.surroundings import writes_files
from paceline_accelerate.tracking import TrackerList
from paceline_accelerate.wrapping import extract_model_from_parallel

if TYPE_CHECKING:
    from paceline_accelerate.deepspeed_preparation import DeepSpeedPreparation

# Kind of an object -> the method that prepares it, which a script may replace.
_PREPARE = {
    "model": "prepare_model",
    "loader": "prepare_data_loader",
    "optimizer": "prepare_optimizer",
    "scheduler": "prepare_scheduler",
}
_Tensors = torch.Tensor | Iterable[torch.Tensor]


class Accelerator(ParticipantByState, AcceleratorBase):
    """Takes accelerate's arguments and has its names.

    Args:
        device_placement: whether `prepare` moves models and batches to the device.
        split_batches: has no effect, as in accelerate since 1.0; set it in `dataloader_config`.
        gradient_accumulation_steps: counts unless ACCELERATE_GRADIENT_ACCUMULATION_STEPS is set.
        others: as accelerate documents them; those of Megatron-LM are refused, and the error names the native way.

    Ranks: all construct it.

    Raises:
        CompatError: `compat-argument`, with all problems at once; and what the native accelerator raises.
    """

    deepspeed: DeepSpeedPreparation | None
    autocast_handler: AutocastKwargs | None
    profile_handler: ProfileKwargs | None

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = UNSAID,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: object = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
    ) -> None:
        # A copy in another process is made of these arguments (`_unpickled`); `locals()` holds only them this early.
        arguments = dict(locals())
        del arguments["self"]
        if split_batches is UNSAID:
            del arguments["split_batches"]
        self._arguments = arguments
        asked = AcceleratorArguments(**arguments)
        vars(self).update(asked.handlers)  # `ddp_handler` and its like
        self.project_configuration = asked.project
        self.dataloader_config = asked.loading
        self.rng_types = ["generator"] if rng_types is None else rng_types
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._window = asked.window
        self._axes = asked.axes
        self._sync_each_batch = asked.window.sync_each_batch
        self._start(asked.native())
        tracks = self.run.runtime.keeps_files and self.run.runtime.tracks
        self._trackers = TrackerList(log_with, self.logging_dir, is_main=self.is_main_process and tracks)
        self.log_with = self._trackers.asked
        self.step = 0
        self.native_amp = self.run.precision.name != "no"
        self._folder = Folder(self)
        if asked.axes is not None:
            asked.axes.cover(self.plan.layout)  # before its mesh is built
        self.state = AcceleratorState.of(
            self,
            fsdp_plugin,
            torch_tp_plugin,
            asked.dynamo,
            asked.plugins,
            asked.axes,
            shows_wanted_device=self.preparation.device_problem is not None,
        )
        if asked.axes is not None:
            asked.axes._validate_accelerator(self)
        self.deepspeed = None
        if asked.plugins:
            # Importing its engine takes a second, so only a run that uses it pays for that.
            require("deepspeed", "the engine of DeepSpeedPlugin is", "Accelerator(deepspeed_plugin=...)")
            from paceline_accelerate.deepspeed_preparation import DeepSpeedPreparation

            self.deepspeed = DeepSpeedPreparation(self)
        _accelerators[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (os.getpid(), id(self), type(self), self._arguments)

    def _prepares(self, run: Run) -> AcceleratePreparation:
        """Makes what prepares the objects of the run, as objects of accelerate's classes."""
        self.gradient_state = GradientState.of(self, self._window)
        return AcceleratePreparation(run, self.gradient_state, self.dataloader_config, self.rng_types)

    # -- what this run is --------------------------------------------------------------------------------------

    torch_device_mesh = property(lambda self: self.state.device_mesh)
    fp8_backend = property(lambda self: FP8BackendType(_float8_backend(self.fp8_enabled)))
    deepspeed_plugin = property(lambda self: self.state.deepspeed_plugin)
    deepspeed_engine_wrapped = property(lambda self: None if self.deepspeed is None else self.deepspeed.wrapped)
    is_composable_parallelism_enabled = property(lambda self: self.is_fsdp2)
    has_lomo_optimizer = False
    delayed_fp8_autocast = False
    fp8_enabled = property(lambda self: self.mixed_precision == "fp8")
    has_fp8_handler = property(lambda self: self.ao_recipe_handler is not None)
    te_recipe_handler = msamp_recipe_handler = fp8_recipe_handler = None
    parallelism_config = property(lambda self: self._axes)
    project_dir = property(lambda self: self.project_configuration.project_dir)
    is_fsdp2 = property(lambda self: self.state.is_fsdp2)
    mixed_precision = property(lambda self: self.settings.mixed_precision)
    should_save_model = property(lambda self: self.is_local_main_process or self._axes is not None)
    distributed_type = property(lambda self: self.state.distributed_type)
    multi_device = property(lambda self: self.num_processes > 1 and self.device.type != "cpu")
    split_batches = property(lambda self: self.dataloader_config.split_batches)
    dispatch_batches = property(lambda self: self.dataloader_config.dispatch_batches)
    use_seedable_sampler = property(lambda self: self.dataloader_config.use_seedable_sampler)
    non_blocking = property(lambda self: self.dataloader_config.non_blocking)
    use_stateful_dataloader = property(lambda self: self.dataloader_config.use_stateful_dataloader)
    save_iteration = property(lambda self: self.project_configuration.iteration)
    tensor_parallel_rank = property(partial(rank_along, axis="tp"))
    data_parallel_rank = property(partial(rank_along, axis="replicate"))
    data_parallel_shard_rank = property(partial(rank_along, axis="shard"))
    pipeline_parallel_rank = context_parallel_rank = property(no_rank_along)
    _engines = property(lambda self: [] if self.deepspeed is None else self.deepspeed.engines)
    _models = property(lambda self: [*self._engines, *self.preparation.models])
    _optimizers = property(
        lambda self: [*(self.deepspeed.optimizers if self.deepspeed else ()), *self.run.prepared.optimizers]
    )
    _schedulers = property(
        lambda self: [*(self.deepspeed.schedulers if self.deepspeed else ()), *self.run.prepared.schedulers]
    )
    _dataloaders = property(lambda self: self.run.prepared.loaders)
    _custom_objects = property(lambda self: self._folder.custom_objects)
    _save_model_state_pre_hook = property(lambda self: self.states.hooks_by_number("save"))
    _load_model_state_pre_hook = property(lambda self: self.states.hooks_by_number("load"))
    flag_tensor: torch.Tensor | None = None

    @property
    def logging_dir(self) -> str | None:
        """The folder into which trackers write."""
        return self.project_configuration.logging_dir

    @property
    def trackers(self) -> TrackerList:
        """The trackers that were started, as a list, to which a script may assign another list."""
        return self._trackers

    @trackers.setter
    def trackers(self, trackers: Iterable[Any]) -> None:
        self._trackers.assign(trackers)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its accumulation window."""
        return self.gradients.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradients.sync = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of some optimizer was skipped because a gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def even_batches(self) -> bool:
        """Whether the last global batch of a loader prepared from now on is filled up."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value
        self.preparation.tail = "pad" if value else "divide"

    # -- prepare -----------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepares the arguments and returns them in their order; objects of unknown types come back unchanged. Ranks: all."""
        places = [self.device_placement] * len(args)
        if device_placement is not None:
            places = checked_placement(device_placement, len(args))
        for position, argument in enumerate(args):
            if isinstance(argument, nn.Module):
                self.preparation.check_model(argument)
            if isinstance(argument, nn.Module) and self.verify_device_map(argument):
                check_alone(self.num_processes)
                # Its modules already are on the devices that its map names, and moving it would undo that.
                places[position] = False
        objects = args if self.deepspeed is None else self.deepspeed.prepare(args)
        if self.parallelism_config is not None and self.parallelism_config.cp_size > 1:
            objects = self._prepare_cp(*objects)
        if self.is_fsdp2 and self._replaces("_prepare_fsdp2"):
            results = list(self._prepare_fsdp2(*objects))
        elif self._prepares_its_own_way():
            results = self.preparation.one_by_one(objects, places, self._prepare_one)
        else:
            return super().prepare(*objects, device_placement=places)
        return results[0] if len(results) == 1 else tuple(results)

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """Prepares objects under FSDP 2, as `prepare` does; a library may put its own function around it. Ranks: all."""
        results = super().prepare(*args)
        return results if len(args) > 1 else (results,)

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Returns the objects; the plan divides sequences, and `prepare` carries it out. A library may replace it."""
        return args

    def _replaces(self, name: str) -> bool:
        """Whether a subclass, a library or the script itself has replaced a method of this class."""
        return getattr(getattr(self, name), "__func__", None) is not _OWN[name]

    def _prepares_its_own_way(self) -> bool:
        """Whether a subclass, or the script itself, has replaced one of the methods that `prepare` calls under accelerate."""
        return any(self._replaces(name) for name in (*_PREPARE.values(), "_prepare_one"))

    def _prepare_one(self, obj: object, first_pass: bool = False, device_placement: bool | None = None) -> Any:
        """Prepares one object: a scheduler in the second pass, anything else in the first. Ranks: all."""
        kind = self.preparation.kind_of(obj)
        if kind == "done" or first_pass == (kind == "scheduler"):
            return obj
        prepare = getattr(self, _PREPARE[kind])
        if kind == "scheduler":
            return prepare(obj)
        return prepare(obj, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares one model. Ranks: all."""
        self.preparation.check_model(model)
        place = self.device_placement if device_placement is None else device_placement
        return super().prepare_model(model, place and not self.verify_device_map(model), evaluation_mode)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepares one loader. Ranks: all."""
        place = self.device_placement if device_placement is None else device_placement
        return self.preparation.loader(data_loader, place=place, slice_fn_for_dispatch=slice_fn_for_dispatch)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepares one optimizer."""
        return super().prepare_optimizer(optimizer)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model, or a module inside it, was spread over devices by a map with more than one entry."""
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())

    def free_memory(self, *objects: object) -> list[None]:
        """Forgets everything that was prepared and the count of steps; returns as many Nones as objects."""
        self.step = 0
        if self.deepspeed is not None:
            self.deepspeed.clear()
            self.preparation.elsewhere.clear()
            self.preparation.stepped_elsewhere.clear()
        freed = super().free_memory(*objects)
        self.states.register(*self._custom_objects)  # registered objects are not prepared ones, and stay
        return freed

    clear = free_memory

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: str | int = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes a model under Hugging Face's file names; offloaded weights come to the CPU for it.

        Ranks: all, if the model is divided. Otherwise rank 0 may also call it alone.
        """
        max_shard_size = convert_file_size_to_int(max_shard_size)
        is_divided = self.deepspeed is not None or self.plan.layout.size("shard", "tp", "pp") > 1
        if is_divided and not any(map(has_offloaded_params, model.modules())):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        elif self.states.writes and writes_files(self.project_configuration.save_on_each_node):
            save_whole_model(self, model, save_directory, max_shard_size, safe_serialization)

    # -- the step ----------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: _Tensors, max_norm: float, norm_type: float = 2) -> Any:
        """Clips gradients by their norm and returns it; DeepSpeed's engine has already clipped as its config says."""
        engine = self.deepspeed_engine_wrapped
        if engine is not None:
            return engine.get_global_grad_norm()
        if self._clips_inside_window():
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: _Tensors, clip_value: float) -> None:
        """Clamps gradients, also inside a window; raises `deepspeed-step` (TrainError) where an engine has stepped already."""
        engine = self.deepspeed_engine_wrapped
        if engine is not None:
            engine.refuse_clip_grad_value()
        if self._clips_inside_window():
            nn.utils.clip_grad_value_(parameters, clip_value)
        else:
            super().clip_grad_value_(parameters, clip_value)

    def _clips_inside_window(self) -> bool:
        """Whether the gradients that have accumulated so far are clipped, as accelerate does wherever a script asks for it."""
        # A scaler divides gradients only once in a window, and divided parameters have no whole gradients before its end.
        inside = not self.gradients.sync and self.scaler is None
        return inside and self.plan.layout.size("shard", "tp", "pp") == 1

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Runs the block as one micro-batch of an accumulation window."""
        # With `sync_each_batch` the gradients are averaged after each micro-batch (`backward`), so nothing is held back.
        hold = nullcontext if self._sync_each_batch else partial(self.no_sync, *models)
        # The step decides, because it is saved and loaded, and because the number of steps in a window may have changed.
        with self.gradients.window(hold, done=self.step % self.gradients.steps):
            ends_epoch = self.gradients.sync_at_end and self.gradient_state.end_of_dataloader
            self.step = 0 if ends_epoch else self.step + 1
            yield

    def no_sync(self, *models: nn.Module, model: nn.Module | None = None) -> AbstractContextManager[Any]:
        """Lets backward passes in the block skip communication; models that were not prepared never communicate."""
        if model is not None:
            models = (*models, model)
        prepared = [model for model in models if self.run.prepared.find(model)]
        if models and not prepared:
            return nullcontext()
        return super().no_sync(*prepared)  # without arguments it holds for all prepared models

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Averages gradients over the ranks after the block, even if the forward pass ran in `no_sync`. Ranks: all."""
        yield
        for run in live_runs():
            entry = run.prepared.find(model)
            for applied in entry.chain.strategies if entry is not None else ():
                applied.finish_reduction()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Computes the gradients of a mean loss, divided by the number of steps in a window. Ranks: all.

        DeepSpeed's engine also steps the optimizer at the end of a window.
        """
        engine = self.deepspeed_engine_wrapped
        if engine is not None:
            engine.backward(loss, sync_gradients=self.sync_gradients, **kwargs)
            return
        super().backward(loss, **kwargs)
        if self._sync_each_batch and not self.gradients.sync:
            self.run.prepared.finish_reduction()

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Raises `compat-argument` (CompatValueError), because LOMO steps inside the backward pass."""
        raise CompatValueError(
            "compat-argument",
            "no LOMO optimizer was prepared.",
            why="LOMO steps inside the backward pass, which nothing here does",
            fix="use an optimizer that steps after it, and `accelerator.backward(loss)`",
        )

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Runs the block in the run's precision."""
        chosen = autocast_handler or self.autocast_handler or AutocastKwargs()
        return super().autocast(chosen.enabled, chosen.cache_enabled)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Runs torch's profiler over the block."""
        chosen = profile_handler or self.profile_handler or ProfileKwargs()
        return super().profile(**chosen.to_kwargs())

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Lets ranks with fewer batches take part; with `even_batches=False` a last batch is divided and not filled up."""
        tail = "divide" if even_batches is False else None
        with super().join_uneven_inputs(joinables), self.preparation.tails(tail):
            yield

    def maybe_context_parallel(
        self, buffers: object = None, buffer_seq_dims: object = None, no_restore_buffers: object = None
    ) -> AbstractContextManager[None]:
        """Does nothing, because a plan with `cp` divides sequences by itself."""
        return nullcontext()

    def deepspeed_ulysses_dl_adapter(self, dl: object, model: Any) -> Any:
        """Returns the loader unchanged."""
        return dl

    # -- between ranks -----------------------------------------------------------------------------------------

    def gather(self, tensor: object) -> Any:
        """Concatenates tensors of all processes along dim 0; with one process they stay as they are. Ranks: all."""
        result = gather(tensor)
        self.run.events.gathered("gather", result)
        return result

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Gathers the values of real samples: those of repeated samples in an epoch's last batch are cut off, 0-dim ones too.

        With one process only the values beyond the rows of a last batch that is not full are cut: scripts repeat a mean loss
        by the batch size (`loss.repeat(8)`), and each row is to count once.

        Ranks: all.
        """
        result = gather_for_metrics(self.run, input_data, use_gather_object)
        self.run.events.gathered("gather_for_metrics", result)
        return result

    def set_trigger(self) -> None:
        """Raises a flag on this rank, for `check_trigger` on all."""
        super().set_trigger()
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any rank raised the flag; lowers it if so. Ranks: all."""
        raised = super().check_trigger()
        self.flag_tensor = torch.tensor(0, device=self.device)
        return raised

    def reduce(self, tensor: object, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces over processes by "sum", "mean" or "max"; with one process tensors stay as they are. Ranks: all."""
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: object, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads tensors to the length that the longest has on any process. Ranks: all."""
        return pad_across_processes(tensor, dim, pad_index, pad_first)

    # -- files and logs ----------------------------------------------------------------------------------------

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Returns the script's own module without the wrappers of `prepare`, the script and `torch.compile`."""
        if any(model is engine for engine in self._engines):
            model = model.module
        inner = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        return extract_model_from_parallel(inner, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Returns the whole state of a model under any plan. Ranks: all call it, and all get it."""
        if self.deepspeed is not None and (engine := self.deepspeed.engine_of(model)) is not None:
            return self.deepspeed.state_dict(engine)
        return super().get_state_dict(model, unwrap)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to what `save_state` saves."""
        self._folder.register(objects)
        super().register_for_checkpointing(*objects)

    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool | None = None, **others: object
    ) -> Path | str:
        """Saves under accelerate's file names; see `Folder.save`. Ranks: all."""
        return self._folder.save(output_dir, safe_serialization)

    def load_state(
        self, input_dir: str | Path | None = None, load_kwargs: Any = None, **load_model_func_kwargs: Any
    ) -> None:
        """Loads what `save_state`, accelerate's own or the native one wrote. Ranks: all."""
        self._folder.load(input_dir, **load_model_func_kwargs)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns the loader without its first batches."""
        return skip_first_batches(dataloader, num_batches)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Logs values to every tracker on the main process, and to the journal of a run that is watched."""
        self.trackers.log(self._with_system_values(values, step), step, log_kwargs)

    def end_training(self) -> None:
        """Finishes trackers. The group stays: scripts of transformers call `wait_for_everyone` after it. Ranks: all."""
        self.run.lifetime.end()
        self.trackers.finish()


# The methods that `prepare` calls, as they are here: a library may put others into the class, or a script into its accelerator.
_OWN = {name: getattr(Accelerator, name) for name in (*_PREPARE.values(), "_prepare_one", "_prepare_fsdp2")}

# Accelerators by `id`, so that unpickling in the process that pickled one returns that very accelerator.
_accelerators: weakref.WeakValueDictionary[int, Accelerator] = weakref.WeakValueDictionary()


def _unpickled(process: int, number: int, kind: type[Accelerator], arguments: dict[str, Any]) -> Accelerator:
    """Returns the accelerator that was pickled, or in another process a new one with the same arguments."""
    original = _accelerators.get(number) if process == os.getpid() else None
    return kind(**arguments) if original is None else original


def _float8_backend(is_enabled: bool) -> str:
    """Returns what accelerate calls the library of float8: the one of the variable, or torchao, which computes it."""
    return environment.snapshot().get("ACCELERATE_FP8_BACKEND", "AO" if is_enabled else "NO")
