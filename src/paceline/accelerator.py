"""`Accelerator`: the facade that a training script holds. It holds and delegates, and contains no algorithm.

Accelerator(...)   World.detect -> settings merged -> draft plan -> process group up
prepare(...)       facts -> plan -> chain -> optimizers -> loaders        (preparation.py)
the loop           accumulate, backward, clip, step, gather_for_metrics   (optim/, world/collectives.py)
save_state         one TrainState                                         (keeping.py, checkpoint/)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypedDict, TypeVar, TypeVarTuple, Unpack, cast, overload

import torch
from torch import nn

from paceline.base.errors import PlanError
from paceline.base.log import warn_once
from paceline.checkpoint.retention import Keep
from paceline.config import resolve_run
from paceline.config.keywords import checked_keywords, refuse_unknown
from paceline.data.active import ActiveLoaders
from paceline.data.metrics import gather_for_metrics
from paceline.data.skip import skip_first_batches
from paceline.keeping import Keeping
from paceline.observe.profile import profile as observe_profile
from paceline.observe.profiles import NAME as PROFILES
from paceline.observe.profiles import chosen
from paceline.observe.trackers.group import Trackers
from paceline.optim.accumulate import Accumulation
from paceline.optim.clip import clip_grad_norm, clip_grad_value
from paceline.parallel.batch_norm import local_statistics
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft
from paceline.precision.policy import TABLE, autocast
from paceline.precision.scaler import LossScaler
from paceline.preparation import Preparation
from paceline.profiling import profiles_of
from paceline.states import States, UnkeptStates
from paceline.steps import Steps
from paceline.world import rendezvous, runtime, torch_version
from paceline.world.collectives import Collectives
from paceline.world.mesh import Mesh
from paceline.world.places import user_frame
from paceline.world.world import World

Prepared = TypeVar("Prepared")
Several = TypeVarTuple("Several")
Model = TypeVar("Model", bound=nn.Module)


class BackwardOptions(TypedDict, total=False):
    """What `Tensor.backward` takes besides."""

    gradient: torch.Tensor | None
    retain_graph: bool | None
    create_graph: bool
    inputs: torch.Tensor | Sequence[torch.Tensor] | None


@checked_keywords
class Accelerator(Keeping):
    """Runs an ordinary PyTorch loop on any number of processes, with the same numbers.

    Any argument left None is taken from the command line of `paceline launch`, else the environment, else a config
    file, else its default; `accelerator.plan.explain()` says which.

    Args:
        mixed_precision: "no", "bf16" or "fp16".
        gradient_accumulation_steps: micro-batches in one optimizer step.
        cpu: True computes on the CPU although there is an accelerator.
        plan: settings of the plan, such as `{"shard": 2, "zero": 1}`; or the name of a config file.
        options: options of strategies, such as `{"replicate": {"comm_hook": "bf16"}}`.
        split_batches: a loader's batch size is that of all ranks together (False: of one rank).
        dispatch_batches: rank 0 reads and sends each rank its part.
        even_batches: fills the last global batch with repeated samples (False: divides it).
        data_seed: with the epoch, decides the order of shuffled loaders; None takes torch's seed on rank 0.
        non_blocking: copies batches to the device without waiting.
        log_with: trackers, such as "jsonl" or ["tensorboard", MyTracker].
        project_dir: where checkpoints with automatic names and trackers write; of a URL (`s3://bucket/run`), checkpoints.
        total_limit: how many automatically named checkpoints are kept; None keeps all.
        keep: a rule for that, in place of a number: `Keep(last=3, every=1000, best="loss")`.
        scaler: options of the loss scaler (`init_scale`, `growth_interval`, `hysteresis`, ...); see `precision.scale.Growth`.
        profile: what is measured: some of "wall-clock", "flops", "comms", "memory", or "all"; as text, as a list, or with
            options of each: `{"flops": {"step": 3}}`; see `accelerator.profiles`.
        debug: checks every collective across ranks and explains hangs.
        timeout_s: seconds after which a collective that some rank never enters fails.

    Ranks: all construct it; with more than one process it forms the process group.
    Raises: ConfigError, PlanError, WorldError: before the group is up, all problems at once.
    """

    _constructed_at = ("", 0)  # file and line, of an instance
    _preparation = Preparation  # a class of its own where `prepare` has other manners

    def __init__(
        self,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        *,
        plan: Mapping[str, Any] | str | Path | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        split_batches: bool | None = None,
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        data_seed: int | None = None,
        non_blocking: bool | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        total_limit: int | None = None,
        keep: Keep | None = None,
        scaler: Mapping[str, Any] | None = None,
        profile: str | Sequence[str] | Mapping[str, Any] | None = None,
        debug: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        torch_version.check(torch.__version__)
        frame = user_frame()
        self._constructed_at = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        measured, options = chosen(profile, options)
        resolved = resolve_run(dict(
            mixed_precision=mixed_precision, accumulate=gradient_accumulation_steps, cpu=cpu, debug=debug,
            timeout_s=timeout_s, split_batches=split_batches, dispatch_batches=dispatch_batches,
            even_batches=even_batches, data_seed=data_seed, non_blocking=non_blocking, profile=measured,
        ), plan=plan, options=options)  # fmt: skip
        self.settings = settings = resolved.settings
        decisions = [Decision(**vars(choice)) for choice in resolved.decisions]
        found = World.detect()
        plain = {name: told for name, told in settings.options.items() if name != PROFILES}
        started = draft(vars(settings), decisions, found.size, plain)
        for notice in resolved.notices:
            warn_once("config", notice)
        world = rendezvous.join(found, cpu=settings.cpu, timeout_s=settings.timeout_s)
        device = torch.device(world.device)
        surroundings = runtime.current()
        collectives = surroundings.collectives(world, device) or Collectives(
            world, device=device, debug=settings.debug, timeout_s=settings.timeout_s,
            hang_report_s=settings.hang_report_s)  # fmt: skip
        super().__init__(world, device, collectives)
        self._precision = TABLE[started.precision]
        # Options are checked under every precision: a misspelt one must not wait for the first run in fp16.
        loss_scaler = LossScaler(device, collectives, **(scaler or {})) if self._precision.scales or scaler else None
        self.scaler = loss_scaler if self._precision.scales else None
        self._active = ActiveLoaders()
        self.gradients = Accumulation(started.accumulate, started.layout.width, self._active, collectives)
        self._prepared = self._preparation(
            started, collectives, device, self._precision, self.gradients, self.scaler, self._active,
            dict(seed=settings.data_seed, split_batches=settings.split_batches, dispatch=settings.dispatch_batches,
                 tail="pad" if settings.even_batches else "divide", non_blocking=settings.non_blocking))  # fmt: skip
        self.project_dir = None if project_dir is None else str(project_dir)
        self.trackers = Trackers(log_with, self.logging_dir, is_main=world.is_main)
        kind = States if surroundings.keeps_files else UnkeptStates
        self._states = kind(
            self._prepared, self.collectives, self.scaler, self.project_dir, Keep.of(total_limit, keep),
            next(each for each in decisions if each.field == "resume"), self._active, self.gradients)  # fmt: skip
        self._steps = Steps(self._prepared, self.gradients, self.scaler, self._active, collectives, settings.debug)
        self.profiles = profiles_of(
            settings, self._prepared, self._active, collectives, world, device, self.project_dir, decisions)  # fmt: skip
        self._norm = torch.zeros((), device=device)

    # -- what this run is --------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the models prepared last; before that its draft."""
        return self._prepared.plan

    @property
    def mesh(self) -> Mesh:
        """The groups of the plan."""
        return self._prepared.mesh

    @property
    def mixed_precision(self) -> str:
        """Name of the precision."""
        return self._precision.name

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in one optimizer step."""
        return self.gradients.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise PlanError(
                "plan-accumulate",
                f"{steps!r} micro-batches cannot make an optimizer step.",
                why=f"accelerator.gradient_accumulation_steps = {steps!r}; it is a whole number, 1 or more",
                fix="set gradient_accumulation_steps to 1 or more",
            )
        self.gradients.steps = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch at hand ends its window, so that optimizers step."""
        return self.gradients.sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of some optimizer was skipped because a gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    @property
    def logging_dir(self) -> str:
        """Where trackers write: `project_dir`, or `runs` where that is the URL of a store, since logs are appended to."""
        folder = (self.project_dir or "runs").removeprefix("file://")
        return "runs" if "://" in folder else folder

    # -- prepare -----------------------------------------------------------------------------------------------

    @overload
    def prepare(self, prepared: Prepared, /, *, device_placement: Sequence[bool] | None = None) -> Prepared: ...
    @overload
    def prepare(self, *objects: *Several, device_placement: Sequence[bool] | None = None) -> tuple[*Several]: ...
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepares models, optimizers, loaders and schedulers, any number in any order.

        To type checkers each comes back as what it was: a loop uses it alike. Where a plan wraps a model,
        `unwrap_model` gives the module with attributes of its own; a prepared loader is no `DataLoader` for `isinstance`.

        Args:
            device_placement: for each object, whether it (a loader: its batches) is moved to the device; None moves all.

        Returns the prepared objects in the same order; one object alone for one.

        Ranks: all, with the same objects in the same order.

        Raises: PrepareError, PlanError, DataError: before anything is touched, where that can be known.
        """
        result = self._prepared.prepare(objects, device_placement)
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self,
        model: Model,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        plan: Mapping[str, Any] | None = None,
    ) -> Model:
        """Prepares one model. Ranks: all.

        Args:
            evaluation_mode: it is moved and computes in the run's precision, nothing more.
            plan: another plan than the run's, for this model (a frozen teacher beside a sharded student); its ranks must
                read the same samples, so `replicate` x `shard` stays what it is.
        """
        place = device_placement is not False
        if evaluation_mode:
            return cast(Model, self._prepared.evaluation_model(model, place=place))
        with self._prepared.under(plan):
            return self.prepare(model, device_placement=[place])

    def prepare_data_loader(self, data_loader: Prepared, device_placement: bool | None = None) -> Prepared:
        """Prepares one loader. Ranks: all."""
        return cast(Prepared, self._prepared.loader(data_loader, place=device_placement is not False))

    def prepare_optimizer(self, optimizer: Prepared) -> Prepared:
        """Prepares one optimizer of models that were prepared before."""
        return cast(Prepared, self._prepared.optimizer(optimizer))

    def prepare_scheduler(self, scheduler: Prepared) -> Prepared:
        """Prepares one scheduler."""
        return cast(Prepared, self._prepared.scheduler(scheduler))

    def free_memory(self, *objects: Any) -> list[None]:
        """Forgets everything that was prepared and empties the device's cache; returns as many Nones as objects."""
        self._prepared.clear()
        self._states.clear()
        return [None] * len(objects)

    clear = free_memory

    # -- the step ----------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch: optimizers step, and ranks communicate, only at the end of a window.

        Args:
            models: those that the micro-batch trains; none means all prepared ones.
        """
        with self._prepared.exhausted("forward"), self.gradients.window(lambda: self._prepared.hold_gradients(models)):
            yield

    def no_sync(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """Backward passes inside accumulate gradients without communication."""
        return self._prepared.hold_gradients(models)

    def backward(
        self, loss: torch.Tensor, num_items: int | torch.Tensor | None = None, **kwargs: Unpack[BackwardOptions]
    ) -> None:
        """Computes gradients such that a window's gradient is the mean over its samples (or items), at every width.

        Args:
            loss: 0-dim; the mean over this rank's micro-batch, or with `num_items` the sum over its items.
            num_items: items (tokens) that `loss` sums over on this rank; counted exactly over micro-batches and ranks.
            kwargs: for `Tensor.backward`.

        Ranks: all; communicates at the end of a window.

        Raises:
            PlanError, TrainError: `backward-pipeline`, `unused-parameters`, `backward-loss`, `accumulate-outside`.
        """
        if kwargs:
            refuse_unknown("backward", kwargs, ("num_items", *BackwardOptions.__annotations__))
        self._steps.backward(loss, num_items, **kwargs)

    def forward_backward(
        self, model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor], num_items: int | None = None
    ) -> torch.Tensor:
        """Forward, loss and backward in one call, which works under every plan.

        Args:
            batch: a pair or longer sequence `(*inputs, target)`, of which the model gets the inputs and `loss_fn(output,
                target)` the last; or a mapping, which the model gets as keywords and `loss_fn(output, batch)` whole; or
                `parallel.microbatches.Microbatches` of these, which make one step.
            num_items: as in `backward`.

        Returns this rank's loss, 0-dim, detached.
        """
        return self._steps.forward_backward(model, batch, loss_fn, num_items)

    def full_parameters(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[Any]:
        """While it is open, the model's parameters are whole plain tensors, on every rank that holds a part of them.

        Args:
            model: a prepared model.
            writeback: takes changes over into the divided parameters; every rank must make the same ones.

        Ranks: all open it.
        """
        return self._prepared.full_parameters(model, writeback)

    def autocast(self, enabled: bool = True, cache_enabled: bool | None = None) -> AbstractContextManager[Any]:
        """Computes in the run's precision; for code outside the model's forward, which does so by itself."""
        return autocast(self._precision, self.device, enabled=enabled, cache_enabled=cache_enabled)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Makes gradients final: corrected to the window's real size, and unscaled under fp16."""
        chosen = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        for each in self._prepared.optimizers:
            if optimizer is None or each in chosen:
                each.unscale()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the window's gradients to a norm of at most `max_norm`; inside a window it does nothing.

        Returns the norm before clipping, 0-dim, the same on every rank; inside a window that of the window before.
        """
        if self.gradients.sync:
            with self._prepared.phase("clip"):
                self.unscale_gradients()
                self._norm = clip_grad_norm(parameters, max_norm, norm_type, self._prepared.across())
        return self._norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamps the window's gradients to [-clip_value, clip_value]; inside a window it does nothing."""
        if self.gradients.sync:
            with self._prepared.phase("clip"):
                self.unscale_gradients()
                clip_grad_value(parameters, clip_value)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Lets ranks take different numbers of steps over loaders that were NOT prepared; prepared ones are even already."""
        from torch.distributed.algorithms.join import Join, Joinable

        wrapped = [each for each in joinables if isinstance(each, Joinable)]
        models = [each.module for each in self._prepared.models]
        with local_statistics(models), Join(wrapped) if wrapped and self.use_distributed else nullcontext():
            yield

    # -- between ranks -----------------------------------------------------------------------------------------

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers what belongs to the current batch over real samples only, in sample order.

        Args:
            input_data: any nesting of tensors [rows of this rank's batch, ...] or 0-dim ones (of which one for each rank
                with a real sample comes back), or objects: a list with one entry a row, or anything.
            use_gather_object: gathers Python objects even where there are tensors.

        Ranks: all; all get the result, by one collective for the whole structure.
        """
        return gather_for_metrics(self._active, self._prepared.data, input_data, use_gather_object)

    # -- models and files --------------------------------------------------------------------------------------

    def unwrap_model(self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Model:
        """The module that the user wrote.

        Args:
            keep_fp32_wrapper: False also takes off the mixed-precision forward.
            keep_torch_compile: False also takes the module out of `torch.compile`.
        """
        return cast(Model, self._prepared.unwrap(model, keep_fp32_wrapper, keep_torch_compile))

    def skip_first_batches(self, dataloader: Prepared, num_batches: int = 0) -> Prepared:
        """A loader without the first `num_batches` batches of each epoch."""
        return skip_first_batches(dataloader, num_batches)

    # -- logs --------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers of `log_with`, on the main process."""
        self.trackers.start(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name (one that does nothing on other processes)."""
        return self.trackers.get_tracker(name, unwrap)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Logs values to every tracker, on the main process."""
        self.trackers.log(values, step)

    def end_training(self) -> None:
        """Waits for a save that is under way, finishes trackers and leaves the process group. Ranks: all.

        What was measured is told, or written to `profile.jsonl` in `project_dir`.
        """
        try:
            if self.profiles is not None:
                self.profiles.finish()
            self._states.end()
        finally:
            self.trackers.finish()
            rendezvous.leave()

    def profile(self, **options: Any) -> AbstractContextManager[Any]:
        """torch's profiler over a block; options and errors as of `paceline.observe.profile.profile`."""
        return observe_profile(rank=self.process_index, **options)

    def __repr__(self) -> str:
        return f"Accelerator({self.plan.layout}, precision {self.mixed_precision}, device {self.device})"
