"""`Accelerator`: the facade that a training script holds. It holds and delegates, and contains no algorithm.

Accelerator(...)   World.detect -> settings merged -> draft plan -> process group up -> Run      (run.py)
prepare(...)       facts -> plan -> chain -> optimizers -> loaders        (preparation.py, prepared.py)
the loop           accumulate, backward, clip, step, gather_for_metrics   (steps.py, optim/, world/collectives.py)
save_state         one TrainState                                         (states.py, checkpoint/)

What other libraries' doors (`compat/`) build on, and no script: the attributes `run`, `preparation`, `steps` and `states` of
an accelerator, `run.live_runs()`, and a subclass' `_preparation_class`, whose methods `Preparation` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar, TypeVarTuple, Unpack, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.anomalies import anomalies_of
from paceline.anomalies import chosen as chosen_anomalies
from paceline.base.log import warn_once
from paceline.checkpoint.files import save_object
from paceline.checkpoint.retention import Keep
from paceline.checkpoint.state.train_state import Stateful
from paceline.config import resolve_run
from paceline.config.keywords import checked_keywords, refuse_unknown
from paceline.data.metrics import gather_for_metrics
from paceline.data.skip import skip_first_batches
from paceline.observe.profile import profile as observe_profile
from paceline.observe.profiles import chosen
from paceline.observe.trackers.group import Trackers
from paceline.observe.trackers.group import Wanted as TrackerChoice
from paceline.optim.clip import clip_grad_norm, clip_grad_value
from paceline.optim.schedule import Scheduler
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft
from paceline.preparation import Preparation
from paceline.profiling import profiles_of
from paceline.run import Run
from paceline.states import Hook, Start, States, UnkeptStates
from paceline.steps import Steps
from paceline.system_values import system_values_of
from paceline.watching import telemetry_of
from paceline.world import rendezvous, runtime, torch_version
from paceline.world.collectives import Collectives
from paceline.world.mesh import Mesh
from paceline.world.participant import Participant
from paceline.world.places import user_frame
from paceline.world.progress_thread import watch as watch_progress
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
class Accelerator(Participant):
    """Runs an ordinary PyTorch loop on any number of processes, with the losses and weights of one process.

    An argument that is None gets its value from the command line of `paceline launch`, the environment, a config file or
    its default, in this order of precedence; `accelerator.plan.explain()` shows the source.

    Args:
        mixed_precision: "no", "bf16" or "fp16".
        gradient_accumulation_steps: micro-batches in one optimizer step.
        cpu: True computes on the CPU, even if there is an accelerator.
        plan: settings of the plan, such as `{"shard": 2, "zero": 1}`, or the path of a config file.
        options: options of strategies, such as `{"replicate": {"comm_hook": "bf16"}}`.
        split_batches: True: the batch size of a loader is that of all ranks together. False: it is that of one rank.
        dispatch_batches: True: rank 0 reads all samples and sends each rank its part.
        even_batches: True: the last global batch is filled with repeated samples. False: it is divided.
        data_seed: seed of the order of shuffled loaders, together with the epoch; None means torch's seed on rank 0.
        non_blocking: copies batches to the device without waiting for the end of the copy.
        log_system: `log` adds throughput, model FLOPs utilisation and memory, such as `system/samples_per_second`.
        log_with: trackers, such as "jsonl" or ["tensorboard", MyTracker].
        project_dir: folder for checkpoints with automatic names and for trackers; a URL (`s3://...`) only for checkpoints.
        total_limit: number of checkpoints with automatic names to keep; None keeps all.
        keep: rules instead of a number: `Keep(last=3, every=1000, best="loss")`.
        scaler: options of the loss scaler (`init_scale`, `growth_interval`, `hysteresis`, ...); see `precision.scale.Growth`.
        profile: what to measure: some of "wall-clock", "flops", "comms", "memory", or "all"; as text, as a list, or with
            options of each: `{"flops": {"step": 3}}`; see `accelerator.profiles`.
        anomalies: what to do before a step with an unusual loss or gradient is taken, by kind: `{"nan": "skip",
            "loss_spike": {"deviations": 6, "action": "rollback"}, "gradient_norm": {"factor": 10, "action": "log"}}`.
        debug: checks before each collective that all ranks call the same one, and explains hangs.
        timeout_s: seconds after which a collective fails if some rank does not call it.

    Ranks: all construct it; with more than one process it creates the process group.
    Raises: ConfigError, PlanError, WorldError: all problems at once, before the group is created.
    """

    _constructed_at = ("", 0)  # file and line, of an instance
    _preparation_class: ClassVar[type[Preparation]] = Preparation  # another where `prepare` has other manners

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
        log_system: bool | None = None,
        log_with: TrackerChoice | Iterable[TrackerChoice] | None = None,
        project_dir: str | Path | None = None,
        total_limit: int | None = None,
        keep: Keep | None = None,
        scaler: Mapping[str, Any] | None = None,
        profile: str | Sequence[str] | Mapping[str, Any] | None = None,
        anomalies: Mapping[str, Any] | None = None,
        debug: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        torch_version.check(torch.__version__)
        frame = user_frame()
        self._constructed_at = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        profile_names, options = chosen(profile, options)
        options = chosen_anomalies(anomalies, options)
        resolved = resolve_run(dict(
            mixed_precision=mixed_precision, accumulate=gradient_accumulation_steps, cpu=cpu, debug=debug,
            timeout_s=timeout_s, split_batches=split_batches, dispatch_batches=dispatch_batches,
            even_batches=even_batches, data_seed=data_seed, non_blocking=non_blocking, profile=profile_names,
            log_system=log_system,
        ), plan=plan, options=options)  # fmt: skip
        surroundings = runtime.current()
        settings = surroundings.settings(resolved.settings)
        decisions = [Decision(**vars(choice)) for choice in resolved.decisions]
        detected = World.detect()
        draft_plan = draft(settings.by_name(), decisions, detected.size, settings.options)
        for notice in resolved.notices:
            warn_once("config", notice)
        world = rendezvous.join(detected, cpu=settings.cpu, timeout_s=settings.timeout_s)
        device = torch.device(world.device)
        collectives = surroundings.collectives(world, device) or Collectives(
            world, device=device, debug=settings.debug, timeout_s=settings.timeout_s,
            hang_report_s=settings.hang_report_s)  # fmt: skip
        super().__init__(world, device, collectives)
        self.settings = settings
        self.project_dir = None if project_dir is None else str(project_dir)
        self.run = Run(world, device, collectives, settings, decisions, draft_plan, scaler, self.project_dir)
        progress = watch_progress(world, settings.stuck_after, computes_on_cpu=device.type == "cpu")
        if progress is not None:
            self.run.events.before_step.subscribe(lambda _: progress.stepped())
        self.gradients = self.run.gradients
        self.scaler = self.run.scaler
        self.trackers = Trackers(log_with, self.logging_dir, is_main=world.is_main)
        self.profiles = profiles_of(self.run)
        self._system_values = system_values_of(self.run, self.profiles)
        self.preparation = self._preparation_class(self.run, self.profiles)
        self.steps = Steps(self.run)
        kind = States if surroundings.keeps_files else UnkeptStates
        self.states = kind(self.run, Keep.of(total_limit, keep))
        self._anomalies = anomalies_of(self.run, self.states)
        self._norm = torch.zeros((), device=device)
        telemetry_of(self.run)

    # -- what this run is --------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the models that were prepared last, or a draft before `prepare`."""
        return self.run.plan

    @property
    def mesh(self) -> Mesh:
        """The device mesh of the plan, with the process groups of its axes."""
        return self.run.mesh

    @property
    def mixed_precision(self) -> str:
        """Name of the precision."""
        return self.run.precision.name

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in one optimizer step."""
        return self.gradients.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradients.set_steps(steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window, so that optimizers step."""
        return self.gradients.sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer was skipped because of an overflow or an anomaly."""
        return any(optimizer.step_was_skipped for optimizer in self.run.prepared.optimizers)

    @property
    def anomaly_counts(self) -> dict[str, int]:
        """How many steps had an anomaly of each kind ("nan", "loss_spike", "gradient_norm"), how many of them were "skipped",
        and how often the run went back ("rollbacks"); empty where no anomalies are looked for."""
        return {} if self._anomalies is None else dict(self._anomalies.counts)

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
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:  # type: ignore[misc]
        """Prepares models, optimizers, loaders and schedulers, any number in any order.

        For type checkers, each object keeps its type. If the plan wraps a model, `unwrap_model` returns the module with
        its own attributes. A prepared loader is not an instance of `DataLoader`.

        Args:
            device_placement: for each object, whether it (a loader: its batches) is moved to the device; None moves all.

        Returns the prepared objects in the same order; for one object, this object.

        Ranks: all, with the same objects in the same order.

        Raises: PrepareError, PlanError, DataError: before any object is changed, if possible.
        """
        result = self.preparation.prepare(objects, device_placement)
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
            evaluation_mode: the model is only moved to the device, and computes in the precision of the run.
            plan: another plan than the run's, for this model (a frozen teacher beside a sharded student); its ranks must
                read the same samples, so `replicate` x `shard` stays what it is.
        """
        place = device_placement is not False
        if evaluation_mode:
            return cast(Model, self.preparation.evaluation_model(model, place=place))
        return cast(Model, self.preparation.prepare([model], [place], plan)[0])

    def prepare_data_loader(self, data_loader: Prepared, device_placement: bool | None = None) -> Prepared:
        """Prepares one loader. Ranks: all."""
        loader = cast(DataLoader[Any], data_loader)
        return cast(Prepared, self.preparation.loader(loader, place=device_placement is not False))

    def prepare_optimizer(self, optimizer: Prepared) -> Prepared:
        """Prepares one optimizer of models that were prepared before."""
        return cast(Prepared, self.preparation.prepare([optimizer])[0])

    def prepare_scheduler(self, scheduler: Prepared) -> Prepared:
        """Prepares one scheduler."""
        return cast(Prepared, self.preparation.scheduler(cast(Scheduler, scheduler)))

    def skip_first_batches(self, dataloader: Prepared, num_batches: int = 0) -> Prepared:
        """A loader without the first `num_batches` batches of each epoch."""
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: object) -> list[None]:
        """Drops everything that was prepared and empties the device's cache; returns one None for each object."""
        self.preparation.clear()
        self.states.clear()
        return [None] * len(objects)

    clear = free_memory

    # -- the step ----------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch: optimizers step, and ranks communicate, only at the end of a window.

        Args:
            models: the models that the micro-batch trains; without any, all prepared ones.
        """
        window = self.gradients.window(lambda: self.run.prepared.hold_gradients(models))
        with self.run.explaining_memory("forward"), window:
            yield

    def no_sync(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """Inside this context, backward passes accumulate gradients without communication."""
        return self.run.prepared.hold_gradients(models)

    def backward(
        self, loss: torch.Tensor, num_items: int | torch.Tensor | None = None, **kwargs: Unpack[BackwardOptions]
    ) -> None:
        """Computes gradients. The gradient of a window is the mean over all its samples (or items), on any number of ranks.

        Args:
            loss: 0-dim tensor: the mean over the micro-batch of this rank, or with `num_items` the sum over its items.
            num_items: number of items (tokens) over which `loss` is summed on this rank.
            kwargs: passed to `Tensor.backward`.

        Ranks: all; communicates at the end of a window.

        Raises:
            PlanError, TrainError: `backward-pipeline`, `unused-parameters`, `backward-loss`, `accumulate-outside`.
        """
        if kwargs:
            refuse_unknown("backward", kwargs, ("num_items", *BackwardOptions.__annotations__))
        self.steps.backward(loss, num_items, **kwargs)

    def forward_backward(
        self, model: nn.Module, batch: object, loss_fn: Callable[..., torch.Tensor], num_items: int | None = None
    ) -> torch.Tensor:
        """Runs the forward pass, the loss and the backward pass in one call, which works under every plan.

        Args:
            batch: a pair or longer sequence `(*inputs, target)`, of which the model gets the inputs and `loss_fn(output,
                target)` the last; or a mapping, which the model gets as keywords and `loss_fn(output, batch)` whole; or
                `parallel.microbatches.Microbatches` of these, which make one step.
            num_items: as in `backward`.

        Returns this rank's loss, 0-dim, detached.
        """
        return self.steps.forward_backward(model, batch, loss_fn, num_items)

    def full_parameters(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[Any]:
        """Inside this context, the parameters of the model are whole plain tensors on every rank that holds a part of them.

        Args:
            model: a prepared model.
            writeback: copies changes into the divided parameters; every rank must make the same changes.

        Ranks: all enter it.
        """
        return self.run.prepared.full_parameters(model, writeback)

    def autocast(self, enabled: bool = True, cache_enabled: bool | None = None) -> AbstractContextManager[Any]:
        """Computes in the precision of the run; for code outside of the model, whose forward pass does this itself."""
        return self.run.precision.autocast(self.device, enabled=enabled, cache_enabled=cache_enabled)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Makes gradients final: corrects them to the real size of the window, and unscales them under fp16."""
        chosen = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        for prepared in self.run.prepared.optimizers:
            if optimizer is None or prepared in chosen:
                prepared.unscale()

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scales the gradients of a window to a norm of at most `max_norm`; before the end of the window it does nothing.

        Returns the norm before clipping, 0-dim, the same on every rank; before the end of a window, the previous norm.
        """
        if self.gradients.sync:
            with self.run.events.phase("clip"):
                self.unscale_gradients()
                self._norm = clip_grad_norm(parameters, max_norm, norm_type, self.run.prepared.across())
                self.run.events.clipped(self._norm)
        return self._norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps the gradients of a window to [-clip_value, clip_value]; before the end of the window it does nothing."""
        if self.gradients.sync:
            with self.run.events.phase("clip"):
                self.unscale_gradients()
                clip_grad_value(parameters, clip_value)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Lets ranks take different numbers of steps over loaders that were NOT prepared; prepared loaders do not need it."""
        from torch.distributed.algorithms.join import Join, Joinable

        if self._anomalies is not None and self.use_distributed:
            self._anomalies.refuse_uneven_steps()
        wrapped = [model for model in joinables if isinstance(model, Joinable)]
        with ExitStack() as stack:
            for entry in self.run.prepared.models:
                stack.enter_context(entry.chain.uneven_steps())
            if wrapped and self.use_distributed:
                stack.enter_context(Join(wrapped))
            yield

    # -- between ranks -----------------------------------------------------------------------------------------

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Gathers values of the current batch from all ranks: only for real samples, in their order.

        Args:
            input_data: any nesting of tensors [rows of this rank's batch, ...] or 0-dim ones (of which one for each rank
                with a real sample comes back), or objects: a list with one entry a row, or anything.
            use_gather_object: gathers Python objects, even if there are tensors.

        Ranks: all; all get the result. The whole structure needs one collective.
        """
        result = gather_for_metrics(self.run.active_loaders, self.run.data_ranks, input_data, use_gather_object)
        runtime.current().gathered("gather_for_metrics", input_data, result)
        return result

    # -- models and files --------------------------------------------------------------------------------------

    def unwrap_model(self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Model:
        """Returns the module that the user wrote.

        Args:
            keep_fp32_wrapper: False also removes the mixed-precision forward.
            keep_torch_compile: False also removes `torch.compile`.
        """
        return cast(Model, self.run.prepared.unwrap(model, keep_fp32_wrapper, keep_torch_compile))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the whole state of a model under every plan. Ranks: all; all get it."""
        return self.run.prepared.state_dict(model, self.unwrap_model(model) if unwrap else model)

    def save(self, obj: object, f: str | Path, safe_serialization: bool = False) -> None:
        """Writes an object to `f` on the main process: first to a temporary file, which is then renamed."""
        if self.is_main_process and self.states.writes:
            save_object(obj, str(f), safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: str | int = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes a model with the file names of Hugging Face, in files of at most `max_shard_size`, under every plan.

        The ranks that write receive tensors row by row, so no rank ever holds the whole model.

        Ranks: all.

        Raises:
            CheckpointError: on every rank; what was saved in the folder before is whole.
        """
        if not self.states.writes:
            return
        from paceline.checkpoint.weights import model as files  # takes half a second: not before it is needed

        names, tied = self._names_of(model)
        files.save_model(
            self.unwrap_model(model),
            save_directory,
            max_shard_size,
            safe_serialization,
            peers=self.collectives,
            order=names,
            tied=tied,
        )

    def load_model(self, model: nn.Module, directory: str | Path, *, strict: bool = True) -> None:
        """Reads weights into a model under every plan; each rank reads only its own part.

        Args:
            model: a model before or after `prepare`, also on the meta device.
            directory: a folder that `save_model`, a Hugging Face library, `save_state` or torch's distributed checkpoint
                wrote, or one file of weights (safetensors, or `torch.save`).
            strict: whether all names must be the same; shapes must always be the same.

        Ranks: all.

        Raises:
            CheckpointError: `checkpoint-other-model` with what is missing, unexpected or misshapen; nothing was touched.
        """
        from paceline.checkpoint.weights import model as files

        _, tied = self._names_of(model)
        files.load_model(self.unwrap_model(model), directory, strict=strict, peers=self.collectives, tied=tied)

    def _names_of(self, model: nn.Module) -> tuple[Sequence[str], Mapping[str, str]]:
        """All names of a model's state in order, and the tied ones; () and {} where no plan has changed it."""
        entry = self.run.prepared.find(model)
        return ((), {}) if entry is None else (entry.names, entry.tied)

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Lets `save_state` also save these objects, which have `state_dict` and `load_state_dict`."""
        self.states.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Hook:
        """Calls `hook(models, weights, output_dir)` before each save; returns a handle with `remove()`."""
        return self.states.add_hook("save", hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Hook:
        """Calls `hook(models, input_dir)` before each load; returns a handle with `remove()`."""
        return self.states.add_hook("load", hook)

    def save_state(
        self,
        output_dir: str | Path | None = None,
        *,
        background: bool = False,
        busy: str = "wait",
        metrics: Mapping[str, float] | None = None,
    ) -> str | None:
        """Saves everything that a resume needs: models, optimizers, schedulers, loaders, scaler, RNG, counters, objects.

        Args:
            output_dir: a folder or a URI; None names it `<project_dir>/checkpoints/checkpoint_<n>`.
            background: returns as soon as the state is copied to host memory; the files are written afterwards.
            busy: if an earlier save is still being written: "wait" for its end, or "skip" this one.
            metrics: values for the manifest, which `Keep(best=...)` compares.

        Returns the folder, or None if the save was skipped.

        Ranks: all. The folder is written beside and renamed: a crash leaves the old one or none.

        Raises:
            CheckpointError: nothing that was saved before is lost. An error of a background save is raised by the next
                call that saves, loads, waits or ends.
        """
        folder = None if output_dir is None else str(output_dir)
        return self.states.save(folder, background=background, busy=busy, metrics=metrics)

    def wait_for_save(self) -> None:
        """Waits for the end of a background save, and raises its error if it failed. Ranks: all."""
        self.states.wait()

    def resume(self) -> Start:
        """Continues an interrupted run: loads what the setting `resume` says. Call it once after `prepare`.

        The default of `resume` (`--resume`, PACELINE_RESUME) is "auto": the newest undamaged checkpoint in
        `<project_dir>/checkpoints`, if there is one. After this call, SIGTERM ends the run after the current step and a
        save, with exit code 75 (`paceline.base.exits.PREEMPTED`); so does Ctrl-C, with exit code 130.

        Returns the epoch and step at which to continue; 0 and 0 if nothing was loaded.

        Ranks: all.

        Example:
            >>> start = accelerator.resume()
            >>> for epoch in range(start.epoch, 10):
            ...     for batch in loader: ...
        """
        return self.states.resume()

    def load_state(self, input_dir: str | Path | None = None, *, strict: bool = True) -> None:
        """Loads a checkpoint with any number of ranks; None means the newest one with an automatic name. Ranks: all.

        With `strict=False`, names that only one side has are ignored; shapes must always be the same.
        """
        self.states.load(None if input_dir is None else str(input_dir), strict)

    # -- logs --------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers of `log_with`, on the main process.

        If the run was resumed before this call, or was started again by its launcher, trackers continue their previous
        runs.

        Raises:
            TrackerError: `tracker-start`, if you are not logged in or no server answers.
        """
        self.trackers.start(project_name, config, init_kwargs, goes_on=self.states.goes_on)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns a tracker by its name; on other processes than the main one, it does nothing."""
        return self.trackers.get_tracker(name, unwrap)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Logs values to every tracker, on the main process, and to the journal of a watched run.

        With `log_system` it adds throughput since the last call, utilisation and memory: see `paceline.system_values`.
        """
        runtime.current().logged(values, step)
        values = self._with_system_values(values)
        self.run.events.logged(values, step)
        self.trackers.log(values, step)

    def _with_system_values(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._system_values is None:
            return values
        return {**values, **self._system_values.read()}

    def end_training(self) -> None:
        """Waits for a running save, finishes trackers and leaves the process group. Ranks: all.

        The results of a profile are printed, or written to `profile.jsonl` in `project_dir`.
        """
        try:
            self.run.events.leaving()
        finally:
            # The others need not wait until a tracker's server has answered.
            rendezvous.leave()
            self.trackers.finish()

    def profile(self, **options: Any) -> AbstractContextManager[Any]:
        """torch's profiler over a block; options and errors as of `paceline.observe.profile.profile`."""
        return observe_profile(rank=self.process_index, **options)

    def __repr__(self) -> str:
        return f"Accelerator({self.plan.layout}, precision {self.mixed_precision}, device {self.device})"
