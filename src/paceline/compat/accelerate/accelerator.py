"""`accelerate.Accelerator` on ours: its constructor, its names, and its semantics where they differ.

batches      the last global batch is filled up with the first samples; loss is a plain mean, divided by the steps
scheduler    steps once for each process                                            (preparation.py)
gather       values of one process stay as they are; 0-dim ones of several make one value a process
checkpoints  accelerate's files                                                     (checkpoint.py)
state        views of this very accelerator; a second one does not touch it         (state.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.accelerator import Accelerator as NativeAccelerator
from paceline.base.errors import CompatError, Problem
from paceline.compat.absent import refuse
from paceline.compat.accelerate.arguments import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from paceline.compat.accelerate.checkpoint import Folder
from paceline.compat.accelerate.loaders import skip_first_batches
from paceline.compat.accelerate.parallelism_config import ParallelismConfig
from paceline.compat.accelerate.plugins import DeepSpeedPlugin
from paceline.compat.accelerate.preparation import AcceleratePreparation
from paceline.compat.accelerate.state import AcceleratorState, GradientState
from paceline.compat.accelerate.tracking import TrackerList
from paceline.compat.fsdp import said_by
from paceline.config.given import Given
from paceline.world.tree import map_tensors, tensors

_HANDLERS = {
    "ddp_handler": DistributedDataParallelKwargs,
    "scaler_handler": GradScalerKwargs,
    "init_handler": InitProcessGroupKwargs,
    "autocast_handler": AutocastKwargs,
    "profile_handler": ProfileKwargs,
}
_UNSAID = object()


class Accelerator(NativeAccelerator):
    """Takes accelerate's arguments and has its names.

    Args:
        device_placement: whether `prepare` moves models and batches to the device.
        split_batches: taken for old scripts; `dataloader_config` says it now.
        gradient_accumulation_steps: the default of 1 leaves the choice to the environment; another value beats it.
        others: as accelerate names them; those of Megatron-LM are refused, with the native way.

    Ranks: all construct it.

    Raises:
        CompatError: `compat-argument`, all at once; and what the native one raises.
    """

    _preparation_class = AcceleratePreparation
    preparation: AcceleratePreparation

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: Any = _UNSAID,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
    ) -> None:
        several = None if isinstance(deepspeed_plugin, DeepSpeedPlugin) else deepspeed_plugin or deepspeed_plugins
        plugins = {"deepspeed_plugin": several, "megatron_lm_plugin": megatron_lm_plugin}
        _check(plugins, mixed_precision, gradient_accumulation_steps, gradient_accumulation_plugin, kwargs_handlers)
        for name, kind in _HANDLERS.items():
            setattr(self, name, next((each for each in kwargs_handlers or () if isinstance(each, kind)), None))
        loading = dataloader_config or DataLoaderConfiguration()
        if split_batches is not _UNSAID:
            loading = replace(loading, split_batches=bool(split_batches))
        window = gradient_accumulation_plugin or GradientAccumulationPlugin(num_steps=gradient_accumulation_steps)
        self.dataloader_config, self.parallelism_config, self.rng_types = loading, parallelism_config, rng_types
        self.project_configuration = project_config or ProjectConfiguration(project_dir)
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.device_placement, self.step_scheduler_with_optimizer = device_placement, step_scheduler_with_optimizer
        super().__init__(
            None if mixed_precision is None else str(getattr(mixed_precision, "value", mixed_precision)),
            window.num_steps if (window.num_steps or 1) != 1 else None,
            cpu or None,
            plan=_said(
                fsdp_plugin, parallelism_config, torch_tp_plugin, dynamo_plugin, dynamo_backend, deepspeed_plugin
            ),
            options={"replicate": self.ddp_handler.options()} if self.ddp_handler else None,
            split_batches=loading.split_batches,
            dispatch_batches=loading.dispatch_batches,
            even_batches=loading.even_batches,
            data_seed=loading.data_seed,
            non_blocking=loading.non_blocking,
            project_dir=self.project_configuration.project_dir,
            scaler=self.scaler_handler.to_kwargs() if self.scaler_handler else None,
            timeout_s=self.init_handler.timeout.total_seconds()
            if self.init_handler and self.init_handler.said("timeout")
            else None,
        )
        self._adopt_manners(window, log_with)
        self.deepspeed_plugin = deepspeed_plugin
        self.state.adopt(self, fsdp_plugin, torch_tp_plugin, dynamo_plugin)

    def _adopt_manners(self, window: GradientAccumulationPlugin, log_with: Any) -> None:
        """What differs from the native accelerator, once it stands."""
        self.gradients.follow_script(window.sync_with_dataloader)
        self._sync_each_batch = window.sync_each_batch
        times = 1 if self.dataloader_config.split_batches else self.num_processes
        self.preparation.step_schedulers(times, self.step_scheduler_with_optimizer)
        self.trackers = TrackerList(log_with, self.logging_dir or ".", is_main=self.is_main_process)
        self.log_with = self.trackers.names
        self.step = 0
        self.native_amp = self.mixed_precision != "no"
        self.state = AcceleratorState.of(self)
        self.gradient_state = GradientState.of(self, window)
        self._custom_objects: list[Any] = []
        self._folder = Folder(self)

    # -- what this run is --------------------------------------------------------------------------------------

    deepspeed_plugin = deepspeed_engine_wrapped = torch_device_mesh = fp8_backend = None
    is_composable_parallelism_enabled = has_lomo_optimizer = False
    is_fsdp2 = property(lambda self: self.state.is_fsdp2)
    should_save_model = True
    distributed_type = property(lambda self: self.state.distributed_type)
    multi_device = property(lambda self: self.num_processes > 1 and self.device.type != "cpu")
    split_batches = property(lambda self: self.dataloader_config.split_batches)
    dispatch_batches = property(lambda self: self.dataloader_config.dispatch_batches)
    use_seedable_sampler = property(lambda self: self.dataloader_config.use_seedable_sampler)
    non_blocking = property(lambda self: self.dataloader_config.non_blocking)
    use_stateful_dataloader = property(lambda self: self.dataloader_config.use_stateful_dataloader)
    save_iteration = property(lambda self: self.project_configuration.iteration)
    tensor_parallel_rank = property(lambda self: self.plan.layout.coordinate(self.process_index)["tp"])
    data_parallel_rank = property(lambda self: self.plan.layout.coordinate(self.process_index)["replicate"])
    data_parallel_shard_rank = property(lambda self: self.plan.layout.coordinate(self.process_index)["shard"])
    _models = property(lambda self: [entry.module for entry in self.run.prepared.models])
    _optimizers = property(lambda self: self.run.prepared.optimizers)
    _schedulers = property(lambda self: self.run.prepared.schedulers)
    _dataloaders = property(lambda self: self.run.prepared.loaders)
    flag_tensor = property(lambda self: torch.tensor(int(self._trigger)) if self._trigger else None)

    @property
    def logging_dir(self) -> str | None:  # type: ignore[override]
        """Where trackers write."""
        return self.project_configuration.logging_dir

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch at hand ends its window."""
        return self.gradients.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradients.sync = value

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
        """Prepares what it knows, in the order of the arguments; anything else comes back as it is. Ranks: all."""
        places = device_placement if device_placement is not None else [self.device_placement] * len(args)
        return super().prepare(*args, device_placement=places)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares one model. Ranks: all."""
        place = self.device_placement if device_placement is None else device_placement
        return super().prepare_model(model, place, evaluation_mode)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepares one loader. Ranks: all."""
        place = self.device_placement if device_placement is None else device_placement
        return super().prepare_data_loader(data_loader, place)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepares one optimizer."""
        return super().prepare_optimizer(optimizer)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model was spread over devices, which nothing here does."""
        return len(getattr(model, "hf_device_map", None) or ()) > 1

    # -- the step ----------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch."""
        hold = nullcontext if self._sync_each_batch else lambda: self.no_sync(*models)
        with self.gradients.window(hold):
            self.step = 0 if self.gradients.sync_at_end and self.gradient_state.end_of_dataloader else self.step + 1
            yield

    def no_sync(self, *models: nn.Module, model: nn.Module | None = None) -> AbstractContextManager[Any]:
        """Backward passes inside do not communicate; models that were not prepared never do."""
        models = models if model is None else (*models, model)
        known = [each for each in models if self.run.prepared.find(each)]
        return super().no_sync(*known) if known or not models else nullcontext()

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> Any:
        """Not carried."""
        refuse(
            "Accelerator.trigger_sync_in_backward",
            "a backward pass communicates, or does not, as its forward pass was run",
            "run the last forward pass outside `no_sync`",
        )

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Not carried."""
        refuse(
            "Accelerator.lomo_backward", "LOMO steps inside the backward pass", "use an optimizer that steps after it"
        )

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Computes in the run's precision."""
        chosen = autocast_handler or self.autocast_handler or AutocastKwargs()
        return super().autocast(chosen.enabled, chosen.cache_enabled)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """torch's profiler over a block."""
        return super().profile(**(profile_handler or self.profile_handler or ProfileKwargs()).to_kwargs())

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """With `even_batches=False`, epochs begun inside divide their last batch rather than fill it up."""
        with super().join_uneven_inputs(joinables), self.preparation.tails("divide" if even_batches is False else None):
            yield

    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> AbstractContextManager[None]:
        """Nothing: a plan with `cp` divides sequences by itself."""
        return nullcontext()

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """The loader as it is."""
        return dl

    # -- between ranks -----------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenates tensors of all processes along dim 0; with one process they stay as they are. Ranks: all."""
        return tensor if self.num_processes == 1 else super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers over real samples; a 0-dim tensor makes one value a process. Ranks: all."""
        if self.num_processes == 1:
            return self._without_repeats(input_data)
        found = super().gather_for_metrics(input_data, use_gather_object)
        loader = self.run.active_loaders.top
        info = loader.current if loader is not None else None
        if use_gather_object or info is None or info.full or not any(t.ndim == 0 for t in tensors(input_data)):
            return found
        # A process whose rows are all filler gave no value of its own; scripts count on one for each.
        every = iter(tensors(super().gather([t for t in tensors(input_data) if t.ndim == 0])))
        was = iter(tensors(input_data))
        return map_tensors(lambda t: next(every) if next(was).ndim == 0 else t, found)

    def _without_repeats(self, values: Any) -> Any:
        """Values of one process without those past the real rows of an epoch's last batch.

        Scripts repeat a mean by the batch size (`loss.repeat(8)`), so that each row counts once: a last batch of 5 rows
        comes with 8 values. A 0-dim tensor, or an object that cannot be cut, leaves everything as it is.
        """
        loader = self.run.active_loaders.top
        if loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
            return values
        leaves = tensors(values)
        if not leaves:
            return values[: loader.remainder] if isinstance(values, (list, tuple)) else values
        if any(leaf.ndim == 0 for leaf in leaves):
            return values
        return map_tensors(lambda leaf: leaf[: loader.remainder], values)

    # -- files and logs ----------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to what `save_state` saves."""
        super().register_for_checkpointing(*objects)
        self._custom_objects.extend(objects)

    def save_state(  # type: ignore[override]
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Saves under accelerate's file names; see `Folder.save`. Ranks: all."""
        return self._folder.save(output_dir, safe_serialization)

    def load_state(  # type: ignore[override]
        self, input_dir: str | Path | None = None, load_kwargs: Any = None, **load_model_func_kwargs: Any
    ) -> None:
        """Loads what `save_state`, accelerate's own or the native one wrote. Ranks: all."""
        self._folder.load(input_dir, strict=load_model_func_kwargs.get("strict", True))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader without its first batches."""
        return skip_first_batches(dataloader, num_batches)

    def log(self, values: Any, step: int | None = None, log_kwargs: Any = None) -> None:
        """Logs values to every tracker, on the main process."""
        super().log(values, step)


def _check(plugins: dict[str, Any], precision: Any, steps: int, window: Any, handlers: Sequence[Any] | None) -> None:
    """Raises all problems of the arguments at once."""
    problems = [
        _problem(f"{name} is not carried", f"{name}={value!r}", _WAYS[name]) for name, value in plugins.items() if value
    ]
    if str(getattr(precision, "value", precision)) == "fp8":
        problems.append(
            _problem("8-bit training is not built yet", "mixed_precision='fp8'", "use mixed_precision='bf16'")
        )
    if window is not None and steps != 1:
        why = f"gradient_accumulation_steps={steps} and {window}"
        problems.append(_problem("the window's length is said twice", why, "say it once"))
    kinds = [type(each) for each in handlers or ()]
    for kind in dict.fromkeys(kinds):
        if kind not in _HANDLERS.values():
            known = ", ".join(each.__name__ for each in _HANDLERS.values())
            problems.append(_problem(f"kwargs_handlers holds a {kind.__name__}", f"known: {known}", "leave it out"))
        elif kinds.count(kind) > 1:
            problems.append(
                _problem(f"kwargs_handlers holds several {kind.__name__}", "only one can count", "merge them")
            )
    if problems:
        raise CompatError.of(problems)


def _said(
    fsdp: Any, axes: Any, tensor: Any, dynamo: Any, backend: Any, deepspeed: DeepSpeedPlugin | None
) -> list[Given]:
    """What the plugins say, in accelerate's words; `config.engines` says it in ours."""
    # Weaker than whatever a command line, a variable or a file says: accelerate leaves batch norms as they are.
    found = [Given("options.batch_norm.statistics", "local", "default", "as under accelerate")]
    found += deepspeed.said() if deepspeed is not None else []
    found += [given for plugin in (fsdp, axes, tensor, dynamo) if plugin is not None for given in said_by(plugin)]
    if fsdp is not None:
        found.append(Given("use_fsdp", "true", "code", "Accelerator(fsdp_plugin=...)"))
    for name in ("tp", "cp", "sp"):
        handler = getattr(axes, f"{name}_handler", None)
        found += said_by(handler) if handler is not None else []
    if backend is not None and dynamo is None:
        found.append(Given("dynamo_backend", str(backend), "code", "Accelerator(dynamo_backend=...)"))
    return found


_WAYS = {
    "deepspeed_plugin": "give one `DeepSpeedPlugin`",
    "megatron_lm_plugin": "native: `paceline.Accelerator(plan={'tp': 2, 'pp': 2})`",
}


def _problem(what: str, why: str, fix: str) -> Problem:
    return Problem("compat-argument", f"Accelerator: {what}.", why=why, fix=fix)
