"""`DeepSpeedEngine`: DeepSpeed's step on our accelerator.

engine(x)               forward; ranks communicate in the backward of the window's last micro-batch alone
engine.backward(loss)   loss / accumulation steps -> autograd
loss.backward()         the same, by hooks on what the forward pass returned (`script_backward`)
engine.step()           at a boundary: norm, clip, optimizer, scheduler, counters, events; else it counts a micro-batch
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.accelerator import Accelerator
from paceline.base.errors import ConfigError, TrainError
from paceline.base.log import warn_once
from paceline.config.given import Given
from paceline.torch_internals.modules import is_compiled_in_place
from paceline_deepspeed import (
    checkpoint,
    missing_gradients,
    module_state,
    optimizers,
    parameter_status,
    replaced,
    script_backward,
)
from paceline_deepspeed.attendance import Attendance
from paceline_deepspeed.config import Batch, DeepSpeedConfig
from paceline_deepspeed.config_view import ConfigView
from paceline_deepspeed.loader import deepspeed_io
from paceline_deepspeed.monitors import StepEvents
from paceline_deepspeed.muon import MuonWithAdam
from paceline_deepspeed.offload_states import OffloadedTensors
from paceline_deepspeed.scheduler import EngineScheduler
from paceline_deepspeed.timers import StepTimer, SynchronizedWallClockTimer


class DeepSpeedEngine(nn.Module):
    """Holds a model, its optimizer and its scheduler, and counts.

    What it has no name for is looked up in `view`, which answers from the config, and then in the model.

    Args:
        accelerator: the run.
        config: what was asked for.
        batch: the batch triangle.
        model, optimizer: the user's; the optimizer may be None where nothing is trained.
        scheduler: of the learning rate; the engine steps it.
        training_data: a loader, yet to be prepared.
        client_optimizer, client_lr_scheduler: what the script has given to `initialize`.

    Attributes:
        accelerator: ours, for what DeepSpeed has no name for.
        view: the config, by DeepSpeed's names of methods: `engine.gradient_clipping()`.
        micro_steps, global_steps, global_samples, skipped_steps: counters, as DeepSpeed counts them.
        training_dataloader: the prepared loader.
        basic_optimizer: the optimizer that `optimizer` steps; None without one.
        timers: of the script's own sections.
        tput_timer: samples a second, and the epochs that the script counts.
        compares_rows: whether the rows of each micro-batch are compared with the config's.
        inside_no_sync_ctxt: whether the script is inside of `no_sync`.
        enable_backward_allreduce: whether the last backward pass of a window averages gradients. A script that sets it to
            False calls `allreduce_gradients` before `step`.
        offloaded: what `offload_states` has moved.
        has_given_up: whether a later engine trains the model.
        monitor: takes events of the script's own: `engine.monitor.write_events([(name, value, step)])`.
    """

    pipeline_parallelism = False
    enable_backward_allreduce = True
    _metric_fix = "give it one: `engine.step(lr_kwargs={'metrics': loss.item()})`"

    def __init__(
        self,
        accelerator: Accelerator,
        config: DeepSpeedConfig,
        batch: Batch,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        training_data: DataLoader[Any] | None = None,
        client_optimizer: Any = None,
        client_lr_scheduler: Any = None,
    ) -> None:
        super().__init__()
        self.client_optimizer = client_optimizer
        self.client_lr_scheduler = client_lr_scheduler
        self.accelerator = accelerator
        self.config = config
        self.view = ConfigView(accelerator, config, batch)
        parameters_before = dict(model.named_parameters())
        trains = self.trains(config, optimizer)
        # `prepare` hands a None back as it is.
        prepared = accelerator.preparation.prepare([model, optimizer, training_data, scheduler], trains=trains)
        wrapped, prepared_optimizer, self.training_dataloader, prepared_scheduler = prepared
        self._prepared_model = (wrapped,)  # in a tuple: as a submodule it would show each parameter of `module` twice
        self.module = accelerator.unwrap_model(wrapped)
        replaced.record(parameters_before, dict(self.module.named_parameters()))
        if config["zero_optimization.stage"] == 3:
            parameter_status.describe(self.module, parameters_before.values())
        self._take_optimizer(prepared_optimizer)
        # Each step looks at all of them, and a walk through 500 modules takes 3 ms.
        self._parameter_list = list(self.module.parameters())
        self._config = self.view.attributes
        self._lr_scheduler = None if prepared_scheduler is None else EngineScheduler(prepared_scheduler, self)
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._steps_before_window = 0  # micro-steps before the window at hand
        self._unreduced = False  # the last backward pass kept its gradients to this rank
        self._norm: torch.Tensor | None = None
        self._boundary: bool | None = None  # what a script said of the micro-batch at hand
        self.compares_rows = True
        self.has_given_up = False
        self._applied = False  # whether the last step changed the weights
        self.inside_no_sync_ctxt = False
        self._by_hand: ExitStack | None = None  # holds gradients until `step`, where a script calls backward itself
        self._script_backward = script_backward.ScriptBackward(self._begin_script_backward, self._finish_pass)
        self._num_passes = 0  # backward passes of the window at hand
        self.events = StepEvents(self)
        self.tput_timer = StepTimer(batch.train)
        self.timers = SynchronizedWallClockTimer()
        self.attendance = Attendance(accelerator.world, accelerator.run.runtime.others_answer)

    # -- how it is made --------------------------------------------------------------------------------------------

    @classmethod
    def trains(cls, config: DeepSpeedConfig, optimizer: Any) -> bool:
        """Whether the model is prepared to be trained, by a config and an optimizer of the script's, which may be None.

        An engine without an optimizer trains nothing. A script may pass its model to `initialize` again, with an optimizer, as
        trl's DPO does: so it leaves the gradients of the model to that engine, and lets its optimizer step.
        """
        has_optimizer = optimizer is not None or config["optimizer.type"] is not None
        return has_optimizer or config["zero_optimization.stage"] == 3

    @classmethod
    def settings(cls, model: nn.Module, batch: Batch, training_data: Any = None, collate_fn: Any = None) -> list[Given]:
        """Lists the settings that a model of this kind adds to the plan."""
        return []

    @classmethod
    def width(cls, model: nn.Module, world: int) -> int:
        """Returns how many of `world` ranks, those that no layer or sequence is divided over, read different samples."""
        return world

    @classmethod
    def shuffles(cls) -> bool:
        """Whether a loader of `training_data` is shuffled."""
        return True

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Takes an optimizer once the engine is made; diffusion-pipe calls this name. Ranks: all.

        Args:
            client_optimizer: an optimizer, a function that makes one of the parameters, or None for the config's.
            model_parameters: what it steps, tensors or groups; None for all that are trained.

        Raises:
            ConfigError: `deepspeed-optimizer`.
        """
        why = ""
        if self.optimizer is not None:
            why = f"it has one already, {type(self.basic_optimizer).__name__}"
        elif not self.trains(self.config, None):
            why = "its model was prepared to be evaluated alone, because `initialize` got no optimizer"
        if why:
            raise ConfigError(
                "deepspeed-optimizer",
                "`engine._configure_optimizer` cannot give this engine an optimizer.",
                why=why,
                fix="pass an optimizer, or a function that makes one of parameters: `deepspeed.initialize(optimizer=...)`",
            )
        chosen = optimizers.chosen(self.config, self.module, client_optimizer, model_parameters)
        (prepared,) = self.accelerator.preparation.prepare([chosen])
        self._take_optimizer(prepared)

    def _take_optimizer(self, prepared: Any) -> None:
        """Makes a prepared optimizer the engine's; None where nothing is trained."""
        self.optimizer = prepared
        self.basic_optimizer = getattr(prepared, "optimizer", None)
        self.offloaded = OffloadedTensors(self.module, self.basic_optimizer)
        if prepared is None:
            return
        if self.config["zero_optimization.stage"] == 3:
            prepared.parameter_offload = parameter_status.ParameterOffload(self.module)
        # OpenRLHF calls these names.
        prepared.offload_states = self.offloaded.offload
        prepared.reload_states = self.offloaded.reload

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `step` steps; a script may set another one."""
        return self._lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        if scheduler is self._lr_scheduler:
            return
        if self._lr_scheduler is not None:
            self.accelerator.run.prepared.schedulers.remove(
                self._lr_scheduler.prepared
            )  # no checkpoint asks for it any more
        self._lr_scheduler = None
        if scheduler is not None:
            self._lr_scheduler = EngineScheduler(self.accelerator.preparation.scheduler(scheduler), self)

    @property
    def batch(self) -> Batch:
        """The batch triangle."""
        return self.view.batch

    @property
    def prepared_model(self) -> nn.Module:
        """The model as `prepare` gave it back: `module`, in what the plan has put around it."""
        model: nn.Module = self._prepared_model[0]
        return model

    # -- the window ------------------------------------------------------------------------------------------------

    @property
    def steps_in_window(self) -> int:
        """Micro-batches of the window at hand that `step` has counted."""
        return self.micro_steps - self._steps_before_window

    def restart_window(self, done: int) -> None:
        """Continues a window of which `done` micro-batches were taken; called once counters were loaded."""
        self._steps_before_window = self.global_steps * self.batch.accumulate
        self.micro_steps = self._steps_before_window + done
        self._num_passes = done

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of its window.

        False where the config leaves windows to the script: which is the last is known when it calls `step`.
        """
        if self._boundary is not None:
            return self._boundary
        return self._counts_windows and (self.steps_in_window + 1) % self.batch.accumulate == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the micro-batch at hand ends its window; holds until it is said otherwise.

        Raises:
            ConfigError: `deepspeed-window`.
        """
        if not self._counts_windows:
            raise ConfigError(
                "deepspeed-window",
                "`set_gradient_accumulation_boundary` was called, but each `engine.step()` ends a window.",
                why=f"{self.config.source} says `managed_gradient_accumulation: false`",
                fix="leave the call out, or that key",
            )
        self._boundary = bool(is_boundary)

    @property
    def _counts_windows(self) -> bool:
        """Whether the engine ends a window after so many micro-batches; else each `step` ends one."""
        return bool(self.config["managed_gradient_accumulation"])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds up the gradients of the backward passes inside without communication, at every stage; `step` comes later."""
        before = self.inside_no_sync_ctxt
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = before

    def _hold(self) -> AbstractContextManager[Any]:
        """Keeps ranks from communicating inside a window."""
        is_averaged = self.enable_backward_allreduce and not self.inside_no_sync_ctxt
        last = is_averaged and self.is_gradient_accumulation_boundary()
        self.accelerator.gradients.sync = last
        return nullcontext() if last else self.accelerator.no_sync()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the global batch by the number of micro-batches in a step.

        Raises:
            ConfigError: `deepspeed-batch-size`, also inside a window.
        """
        samples = self.batch.micro * self.batch.width  # of one micro-batch on all ranks
        if train_batch_size < 1 or train_batch_size % samples:
            raise ConfigError(
                "deepspeed-batch-size",
                f"a global batch of {train_batch_size} is no whole number of micro-batches.",
                why=f"one on each rank is {samples} samples: {self.batch.micro} x {self.batch.width} ranks",
                fix=f"choose a multiple of {samples}, such as {max(1, round(train_batch_size / samples)) * samples}",
            )
        self._rebatch(self.batch.micro, train_batch_size // samples)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro-batch, and keeps their number in a step; the script's loader must follow."""
        self._rebatch(micro_batch_size, self.batch.accumulate)

    def _rebatch(self, micro: int, accumulate: int) -> None:
        done = self.steps_in_window
        if done and accumulate != self.batch.accumulate:
            raise ConfigError(
                "deepspeed-batch-size",
                f"a window of {self.batch.accumulate} micro-batches cannot become one of {accumulate} while it is open.",
                why=f"{done} of its micro-batches {'was' if done == 1 else 'were'} divided by {self.batch.accumulate} already",
                fix="change the batch after a step: `if engine.was_step_applied(): engine.set_train_batch_size(...)`",
            )
        train = micro * accumulate * self.batch.width
        self.view.rebatch(replace(self.batch, train=train, micro=micro, accumulate=accumulate))
        self.accelerator.gradient_accumulation_steps = accumulate

    # -- forward and backward --------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Runs the model."""
        if not (self.training and torch.is_grad_enabled()):
            return self.prepared_model(*inputs, **keywords)
        self._compare_rows(inputs, keywords)
        self.accelerator.run.events.micro_batch((inputs, keywords), self.batch.train)
        self.attendance.begins(self.micro_steps + 1)
        inputs, keywords = self._script_backward.hook_inputs((inputs, keywords))
        with self._hold():
            output = self.prepared_model(*inputs, **keywords)
        return self._script_backward.hook_outputs(output)

    def train(self, *inputs: Any, **keywords: Any) -> Any:
        """Sets the training mode, as for any module. Called with a batch, it runs the model and returns the loss."""
        # `train()`, `train(False)` or `train(mode=False)`: any other argument is a batch.
        if keywords.keys() <= {"mode"} and all(isinstance(value, bool) for value in inputs):
            super().train(*inputs, **keywords)
            self.prepared_model.train(self.training)
            return self
        warn_once(
            "compat",
            "`engine.train(**batch)` was called with a batch: it runs the model, as `engine(**batch)` does. Write that one.",
        )
        self.train(True)
        output = self(*inputs, **keywords)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return output if loss is None else loss

    def _compare_rows(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Says where the batch of a whole step seems to be fed as one micro-batch."""
        batch = self.batch
        if batch.train == batch.micro or not self.compares_rows:
            return
        values = (*inputs, *keywords.values())
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
        if tensors and tensors[0].shape[0] == batch.train:
            warn_once(
                "compat",
                f"a micro-batch of {batch.train} rows was fed to the engine, but a micro-batch is {batch.micro} "
                f"(train_batch_size {batch.train} = {batch.micro} x {batch.accumulate} micro-batches x {batch.width} ranks): "
                f"a step sees {batch.train * batch.accumulate * batch.width} samples. Load "
                "`engine.train_micro_batch_size_per_gpu()` rows at a time.",
            )

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **ignored: Any
    ) -> torch.Tensor:
        """Computes gradients.

        Args:
            loss: 0-dim; the mean over this rank's micro-batch.
            retain_graph: as for `Tensor.backward`.
            scale_wrt_gas: divides by the accumulation steps.
            ignored: what earlier versions took (`allreduce_gradients`, `release_loss`).

        Returns the loss divided by the accumulation steps, detached.

        Raises:
            TrainError: `backward-loss`, `deepspeed-optimizer-missing`.
        """
        self._needs_optimizer("backward")
        steps = self.batch.accumulate
        # The accelerator divides by the steps, so a loss that is not to be divided is multiplied by them first.
        multiplied = loss if scale_wrt_gas else loss * steps
        self._num_passes += 1
        with self._hold(), script_backward.scaled_pass():
            self.accelerator.backward(multiplied, retain_graph=retain_graph or None)
        self._unreduced = not self.accelerator.gradients.sync
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Scales a loss on which the script calls `backward` itself: divided by the window, times the loss scale."""
        self._needs_optimizer("scale")
        self._hold_until_step()
        scaled = self.accelerator.steps.scaled(self.accelerator.gradients.checked(loss, {}))
        script_backward.mark_scaled(scaled, self._finish_pass)
        return scaled

    def _finish_pass(self) -> None:
        """Averages gradients at the end of a backward pass of the script's, in the last micro-batch of a window."""
        self.accelerator.steps.finish_reduction()
        self._unreduced = not self.accelerator.gradients.sync

    def _hold_until_step(self) -> None:
        """Keeps ranks from communicating inside a window, until the script calls `step`."""
        self._num_passes += 1
        if self._by_hand is None:
            self._by_hand = ExitStack()
            self._by_hand.enter_context(self._hold())

    def _begin_script_backward(self) -> float:
        """Begins a backward pass of a loss that the engine has not seen; returns the factor of its gradients.

        Raises:
            TrainError: `deepspeed-loss-scale`, `deepspeed-optimizer-missing`.
        """
        self._needs_optimizer("backward")
        if self.accelerator.scaler is not None:
            raise script_backward.unscaled()
        self._hold_until_step()
        # Scaling is linear in the loss, so what it makes of 1 is the factor.
        return self.accelerator.gradients.scale(torch.ones(())).item()

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Counts a micro-batch, and takes an optimizer step at a boundary.

        Args:
            lr_kwargs: for the scheduler.

        Raises:
            TrainError: `deepspeed-step`, `deepspeed-metric`, `deepspeed-optimizer-missing`, `deepspeed-backward`.
        """
        self._needs_optimizer("step")
        if self.inside_no_sync_ctxt:
            raise TrainError(
                "deepspeed-step",
                "`engine.step()` was called inside `engine.no_sync()`.",
                why="the gradients of the ranks have not been averaged yet",
                fix="call it after the block, and after one more backward pass outside of it",
            )
        boundary = self.is_gradient_accumulation_boundary() or not self._counts_windows
        self._applied = False
        if boundary:
            self._check_metric(lr_kwargs or {})
            if not self._num_passes and any(parameter.grad is not None for parameter in self._parameter_list):
                raise script_backward.unseen()
            self._check_average()
        self.accelerator.gradients.sync = boundary
        if self._by_hand is not None:
            self._by_hand.close()
            self._by_hand = None
        if boundary:
            if self._unreduced:  # backward did not know that it was the window's last
                self.accelerator.steps.finish_reduction()
            self._update(dict(lr_kwargs or {}))
        self.micro_steps += 1
        if boundary:
            self._steps_before_window = self.micro_steps
            self._unreduced = False
            self._num_passes = 0
        self.events.after_step(boundary)

    def _check_metric(self, lr_kwargs: Mapping[str, Any]) -> None:
        """Refuses a step whose scheduler waits for a metric that nobody gives, before a weight has changed."""
        scheduler = getattr(getattr(self.lr_scheduler, "prepared", None), "scheduler", None)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and "metrics" not in lr_kwargs:
            raise TrainError(
                "deepspeed-metric",
                "ReduceLROnPlateau cannot step: it needs a metric, and the engine steps it without one.",
                why=f"the scheduler of this engine steps with each optimizer step; lr_kwargs={dict(lr_kwargs)}",
                fix=self._metric_fix,
            )

    def _check_average(self) -> None:
        """Refuses a step on gradients that the script wants to average itself and has not."""
        if self._unreduced and not self.enable_backward_allreduce and self.batch.width > 1:
            raise TrainError(
                "deepspeed-step",
                "`engine.step()` was called, but the gradients of the ranks have not been averaged.",
                why="`engine.enable_backward_allreduce` is False, so no backward pass averages them",
                fix="call `engine.allreduce_gradients()` before it, or leave `enable_backward_allreduce` True",
            )

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        """Ends a window: clips, steps the optimizer and the scheduler, and counts."""
        missing_gradients.fill(self.module, self._parameter_list)
        if self._measure():
            self.optimizer.step()
            overflow = self.optimizer.step_was_skipped
        else:
            overflow = True
            with self.accelerator.run.events.phase["step"]:
                pass  # nothing is applied, but for whoever measures this step ends too
        self.optimizer.zero_grad()
        self.optimizer.overflow = overflow  # where DeepSpeed's scripts look for it
        self._applied = not overflow
        if overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.prepared.step(**lr_kwargs)
        self.global_steps += 1
        num_micro = self.batch.accumulate if self._counts_windows else self._num_passes
        self.global_samples += self.batch.micro * num_micro * self.batch.width
        self.tput_timer.count_step()

    def _measure(self) -> bool:
        """Takes the norm, and clips. False where the step is to be left out. Ranks: all, since the norm is that of all."""
        clip = self.config["gradient_clipping"]
        is_divided = self.view.zero_optimization()
        checks = self.config["bf16.enabled"] and self.config["bf16.check_grad_overflow"]
        if not (clip or checks or self.config["fp16.enabled"] or is_divided):
            return True
        parameters = [parameter for parameter in self._parameter_list if parameter.requires_grad]
        inner = self.basic_optimizer
        if isinstance(inner, MuonWithAdam) and is_divided:
            inner.max_norm = clip
            clip = 0.0
        # An infinite limit clips nothing: the norm alone is taken, for `get_global_grad_norm` and the check.
        self._norm = self.accelerator.clip_grad_norm_(parameters, clip or math.inf)
        return not checks or bool(torch.isfinite(self._norm))

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Averages, at a boundary, gradients that the last backward pass held back; `bucket_size` is the plan's. Ranks: all."""
        if self.is_gradient_accumulation_boundary() and self._unreduced and not self.inside_no_sync_ctxt:
            self.accelerator.gradients.sync = True
            self.accelerator.steps.finish_reduction()
            self._unreduced = False

    def empty_partition_cache(self) -> None:
        """Gives up the whole parameters that stage 3 keeps gathered between a forward and a backward pass."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.prepared_model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def offload_states(self, *arguments: Any, **keywords: Any) -> None:
        """Moves states to the host's memory until `reload_states`; the arguments are those of `OffloadedTensors.offload`."""
        self.offloaded.offload(*arguments, **keywords)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the states of `offload_states` back."""
        self.offloaded.reload(non_blocking)

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    @property
    def is_compiled(self) -> bool:
        return is_compiled_in_place(self) or is_compiled_in_place(self.module)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients."""
        self.prepared_model.zero_grad()  # and what is kept elsewhere until it is reduced
        if self.optimizer is not None:
            self.optimizer.optimizer.zero_grad()
        for parameter in self.module.parameters():
            parameter.grad = None

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Returns the last window's gradient norm before clipping: infinity after an overflow, None where none was taken."""
        if self._norm is None:
            return None
        return torch.where(torch.isfinite(self._norm), self._norm, math.inf)

    def give_up(self) -> None:
        """Called when a later engine trains the model: this one has no optimizer any more."""
        self.optimizer = self._lr_scheduler = self.basic_optimizer = None
        self.has_given_up = True

    def _needs_optimizer(self, what: str) -> None:
        if self.optimizer is not None:
            return
        why = f"neither `initialize(optimizer=...)` nor {self.config.source} names one"
        fix = 'write `"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}` in the config'
        if self.has_given_up:
            why = "a later call of `deepspeed.initialize` got the same model, whose gradients belong to one engine"
            fix = "use the engine that this call has returned"
        raise TrainError(
            "deepspeed-optimizer-missing",
            f"`engine.{what}` was called, but the engine has no optimizer.",
            why=why,
            fix=fix,
        )

    deepspeed_io = deepspeed_io

    # -- the optimizer's numbers -----------------------------------------------------------------------------------

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: not inside a window, and not after an overflow."""
        return self._applied

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._groups()]

    def set_lr(self, lr: float) -> None:
        for group in self._groups():
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Betas (or momentum) of each group."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """Returns the `type` of each group; 0.0, as DeepSpeed does, for a group without one."""
        return [group.get("type", 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            return []
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the micro-batch and the step that ended last, by DeepSpeed's names."""
        return dict(self.events.timers.last)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    save_checkpoint = checkpoint.save_checkpoint
    load_checkpoint = checkpoint.load_checkpoint
    save_16bit_model = checkpoint.save_16bit_model
    save_fp16_model = save_16bit_model  # its older name
    module_state_dict = module_state.module_state_dict
    load_module_state_dict = module_state.load_module_state_dict

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Returns the whole state of the model; transformers and accelerate call this name at stage 3. Ranks: all."""
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict  # what OpenRLHF calls

    # -- what only a pipeline has ----------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> Any:
        _refuse_without_pipeline("train_batch", self.module)

    def eval_batch(self, data_iter: Any = None, **keywords: Any) -> Any:
        _refuse_without_pipeline("eval_batch", self.module)

    def destroy(self) -> None:
        """Closes what the engine opened: the monitors' files."""
        self.monitor.finish()

    @property
    def monitor(self) -> Any:
        return self.events.monitors

    def __getattr__(self, name: str) -> Any:
        view = self.__dict__.get("view")
        if not name.startswith("_") and hasattr(ConfigView, name) and view is not None:
            return getattr(view, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)


def _refuse_without_pipeline(method: str, model: nn.Module) -> NoReturn:
    raise TrainError(
        "deepspeed-train-batch",
        f"`engine.{method}` runs a pipeline, and this model is none.",
        why=f"{type(model).__name__} is no PipelineModule, so the engine does not know its loss",
        fix="write the loop: `loss = ...engine(inputs)...; engine.backward(loss); engine.step()`; or make the model a "
        "`deepspeed.pipe.PipelineModule(layers, loss_fn=..., num_stages=1)`",
    )
