"""`Accelerator`: the facade that a training script uses. It delegates to its parts and contains no algorithm.

Accelerator(...)   World.detect -> settings merged -> draft plan -> process group up -> Run      (run/starting.py, run/run.py)
prepare(...)       facts -> plan -> chain -> optimizers -> loaders        (run/preparation.py, run/prepared.py)
the loop           accumulate, backward, clip, step, gather_for_metrics   (run/steps.py, optim/, world/collectives.py)
save_state         one TrainState                                         (run/states.py, checkpoint/)

The doors build other libraries' interfaces on the attributes `run`, `preparation`, `steps` and `states` of an accelerator, on
`run.live_runs()`, and on `start_accelerator`, which takes a door's `Semantics`. Scripts use none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, TypeVarTuple, Unpack, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from paceline.checkpoint.keep import Keep
from paceline.config import Overrides, PlanArgument
from paceline.config.keywords import checked_keywords, refuse_unknown
from paceline.optim.schedule import Scheduler
from paceline.plan.plan import Plan
from paceline.run.observers import join_observers
from paceline.run.preparation import Preparation
from paceline.run.run import Run
from paceline.run.starting import RunArguments, start_run
from paceline.run.states import Start, States
from paceline.run.steps import Steps
from paceline.world import rendezvous
from paceline.world.mesh import Mesh
from paceline.world.participant import Participant
from paceline.world.places import user_frame
from paceline.world.sharded import any_sharded

if TYPE_CHECKING:
    from paceline.checkpoint.state.run_state import Stateful
    from paceline.observe.trackers.group import Trackers
    from paceline.observe.trackers.group import Wanted as TrackerChoice

Prepared = TypeVar("Prepared")
Several = TypeVarTuple("Several")
Model = TypeVar("Model", bound=nn.Module)
T = TypeVar("T")
Gathered = TypeVar("Gathered", bound=torch.Tensor | tuple[Any, ...] | list[Any] | dict[str, Any])
Tensors = torch.Tensor | Iterable[torch.Tensor]


class BackwardOptions(TypedDict, total=False):
    """The keyword arguments of `Tensor.backward`."""

    gradient: torch.Tensor | None
    retain_graph: bool | None
    create_graph: bool
    inputs: torch.Tensor | Sequence[torch.Tensor] | None


@checked_keywords
class Accelerator(Participant):
    """Runs an ordinary PyTorch loop on any number of processes, with the losses and weights of one process.

    An argument that is None is taken from the command line of `paceline launch`, else from the environment, else from a
    config file, else from its default. `accelerator.plan.explain()` shows the source of each value.

    Args:
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        gradient_accumulation_steps: micro-batches in one optimizer step.
        cpu: True computes on the CPU even if the machine has an accelerator.
        plan: settings of the plan, such as `{"shard": 2, "zero": 1}`; or the name of a config file.
        options: options of strategies, such as `{"replicate": {"comm_hook": "bf16"}}`.
        split_batches: whether a loader's batch size counts the samples of all ranks together, or of one rank (False).
        dispatch_batches: whether rank 0 reads all batches and sends each rank its part.
        even_batches: whether the last global batch is filled with repeated samples, or divided as it is (False).
        data_seed: seed that, with the epoch, decides the order of samples; None draws it as torch's DataLoader does.
        non_blocking: whether batches are copied to the device asynchronously.
        log_system: `log` adds throughput, model FLOPs utilisation and memory, as `system/samples_per_second` and the like.
        log_with: trackers, such as "jsonl" or ["tensorboard", MyTracker].
        project_dir: folder of automatically named checkpoints and of trackers. A URL (`s3://bucket/run`) takes checkpoints
            only; trackers then write to the folder `runs`.
        total_limit: how many automatically named checkpoints are kept; None keeps all.
        keep: a rule in place of `total_limit`, such as `Keep(last=3, every=1000, best="loss")`.
        scaler: options of the loss scaler (`init_scale`, `growth_interval`, `hysteresis`, ...); see `precision.scale.Growth`.
        profile: what is measured: "wall-clock", "flops", "comms", "memory" or "all"; as text, as a list, or as a mapping
            with options of each: `{"flops": {"step": 3}}`. The results are in `accelerator.profiles`.
        anomalies: the action for each kind of unusual step, taken before the optimizer steps: `{"nan": "skip",
            "loss_spike": {"deviations": 6, "action": "rollback"}, "gradient_norm": {"factor": 10, "action": "log"}}`.
        debug: checks every collective across ranks and explains hangs.
        timeout_s: seconds after which a collective fails that some rank has not entered.

    Ranks: all ranks must construct it. With more than one process this initializes the process group.

    Raises:
        ConfigError, PlanError, WorldError: before the process group is initialized, with all problems at once.
    """

    project_dir = property(lambda self: self.run.project_dir, doc="The folder, or the URL, of checkpoints; or None.")
    _constructed_at = ("", 0)  # file and line of the script that constructed an instance

    def __init__(
        self,
        mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        *,
        plan: PlanArgument | None = None,
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
        overrides = Overrides(
            mixed_precision=mixed_precision,
            accumulate=gradient_accumulation_steps,
            cpu=cpu,
            debug=debug,
            timeout_s=timeout_s,
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            data_seed=data_seed,
            non_blocking=non_blocking,
            log_system=log_system,
            plan=plan,
            options=options,
        )
        arguments = RunArguments(
            overrides=overrides, profile=profile, anomalies=anomalies, scaler=scaler, project_dir=project_dir
        )
        self._start(arguments, log_with, Keep.of(total_limit, keep))

    def _start(
        self,
        arguments: RunArguments,
        log_with: TrackerChoice | Iterable[TrackerChoice] | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Starts the run, and makes its parts."""
        frame = user_frame()
        if frame is not None:
            self._constructed_at = (frame.f_code.co_filename, frame.f_lineno)
        run = start_run(arguments)
        super().__init__(run.world, run.device, run.collectives)
        # The parts of the run. Each of them gets the one `Run`, and subscribes to its events.
        self.run = run
        self.settings = run.settings
        self.gradients = run.gradients
        self.scaler = run.scaler
        self._log_with = log_with
        if log_with is not None:
            _ = self.trackers  # what is wrong with the names is an error here
        self.preparation = self._prepares(run)
        self.steps = Steps(run)
        self.states = States.of(run, keep or Keep())
        self._observers = join_observers(run, self.states)

    def _prepares(self, run: Run) -> Preparation:
        """Makes what prepares the objects of the run; a door gives them classes of its own."""
        return Preparation(run)

    @cached_property
    def trackers(self) -> Trackers:
        """The trackers that `log_with` asks for."""
        from paceline.observe.trackers.group import Trackers

        is_writer = self.run.world.is_main and self.run.runtime.keeps_files and self.run.runtime.tracks
        return Trackers(self._log_with, self.logging_dir, is_main=is_writer)

    # -- what this run is --------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the models that were prepared last, or its draft before `prepare`."""
        return self.run.plan

    @property
    def mesh(self) -> Mesh:
        """The device mesh of the plan, with its process groups."""
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
        """Whether the current micro-batch is the last of its accumulation window, so that optimizers step."""
        return self.gradients.sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because of an overflow or an anomaly."""
        return any(optimizer.step_was_skipped for optimizer in self.run.prepared.optimizers)

    @property
    def anomaly_counts(self) -> dict[str, int]:
        """The number of steps with an anomaly of each kind ("nan", "loss_spike", "gradient_norm"), of steps that were
        "skipped", and of "rollbacks". Empty if the argument `anomalies` was not given."""
        anomalies = self._observers.get("anomalies")
        return {} if anomalies is None else dict(anomalies.counts)

    @property
    def profiles(self) -> Any:
        """The profiles that the setting `profile` asks for, with `summary` and `text`; None where it asks for none."""
        return self._observers.get("profile")

    @property
    def logging_dir(self) -> str:
        """The folder in which trackers write: `project_dir`, or `runs` if that is a URL, to which nothing can be appended."""
        return self.run.logging_dir

    # -- prepare -----------------------------------------------------------------------------------------------

    @overload
    def prepare(self, prepared: Prepared, /, *, device_placement: Sequence[bool] | None = None) -> Prepared: ...
    @overload
    def prepare(self, *objects: *Several, device_placement: Sequence[bool] | None = None) -> tuple[*Several]: ...
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:  # type: ignore[misc]
        """Prepares any number of models, optimizers, loaders and schedulers, in any order.

        To type checkers each prepared object has the type of the original, since a loop uses it in the same way. If the
        plan wraps a model, `unwrap_model` returns the module with its own attributes. A prepared loader is not an instance
        of `DataLoader`.

        Args:
            device_placement: for each object, whether it is moved to the device (for a loader: its batches); None moves all.

        Returns:
            The prepared objects in the same order; a single object if one was given.

        Ranks: all, with the same objects in the same order.

        Raises: PrepareError, PlanError, DataError: before anything is changed, if the problem can be known by then.
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
            evaluation_mode: whether the model is only moved to the device and run in the run's precision.
            plan: settings of another plan for this model, such as a frozen teacher beside a sharded student. Ranks must
                read the same samples for both models, so the product `replicate` x `shard` must stay the same.
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
        """Prepares one optimizer, whose models must have been prepared before."""
        return cast(Prepared, self.preparation.prepare([optimizer])[0])

    def prepare_scheduler(self, scheduler: Prepared) -> Prepared:
        """Prepares one scheduler."""
        return cast(Prepared, self.preparation.scheduler(cast(Scheduler, scheduler)))

    def skip_first_batches(self, dataloader: Prepared, num_batches: int = 0) -> Prepared:
        """Returns a loader that leaves out the first `num_batches` batches of each epoch."""
        from paceline.data.skip import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: object) -> list[None]:
        """Forgets everything that was prepared, empties the device's cache, and returns as many Nones as objects were given."""
        self.preparation.clear()
        self.states.clear()
        return [None] * len(objects)

    clear = free_memory

    # -- the step ----------------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Runs one micro-batch: optimizers step, and ranks reduce gradients, only at the end of an accumulation window.

        Args:
            models: the models that the micro-batch trains; all prepared models if none is given. A window belongs to its
                models: `accumulate(a)` and `accumulate(b)` count their micro-batches each for itself.
        """
        run = self.run
        numbers = run.prepared.numbers_of(models)
        hold = partial(run.prepared.hold_gradients, models)
        return run.gradients.window(hold, models=numbers, failed=partial(run.explain_exhaustion, "forward"))

    def no_sync(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """While it is open, backward passes accumulate gradients without communication."""
        return self.run.prepared.hold_gradients(models)

    def backward(
        self, loss: torch.Tensor, num_items: float | torch.Tensor | None = None, **kwargs: Unpack[BackwardOptions]
    ) -> None:
        """Computes gradients such that a window's gradient is the mean over its samples (or items), on any number of ranks.

        Args:
            loss: the mean over this rank's micro-batch; with `num_items`, the sum over its items.
            num_items: the number of items (tokens) on this rank over which `loss` is a sum. Items are counted exactly, over
                micro-batches and ranks.
            kwargs: keyword arguments of `Tensor.backward`.

        Shape: loss [].

        Ranks: all; gradients are reduced at the end of a window.

        Raises:
            PlanError, TrainError: `backward-pipeline`, `backward-loss`, `accumulate-outside`.
        """
        if kwargs:
            refuse_unknown("backward", kwargs, ("num_items", *BackwardOptions.__annotations__))
        self.steps.backward(loss, num_items, **kwargs)

    def forward_backward(
        self, model: nn.Module, batch: object, loss_fn: Callable[..., torch.Tensor], num_items: float | None = None
    ) -> torch.Tensor:
        """Runs the forward pass, the loss and the backward pass in one call, which works under every plan. Ranks: all.

        Args:
            model: a prepared model.
            batch: a sequence `(*inputs, target)`: the model is called with the inputs, and the loss is `loss_fn(output,
                target)`. Or a mapping: the model is called with it as keyword arguments, and the loss is `loss_fn(output,
                batch)`. Or `parallel.microbatches.Microbatches` of these, which make one optimizer step together.
            loss_fn: computes the loss, a mean over the batch; with `num_items`, a sum over its items.
            num_items: as in `backward`.

        Returns:
            This rank's loss, detached. Shape: [].
        """
        return self.steps.forward_backward(model, batch, loss_fn, num_items)

    def full_parameters(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[Any]:
        """While it is open, the model's parameters are unsharded plain tensors on all ranks. Ranks: all.

        Args:
            model: a prepared model.
            writeback: whether changes are written back into the shards; every rank must make the same changes.
        """
        return self.run.prepared.full_parameters(model, writeback)

    def autocast(self, enabled: bool = True, cache_enabled: bool | None = None) -> AbstractContextManager[Any]:
        """Computes in the run's precision. The forward of a prepared model does so by itself; this is for other code."""
        return self.run.precision.autocast(self.device, enabled=enabled, cache_enabled=cache_enabled)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Makes gradients final: corrects them to the window's real size and, under fp16, divides them by the loss scale."""
        self.steps.unscale(optimizer)

    def clip_grad_norm_(
        self, parameters: Tensors, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales gradients at the end of a window such that their norm is at most `max_norm`; inside one, does nothing.

        Returns:
            The norm before clipping, the same on every rank; inside a window, that of the previous window. Shape: [].
        """
        return self.steps.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, parameters: Tensors, clip_value: float) -> None:
        """Clamps gradients to [-clip_value, clip_value] at the end of a window; otherwise does nothing."""
        self.steps.clip_value(parameters, clip_value)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Allows ranks to take different numbers of steps over loaders that were NOT prepared; prepared ones are even."""
        return self.steps.uneven(joinables)

    # -- between ranks -----------------------------------------------------------------------------------------

    def gather(self, tensor: T, with_gradient: bool = False) -> T:
        """Concatenates tensors of all ranks along dim 0; a 0-dim tensor becomes [num_processes].

        Args:
            tensor: a tensor, or a nested structure of tensors.
            with_gradient: whether gradients flow back to the ranks that computed the rows, for a loss over the rows of the
                whole batch (contrastive learning). Then rows come from the ranks that read different samples, without filler.

        Ranks: all; with gradients in the backward pass, too.

        Raises:
            TrainError: `gather-scalar`.
        """
        if with_gradient:
            from paceline.parallel.data.gather import gather_with_gradient

            info = self.run.active_loaders.gathered()
            result = cast(T, gather_with_gradient(tensor, self.run.mesh.statistics_group, info))
        else:
            result = super().gather(tensor)
        self.run.events.gathered("gather", result)
        return result

    def reduce(self, tensor: T, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0) -> T:
        """Returns the sum or mean over ranks of each tensor of a structure. Ranks: all; all get the result.

        Along tp, pp and cp ranks read the same samples: a sum that counts samples counts each of them several times there.
        """
        result = super().reduce(tensor, reduction, scale)
        if reduction == "sum" and self.run.data_ranks.size < self.num_processes:
            from paceline.data.metrics import tell_of_repeats

            tell_of_repeats(self.run.data_ranks.size, self.num_processes)
        self.run.events.gathered("reduce", result)
        return result

    @overload
    def gather_for_metrics(self, input_data: Gathered, use_gather_object: Literal[False] = False) -> Gathered: ...
    @overload
    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any: ...
    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Gathers what belongs to the current batch from all ranks, in sample order and without repeated samples.

        Args:
            input_data: tensors or objects, nested; of a list with one entry a row, rows are gathered.
            use_gather_object: whether tensors are gathered as Python objects, too.
        Shape: each tensor [rows of this rank's batch, ...] -> [samples of the global batch, ...]; [] -> [ranks with a sample].
        Ranks: all; each gets the result. The whole structure takes one collective.
        """
        from paceline.data.metrics import gather_for_metrics  # a loop that only trains has no metrics

        result = gather_for_metrics(self.run.active_loaders, self.run.data_ranks, input_data, use_gather_object)
        self.run.events.gathered("gather_for_metrics", result)
        return result

    # -- models and files --------------------------------------------------------------------------------------

    def unwrap_model(self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Model:
        """Returns the module that the user wrote.

        Args:
            keep_fp32_wrapper: False also removes the mixed-precision forward.
            keep_torch_compile: False also takes the module out of `torch.compile`.
        """
        return cast(Model, self.run.prepared.unwrap(model, keep_fp32_wrapper, keep_torch_compile))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the full state dict of a model under any plan. Ranks: all; each gets it."""
        module = self.unwrap_model(model) if unwrap else model
        # A rank that asks alone learns of it here, and so do the others. Stages of a pipeline may have no divided parameter.
        if self.run.plan.layout.pp == 1 and any_sharded(module.parameters()):
            self.run.collectives.barrier("get_state_dict")
        return self.run.prepared.state_dict(model, module)

    def save(self, obj: object, f: str | Path, safe_serialization: bool = False) -> None:
        """Saves an object on the main process: writes a file beside `f` and renames it, so that `f` is never half written."""
        self.states.save_object(obj, str(f), safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: str | int = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Saves a model's weights under Hugging Face's file names, in files of at most `max_shard_size`. Ranks: all.

        Rows of tensors are sent to the ranks that write as they are written, so that no rank ever holds the whole model.

        Raises:
            CheckpointError: on every rank; the files that were in the folder before are untouched.
        """
        self.states.save_model(model, self.unwrap_model(model), save_directory, max_shard_size, safe_serialization)

    def load_model(self, model: nn.Module, directory: str | Path, *, strict: bool = True) -> None:
        """Loads weights into a model under any plan; each rank reads only its own part. Ranks: all.

        Args:
            model: prepared or not, also on the meta device.
            directory: a folder that `save_model`, a Hugging Face library, `save_state` or torch's distributed checkpoint
                wrote, or a single file of weights (safetensors, or `torch.save`).
            strict: whether the names must be the same; shapes must be the same in any case.

        Raises:
            CheckpointError: `checkpoint-other-model` with the names that are missing, unexpected or of another shape. The
                model is not changed then.
        """
        self.states.load_model(model, self.unwrap_model(model), directory, strict)

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to the checkpoints of this run."""
        self.states.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Registers a hook that is called as `hook(models, weights, output_dir)` before each save."""
        return self.states.add_hook("save", hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Registers a hook that is called as `hook(models, input_dir)` before each load."""
        return self.states.add_hook("load", hook)

    def save_state(
        self,
        output_dir: str | Path | None = None,
        *,
        background: bool = False,
        busy: Literal["wait", "skip"] = "wait",
        metrics: Mapping[str, float] | None = None,
    ) -> str | None:
        """Saves everything that a resume needs: models, optimizers, schedulers, loaders, scaler, RNG, counters, objects.

        The checkpoint is written into another folder, which is renamed at the end. A crash leaves the old checkpoint or none.

        Args:
            output_dir: a folder or a URL; None saves to `<project_dir>/checkpoints/checkpoint_<n>`.
            background: whether to return as soon as the state is copied to host memory; a thread then writes the files.
            busy: what to do while an earlier save is still being written: "wait" for its end, or "skip" this one.
            metrics: values for the manifest, which `Keep(best=...)` compares.

        Returns:
            The folder; None if the save was skipped.

        Ranks: all.

        Raises:
            CheckpointError: earlier checkpoints are untouched. The error of a save in the background is raised by the next
                call that saves, loads, waits for a save or ends the run.
            TrainError: `replicas-differ`, where ranks that should train the same model have come apart.
        """
        folder = None if output_dir is None else str(output_dir)
        compare = self.steps.compare_ranks
        return self.states.save(folder, background=background, busy=busy, metrics=metrics, check=compare)

    def wait_for_save(self) -> None:
        """Waits for a save in the background to end, and raises its error if it failed. Ranks: all."""
        self.states.wait()

    def resume(self) -> Start:
        """Continues a run: loads the checkpoint that the setting `resume` names. Call it after `prepare`.

        The setting (`--resume`, PACELINE_RESUME) defaults to "auto": the newest checkpoint in `<project_dir>/checkpoints`
        whose files are undamaged, if there is one. After this call SIGTERM lets the current batch end, saves a checkpoint,
        and exits with code 75 (`paceline.base.exits.PREEMPTED`); Ctrl-C does the same with exit code 130.

        Returns:
            Where to continue; epoch 0 and step 0 for a new run.

        Ranks: all.

        Example:
            >>> start = accelerator.resume()
            >>> for epoch in range(start.epoch, 10):
            ...     for batch in loader: ...
        """
        return self.states.resume()

    def load_state(self, input_dir: str | Path | None = None, *, strict: bool = True) -> None:
        """Loads what `save_state` saved, on any number of ranks and under any plan. Ranks: all.

        Args:
            input_dir: the checkpoint; None loads the newest automatically named one.
            strict: False skips names that only the run or only the checkpoint has; shapes must be the same in any case.
        """
        self.states.load(None if input_dir is None else str(input_dir), strict)

    # -- logs --------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers of `log_with` on the main process; in a run that was resumed or restarted, they continue
        the runs that they wrote to before.

        Raises: TrackerError: `tracker-start`, if a tracker has no login or its server does not answer.
        """
        self.trackers.start(project_name, config, init_kwargs, goes_on=self.states.goes_on)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns a tracker by name; on other processes than the main one, a tracker that does nothing."""
        return self.trackers.get_tracker(name, unwrap)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Logs values to every tracker, on the main process, and to the journal of a watched run.

        With `log_system` it adds throughput since the last call, utilisation and memory: see `system_values` of
        `paceline-lens`.
        """
        self.trackers.log(self._with_system_values(values, step), step)

    def _with_system_values(self, values: Mapping[str, Any], step: int | None) -> Mapping[str, Any]:
        """Passes logged values to those that look at the run, and returns what the trackers get."""
        system_values = self._observers.get("system_values")
        if system_values is not None:
            values = {**values, **system_values.read()}
        self.run.events.logged(values, step)
        return values

    def end_training(self) -> None:
        """Waits for a save in the background, finishes trackers and destroys the process group. Ranks: all.

        Results of profiles are logged, or written to `profile.jsonl` in `project_dir`.
        """
        try:
            self.run.lifetime.end()
        finally:
            # The process group first: other ranks should not wait until the server of a tracker has answered.
            rendezvous.leave()
            if "trackers" in vars(self):  # else nobody has used them
                self.trackers.finish()

    def profile(self, **options: Any) -> AbstractContextManager[Any]:
        """Runs torch's profiler over a block; see `paceline.observe.profile.profile` for options and errors."""
        from paceline.observe.profile import profile

        return profile(rank=self.process_index, **options)

    def __repr__(self) -> str:
        return f"Accelerator({self.plan.layout}, precision {self.mixed_precision}, device {self.device})"


def start_accelerator(arguments: RunArguments) -> Accelerator:
    """Makes an accelerator for a door, whose arguments say how its library means a loop. Ranks: all."""
    accelerator = Accelerator.__new__(Accelerator)
    accelerator._start(arguments)
    return accelerator
