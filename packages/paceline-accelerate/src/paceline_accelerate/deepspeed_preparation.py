"""`DeepSpeedPreparation`: what the accelerator's `prepare` does in a run that uses DeepSpeed.

objects -> keys that are "auto" get their values (batch sizes of the loaders, sizes of the model, DummyOptim's rates)
        -> deepspeed.initialize(model, optimizer, scheduler of its own, config) of `paceline_deepspeed`
        -> engine, DeepSpeedOptimizerWrapper and DeepSpeedSchedulerWrapper replace the model, its optimizer and its scheduler;
           a scheduler that is none of DeepSpeed's is prepared as without DeepSpeed

The accelerator prepares loaders as it does without DeepSpeed. Each engine has an accelerator of its own inside, so several
plugins (a student at stage 2, a teacher at stage 3) are several plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.base.errors import ConfigError
from paceline.base.log import warn_once
from paceline.data.loader import PreparedLoader
from paceline.optim.schedule import is_scheduler
from paceline_accelerate.deepspeed_plugin import DeepSpeedPlugin, get_active_deepspeed_plugin
from paceline_accelerate.deepspeed_wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
)
from paceline_deepspeed.arguments import sizes_for_auto
from paceline_deepspeed.engine import DeepSpeedEngine
from paceline_deepspeed.initialize import build
from paceline_deepspeed.schedules import VALID_LR_SCHEDULES

if TYPE_CHECKING:
    from paceline_accelerate.accelerator_base import AcceleratorBase

_MICRO = "train_micro_batch_size_per_gpu"
_GATHER_ON_SAVE = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


class DeepSpeedPreparation:
    """Makes and holds the engines of one accelerator.

    Args:
        accelerator: the accelerator, of `paceline_accelerate`.

    Attributes:
        engines: in the order in which they were made.
        optimizers, schedulers: the wrappers of their optimizers and schedulers.
        wrapped: wrapper of the first engine that trains, which `accelerator.backward` calls; None before there is one.
    """

    def __init__(self, accelerator: AcceleratorBase) -> None:
        self._accelerator = accelerator
        self.clear()

    def clear(self) -> None:
        """Forgets the engines."""
        self.engines: list[DeepSpeedEngine] = []
        self.optimizers: list[DeepSpeedOptimizerWrapper] = []
        self.schedulers: list[Any] = []
        self.wrapped: DeepSpeedEngineWrapper | None = None

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Replaces a model by an engine, and its optimizer and scheduler by wrappers. Ranks: all.

        Args:
            objects: as the script gave them. Loaders, and objects that are prepared already, are returned unchanged.

        Raises:
            ConfigError: `deepspeed-prepare`, and those of `deepspeed.initialize`.
        """
        models = [value for value in objects if isinstance(value, nn.Module) and not isinstance(value, DeepSpeedEngine)]
        if not models:
            return list(objects)
        optimizer = _only([value for value in objects if isinstance(value, Optimizer | DummyOptim)], "optimizers")
        scheduler = _only([value for value in objects if _schedules(value)], "schedulers")
        model = _only(models, "models")
        loaders = [value for value in objects if isinstance(value, DataLoader | PreparedLoader)]
        plugin = get_active_deepspeed_plugin(self._accelerator.state)
        self._check(plugin, optimizer, scheduler)
        self._fill(plugin, model, optimizer, scheduler, loaders)
        engine, engine_scheduler = self._make(plugin, model, optimizer, scheduler)
        replaced: dict[int, Any] = {id(model): engine}
        if optimizer is not None:
            wrapper = DeepSpeedOptimizerWrapper(engine.optimizer)
            self.optimizers.append(wrapper)
            self._accelerator.preparation.stepped_elsewhere.append(wrapper)
            replaced[id(optimizer)] = wrapper
        if scheduler is not None:
            replaced[id(scheduler)] = self._wrap_scheduler(scheduler, engine_scheduler)
        return [replaced.get(id(value), value) for value in objects]

    def _check(self, plugin: DeepSpeedPlugin, optimizer: Any, scheduler: Any) -> None:
        """Refuses an optimizer or a scheduler that is given both by the script and by the config, or by neither."""
        config = plugin.deepspeed_config
        for role, value, dummy in (("optimizer", optimizer, DummyOptim), ("scheduler", scheduler, DummyScheduler)):
            is_dummy = isinstance(value, dummy)
            is_described = role in config
            if is_described and value is not None and not is_dummy:
                what = f"the DeepSpeed config describes the {role}, and the script has made one."
                fix = f"prepare `accelerate.utils.{dummy.__name__}(...)`, or take the block out of the config"
                raise _refused(what, f"prepare was given a {type(value).__name__}; the config has {role!r}", fix)
            has_function = isinstance(value, DummyScheduler) and value.lr_scheduler_callable is not None
            if is_dummy and not is_described and not has_function:
                what = f"the DeepSpeed config does not describe the {role} that {dummy.__name__} stands for."
                fix = "write that block"
                if role == "scheduler":
                    fix += "; or pass it `lr_scheduler_callable=`"
                raise _refused(what, f"the DeepSpeed config has no block {role!r}", fix)

    def _fill(
        self, plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any, loaders: Sequence[Any]
    ) -> None:
        """Gives all keys that are "auto" their values."""
        processes = self._accelerator.num_processes
        steps = self._accumulation_steps(plugin)
        micro_batch = self._micro_batch(plugin, loaders)
        values: dict[str, Any] = {
            "gradient_accumulation_steps": steps,
            _MICRO: micro_batch,
            "train_batch_size": micro_batch * steps * processes,
            "gradient_clipping": 1.0,
            _GATHER_ON_SAVE: False,
            **sizes_for_auto(model),
        }
        if isinstance(optimizer, DummyOptim):
            values["optimizer.params.lr"] = optimizer.lr
            values["optimizer.params.weight_decay"] = optimizer.weight_decay
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
            values |= self._schedule(scheduler, processes)
        plugin.deepspeed_config_process(must_match=False, **values)

    def _accumulation_steps(self, plugin: DeepSpeedPlugin) -> int:
        """Returns the number of micro-batches in a step: the config's, which the accelerator takes too, else its own."""
        accelerator = self._accelerator
        given_steps = plugin.get_value("gradient_accumulation_steps")
        if given_steps is None or given_steps == "auto":
            return int(accelerator.gradient_accumulation_steps)
        if given_steps != accelerator.gradient_accumulation_steps:
            warn_once(
                "compat",
                f"gradient_accumulation_steps is {accelerator.gradient_accumulation_steps} for the accelerator and "
                f"{given_steps} in the DeepSpeed config: the config's counts.",
            )
            accelerator.gradient_accumulation_steps = given_steps
        return int(given_steps)

    def _micro_batch(self, plugin: DeepSpeedPlugin, loaders: Sequence[Any]) -> int:
        """Returns the number of samples in one rank's micro-batch: the config's, else the batch size of the loaders."""
        given_size = plugin.get_value(_MICRO)
        if given_size is not None and given_size != "auto":
            return int(given_size)
        num_processes = self._accelerator.num_processes
        global_batch = plugin.get_value("train_batch_size")
        if given_size is None and isinstance(global_batch, int):
            batch_of_rank = global_batch // num_processes
            return batch_of_rank // self._accumulation_steps(plugin)
        sizes: list[int] = []
        for loader in loaders:
            batch_size = getattr(loader, "batch_size", None)
            if isinstance(batch_size, int):
                sizes.append(batch_size)
        if not sizes:
            what = f"{_MICRO} is auto, and no loader says what that is."
            why = "a loader with a whole number as its batch_size must be prepared in the same call"
            fix = f"prepare the model and its loader together, or write {_MICRO} into the DeepSpeed config"
            raise _refused(what, why, fix)
        size = min(sizes) if plugin.is_train_batch_min else max(sizes)
        # With `split_batches` a loader's batch is that of all processes together.
        if self._accelerator.split_batches:
            size //= num_processes
        return size

    def _schedule(self, scheduler: DummyScheduler, processes: int) -> dict[str, Any]:
        """Returns the values of a scheduler in the config. Scripts for accelerate count its steps over all processes."""
        values = {
            "scheduler.params.warmup_min_lr": 0,
            "scheduler.params.warmup_max_lr": _rate(scheduler.optimizer),
            # A `DummyScheduler` says 0 where the script says nothing, and DeepSpeed's schedules want one step or more.
            "scheduler.params.warmup_num_steps": max(1, scheduler.warmup_num_steps),
        }
        if scheduler.total_num_steps is not None:
            # accelerate does not divide the steps of the warm-up.
            counts_per_step = 1 if self._accelerator.split_batches else processes
            values["scheduler.params.total_num_steps"] = math.ceil(scheduler.total_num_steps / counts_per_step)
        return values

    def _make(
        self, plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any
    ) -> tuple[DeepSpeedEngine, Any]:
        """Makes an engine; returns it and its scheduler."""
        # accelerate writes infinity for "never"; Paceline's `initialize` wants the key left out then. The other key is not
        # needed, because here ZeRO divides any optimizer.
        config: dict[str, Any] = {}
        for name, value in plugin.deepspeed_config.items():
            if value != math.inf and name != "zero_allow_untested_optimizer":
                config[name] = value
        arguments: dict[str, Any] = {"model": model, "config": config}
        if isinstance(optimizer, DummyOptim):
            arguments["model_parameters"] = optimizer.params
        elif optimizer is not None:
            arguments["optimizer"] = optimizer
        if isinstance(scheduler, DummyScheduler):
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
        elif type(scheduler).__name__ in VALID_LR_SCHEDULES:
            arguments["lr_scheduler"] = scheduler
        engine, _, _, engine_scheduler = build(**arguments)
        # The micro-batch is that of the prepared loader. A model may get more rows: in trl's DPO two for each sample.
        engine.compares_rows = False

        def tell_boundary(*_: Any) -> None:
            engine.set_gradient_accumulation_boundary(bool(self._accelerator.sync_gradients))

        # A forward pass must know whether its backward pass ends a window: ranks communicate in that one alone.
        engine.register_forward_pre_hook(tell_boundary)
        self.engines.append(engine)
        self._accelerator.preparation.elsewhere.append(engine)
        if engine.optimizer is not None and self.wrapped is None:
            self.wrapped = DeepSpeedEngineWrapper(engine)
        elif engine.optimizer is not None:
            warn_once(
                "compat",
                "this accelerator has an engine already, which `accelerator.backward` drives. For a second model that is "
                "trained make a second `Accelerator()`, and prepare the model with it.",
            )
        return engine, engine_scheduler

    def _wrap_scheduler(self, scheduler: Any, engine_scheduler: Any) -> Any:
        """Returns what the script gets in place of its scheduler."""
        # The engine steps its own schedules alone. Others step in the script, once for each process.
        if engine_scheduler is None:
            return self._accelerator.preparation.scheduler(scheduler)
        wrapper = DeepSpeedSchedulerWrapper(engine_scheduler, self.optimizers[-1:])
        self.schedulers.append(wrapper)
        return wrapper

    # -- the whole state -----------------------------------------------------------------------------------------------

    def engine_of(self, model: nn.Module) -> DeepSpeedEngine | None:
        """Returns the engine that is, or trains, a model; None for any other model."""
        return next((engine for engine in self.engines if model is engine or model is engine.module), None)

    def state_dict(self, engine: DeepSpeedEngine) -> dict[str, Any]:
        """Returns the whole state of an engine's model. Ranks: all.

        Raises:
            ConfigError: `deepspeed-prepare` at stage 3, if the config does not ask for whole weights: gathering them takes
                the memory of the whole model, and transformers' Trainer saves the divided ones after this error.
        """
        is_divided = engine.zero_optimization_partition_weights()
        if is_divided and not engine.zero_gather_16bit_weights_on_model_save():
            what = "the weights are divided over the ranks, and the DeepSpeed config does not ask for whole ones."
            why = f"the stage is 3 and {_GATHER_ON_SAVE} is false"
            fix = f"set {_GATHER_ON_SAVE} to true, or save with `engine.save_checkpoint(folder)`"
            raise _refused(what, why, fix)
        return engine.module_state_dict()


def _only(values: list[Any], what: str) -> Any:
    """Returns the only value of a list; None if the list is empty."""
    if len(values) > 1:
        names = ", ".join(type(value).__name__ for value in values)
        fix = "prepare one of them; for a second model make a second plugin and a second `Accelerator()`"
        raise _refused(f"{len(values)} {what} were prepared together.", f"an engine has one: {names}", fix)
    return values[0] if values else None


def _schedules(value: object) -> bool:
    return isinstance(value, DummyScheduler) or (is_scheduler(value) and not isinstance(value, Optimizer))


def _rate(optimizer: Any) -> float:
    """Returns the learning rate that an optimizer or a `DummyOptim` was given."""
    if isinstance(optimizer, DummyOptim):
        return float(optimizer.lr)
    return float(optimizer.defaults["lr"])


def _refused(what: str, why: str, fix: str) -> ConfigError:
    return ConfigError("deepspeed-prepare", what, why=why, fix=fix)
